"""Muon in g^hor: no gauge, no scale, torch's own on Euclidean matrices, AdamW on the rest; other rules of
matrices."""

import math

import pytest
import torch
from liftable import NO, points, refusal
from rules import Plain
from steps import STIEFEL, Net, gradients, same, through_a_file, train, values
from table import MANIFOLDS, each_shape_and_section, name, on, point, randn, shapes
from torch import nn

import ghor
from ghor._torch.muon import orthogonalised
from ghor.optim.muon import orthogonalised as blockwise
from ghor.optim.muon import ratio

GRASSMANN = ghor.Grassmann()
MATRICES = [(STIEFEL, (12, 4)), (GRASSMANN, (3, 10))]
each_matrix = pytest.mark.parametrize(("space", "shape"), MATRICES, ids=name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=name)


def brockett(space, shape, dtype, section, steps=100, turn_at=None, cls=ghor.optim.Muon):
    """Steps on tr(Y^H S Y D); before step `turn_at` the complement's basis is turned, and the momentum with
    it."""
    gen = torch.Generator().manual_seed(0)
    N, n = space.size(shape)
    Y = nn.Parameter(space.random(*shape, generator=gen, dtype=dtype))
    S, D = randn((N, N), gen, dtype), torch.arange(1.0, n + 1)
    opt = cls([Y], space=space, section=section, lr=0.01)
    for t in range(steps):
        opt.zero_grad()
        M = space.matrix(Y)
        loss = ((M.mH @ (S + S.mH) @ M).diagonal().real * D).sum()
        loss.backward()
        if t == turn_at:
            O = torch.linalg.qr(randn((N - n, N - n), gen, dtype))[0]
            Q, M = opt.state[Y]["section"][..., n:], space.matrix(opt.state[Y]["momentum_buffer"])[..., n:, :]
            Q.copy_(Q @ O)
            M.copy_(O.mH @ M)
        opt.step()
    return Y.detach()


@each_matrix
@each_dtype
def test_no_gauge(space, shape, dtype):
    """Sections of both kinds, and one that is turned on the way, give the same weights.

    On the way down: once there, constant steps swing around the optimum, and rounding grows.
    """
    Y = brockett(space, shape, dtype, "transported")
    for other in (
        brockett(space, shape, dtype, "implicit"),
        brockett(space, shape, dtype, "transported", turn_at=3),
    ):
        assert (other - Y).norm() <= 1e-9 * Y.norm()


def test_adam_has_one():
    """The same with Adam shows what there is to see."""
    Y, other = (
        brockett(STIEFEL, (12, 4), torch.float64, s, 20, cls=ghor.optim.Adam)
        for s in ("transported", "implicit")
    )
    assert (other - Y).norm() > 1e-3 * Y.norm()


@each_shape_and_section
def test_every_space(space, shape, section, gen):
    """Stays on the space, and decreases the distance to a point beside it."""
    dtype = torch.float64
    Y = nn.Parameter(point(space, shape, gen, dtype))
    target = Y.detach() + 0.1 * randn(shape, gen, dtype)
    opt = ghor.optim.Muon([Y], space=space, section=section, lr=1e-3, weight_decay=0)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        loss = (Y - target).square().sum()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert on(space, Y)


def test_euclidean_matrices_are_torchs_to_the_bit(gen):
    start = [randn(shape, gen, torch.float32) for shape in [(9, 4), (3, 7), (5, 5)]]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    Y = nn.Parameter(STIEFEL.random(6, 2, generator=gen))
    options = {"lr": 0.02, "momentum": 0.9, "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"}
    opt = ghor.optim.Muon([{"params": ours}, {"params": [Y], "space": STIEFEL}], **options)
    ref = torch.optim.Muon(theirs, **options)
    for _ in range(100):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = randn(tuple(p.shape), gen, torch.float32)
            q.grad = p.grad.clone()
        Y.grad = randn((6, 2), gen, torch.float32)
        opt.step()
        ref.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(opt.state[p]["momentum_buffer"], ref.state[q]["momentum_buffer"])


