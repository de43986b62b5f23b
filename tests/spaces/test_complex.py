"""Complex weights, beyond the laws: torch's gradients, its optimizers, the real case in it, long runs."""

import pytest
import torch
from helpers.steps import through_a_file
from helpers.table import CIRCLE_CASES, MANIFOLDS, close, has_complex, name, randn, shapes
from torch import nn

import ghor

CASES = [
    (ghor.Stiefel(), (6, 3)),
    (ghor.Grassmann(), (2, 8)),
    (ghor.Sphere(), (3, 4)),
    (ghor.Unitary(), (2, 4, 4)),
    *CIRCLE_CASES,
]
DTYPES = [torch.complex128, torch.complex64]
each_case = pytest.mark.parametrize(("space", "shape"), CASES, ids=name)


def step(opt, gen, n=1, size=1.0):
    for _ in range(n):
        for p in opt.param_groups[0]["params"]:
            p.grad = size * randn(tuple(p.shape), gen, p.dtype)
        opt.step()


def start(space, shape, gen, dtype=torch.complex128):
    return nn.Parameter(space.random(*shape, generator=gen, dtype=dtype))


@each_case
@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_moments_are_in_ghor_to_the_bit(space, shape, section, gen):
    """Entries of A that are 0 by its structure stay 0, others each other's copies."""
    Y = start(space, shape, gen)
    opt = ghor.optim.Adam([Y], space=space, lr=0.05, section=section)
    step(opt, gen, 12)
    m, v = (space.layout.points(opt.state[Y][key]).clone() for key in ("exp_avg", "exp_avg_sq"))
    space.geometry.hor_(H := m.clone())
    assert torch.equal(H, m)
    diagonal = m[..., : m.shape[-1], :].diagonal(dim1=-2, dim2=-1)
    assert not diagonal.real.any()
    assert not torch.view_as_real(v[..., : m.shape[-1], :].diagonal(dim1=-2, dim2=-1))[..., 0].any()
    assert space.residual(Y.detach()).max() <= 1e-14 * 4


@pytest.mark.parametrize(("space", "shape"), CASES[:4], ids=name)
def test_a_real_weight_as_a_complex_one(space, shape, gen):
    """Real points and gradients: the complex space takes the steps of the real one, to rounding."""
    y = nn.Parameter(space.random(*shape, generator=gen, dtype=torch.float64))
    Y = nn.Parameter(y.detach().to(torch.complex128))
    both = [ghor.optim.Adam([p], space=space, lr=0.1, section="transported") for p in (y, Y)]
    for _ in range(20):
        y.grad = randn(shape, gen)
        Y.grad = y.grad.to(torch.complex128)
        for opt in both:
            opt.step()
    assert torch.equal(Y.detach().imag, torch.zeros_like(y))
    close(Y.detach().real, y.detach(), 1e-13)


@pytest.mark.filterwarnings("ignore:a velocity of length .* was clipped")
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("section", ["transported", "implicit"])
@each_case
def test_any_learning_rate(space, shape, section, dtype, gen):
    """Steps beyond every limit and 0/0 in the moments; a resumed run goes on to the bit."""
    Y = start(space, shape, gen, dtype)
    opt = ghor.optim.Adam([Y], space=space, lr=1e3, section=section, eps=0)
    step(opt, gen, 3)
    assert space.residual(Y.detach()).max() <= 100 * torch.finfo(dtype).eps
    Z = nn.Parameter(Y.detach().clone())
    other = ghor.optim.Adam([Z], space=space, section=section)
    other.load_state_dict(through_a_file(opt.state_dict()))
    Y.grad = randn(shape, gen, dtype)
    Z.grad = Y.grad.clone()
    opt.step()
    other.step()
    assert torch.equal(Y, Z)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_declared_on_a_module(capsys):
    narrow, layer = (nn.Linear(7, 3, dtype=dtype) for dtype in (torch.complex64, torch.complex128))
    for module in (narrow, layer):
        ghor.constrain(module, "weight", ghor.Stiefel())
    assert ghor.Stiefel().residual(narrow.weight.detach()) < 1e-6
    assert "Stiefel()" in ghor.check(narrow)
    assert ghor.project(narrow)["weight"] < 1e-6
    with torch.no_grad():
        layer.weight.copy_(narrow.weight)
    with pytest.warns(UserWarning, match="is complex128 and was .* off .*, as a complex64 weight"):
        ghor.optim.Adam(layer, lr=1e-3)
    assert ghor.Stiefel().residual(layer.weight.detach()) < 1e-14


