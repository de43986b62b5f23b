"""The implicit section against N x N matrices written here, and against the transported one."""

import math
import warnings

import pytest
import torch
from helpers.table import frame as frame_of
from helpers.table import name, point, randn

import ghor
from ghor.spaces.frames import ClosedForm, Stored

ST = ghor.Stiefel()
F64, C128 = torch.float64, torch.complex128
CASES = [
    (ST, (12, 3), F64),
    (ghor.Grassmann(), (12, 3), F64),
    (ghor.Sphere(), (9,), F64),
    (ST, (9, 8), F64),
    (ST, (3, 12), F64),
    (ST, (2, 12, 3), F64),
    (ghor.Hyperbolic(), (20, 6), F64),
    (ST, (6, 3), C128),
    (ghor.Grassmann(), (2, 8), C128),
    (ghor.Sphere(), (3, 4), C128),
]
cases = pytest.mark.parametrize(("space", "shape", "dtype"), CASES, ids=name)
retractions = pytest.mark.parametrize("retraction", ["cayley", "geodesic"])


def frame(Y, R):
    """[Y, Q] from the reflection -I + D (I + Z1^T)^-1 D^T, D = Z + E, Z = Y R^T, its last columns negated."""
    N, n = Y.shape
    E, I = torch.eye(N, n, dtype=Y.dtype), torch.eye(N, dtype=Y.dtype)
    Z = Y @ R.mT
    D = Z + E
    reflection = -I + D @ torch.linalg.inv(torch.eye(n, dtype=Y.dtype) + Z[:n].mT) @ D.mT
    return torch.cat([reflection[:, :n] @ R, -reflection[:, n:]], 1)


def polar(X):
    U, _, Vh = torch.linalg.svd(X)
    return U @ Vh


@pytest.mark.parametrize("start", ["random", "minus E", "top block zero"])
def test_the_closed_form_is_a_section(start, gen):
    N, n = 10, 3
    Y = {
        "random": ST.random(N, n, generator=gen, dtype=torch.float64),
        "minus E": -torch.eye(N, n, dtype=torch.float64),
        "top block zero": torch.eye(N, dtype=torch.float64)[:, n : 2 * n],
    }[start]
    R = polar(Y[:n])
    Lambda = frame(Y, R)
    assert (Lambda.mT @ Lambda - torch.eye(N, dtype=torch.float64)).abs().max() < 5e-15
    assert (Lambda[:, :n] - Y).abs().max() < 5e-15
    assert (ST.section(Y) - Lambda).abs().max() < 5e-15
    G, L = randn((N, n), gen), frame_of(ST, Y, "implicit")
    L.pull(G[None], H := L.zeros())
    expected = Lambda.mT @ G
    expected[:n] -= expected[:n].mT.clone()
    assert (H[0] - expected).abs().max() < 1e-14
    W = L.zeros()
    W.copy_(H)
    assert (L.push(W)[0] - Lambda @ H[0]).abs().max() < 1e-14


