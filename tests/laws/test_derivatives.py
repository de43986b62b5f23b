"""Laws on derivatives: in forward mode, in reverse mode and under torch.func they are those of differences.

Values are those of central differences at h = 1e-5: error h^2 times a third derivative, and rounding eps/h
times the condition of the function, both below 1e-7 in the table.
"""

import pytest
import torch
from helpers.table import COMPLEX_CASES, FIRST, MANIFOLD_CASES, is_graph, name, point, randn, tangent
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import ghor

# what torch says of its own imports when forward mode starts
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of operations in place, under vmap
]

F64 = torch.float64
WITH_LOG = [c for c in FIRST if c[0].has("log")] + [(ghor.SpecialOrthogonal(), s) for s in ((2, 2), (3, 3))]


def small(shape):
    """At most one batch dimension."""
    return (9, 3) if shape == (49, 7) else shape[-3:]


def functions(space, shape, dtype, gen):
    """Functions of one tensor, and the tensor."""
    Y = point(space, shape, gen, dtype)
    V, U = tangent(space, Y, gen, 0.5), tangent(space, Y, gen)
    table = {
        "project": (space.project, Y + 0.1 * U),
        "exp": (lambda v: space.exp(Y, space.tangent(Y, v)), V),
        "exp at 0": (lambda v: space.exp(Y, space.tangent(Y, v)), 0 * V),
        "retract": (lambda v: space.retract(Y, space.tangent(Y, v)), V),
        "retract at 0": (lambda v: space.retract(Y, space.tangent(Y, v)), 0 * V),
        "transport": (lambda v: space.transport(Y, space.tangent(Y, v), U), V),
        "metric": (lambda v: space.metric(Y, v, U), V),
        "rgrad": (lambda y: space.rgrad(y, U), Y),
    }
    if space.has("log"):
        Z = space.exp(Y, V)
        table["log"] = (lambda z: space.log(Y, space.project(z)), Z)
        table["log of its foot"] = (lambda y: space.log(space.project(y), Z), Y)
        table["dist"] = (lambda z: space.dist(Y, space.project(z)), Z)
    return table


def difference(f, x, D, h=1e-5):
    return (f(x + h * D) - f(x - h * D)) / (2 * h)


def agree(a, b, what):
    assert (a - b).abs().max() <= 1e-6 * (1 + b.abs().max()), what


CASES = [(s, small(shape), F64) for s, shape in MANIFOLD_CASES if len(shape) < 4]
CASES += [(s, shape, torch.complex128) for s, shape in COMPLEX_CASES if len(shape) < 4]


@pytest.mark.parametrize(("space", "shape", "dtype"), CASES, ids=name)
def test_forward_and_reverse_mode_are_differences(space, shape, dtype, gen):
    for what, (f, x) in functions(space, shape, dtype, gen).items():
        D = randn(x.shape, gen, dtype)
        slope = difference(f, x, D)
        agree(jvp(f, (x,), (D,))[1], slope, what)
        with forward_ad.dual_level():
            dual = f(forward_ad.make_dual(x, D))
            agree(forward_ad.unpack_dual(dual).tangent, slope, what)
        C = randn(slope.shape, gen, slope.dtype)
        (G,) = vjp(f, x)[1](C)
        agree((G.conj() * D).real.sum(), (C.conj() * slope).real.sum(), what)
        if what in ("log", "dist", "project"):  # twice, without torch.func
            x = x.clone().requires_grad_()
            assert torch.autograd.gradgradcheck(f, (x,), atol=1e-4, fast_mode=True), what


@pytest.mark.parametrize(("space", "shape"), WITH_LOG, ids=name)
def test_jacobians_and_second_derivatives_of_distances(space, shape, gen):
    shape = small(shape)
    Y = point(space, shape, gen)
    Z = space.exp(Y, tangent(space, Y, gen, 0.5))

    def f(z):
        return space.dist(Y, space.project(z)).square().sum()

    D = randn(shape, gen)
    for jacobian in (jacfwd, jacrev, grad):
        agree((jacobian(f)(Z) * D).sum(), difference(f, Z, D), jacobian.__name__)
    bend = difference(grad(f), Z, D)
    for H in (hessian(f), jacrev(jacfwd(f)), jacrev(jacrev(f))):
        agree((H(Z) * D).flatten(len(shape)).sum(-1), bend, "second derivative")
    if not is_graph(space):  # its distance is one Function, of which torch loses terms here (pytorch#197867)
        agree((jacfwd(jacfwd(f))(Z) * D).flatten(len(shape)).sum(-1), bend, "forward over forward")
    with forward_ad.dual_level():
        x = forward_ad.make_dual(Z.clone().requires_grad_(), D)
        (G,) = torch.autograd.grad(f(x), x)
        agree(forward_ad.unpack_dual(G).tangent, bend, "forward over reverse")


