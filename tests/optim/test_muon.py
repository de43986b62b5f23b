"""Muon in g^hor: no gauge, no scale, torch's own on Euclidean matrices, AdamW on the rest."""

import math
import warnings

import pytest
import torch
from helpers.steps import STIEFEL, same, through_a_file
from helpers.table import each_shape_and_section, name, on, point, randn
from torch import nn

import ghor
from ghor.optim.muon import POLAR_EXPRESS, orthogonalise_, ratio

GRASSMANN = ghor.Grassmann()
MATRICES = [(STIEFEL, (12, 4)), (GRASSMANN, (3, 10))]
each_matrix = pytest.mark.parametrize(("space", "shape"), MATRICES, ids=name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=name)


def brockett(space, shape, dtype, cls, turn_at=None):
    """Steps on tr(Y^H S Y D) above stored frames; before step `turn_at` the complement's basis is turned, and
    the momentum with it. On the way down: near the optimum constant steps swing, and rounding grows."""
    gen = torch.Generator().manual_seed(0)
    N, n = max(shape), min(shape)
    Y = nn.Parameter(space.random(*shape, generator=gen, dtype=dtype))
    S, D = randn((N, N), gen, dtype), torch.arange(1.0, n + 1)
    opt = cls([Y], space=space, section="transported", lr=0.01)
    for t in range(20):
        opt.zero_grad()
        M = Y if Y.shape[0] > Y.shape[1] else Y.mT
        loss = ((M.mH @ (S + S.mH) @ M).diagonal().real * D).sum()
        loss.backward()
        if t == turn_at:
            O = torch.linalg.qr(randn((N - n, N - n), gen, dtype))[0]
            M = next(v for k, v in opt.state[Y].items() if k in ("momentum_buffer", "exp_avg"))
            Q, M = opt.state[Y]["section"][..., n:], (M if M.shape[0] > M.shape[1] else M.mT)[..., n:, :]
            Q.copy_(Q @ O)
            M.copy_(O.mH @ M)
        opt.step()
    return Y.detach()


@each_matrix
@each_dtype
def test_no_gauge(space, shape, dtype):
    """A frame that is turned on the way gives the same weights; Adam's are others, so there is something to
    see. (tests/spaces/test_tangent.py has no frame, and frames of both kinds.)"""
    Y, other = (brockett(space, shape, dtype, ghor.optim.Muon, t) for t in (None, 3))
    assert (other - Y).norm() <= 1e-9 * Y.norm()
    Y, other = (brockett(space, shape, dtype, ghor.optim.Adam, t) for t in (None, 3))
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


class Decoder(nn.Module):
    """An embedding, a tied head and one that is not, a gate, and matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.mix, self.gate, self.turn = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 3, bias=False)
        self.head, self.other = nn.Linear(6, 11, bias=False), nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
        ghor.constrain(self.turn, "weight", STIEFEL)


def names_of(opt, adamw):
    return [n for group in opt.param_groups if group["adamw"] is adamw for n in group["param_names"]]


def test_with_a_model_tables_and_heads_are_adamws_and_what_is_no_matrix(gen):
    """Embeddings, tied weights, and Linears with as many outputs as there are words, in a group of their own
    with its own options; torch's to the bit."""
    ours, theirs = Decoder(), Decoder()
    opt = ghor.optim.Muon(ours, lr=0.02, adamw={"lr": 3e-3, "betas": (0.8, 0.9)})
    assert names_of(opt, False) == ["mix.weight", "gate.weight", "turn.weight"]
    assert names_of(opt, True) == ["words.weight", "places.weight", "mix.bias", "gate.bias", "other.weight"]
    assert [g["lr"] for g in opt.param_groups] == [0.02, 3e-3]
    muons, rest = ([theirs.get_parameter(n) for n in names_of(opt, kind)] for kind in (False, True))
    refs = torch.optim.Muon(muons[:2], lr=0.02), torch.optim.AdamW(rest, lr=3e-3, betas=(0.8, 0.9))
    for _ in range(10):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = randn(tuple(p.shape), gen, torch.float32)
            q.grad = p.grad.clone()
        for o in (opt, *refs):
            o.step()
    for n, q in theirs.named_parameters():
        assert n == "turn.weight" or torch.equal(ours.get_parameter(n), q), n
    assert on(STIEFEL, ours.turn.weight)