class Words(nn.Module):
    """An embedding, a Euclidean matrix, a constrained one, a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.flat, self.turn = (
            nn.Embedding(11, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3, bias=False),
        )
        ghor.constrain(self.turn, "weight", STIEFEL)


def test_what_is_no_matrix_is_adamws(gen):
    """Embeddings and biases, in a group of their own with its own options; torch's to the bit."""
    ours, theirs = Words(), Words()
    opt = ghor.optim.Muon(ours, lr=0.02, adamw={"lr": 3e-3, "betas": (0.8, 0.9)})
    assert [g["param_names"] for g in opt.param_groups] == [
        ["flat.weight", "turn.weight"],
        ["embedding.weight", "flat.bias"],
    ]
    assert [g["lr"] for g in opt.param_groups] == [0.02, 3e-3]
    rest = [theirs.embedding.weight, theirs.flat.bias]
    refs = torch.optim.Muon([theirs.flat.weight], lr=0.02), torch.optim.AdamW(rest, lr=3e-3, betas=(0.8, 0.9))
    for _ in range(10):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = randn(tuple(p.shape), gen, torch.float32)
            q.grad = p.grad.clone()
        for o in (opt, *refs):
            o.step()
    for p, q in (
        (ours.flat.weight, theirs.flat.weight),
        *zip((ours.embedding.weight, ours.flat.bias), rest, strict=True),
    ):
        assert torch.equal(p, q)
    assert on(STIEFEL, ours.turn.weight)


def test_groups_say_which_they_are():
    model = Words()
    groups = [
        {"params": [model.flat.weight, model.turn.weight], "adamw": True, "lr": 0.3},
        {"params": [model.flat.bias], "lr": 0.4},
        {"params": [model.embedding.weight]},
    ]
    opt = ghor.optim.Muon(groups, lr=0.1, adamw={"lr": 0.2})
    assert [(g["adamw"], g["lr"], g.get("betas")) for g in opt.param_groups] == [
        (True, 0.3, (0.9, 0.999)),
        (True, 0.4, (0.9, 0.999)),
        (False, 0.1, None),
    ]
    with pytest.raises(ValueError, match="Invalid beta"):
        ghor.optim.Muon(model, adamw={"betas": (0.9, 2.0)})
    with pytest.raises(ValueError, match="3 numbers"):
        ghor.optim.Muon(model, ns_coefficients=(1.0, 2.0))


@pytest.mark.parametrize(
    ("space", "shape", "sides"),
    [
        (ghor.Stiefel(flatten=3), (12, 4, 3, 3), (12, 36)),
        (ghor.Stiefel(blocks=2), (16, 4), (8, 4)),
        (ghor.Sphere(flatten=2), (5, 4, 3), (12, 1)),
    ],
    ids=str,
)
def test_torchs_scalings_take_the_sides_of_the_points(space, shape, sides, gen):
    Y, G, moved = space.random(*shape, generator=gen, dtype=torch.float64), randn(shape, gen), []
    for how in (None, "match_rms_adamw"):
        p = nn.Parameter(Y.clone())
        p.grad = G.clone()
        ghor.optim.Muon([p], space=space, lr=1e-6, adjust_lr_fn=how).step()
        moved.append(p.detach() - Y)
    same(moved[1], moved[0] * 0.2 * math.sqrt(max(sides)), rtol=1e-4, atol=1e-12)


def test_unknown_options_of_groups(gen):
    p = nn.Parameter(STIEFEL.random(7, 3, generator=gen))
    with pytest.raises(ValueError, match=r"unknown option 'lrr' of AdamW; there are \['amsgrad'"):
        ghor.optim.Muon(
            [{"params": [p], "space": STIEFEL}, {"params": [nn.Parameter(p[0].clone())], "adamw": {"lrr": 1}}]
        )
    with pytest.raises(ValueError, match="adjust_lr_fn is None, 'original' or 'match_rms_adamw', got 'foo'"):
        ghor.optim.Muon([{"params": [p], "space": STIEFEL, "adjust_lr_fn": "foo"}])


MUONS = (3.4445, -4.775, 2.0315)