@pytest.mark.parametrize(("space", "shape"), WITH_LOG, ids=name)
def test_a_vmap_is_a_stack(space, shape, gen):
    """vmap of a gradient, and the gradient and the forward mode of a vmap, are those of points one by one."""
    shape = small(shape)
    Y = point(space, shape, gen)
    V = torch.stack([tangent(space, Y, gen, 0.5) for _ in range(3)])
    Z = torch.stack([space.exp(Y, v) for v in V])
    C, D = randn(shape, gen), randn(V.shape, gen)
    for f, stack in (
        (lambda z: space.dist(Y, z).sum(), Z),
        (lambda z: (space.log(Y, z) * C).sum(), Z),
        (lambda z: (space.project(z) * C).sum(), Z),
        (lambda v: (space.exp(Y, v) * C).sum(), V),
    ):
        loop = torch.stack([grad(f)(x) for x in stack])
        agree(vmap(grad(f))(stack), loop, "vmap of a gradient")
        agree(grad(lambda stack, f=f: vmap(f)(stack).sum())(stack), loop, "gradient of a vmap")
        values, slopes = jvp(vmap(f), (stack,), (D,))
        agree(values, torch.stack([f(x) for x in stack]), "value of a vmap")
        agree(slopes, (loop * D).flatten(1).sum(1), "forward mode of a vmap")


@pytest.mark.parametrize("length", [0.1, 1.0, 1.5])
@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (ghor.Stiefel(), (5, 2), F64),
        (ghor.Stiefel(), (4, 12), F64),
        (ghor.Stiefel(), (6, 2), torch.complex128),
        (ghor.Sphere(), (2,), torch.complex128),
    ],
    ids=name,
)
def test_a_logarithm_found_by_iteration_has_its_derivative(space, shape, dtype, length, gen):
    """Also along a horizontal geodesic from E, A = 0, where the iteration has nothing to do.

    Differences of fourth order at h = 1e-3: h^4 of a fifth derivative and eps/h, below 1e-10.
    """
    E = space.E(shape, dtype=dtype)
    W = tangent(space, E, gen)
    w = space.layout.points(W)
    w[..., : w.shape[-1], :] = 0
    Y = point(space, shape, gen, dtype)
    check_log(space, E, W * (length / space.norm(E, W)), gen)
    V = tangent(space, Y, gen)
    check_log(space, Y, V * (length / space.norm(Y, V)), gen)


def check_log(space, Y, V, gen, h=1e-3):
    Z = space.exp(Y, V)
    T = tangent(space, Z, gen)

    def log(z):
        return space.log(Y, z)

    a, b, c, d = (log(space.exp(Z, k * h * T)) for k in (-2, -1, 1, 2))
    slope = (8 * (c - b) - (d - a)) / (12 * h)
    assert (jvp(log, (Z,), (T,))[1] - slope).abs().max() <= 1e-8
    C = randn(Z.shape, gen, Z.dtype)
    (G,) = vjp(log, Z)[1](C)
    assert ((G.conj() * T).real.sum() - (C.conj() * slope).real.sum()).abs() <= 1e-8


@pytest.mark.parametrize("degrees", [10.0, 60.0, 120.0, 170.0, 180.0])
@pytest.mark.parametrize("N", [2, 3, 5])
def test_derivatives_of_rotations_at_any_angle(N, degrees):
    """dist^2 of plane rotations is the square of the angle, at 180 degrees as well, for N = 2, 3."""
    if degrees == 180 and N > 3:
        pytest.skip("an angle of pi beside others")
    space = ghor.SpecialOrthogonal()
    I, angle = torch.eye(N, dtype=F64), torch.tensor(degrees, dtype=F64).deg2rad()

    def square(a):
        R = torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()]).view(2, 2)
        return space.dist(I, torch.block_diag(R, I[2:, 2:])) ** 2

    agree(square(angle), angle**2, "value")
    agree(grad(square)(angle), 2 * angle, "first derivative")
    agree(grad(grad(square))(angle), torch.tensor(2.0), "second derivative")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("of", ["dist", "log", "exp"])
@pytest.mark.parametrize(("space", "shape"), [(ghor.SPD(), (3, 3)), (ghor.Sphere(), (5,))], ids=name)
def test_gradients_compile_as_one_graph(space, shape, of, gen):
    x, z = (space.random(*shape, generator=gen, dtype=F64) for _ in range(2))
    x.requires_grad_()
    f = getattr(space, of)
    (G,) = torch.autograd.grad(torch.compile(f, backend="eager", fullgraph=True)(x, z).sum(), x)
    agree(G, torch.autograd.grad(f(x, z).sum(), x)[0], of)


def test_second_derivatives_where_tensors_are_saved_elsewhere(gen):
    space = ghor.SPD()
    x, z = (space.random(3, 3, generator=gen, dtype=F64) for _ in range(2))
    x.requires_grad_()

    def second():
        (G,) = torch.autograd.grad(space.dist(x, z) ** 2, x, create_graph=True)
        return torch.autograd.grad(G.square().sum(), x)[0]

    expected = second()
    with torch.autograd.graph.save_on_cpu():
        agree(second(), expected, "dist")