def test_groups_say_which_they_are():
    model = Decoder()
    groups = [
        {"params": [model.mix.weight, model.turn.weight], "adamw": True, "lr": 0.3},
        {"params": [model.mix.bias], "lr": 0.4},
        {"params": [model.words.weight]},
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


def newton_schulz(X, triples):
    """The iteration as it is written, on X itself: the reference."""
    X = X / torch.linalg.matrix_norm(X)[..., None, None]
    for a, b, c in triples:
        G = X.mH @ X
        X = a * X + X @ (b * G + c * G @ G)
    return X


def msign(X, triples=(MUONS,) * 5, floor=1e-7, low=None):
    """Of one block alone."""
    X = X.clone()
    orthogonalise_([X], triples, floor, 1.0, low)
    return X


def test_newton_schulz(gen):
    """Singular values near 1 and the singular vectors of X; a weight by itself, whatever its neighbours."""
    X = randn((3, 9, 4), gen)
    X[1] *= 1e-200
    X[2] = 0
    O = msign(X)
    assert ((torch.linalg.svdvals(O[:2]) > 0.6) & (torch.linalg.svdvals(O[:2]) < 1.3)).all()
    assert not O[2].any()
    U, _, Vh = torch.linalg.svd(X[:2], full_matrices=False)
    T = U.mT @ O[:2] @ Vh.mT
    assert (T - torch.diag_embed(T.diagonal(dim1=-2, dim2=-1))).abs().max() <= 1e-12
    assert torch.equal(msign(X[:1] * 2.0**600), O[:1])


@pytest.mark.parametrize(
    "triples",
    [(MUONS,) * 4, (MUONS,) * 9, ((1.5, -0.5, 0.0),) * 7, ((2.0, -1.5, 0.5),) * 7, POLAR_EXPRESS, ()],
    ids=lambda t: f"{len(t)} of {t[0][0]:.1f}" if t else "none",
)
@pytest.mark.parametrize(("N", "n"), [(9, 4), (6, 4), (4, 4), (5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=name)
def test_the_iteration_on_gram_matrices_is_that_on_the_blocks(triples, N, n, dtype, gen):
    """To rounding, which grows by a^2 in each of the iterations between two restarts, until singular values
    that begin at 1e-3 have come near 1. Two blocks of one width go together, and each is as by itself."""
    V = randn((3, N, n), gen, dtype) * torch.logspace(0, -3, n, dtype=dtype)
    blocks = [V[:, :n].clone(), V[:, n:].clone()] if N > n else [V.clone()]
    expected = [newton_schulz(X, triples) for X in blocks]
    orthogonalise_(blocks, triples, 0.0, 1.0)
    for X, Z in zip(blocks, expected, strict=True):
        assert (X - Z).abs().max() <= 1e4 * torch.finfo(dtype).eps


def test_polar_express_is_nearer_to_the_sign(gen):
    """Singular values down to 3e-3 of ||X||_F: within 0.13 of 1 in five steps, Muon's own within 0.4."""
    U, _, Vh = torch.linalg.svd(randn((9, 6), gen), full_matrices=False)
    X = ((U * torch.logspace(0, -2.5, 6, dtype=torch.float64)) @ Vh)[None]
    off = [float((torch.linalg.svdvals(msign(X, t)) - 1).abs().max()) for t in (POLAR_EXPRESS, (MUONS,) * 5)]
    assert off[0] < 0.13 < off[1] < 0.4


def test_a_polynomial_in_bfloat16(gen):
    """Singular values right to two digits, though X^H X has but two; without restarts some are 400."""
    X = randn((4, 60, 20), gen, torch.float32) * torch.logspace(0, -3, 20)
    low, full = (torch.linalg.svdvals(msign(X, low=dtype)) for dtype in (torch.bfloat16, None))
    assert low.max() < 1.3
    assert (low - full).abs().max() < 0.25


def test_the_rate_is_an_angle():
    """One step of full rank in B alone turns every principal angle by lr, with exact signs; A alone every
    plane."""
    lr, exact = 0.1, {"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 60}
    Y = nn.Parameter(torch.eye(9, 4, dtype=torch.float64))
    opt = ghor.optim.Muon([Y], space=STIEFEL, retraction="geodesic", lr=lr, **exact)
    Y.grad = torch.cat([torch.zeros(4, 4), torch.eye(5, 4)]).double() * torch.tensor([1, 2, 3, 4])
    opt.step()
    same(torch.linalg.svdvals(Y.detach()[:4]).arccos(), torch.full((4,), lr, dtype=torch.float64), atol=1e-9)
    rates = [ratio(how, 49, 7) for how in (None, "original", "match_rms_adamw")]
    assert rates == pytest.approx([1, 7**0.5, 1.4])


# -- scale and rounding --------------------------------------------------------------------------------------


def principal_components(section, steps=60):
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
    runs = [list(principal_components(section)) for section in ("auto", "transported", "implicit")]
    # float32 weights around steps of 2e-3: 6e-8/2e-3, over 10 columns
    assert max(share for run in runs for share, _ in run) <= 1e-3
    for run in runs[1:]:
        assert (runs[0][-1][1] - run[-1][1]).abs().max() <= 1e-5


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
    with pytest.warns(UserWarning, match="is not finite"):  # numbers are looked at in every tenth step
        [opt.step() for _ in range(10)]
    assert torch.equal(Z, torch.eye(6, 3))


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


# -- groups --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Muon was given bare tensors")
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
    opt.add_param_group({"params": [v]})
    v.grad = torch.ones_like(v)
    opt.step()
    assert not torch.equal(v, torch.ones_like(v))


def test_newton_schulz_of_nothing_is_nothing():
    """Also beside a weight that moves."""
    V = torch.zeros(2, 4, 3)
    V[1, 3, 0] = 1e-30
    out = msign(V, floor=1e-4)
    assert not out[0].any()
    assert torch.isfinite(out).all()


# -- which weights are whose ---------------------------------------------------------------------------------


def test_names_say_more():
    opt = ghor.optim.Muon(Decoder(), lr=0.02, adamw_names=("gate", "*.nothing_but_this", "mi?.weight")[::2])
    assert names_of(opt, False) == ["turn.weight"]
    with pytest.raises(ValueError, match="no parameter is called 'gates', as adamw_names says"):
        ghor.optim.Muon(Decoder(), adamw_names=["gates"])


def test_a_module_beside_groups_of_ones_own():
    model = Decoder()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    opt = ghor.optim.Muon([{"params": matrices}], lr=0.02, module=model, adamw_names=["gate.weight"])
    of_adamw = [p for group in opt.param_groups if group["adamw"] for p in group["params"]]
    expected = [model.words.weight, model.places.weight, model.gate.weight, model.other.weight]
    assert set(map(id, of_adamw)) == set(map(id, expected))


def test_bare_parameters_of_all_kinds_are_warned_of():
    model = Decoder()
    with pytest.warns(UserWarning, match=r"all 5 matrices .* shape \(11, 6\).*module=model"):
        ghor.optim.Muon(list(model.parameters()), lr=0.02)
    matrices, vectors = ([p for p in model.parameters() if p.dim() == d] for d in (2, 1))
    with warnings.catch_warnings(action="error"):
        ghor.optim.Muon(matrices, lr=0.02)  # torch's contract
        ghor.optim.Muon(matrices + vectors, lr=0.02, module=model)
        ghor.optim.Muon([{"params": vectors}, {"params": matrices}])


def test_a_list_of_triples_moves_euclidean_matrices_too(gen):
    """As torch's Muon, but for the polynomial: a list of Muon's own triple is one triple, to bfloat16."""
    starts, moved = [randn((9, 4), gen, torch.float32), randn((4, 9), gen, torch.float32)], []
    for coefficients in (MUONS, [MUONS] * 5):
        params = [nn.Parameter(x.clone()) for x in starts]
        opt = ghor.optim.Muon(params, lr=0.1, space=ghor.Euclidean(), ns_coefficients=coefficients)
        for p in params:
            p.grad = p.detach().cos()
        opt.step()
        moved.append(torch.cat([(p.detach() - x).flatten() for p, x in zip(params, starts, strict=True)]))
    assert (moved[0] - moved[1]).abs().max() < 0.1 * moved[0].abs().max()
    for bad in ([(1.0, 2.0)], [], [1.0, 2.0]):
        with pytest.raises(ValueError, match="3 numbers, or 3 for each step"):
            ghor.optim.Muon(starts, space=ghor.Euclidean(), ns_coefficients=bad)


def test_lift_of_torchs_is_ours():
    assert ghor.lift(torch.optim.Muon) is ghor.optim.Muon


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("shape", [(16, 6), (6, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("cls", [ghor.optim.Muon, ghor.optim.SGD])
def test_a_momentum_of_blocks_is_seen_as_it_is_now(cls, shape, along, gen):
    """Wide and tall blocks, side by side or one below the other: state[p] has views, not the first step's."""
    space = ghor.Stiefel(blocks=2, along=along)
    p = nn.Parameter(space.random(*shape, generator=gen))
    opt = cls([p], lr=0.1, momentum=0.9, space=space)
    seen = []
    for _ in range(3):
        p.grad = torch.randn(shape, generator=gen)
        opt.step()
        seen.append(opt.state[p]["momentum_buffer"].clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    again = nn.Parameter(p.detach().clone())
    other = cls([again], lr=0.1, momentum=0.9, space=space)
    other.load_state_dict(through_a_file(opt.state_dict()))
    p.grad = torch.randn(shape, generator=gen)
    again.grad = p.grad.clone()
    opt.step()
    other.step()
    assert torch.equal(p, again)
