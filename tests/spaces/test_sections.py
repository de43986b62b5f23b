"""The implicit section against N x N matrices written here, and against the transported one."""

import math
from contextlib import nullcontext

import pytest
import torch
from table import name, randn

import ghor
from ghor._torch.values import as_on_an_accelerator
from ghor.lifting.probe import parity
from ghor.spaces.sections import fingerprint

ST = ghor.Stiefel()
CASES = [
    (ST, (12, 3)),
    (ghor.Grassmann(), (12, 3)),
    (ghor.Sphere(), (9,)),
    (ST, (9, 8)),
    (ST, (3, 12)),
    (ST, (2, 12, 3)),
]
cases = pytest.mark.parametrize(("space", "shape"), CASES, ids=name)
retractions = pytest.mark.parametrize("retraction", ["cayley", "geodesic"])


def frame(Y, R):
    """[Y, Q] from the reflection -I + D (I + Z1^T)^-1 D^T, D = Z + E, Z = Y R^T, its last columns negated."""
    N, n = Y.shape
    E, I = torch.eye(N, n, dtype=Y.dtype), torch.eye(N, dtype=Y.dtype)
    Z = Y @ R.mT
    D = Z + E
    reflection = -I + D @ torch.linalg.inv(torch.eye(n, dtype=Y.dtype) + Z[:n].mT) @ D.mT
    return torch.cat([reflection[:, :n] @ R, -reflection[:, n:]], 1)


def exp_skew(W):
    """exp of a skew matrix by the eigenvectors of the Hermitian iW: closer than torch.linalg.matrix_exp."""
    w, V = torch.linalg.eigh(1j * W)
    return (V @ torch.diag(torch.exp(-1j * w)) @ V.mH).real


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
    assert (ST.section_matrix(Y, R) - Lambda).abs().max() < 5e-15
    assert (ST.section(Y) - Lambda).abs().max() < 5e-15
    G = randn((N, n), gen)
    H = ST.implicit_grad(Y, R, ST.implicit_inverse(Y, R), G, torch.empty_like(G))
    expected = Lambda.mT @ G
    expected[:n] -= expected[:n].mT.clone()
    assert (H - expected).abs().max() < 1e-14


@retractions
@pytest.mark.parametrize("grassmann", [False, True])
def test_iterates_are_those_of_the_dense_rule(retraction, grassmann, gen):
    """Adam, 200 steps far enough to renew the anchor, to 1e-10."""
    N, n, lr = 9, 4, 0.05
    space = ghor.Grassmann() if grassmann else ST
    Y = torch.nn.Parameter(space.project(torch.eye(N, n, dtype=torch.float64) + 0.1 * randn((N, n), gen)))
    opt = ghor.optim.Adam([Y], space=space, lr=lr, retraction=retraction, section="implicit")
    y, I = Y.detach().clone(), torch.eye(N, dtype=torch.float64)
    R = polar(y[:n])
    m, v = torch.zeros(N, n, dtype=torch.float64), torch.zeros(N, n, dtype=torch.float64)
    renewed = 0
    for t in range(1, 201):  # to a quarter turn, then on towards -E, where the first anchor cannot hold
        target = I[:, n : 2 * n] if t < 80 else -I[:, :n]
        G = y - target + 0.4 * randn((N, n), gen)
        Y.grad = G.clone()
        opt.step()

        Lambda = frame(y, R)
        B = Lambda.mT @ G
        B[:n] = 0 if grassmann else B[:n] - B[:n].mT
        m, v = 0.9 * m + 0.1 * B, 0.999 * v + 0.001 * B * B
        H = -lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        W = torch.cat([H, torch.cat([-H[n:].mT, torch.zeros(N - n, N - n, dtype=torch.float64)])], 1)
        move = exp_skew(W) if retraction == "geodesic" else torch.linalg.solve(I - W / 2, I + W / 2)
        transported = Lambda @ move
        y = (
            transported[:, :n]
            @ (3 * torch.eye(n, dtype=torch.float64) - transported[:, :n].mT @ transported[:, :n])
            / 2
        )
        K = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + y[:n] @ R.mT)
        if K.norm() > 4 * math.sqrt(n):
            R, renewed = polar(y[:n]), renewed + 1
        m[n:] = frame(y, R)[:, n:].mT @ transported[:, n:] @ m[n:]

        assert (Y.detach() - y).abs().max() < 1e-10
        assert (opt.state[Y]["exp_avg"] - m).abs().max() < 1e-10
        assert (opt.state[Y]["frame_anchor"] - R).abs().max() < 1e-10
    assert renewed > 0