def newton_schulz(X, coefficients, steps):
    """The iteration as it is written, on X itself: the reference."""
    a, b, c = coefficients
    X = X / torch.linalg.matrix_norm(X)[..., None, None]
    for _ in range(steps):
        G = X.mH @ X
        X = a * X + X @ (b * G + c * G @ G)
    return X


def test_newton_schulz(gen):
    """Singular values near 1 and the singular vectors of X; a weight by itself, whatever its neighbours."""
    X, msign = randn((3, 9, 4), gen), lambda X: blockwise(X, ghor.Euclidean(), MUONS, 5, 1e-7)
    X[1] *= 1e-200
    X[2] = 0
    O = msign(X)
    assert ((torch.linalg.svdvals(O[:2]) > 0.6) & (torch.linalg.svdvals(O[:2]) < 1.3)).all()
    assert not O[2].any()
    U, _, Vh = torch.linalg.svd(X[:2], full_matrices=False)
    T = U.mT @ O[:2] @ Vh.mT
    assert (T - torch.diag_embed(T.diagonal(dim1=-2, dim2=-1))).abs().max() <= 1e-12
    same(msign(X[:1].mT), O[:1].mT, atol=1e-14)
    assert torch.equal(msign(X[:1] * 2.0**600), O[:1])


@pytest.mark.parametrize(
    "coefficients", [MUONS, (1.5, -0.5, 0.0), (2.0, -1.5, 0.5), (2.0, -1.5, 1e-9)], ids=str
)
@pytest.mark.parametrize("steps", [0, 4, 7])
@pytest.mark.parametrize(("N", "n"), [(9, 4), (6, 4), (4, 4), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=name)
def test_the_iteration_on_gram_matrices_is_that_on_the_blocks(coefficients, steps, N, n, dtype, gen):
    """To rounding, which grows by a^2 = 12 in each of the iterations between two restarts; singular values
    from 1 down to 1e-3."""
    V = STIEFEL.hor(randn((3, N, n), gen, dtype) * torch.logspace(0, -3, n, dtype=dtype))
    out = STIEFEL.ghor_blocks(blockwise(V, STIEFEL, coefficients, steps, 0.0))
    for X, O in zip(STIEFEL.ghor_blocks(V), out, strict=True):
        expected = newton_schulz(X, coefficients, steps)
        assert (O - expected).abs().max() <= 2e3 * torch.finfo(dtype).eps


def test_the_rate_is_an_angle():
    """One step of full rank in B alone turns every principal angle by lr, with exact signs; A alone every
    plane."""
    lr, exact = 0.1, {"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 60}
    Y = nn.Parameter(torch.eye(9, 4, dtype=torch.float64))
    opt = ghor.optim.Muon([Y], space=STIEFEL, retraction="geodesic", lr=lr, **exact)
    Y.grad = torch.cat([torch.zeros(4, 4), torch.eye(5, 4)]).double() * torch.tensor([1, 2, 3, 4])
    opt.step()
    same(torch.linalg.svdvals(Y.detach()[:4]).arccos(), torch.full((4,), lr, dtype=torch.float64), atol=1e-9)
    rates = [ratio(how, (49, 7)) for how in (None, "original", "match_rms_adamw")]
    assert rates == pytest.approx([1, 7**0.5, 1.4])


# -- scale and rounding --------------------------------------------------------------------------------------


def principal_components(section, steps=200):
    """Steps on -tr(Y^T S Y) in float32, St(10, 100): it does not see rotations of the columns, so A is
    rounding."""
    gen = torch.Generator().manual_seed(0)
    Y = nn.Parameter(STIEFEL.random(100, 10, generator=gen, dtype=torch.float32))
    X = randn((100, 100), gen, torch.float32)
    S, opt = X @ X.mT / 100, ghor.optim.Muon([Y], space=STIEFEL, section=section, lr=2e-3)
    for _ in range(steps):
        before = Y.detach().double()
        opt.zero_grad()
        loss = -(Y * (S @ Y)).sum()
        loss.backward()
        opt.step()
        after = Y.detach().double()
        T = before.mT @ after  # I + A + ..., symmetric where A = 0
        A, B = (T - T.mT) / 2, after - before @ T
        yield float(A.norm() / B.norm()), after


def test_rounding_is_not_made_a_step():
    """A is 1e-8 of the gradient; orthogonalised, it would be as long as B, and another for each section."""
    runs = [list(principal_components(section)) for section in ("transported", "implicit")]
    # float32 weights around steps of 2e-3: 6e-8/2e-3, over 10 columns
    assert max(share for run in runs for share, _ in run) <= 1e-3
    assert (runs[0][-1][1] - runs[1][-1][1]).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@each_matrix
def test_no_scale(space, shape, dtype, gen):
    """Gradients times 2^k give the same weights, to the bit."""
    start, steps = (
        space.random(*shape, generator=gen, dtype=dtype),
        [randn(shape, gen, dtype) for _ in range(5)],
    )

    def run(scale):
        Y = nn.Parameter(start.clone())
        opt = ghor.optim.Muon([Y], space=space, lr=0.05)
        for G in steps:
            Y.grad = G * scale
            opt.step()
        return Y.detach()

    for k in (-80, -40, 40, 80):
        assert torch.equal(run(2.0**k), run(1.0))


def test_a_small_block_is_one_unless_it_is_rounding(gen):
    """In bfloat16 1000 units of rounding are more than the whole, yet A moves; and NaN is not rounding."""
    Y = nn.Parameter(torch.eye(6, 3, dtype=torch.bfloat16))
    opt = ghor.optim.Muon([Y], space=STIEFEL, lr=0.1)
    Y.grad = randn((6, 3), gen, torch.float32).bfloat16()
    opt.step()
    assert (Y[:3] - Y[:3].mT).abs().max() > 0.05
    Z = nn.Parameter(torch.eye(6, 3))
    opt = ghor.optim.Muon([Z], space=STIEFEL, lr=0.1)
    Z.grad = torch.full((6, 3), float("nan"))
    with pytest.warns(UserWarning, match="is not finite"):
        opt.step()


# -- checkpoints of torch's ----------------------------------------------------------------------------------


def test_a_state_dict_of_torchs_loads(gen):
    """Euclidean matrices go on to the bit, weights on manifolds start afresh."""
    start, Y = randn((5, 4), gen, torch.float32), STIEFEL.random(6, 2, generator=gen)
    theirs, ours = ([nn.Parameter(x.clone()) for x in (start, Y)] for _ in range(2))
    ref = torch.optim.Muon([{"params": [theirs[0]]}, {"params": [theirs[1]], "lr": 0.01}], lr=0.02)
    opt = ghor.optim.Muon([{"params": [ours[0]]}, {"params": [ours[1]], "space": STIEFEL}], lr=0.1)

    def step(*pairs):
        grads = [randn(tuple(p.shape), gen, torch.float32) for p in ours]
        for o, params in pairs:
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            o.step()

    step((ref, theirs))
    ours[0].data.copy_(theirs[0].data)
    with pytest.warns(UserWarning, match="no section for 1 weights on manifolds"):
        opt.load_state_dict(through_a_file(ref.state_dict()))
    assert [g["lr"] for g in opt.param_groups] == [0.02, 0.01]
    for _ in range(3):
        step((ref, theirs), (opt, ours))
    assert torch.equal(ours[0], theirs[0])
    assert on(STIEFEL, ours[1])
    assert not torch.equal(ours[1], Y)


# -- other rules of matrices ---------------------------------------------------------------------------------


class Sign(Plain):
    """The matrix sign itself, without state; 0 where it is not defined, as on skew matrices with an odd
    side."""

    def velocity(self, p, g):
        U, s, Vh = torch.linalg.svd(g, full_matrices=False)
        return U @ torch.diag((s > 1e-6 * s[0]).to(g)) @ Vh


class Shampoo(Plain):
    """Factors of both sides: state of other shapes than the matrix'."""

    def velocity(self, p, g):
        state = self.state[p]
        for key, X in (("left", g @ g.mT), ("right", g.mT @ g)):
            state[key] = state.get(key, 1e-3 * torch.eye(len(X), dtype=g.dtype)) + X
        roots = [torch.linalg.eigh(state[key]) for key in ("left", "right")]
        L, R = (V @ torch.diag(e**-0.25) @ V.mT for e, V in roots)
        return L @ g @ R


@pytest.mark.parametrize("Base", [Sign, Shampoo])
def test_rules_of_matrices_lift_by_blocks(Base, gen):
    """And through a file: the run goes on to the bit."""
    Lifted = ghor.lift(Base, blocks=True)
    nets = [Net(), Net()]
    for net in nets:
        del net.sphere, net.bias
    opts = [Lifted(net.parameters(), lr=0.02) for net in nets]
    steps = gradients(nets[0], 6)
    train(nets[0], opts[0], steps)
    train(nets[1], opts[1], steps[:3])
    fresh = Lifted(nets[1].parameters(), lr=0.02)
    fresh.load_state_dict(through_a_file(opts[1].state_dict()))
    train(nets[1], fresh, steps[3:])
    same(values(nets[0]), values(nets[1]))
    assert all(on(STIEFEL, p) for p in nets[0].parameters())


class Rounded(Plain):
    """The matrix sign in bfloat16, as torch's Muon has it: of a skew matrix it is skew to 3 digits."""

    def velocity(self, p, g):
        return orthogonalised(g, (3.4445, -4.775, 2.0315), 5, 1e-7).to(g.dtype)


def test_what_a_rule_rounds_is_made_skew(gen):
    Y = nn.Parameter(STIEFEL.random(9, 6, generator=gen))
    opt = ghor.lift(Rounded, blocks=True)([Y], space=STIEFEL, lr=0.3)
    for _ in range(9):  # the tenth step repairs
        Y.grad = randn((9, 6), gen, torch.float32)
        opt.step()
        assert STIEFEL.residual(Y.detach().double()) <= 5e-6


def test_blocks_have_no_gauge_either():
    """A rule with state of other shapes needs a transported section."""
    BySign = ghor.lift(Sign, blocks=True)
    Y, other = (
        brockett(STIEFEL, (12, 4), torch.float64, s, 50, cls=BySign) for s in ("transported", "implicit")
    )
    assert (other - Y).norm() <= 1e-9 * Y.norm()
    (p,) = points(STIEFEL, (12, 4), 1)
    with pytest.raises(ValueError, match="keeps 'left', which is not a vector"):
        ghor.lift(Shampoo, blocks=True)([p], space=STIEFEL, section="implicit")


@pytest.mark.parametrize(
    ("Base", "reason"), [(torch.optim.Adam, "does not turn"), (torch.optim.Adafactor, "row and")]
)
def test_blocks_are_for_rules_that_turn(Base, reason):
    with pytest.raises(ValueError, match=NO + f".*{reason}"):
        ghor.lift(Base, blocks=True)
    assert refusal(Sign) is not None  # and those that turn are no elementwise rules


def test_lift_of_torchs_is_ours():
    for how in ({}, {"blocks": True}, {"stack": False}):
        assert ghor.lift(torch.optim.Muon, **how) is ghor.optim.Muon
    assert all(len(space.ghor_blocks(torch.zeros(shapes(space)[0]))) in (1, 2) for space in MANIFOLDS)


def test_a_group_comes_in_whole_or_not_at_all(gen):
    """Its part for Muon is taken before its part for AdamW is refused."""
    w, v, b = (nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (4, 2), (2,)))
    opt = ghor.optim.Muon([w, b], space=ghor.Euclidean())
    groups = [list(group["params"]) for group in opt.param_groups]
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": [v, b]})
    assert len(groups) == len(opt.param_groups) == 2
    for group, params in zip(opt.param_groups, groups, strict=True):
        assert list(map(id, group["params"])) == list(map(id, params))


def test_newton_schulz_of_nothing_is_nothing():
    """Also beside a weight that moves."""
    V = torch.zeros(2, 4, 3)
    V[1, 3, 0] = 1e-30
    out = blockwise(V, STIEFEL, MUONS, 5, 1e-4)
    assert not out[0].any()
    assert torch.isfinite(out).all()