@cases
@retractions
@pytest.mark.parametrize("nesterov", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_momentum_does_not_see_the_gauge(space, shape, dtype, retraction, nesterov, gen):
    """110 steps: Lambda is polished at 100, Y at every tenth; references are renewed on the way."""
    start = space.random(*shape, generator=gen, dtype=dtype)
    lr = 0.02 if space.compact else 1e-3  # random gradients lead far out
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    opts = [
        ghor.optim.SGD(
            [p], space=space, lr=lr, momentum=0.9, nesterov=nesterov, retraction=retraction, section=s
        )
        for p, s in zip(weights, ("transported", "implicit"), strict=True)
    ]
    for _ in range(110):
        G = randn(shape, gen, dtype)
        for p, opt in zip(weights, opts, strict=True):
            p.grad = G.clone()
            opt.step()
    a, b = weights
    assert (a - b).abs().max() < 5e-13 * (1 if space.compact else a.abs().max())


SMALL = [(ST, (600, 4), 16), (ghor.Sphere(), (100, 11), 100), (ghor.Hyperbolic(), (1000, 11), 0)]


@pytest.mark.parametrize(("space", "shape", "more"), SMALL, ids=name)
def test_state_is_that_of_the_plain_optimizer_and_a_reference(space, shape, more, gen):
    """Adam's two moments, and n x n numbers on Stiefel, or a sign: "auto" is implicit there."""
    Y = torch.nn.Parameter(space.random(*shape, generator=gen))
    opt = ghor.optim.Adam([Y], space=space)
    Y.grad = randn(shape, gen, torch.float32)
    opt.step()
    assert ("frame_anchor" in opt.state[Y]) == (more > 0)
    assert sum(v.numel() for v in opt.state[Y].values() if torch.is_tensor(v)) <= 2 * Y.numel() + more + 2


def test_auto_chooses_by_size():
    E = torch.eye(1024)
    for Y, found in (
        (E[:, :4], ClosedForm),
        (E[:4], ClosedForm),
        (E[:600, :200], Stored),
        (E[:49, :7], Stored),
    ):
        assert type(frame_of(ST, Y, "auto")) is found
    assert type(frame_of(ghor.Sphere(), E[:3, :4].to(C128), "auto")) is Stored
    assert type(frame_of(ST, E[:9, :4], "implicit")) is ClosedForm
    assert type(frame_of(ST, E[:, :4], "transported")) is Stored
    assert type(frame_of(ghor.SpecialOrthogonal(), E[:9, :9], "implicit")) is Stored  # there is no Q
    E = ghor.SymplecticStiefel().E((1024, 4))
    assert type(frame_of(ghor.SymplecticStiefel(), E, "auto")) is Stored


@pytest.mark.parametrize("shape", [(20, 4), (3, 20, 4)], ids=name)
def test_momentum_of_clipped_steps_does_not_see_the_gauge(shape, gen):
    """W = -lr m is shortened then: what is left of m in the plane of the step is not what -lr says."""
    start, grads = (
        point(ST, shape, gen),
        [50 * randn(shape, gen), *(0.1 * randn(shape, gen) for _ in range(4))],
    )
    ends = []
    for section in ("auto", "transported"):  # no frame; and a stored one
        p = torch.nn.Parameter(start.clone())
        opt = ghor.optim.SGD([p], space=ST, lr=1.0, momentum=0.3, section=section)
        for G in grads:
            p.grad = G.clone()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*was clipped")
                opt.step()
        ends.append(p.detach())
    assert (ends[0] - ends[1]).abs().max() <= 1e-11


def test_auto_keeps_the_kind_that_a_state_has(gen):
    p = torch.nn.Parameter(point(ST, (9, 4), gen))
    opt = ghor.optim.Adam([p], space=ST, section="implicit")
    for section in ("implicit", "auto"):
        opt.param_groups[0]["section"] = section
        p.grad = randn((9, 4), gen)
        opt.step()
        assert "frame_anchor" in opt.state[p]
        opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["section"] = "transported"
    opt.step()
    assert "frame_anchor" not in opt.state[p]


@cases
def test_one_section_goes_on_from_the_state_of_the_other(space, shape, dtype, gen):
    """Momentum sees no gauge: 10 steps, the state loaded into the other kind, 10 more = 20 of one kind."""
    start = space.random(*shape, generator=gen, dtype=dtype)
    grads = [randn(shape, gen, dtype) for _ in range(20)]

    def run(kinds):
        p = torch.nn.Parameter(start.clone())
        state = None
        for kind, part in zip(kinds, (grads[:10], grads[10:]), strict=True):
            opt = ghor.optim.SGD([p], space=space, lr=0.02, momentum=0.9, section=kind)
            if state is not None:
                state["param_groups"][0]["section"] = kind
                opt.load_state_dict(state)
            for g in part:
                p.grad = g.clone()
                opt.step()
            state = opt.state_dict()
        return p.detach()

    reference = run(("transported", "transported"))
    for kinds in (("transported", "implicit"), ("implicit", "transported"), ("implicit", "implicit")):
        assert (run(kinds) - reference).abs().max() < 1e-12


@pytest.mark.parametrize("memory", ["channels_last", "transposed", "sliced"])
def test_implicit_moves_weights_of_any_memory_layout(memory, gen):
    if memory == "channels_last":
        space, shape = ghor.Stiefel(flatten=3), (16, 64, 3, 3)
        data = space.random(*shape, generator=gen).to(memory_format=torch.channels_last)
    elif memory == "transposed":
        space, shape = ST, (40, 3)
        data = ST.random(3, 40, generator=gen).mT
    else:
        space, shape = ST, (40, 3)
        data = torch.zeros(80, 6)[::2, ::2].copy_(ST.random(40, 3, generator=gen))
    a, b = torch.nn.Parameter(data), torch.nn.Parameter(data.clone(memory_format=torch.contiguous_format))
    assert not a.is_contiguous()
    start = data.clone()
    opts = [ghor.optim.Adam([p], space=space, lr=0.05, section="implicit") for p in (a, b)]
    for _ in range(5):
        G = randn(shape, gen, torch.float32)
        for p, opt in zip((a, b), opts, strict=True):
            p.grad = G.clone()
            opt.step()
    assert a.data_ptr() == data.data_ptr()  # in place
    assert (a - b).abs().max() < 1e-5
    assert (a - start).abs().max() > 0.1


def test_large_weight_in_seconds(gen):
    """30000 x 50, from constrain to steps: nothing of size N^2 (3.6 GB) exists."""
    layer = torch.nn.Linear(30000, 50, bias=False)
    ghor.constrain(layer, "weight", ST)
    opt = ghor.optim.Adam(layer, lr=1e-3)
    for _ in range(3):
        layer.weight.grad = randn((50, 30000), gen, torch.float32)
        opt.step()
    assert ST.residual(layer.weight.detach().double()) < 1e-5


@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize(("space", "columns"), [(ghor.Sphere(), 1), (ghor.Stiefel(), 2)], ids=str)
def test_all_the_way_around_a_great_circle(space, columns, retraction):
    """Opposite to its reference the closed form does not exist: that is reflected before. On Stiefel the
    first column goes around, and the others stay."""
    start = torch.eye(5, columns, dtype=torch.float64)
    Y = torch.nn.Parameter(start[:, 0].clone() if columns == 1 else start.clone())
    angle = 2 * math.pi / 40
    step = angle if retraction == "geodesic" else 2 * math.tan(angle / 2)
    opt = ghor.optim.SGD([Y], lr=step, space=space, retraction=retraction, section="implicit")
    for i in range(1, 81):
        Y.grad = torch.zeros_like(Y)
        y, g = Y.detach().view(5, columns)[:, 0], Y.grad.view(5, columns)[:, 0]
        g[0], g[4] = y[4], -y[0]
        opt.step()
        expected = start.clone()
        expected[0, 0], expected[4, 0] = math.cos(i * angle), math.sin(i * angle)
        assert (Y.view(5, columns) - expected).abs().max() <= 1e-13