@cases
@retractions
@pytest.mark.parametrize("nesterov", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_momentum_does_not_see_the_gauge(space, shape, retraction, nesterov, gen):
    """110 steps: Lambda is polished at 100, Y at every tenth."""
    start = space.random(*shape, generator=gen, dtype=torch.float64)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    opts = [
        ghor.optim.SGD(
            [p], space=space, lr=0.02, momentum=0.9, nesterov=nesterov, retraction=retraction, section=s
        )
        for p, s in zip(weights, ("transported", "implicit"), strict=True)
    ]
    for _ in range(110):
        G = randn(shape, gen)
        for p, opt in zip(weights, opts, strict=True):
            p.grad = G.clone()
            opt.step()
    assert (weights[0] - weights[1]).abs().max() < 5e-13


def test_state_is_that_of_the_plain_optimizer_and_an_anchor(gen):
    N, n = 600, 4
    Y = torch.nn.Parameter(ST.random(N, n, generator=gen))
    opt = ghor.optim.Adam([Y], space=ST)
    Y.grad = randn((N, n), gen, torch.float32)
    opt.step()
    assert "frame_anchor" in opt.state[Y]  # auto
    entries = sum(v.numel() for v in opt.state[Y].values() if torch.is_tensor(v))
    assert entries <= 2 * N * n + n * n + 2


def test_auto_chooses_by_size_and_by_what_the_optimizer_keeps(gen):
    assert ST.section_kind("auto", (1024, 4)) == ST.section_kind("auto", (4, 1024)) == "implicit"
    assert ST.section_kind("auto", (49, 7)) == ST.section_kind("auto", (1024, 768)) == "transported"
    assert ST.section_kind("implicit", (9, 4)) == "implicit"
    assert ST.section_kind("transported", (1024, 4)) == "transported"
    assert ghor.SpecialOrthogonal().section_kind("implicit", (9, 9)) == "transported"  # nothing to do without
    assert ghor.SymplecticStiefel().section_kind("auto", (1024, 4)) == "transported"
    Y = torch.nn.Parameter(ST.random(1024, 2, generator=gen))
    opt = ghor.optim.RMSprop([Y], space=ST, centered=True)  # could not turn with the frame
    Y.grad = torch.ones_like(Y)
    opt.step()
    assert "section" in opt.state[Y]


EXPECTED = {
    "SGD": ({"momentum": 0.9}, {"momentum_buffer": "vector"}),
    "Adam": ({"amsgrad": True}, {"exp_avg": "vector", "exp_avg_sq": "square", "max_exp_avg_sq": "square"}),
    "AdamW": ({}, {"exp_avg": "vector", "exp_avg_sq": "square"}),
    "Muon": ({}, {"momentum_buffer": "vector"}),
    "NAdam": ({}, {"exp_avg": "vector", "exp_avg_sq": "square"}),
    "RAdam": ({}, {"exp_avg": "vector", "exp_avg_sq": "square"}),
    "Adamax": ({}, {"exp_avg": "vector", "exp_inf": "square"}),
    "Adagrad": ({}, {"sum": "square"}),
    "Adadelta": ({}, {"square_avg": "square", "acc_delta": "square"}),
    "RMSprop": ({"momentum": 0.9}, {"square_avg": "square", "momentum_buffer": "vector"}),
    "Rprop": ({}, {"prev": "vector", "step_size": "square"}),
    "PaperAdam": ({}, {"m": "vector", "v": "square"}),
}


@pytest.mark.parametrize(
    "cls", [getattr(ghor.optim, n) for n in ghor.optim.__all__], ids=lambda c: c.__name__
)
def test_which_state_turns_with_the_frame(cls):
    options, expected = EXPECTED[cls.__name__]
    assert parity(cls.Base, options) == expected


def test_refused_where_it_is_not_defined(gen):
    Y = torch.nn.Parameter(ST.random(9, 3, generator=gen))
    with pytest.raises(ValueError, match="parameter 0 of group 0: RMSprop with these options subtracts"):
        ghor.optim.RMSprop([Y], space=ST, centered=True, section="implicit")
    U = torch.nn.Parameter(ghor.SymplecticStiefel().random(8, 4, generator=gen))
    with pytest.raises(ValueError, match="no implicit section"):
        ghor.optim.Adam([U], space=ghor.SymplecticStiefel(), section="implicit")


@cases
def test_one_section_goes_on_from_the_state_of_the_other(space, shape, gen):
    """Momentum sees no gauge: 10 steps, the state loaded into the other kind, 10 more = 20 of one kind."""
    start = space.random(*shape, generator=gen, dtype=torch.float64)
    grads = [randn(shape, gen) for _ in range(20)]

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


@pytest.mark.parametrize(("i", "j"), [(0, 1), (0, 64), (70, 500), (639, 649)])
def test_a_fingerprint_tells_the_order(i, j, gen):
    """Two of 650 numbers exchanged: in a row of 64, in a column, in neither, in the rest."""
    X = torch.randn(100, 650, generator=gen)  # of fewer points the numbers themselves are kept
    Z = X.clone()
    Z[:, i], Z[:, j] = X[:, j], X[:, i]
    assert (fingerprint(X) != fingerprint(Z)).any(1).all()


@pytest.mark.parametrize("where", [nullcontext, as_on_an_accelerator], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize(("space", "columns"), [(ghor.Sphere(), 1), (ghor.Stiefel(), 2)], ids=str)
def test_all_the_way_around_a_great_circle(space, columns, retraction, where):
    """Opposite to the anchor the implicit frame does not exist: the anchor is renewed before. On Stiefel the
    first column goes around, and the others stay."""
    start = torch.eye(5, columns, dtype=torch.float64)
    Y = torch.nn.Parameter(start[:, 0].clone() if columns == 1 else start.clone())
    angle = 2 * math.pi / 40
    step = angle if retraction == "geodesic" else 2 * math.tan(angle / 2)
    with where():
        opt = ghor.optim.SGD([Y], lr=step, space=space, retraction=retraction, section="implicit")
        for i in range(1, 81):
            Y.grad = torch.zeros_like(Y)
            y, g = Y.detach().view(5, columns)[:, 0], Y.grad.view(5, columns)[:, 0]
            g[0], g[4] = y[4], -y[0]
            opt.step()
            expected = start.clone()
            expected[0, 0], expected[4, 0] = math.cos(i * angle), math.sin(i * angle)
            assert (Y.view(5, columns) - expected).abs().max() <= 1e-13


@pytest.mark.filterwarnings("ignore:.*changed outside")  # the repair may change the last bits of the point
def test_a_loaded_complement_that_was_rounded_is_repaired(gen):
    """The point is exact, so that it is not noticed by what the weight is."""
    Y = torch.nn.Parameter(ghor.Stiefel().random(9, 3, generator=gen))
    opt = ghor.optim.SGD([Y], lr=1e-6, momentum=0.9, space=ghor.Stiefel(), section="transported")
    Y.grad = torch.randn(9, 3, generator=gen)
    opt.step()
    saved = opt.state_dict()
    saved["state"][0]["section"][:, 3:] = saved["state"][0]["section"][:, 3:].bfloat16().float()
    opt.load_state_dict(saved)
    opt.step()
    L = opt.state[Y]["section"].double()
    assert (L.mT @ L - torch.eye(9)).abs().max() <= 1e-6