@pytest.mark.parametrize(
    ("space", "shape"), [(s, shapes(s)[0]) for s in MANIFOLDS if not has_complex(s)], ids=name
)
def test_real_spaces_say_so(space, shape):
    Y = (2 * space.random(*shape)).to(torch.complex64)
    for use in (lambda: space.random(*shape, dtype=Y.dtype), lambda: space.project(Y)):
        with pytest.raises(TypeError, match=r"real floating point tensors, not torch\.complex64|are real"):
            use()
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 of shape .*are real"):
        ghor.optim.Adam([nn.Parameter(Y)], space=space)


@pytest.mark.parametrize(("space", "shape"), CIRCLE_CASES, ids=name)
def test_synchronised_phases(space, shape, gen):
    """The complex circle: max |u^H z|^2 over |z_k| = 1 recovers the phases of u, up to a common one."""
    K = torch.Size(shape).numel()
    u = torch.polar(torch.ones(K), 6.28 * torch.rand(K, generator=gen)).to(torch.complex128)
    z = start(space, shape, gen)
    opt = ghor.optim.Adam([z], space=space, lr=0.1, maximize=True)
    for _ in range(300):
        opt.zero_grad()
        (u.conj() @ z.flatten()).abs().square().backward()
        opt.step()
    assert abs((u.conj() @ z.detach().flatten()).abs() - K) < 1e-6
    assert space.residual(z.detach()).max() < 1e-14


@pytest.mark.parametrize(("space", "shape"), CIRCLE_CASES, ids=name)
def test_real_numbers_of_length_one_do_not_move(space, shape):
    with pytest.raises(ValueError, match="does not move"):
        space.random(*shape)
    with pytest.raises(ValueError, match="does not move"):
        space.project(torch.ones(shape))
    with pytest.raises(ValueError, match=r"parameter 0 of group 0: .*does not move"):
        ghor.optim.Adam([nn.Parameter(torch.ones(shape))], space=space)
    with pytest.raises(TypeError, match="complex32"):
        space.check_dtype(torch.complex32)


def test_the_complex_circle_is_in_the_table():
    assert {s for s, _ in CIRCLE_CASES} >= {ghor.Stiefel(), ghor.Unitary()}


def test_random_unitary_matrices_are_uniform(gen):
    """E tr(U) = 0, E |tr U|^2 = 1, E |tr U^2|^2 = 2, which QR alone misses; 20000 samples, 5 sigma."""
    U = ghor.Unitary().random(20000, 3, 3, generator=gen, dtype=torch.complex128)
    t, t2 = (X.diagonal(dim1=-2, dim2=-1).sum(-1) for X in (U, U @ U))
    assert t.mean().abs() < 5 / 20000**0.5
    assert (t.abs().square().mean() - 1).abs() < 5 / 20000**0.5
    assert (t2.abs().square().mean() - 2).abs() < 5 * 2 / 20000**0.5


LONG = [(ghor.Unitary(), (12, 12)), (ghor.Stiefel(), (20, 6))]


@pytest.mark.parametrize("steps", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.complex128, 1e-13), (torch.complex64, 2e-6)], ids=name)
@pytest.mark.parametrize(("space", "shape"), LONG, ids=name)
def test_no_drift(space, shape, dtype, tol, steps, gen):
    Y = start(space, shape, gen, dtype)
    T = randn(shape, gen, dtype)
    opt = ghor.optim.Adam([Y], space=space, lr=1e-2)
    worst = 0.0
    for i in range(steps):
        Y.grad = Y.detach() - T + randn(shape, gen, dtype)
        opt.step()
        if i % 10 == 9:
            worst = max(worst, float(space.residual(Y.detach().to(torch.complex128))))
    assert worst <= tol
