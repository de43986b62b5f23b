"""Published methods: each has the property that its paper claims, and lacks the one that its docstring
names."""

import copy
import io
import math

import pytest
import torch
from helpers.lab import randn

import ghor
from ghor_lab import baselines
from ghor_lab.baselines import li2020, manifold_muon
from ghor_lab.methods import METHODS

ST, SO = ghor.Stiefel(), ghor.SpecialOrthogonal()
ALL = [
    baselines.CayleySGD,
    baselines.CayleyAdam,
    li2020.SGDG,
    baselines.AdamSO,
    baselines.AdamStiefel,
    baselines.CheapOrthogonal,
    baselines.Trivialization,
    baselines.SoftConstraintAdam,
    baselines.QRAdam,
    baselines.ManifoldMuon,
]
of_class = lambda cls: cls.__name__  # noqa: E731
every = pytest.mark.parametrize("cls", ALL, ids=of_class)


@pytest.fixture(autouse=True)
def no_draw(monkeypatch):
    """SGDG orthonormalises at random; two of them that are compared must not draw differently."""
    monkeypatch.setattr(li2020.random, "randint", lambda low, high: high)


def parameter(Y):
    return torch.nn.Parameter(Y.clone())


def start(cls, gen, *shape):
    return parameter((SO if cls.space == SO else ST).random(*shape, generator=gen, dtype=torch.float64))


def walk(opts, weights, gen, steps):
    """Random gradients, of other sizes from step to step, the same for all; the largest distance on the
    way."""
    worst = 0.0
    for t in range(steps):
        G = randn(tuple(weights[0].shape), gen) * (1 + t % 3)
        for opt, Y in zip(opts, weights, strict=True):
            Y.grad = G.clone()
            opt.step()
        worst = max(worst, float((weights[0] - weights[-1]).detach().abs().max()))
    return worst


def minimise(opt, Y, loss, steps):
    """With a step that falls to zero; returns all losses."""
    lr, losses = opt.param_groups[0]["lr"], []
    for t in range(steps):
        opt.param_groups[0]["lr"] = lr * (1 - t / steps)
        opt.zero_grad()
        value = loss(Y)
        value.backward()
        opt.step()
        losses.append(float(value.detach()))
    return losses


# -- what all have -------------------------------------------------------------------------------------------


@every
def test_a_batch_is_its_matrices_one_by_one(cls, gen):
    """Gradients differ in size by 1e4: a norm over the batch would show."""
    Y = start(cls, gen, 2, 2, 4, 4)
    alone = [parameter(Y.detach()[i, j]) for i in range(2) for j in range(2)]
    opt, ones = cls([Y], lr=0.01), [cls([p], lr=0.01) for p in alone]
    for _ in range(5):
        Y.grad = randn((2, 2, 4, 4), gen) * 10.0 ** torch.arange(-2, 2).reshape(2, 2, 1, 1)
        opt.step()
        for p, G, one in zip(alone, Y.grad.reshape(4, 4, 4), ones, strict=True):
            p.grad = G.clone()
            one.step()
    # products of a batch and of one matrix are summed in another order; exactly skew 0/0 entries cannot
    # differ
    torch.testing.assert_close(Y.detach().reshape(4, 4, 4), torch.stack(alone).detach(), rtol=0, atol=1e-12)


def test_sgdg_orthonormalises_where_it_draws_a_one(gen, monkeypatch):
    """X is orthonormal again before a step of length 0, and only scaled to unit columns otherwise."""
    Y = start(li2020.SGDG, gen, 6, 3).detach() + 1e-3 * randn((6, 3), gen)
    left = []
    for draw in (1, 2):
        monkeypatch.setattr(li2020.random, "randint", lambda low, high, draw=draw: draw)
        P = parameter(Y)
        P.grad = randn((6, 3), gen)
        li2020.SGDG([P], lr=0.0).step()
        left.append(float(ST.residual(P.detach())))
    assert left[0] < 1e-14
    assert left[1] > 1e-4


@pytest.mark.parametrize("cls", [c for c in ALL if c.space == ST], ids=of_class)
def test_a_wide_matrix_is_its_transpose(cls, gen):
    tall = start(cls, gen, 2, 7, 3)
    wide = parameter(tall.detach().mT.contiguous())
    opts = cls([tall], lr=0.01), cls([wide], lr=0.01)
    for _ in range(5):
        tall.grad = randn((2, 7, 3), gen)
        wide.grad = tall.grad.mT.contiguous()
        for opt in opts:
            opt.step()
    torch.testing.assert_close(tall.detach(), wide.detach().mT, rtol=0, atol=1e-13)


@every
def test_it_is_a_normal_optimizer(cls, gen):
    """Groups, a closure, weights without gradient, a checkpoint through a file, deepcopy: to the bit."""
    Y, Z = start(cls, gen, 4, 4), start(cls, gen, 3, 3)
    opt = cls([{"params": [Y]}, {"params": [Z], "lr": 0.02}], lr=0.01)
    target = randn((4, 4), gen)

    def closure():
        opt.zero_grad()
        loss = (Y * target).sum()
        loss.backward()
        return loss

    before = Z.detach().clone()
    value = (Y.detach() * target).sum()
    assert torch.equal(opt.step(closure), value)
    assert torch.equal(Z, before)
    assert [g["lr"] for g in opt.param_groups] == [0.01, 0.02]
    Z.grad = randn((3, 3), gen)
    for _ in range(3):
        opt.step()
    buffer = io.BytesIO()
    torch.save([Y.detach(), Z.detach(), opt.state_dict()], buffer)
    buffer.seek(0)
    *weights, state = torch.load(buffer, weights_only=True)
    P, Q = map(parameter, weights)
    other = cls([{"params": [P]}, {"params": [Q]}])
    other.load_state_dict(state)
    third = copy.deepcopy((opt, Y, Z))
    for o, a, b in ((opt, Y, Z), (other, P, Q), third):
        again = torch.Generator().manual_seed(1)
        for _ in range(3):
            a.grad, b.grad = randn((4, 4), again), randn((3, 3), again)
            o.step()
    for _, a, b in ((other, P, Q), third):
        assert torch.equal(a, Y)
        assert torch.equal(b, Z)


@every
def test_what_it_cannot_take_it_refuses(cls, gen):
    """With the number and the way out; a group that is refused is not added."""
    Y = start(cls, gen, 4, 4)
    opt = cls([Y])
    for wrong, error, words in (
        (torch.eye(3, dtype=torch.complex64), TypeError, "torch.complex64; .* float32 or float64"),
        (torch.eye(3, dtype=torch.bfloat16), TypeError, "parameter 0 of group 1 is torch.bfloat16"),
        *(
            [(2 * torch.eye(3), ValueError, r"of group 1 of shape \(3, 3\) is 5.2e\+00 off .*project")]
            * (cls.room < 1)
        ),
    ):
        with pytest.raises(error, match=words):
            opt.add_param_group({"params": [torch.nn.Parameter(wrong)]})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        cls([Y], lr=-1)


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (baselines.CayleyAdam, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        (baselines.CayleySGD, {"q": -1}, "Invalid q: -1"),
        (
            baselines.AdamStiefel,
            {"expm": "pade"},
            "unknown expm 'pade'; there are .'cayley', 'euler', 'geodesic'.",
        ),
        (baselines.AdamStiefel, {"a": 1.0}, "Invalid a: 1.0; metrics have a < 1"),
        (baselines.Trivialization, {"every": 0}, "Invalid every: 0; a number of steps"),
        (baselines.SoftConstraintAdam, {"mu": -0.5}, "Invalid mu: -0.5"),
        (baselines.ManifoldMuon, {"tol": math.nan}, "Invalid tol: nan"),
    ],
    ids=str,
)
def test_options_are_checked(cls, options, words, gen):
    with pytest.raises(ValueError, match=words):
        cls([start(cls, gen, 4, 4)], **options)


RATES = {"li-1": 0.02, "li-2": 0.1, "scalar": 0.1, "muon": 0.1}  # where lr is not the size of each entry


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.key)
def test_they_descend(method, gen):
    """To a point of the space, from a random one near it; all methods, also those that give things up."""
    shape = (6, 3) if method.stiefel or method.key == "soft" else (5, 5)
    space = ST if shape == (6, 3) else SO
    target = space.random(*shape, generator=gen, dtype=torch.float64)
    Y = parameter(space.project(target + 0.3 * randn(shape, gen)))
    losses = minimise(
        method.make([Y], lr=RATES.get(method.key, 0.03)), Y, lambda Y: (Y - target).square().sum(), 60
    )
    assert losses[-1] < 1e-2 * losses[0]


# -- Li 2020 -------------------------------------------------------------------------------------------------


def test_the_iterated_cayley_transform_converges_to_the_solved_one(gen):
    """By q or more an iteration, for every matrix of a batch, since alpha ||W|| <= 2 q; in alpha with order s
    + 2."""
    X = ST.random(3, 9, 4, generator=gen, dtype=torch.float64)
    W = li2020.rotation(X, randn((3, 9, 4), gen) * torch.tensor([0.1, 1.0, 10.0]).reshape(3, 1, 1))
    I = torch.eye(9, dtype=torch.float64)

    def error(alpha, s):
        exact = torch.linalg.solve(I - alpha / 2 * W, (I + alpha / 2 * W) @ X)
        return (li2020.cayley_iterations(X, W, alpha, s) - exact).norm(dim=(-2, -1))

    alpha = li2020.step_size(W, {"q": 0.5, "lr": math.inf, "eps": 0.0})
    errors = torch.stack([error(alpha, s) for s in range(12)])
    assert bool((errors[1:] <= 0.5 * errors[:-1]).all())
    assert bool((error(alpha, 60) < 1e-14).all())
    for s in range(4):
        slope = torch.log2(error(alpha / 8, s) / error(alpha / 16, s))
        torch.testing.assert_close(slope, torch.full_like(slope, s + 2), rtol=0, atol=0.05)


def test_cayley_adam_is_algorithm_2(gen):
    """Line by line with the solved transform, which 60 iterations are; the step bound is met at some
    steps."""
    Y = start(baselines.CayleyAdam, gen, 6, 2)
    opt = baselines.CayleyAdam([Y], lr=0.8, betas=(0.8, 0.95), eps=1e-3, s=60)
    X, M, v, I = Y.detach().clone(), 0.0, 0.0, torch.eye(6, dtype=torch.float64)
    bounded = 0
    for k in range(1, 21):
        G = Y.grad = randn((6, 2), gen)
        opt.step()
        M, v = 0.8 * M + 0.2 * G, 0.95 * v + 0.05 * float(G.norm()) ** 2
        r = (1 - 0.8**k) * math.sqrt(v / (1 - 0.95**k) + 1e-3)
        W = M @ X.mT - X @ X.mT @ M @ X.mT / 2
        W = (W - W.mT) / r
        M = r * W @ X
        bound = 1 / (float(W.abs().sum(0).max()) + 1e-3)
        bounded += bound < 0.8
        alpha = min(0.8, bound)
        X = torch.linalg.solve(I + alpha / 2 * W, (I - alpha / 2 * W) @ X)
    assert 0 < bounded < 20
    torch.testing.assert_close(Y.detach(), X, rtol=0, atol=1e-12)


def test_with_two_iterations_it_leaves_the_manifold(gen):
    """What li2020 gives up; with enough iterations, or Algorithm 3, the weight stays."""
    off = {}
    for s in (2, 40):
        Y = start(baselines.CayleyAdam, gen, 8, 3)
        walk([baselines.CayleyAdam([Y], lr=0.1, s=s)], [Y], gen, 200)
        off[s] = float(ST.residual(Y.detach()))
    assert off[2] > 1e-6
    assert off[40] < 1e-13


# -- Kong 2022 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_algorithm_5_is_lifted_adam_on_so(retraction, eps, gen):
    """As the paper claims for n = N: a = 1/2, so that f = X^T G - G^T X; eps outside the root, v
    corrected."""
    options = {"lr": 0.03, "betas": (0.9, 0.99), "eps": eps}
    X = start(baselines.AdamSO, gen, 2, 6, 6)
    Y = parameter(X.detach())
    a = baselines.AdamSO([X], expm=retraction, **options)
    b = ghor.optim.Adam([Y], space=SO, retraction=retraction, **options)
    assert walk([a, b], [X, Y], gen, 200) < 1e-12
    assert SO.residual(X.detach()).max() < 1e-13


def test_algorithm_2_on_square_matrices_is_algorithm_5(gen):
    X = start(baselines.AdamSO, gen, 5, 5)
    Y = parameter(X.detach())
    a, b = baselines.AdamStiefel([X], lr=0.03), baselines.AdamSO([Y], lr=0.03)
    assert walk([a, b], [X, Y], gen, 100) < 1e-12


@pytest.mark.parametrize("expm", ["cayley", "euler", "geodesic"])
def test_algorithm_2_keeps_its_structure(expm, gen):
    """X^T X = I, Y skew, X^T V = 0 after every step, as the paper proves, whatever stands for the
    exponential."""
    X = start(baselines.AdamStiefel, gen, 3, 9, 4)
    opt = baselines.AdamStiefel([X], lr=0.05, expm=expm)
    for _ in range(30):
        walk([opt], [X], gen, 1)
        Y, V = opt.state[X]["Y"], opt.state[X]["V"]
        assert ST.residual(X.detach()).max() < 1e-13
        assert (Y + Y.mT).abs().max() < 1e-14
        assert (X.detach().mT @ V).abs().max() < 1e-13


def test_algorithm_2_is_its_formulas(gen):
    """With all roots and inverses solved for; the term V Y counts."""
    weight = start(baselines.AdamStiefel, gen, 7, 3)
    opt = baselines.AdamStiefel([weight], lr=0.1, betas=(0.8, 0.95), eps=1e-3, a=0.2)
    X, I = weight.detach().clone(), torch.eye(3, dtype=torch.float64)
    Y, V, p, q = torch.zeros_like(I), torch.zeros_like(X), 0.0, 0.0
    for t in range(1, 21):
        G = weight.grad = randn((7, 3), gen)
        opt.step()
        b = 0.2 / (0.2 - 1)
        f, g = (1 - b) / 2 * (X.mT @ G - G.mT @ X), G - X @ X.mT @ G
        Y, p, q = 0.8 * Y - 0.2 * f, 0.95 * p + 0.05 * f**2, 0.95 * q + 0.05 * g**2
        V = 0.8 * V + 0.1 * (3 * 0.2 - 2) / 2 * V @ Y - 0.2 * g
        Yt, Vt = (M / (1 - 0.8**t) / (torch.sqrt(s / (1 - 0.95**t)) + 1e-3) for M, s in ((Y, p), (V, q)))
        Vt = Vt - X @ X.mT @ Vt
        X1 = X @ torch.linalg.solve(I - 0.05 * Yt, I + 0.05 * Yt)
        X, V = X1 + 0.1 * Vt @ X1.mT @ X1, V - 0.1 * X1 @ Vt.mT @ V
        d, U = torch.linalg.eigh(X.mT @ X)
        X = X @ U @ torch.diag(d.rsqrt()) @ U.mT
    torch.testing.assert_close(weight.detach(), X, rtol=0, atol=1e-12)


# -- Lezcano-Casado 2019 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [baselines.CheapOrthogonal, baselines.Trivialization], ids=of_class)
def test_static_is_adam_on_a_skew_matrix(cls, gen):
    """From Y = I: torch's Adam on the entries below the diagonal, autograd through torch.matrix_exp."""
    Y = parameter(torch.eye(5, dtype=torch.float64))
    rows, columns = torch.tril_indices(5, 5, -1)
    a = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    mine, torchs = cls([Y], lr=0.05), torch.optim.Adam([a], lr=0.05)
    for _ in range(50):
        G = randn((5, 5), gen)
        A = torch.zeros(5, 5, dtype=torch.float64).index_put((rows, columns), a)
        torchs.zero_grad()
        (torch.matrix_exp(A - A.mT) * G).sum().backward()
        torchs.step()
        Y.grad = G
        mine.step()
    A = torch.zeros(5, 5, dtype=torch.float64).index_put((rows, columns), a.detach())
    # torch.matrix_exp is good to 1e-12, and Adam divides gradients by their size
    torch.testing.assert_close(Y.detach(), torch.matrix_exp(A - A.mT), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("space", "shape"), [(SO, (2, 5, 5)), (ST, (2, 7, 3)), (ST, (5, 4))], ids=str)
def test_with_the_base_moved_at_every_step_it_is_algorithm_3(space, shape, gen):
    """Also on Stiefel; with a base that stays, or moves every tenth step, it is not."""
    first = space.random(*shape, generator=gen, dtype=torch.float64)
    distance = {}
    for k in (1, 10, None):
        X, Y = parameter(first), parameter(first)
        a = baselines.Trivialization([X], lr=0.03, every=k)
        b = ghor.optim.Adam([Y], lr=0.03, space=space, retraction="geodesic", section="transported")
        distance[k] = walk([a, b], [X, Y], torch.Generator().manual_seed(1), 100)
        assert space.residual(X.detach()).max() < 1e-13
    assert distance[1] < 1e-12
    assert distance[10] > 1e-4
    assert distance[None] > 1e-3


# -- the others ----------------------------------------------------------------------------------------------


def test_the_soft_constraint_is_a_penalty_and_the_wrapper_adds_its_gradient(gen):
    Y = parameter(randn((2, 6, 3), gen))
    value = baselines.soft_constraint(Y, mu=0.7)
    expected = sum(0.7 * float((M.mT @ M - torch.eye(3)).norm() ** 2) for M in Y.detach())
    assert float(value.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(baselines.soft_constraint(Y.detach().mT, mu=0.7)) == pytest.approx(expected, rel=1e-12)
    Z = parameter(Y.detach())
    mine, torchs = baselines.SoftConstraintAdam([Z], mu=0.7), torch.optim.Adam([Y])
    for _ in range(20):
        G = randn((2, 6, 3), gen)
        torchs.zero_grad()
        ((Y * G).sum() + baselines.soft_constraint(Y, mu=0.7)).backward()
        torchs.step()
        Z.grad = G
        mine.step()
    torch.testing.assert_close(Y, Z, rtol=0, atol=1e-12)


def test_the_soft_constraint_is_off_by_one_over_mu(gen):
    """Minimum of -<C, Y> + mu ||Y^T Y - I||^2: Y (Y^T Y - I) = C/(4 mu)."""
    C = randn((6, 3), gen)
    off = {}
    for mu in (10.0, 100.0):
        Y = parameter(ST.project(C))
        minimise(baselines.SoftConstraintAdam([Y], mu=mu, lr=0.01), Y, lambda Y: -(Y * C).sum(), 400)
        off[mu] = float(ST.residual(Y.detach()))
    assert off[100.0] > 1e-3
    assert off[10.0] / off[100.0] == pytest.approx(10, rel=0.2)


def brockett(Y):
    """-sum_i (n - i) y_i^T S y_i with S = diag(1, ..., N): the minimum has the last N eigenvectors, in
    order."""
    N, n = Y.shape
    return -(torch.arange(n, 0, -1) * (torch.arange(1, N + 1).unsqueeze(1) * Y * Y).sum(0)).sum()


def test_adam_then_qr_moves_where_there_is_nothing_to_gain(gen):
    """A gradient Y S, S symmetric, is normal: Riemannian methods rest. So an eigenvalue problem ends at a
    loss."""
    S = randn((3, 3), gen)
    moved = {}
    for key, make in (
        ("qr", baselines.QRAdam),
        ("ghor", lambda p, lr: ghor.optim.Adam(p, lr=lr, space=ST, eps=1e-6)),
    ):
        Y = parameter(ST.random(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        before = Y.detach().clone()
        opt = make([Y], lr=0.03)
        Y.grad = Y.detach() @ (S + S.mT)
        opt.step()
        moved[key] = float((Y.detach() - before).norm())
        losses = minimise(make([Y], lr=0.03), Y, brockett, 400)
        moved[key + " gap"] = losses[-1] + 3 * 8 + 2 * 7 + 6
    assert moved["qr"] > 1e-2
    assert moved["ghor"] < 1e-9
    assert moved["qr gap"] > 1
    assert moved["ghor gap"] < 1e-6


def test_muons_direction_is_optimal(gen):
    """Closed forms for n = N and n = 1; for others it is tangent, of norm 1, and no tangent vector does
    better."""
    Y, G = SO.random(5, 5, generator=gen, dtype=torch.float64), randn((5, 5), gen)
    A = manifold_muon.steepest(Y, G, 0.01, 0, 1e-6)  # without an iteration
    U, s, Vh = torch.linalg.svd(Y.mT @ G - G.mT @ Y)
    inside = s > 1e-10  # a skew 5 x 5 matrix has a kernel, where A is not determined
    torch.testing.assert_close(Y.mT @ A @ Vh[inside].mT, -U[:, inside], rtol=0, atol=1e-12)
    y, g = ST.random(5, 1, generator=gen, dtype=torch.float64), randn((5, 1), gen)
    tangent = g - y @ (y.mT @ g)
    torch.testing.assert_close(manifold_muon.steepest(y, g, 0.01, 100, 1e-6), -tangent / tangent.norm())
    Y, G = ST.random(4, 8, 3, generator=gen, dtype=torch.float64), randn((4, 8, 3), gen)
    A = manifold_muon.steepest(Y, G, 0.5, 400, 1e-9)
    assert (A.mT @ Y + Y.mT @ A).abs().max() < 1e-7
    torch.testing.assert_close(torch.linalg.svdvals(A), torch.ones(4, 3, dtype=torch.float64))
    best = (G * A).sum((-2, -1))
    for near in (0.0, 1e-3, 1e-2, 0.1, 1.0):
        T = A + near * randn((200, 4, 8, 3), gen)
        T = T - Y @ (Y.mT @ T + T.mT @ Y) / 2
        T = T / torch.linalg.matrix_norm(T, ord=2, keepdim=True)
        assert bool(((G * T).sum((-2, -1)) >= best - 1e-6).all())


def test_muons_alpha_has_the_size_of_the_gradient(gen):
    """What it gives up: the same gradient a thousand times smaller is not solved with the same alpha."""
    Y, G = ST.random(8, 3, generator=gen, dtype=torch.float64), randn((8, 3), gen)
    off = [
        (A.mT @ Y + Y.mT @ A).norm()
        for A in (manifold_muon.steepest(Y, s * G, 0.5, 100, 1e-9) for s in (1, 1e-3))
    ]
    assert off[0] < 1e-4
    assert off[1] > 1e-2


def test_muon_rests_where_the_gradient_vanishes(gen):
    Y = start(baselines.ManifoldMuon, gen, 2, 6, 3)
    before = Y.detach().clone()
    Y.grad = torch.stack([torch.zeros(6, 3, dtype=torch.float64), randn((6, 3), gen)])
    baselines.ManifoldMuon([Y], lr=0.1).step()
    torch.testing.assert_close(Y.detach()[0], before[0], rtol=0, atol=1e-15)
    assert (Y.detach()[1] - before[1]).norm() > 0.05


# -- without a space of ghor's -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [baselines.AdamH, baselines.MuonH], ids=of_class)
def test_hyperball_is_its_formula(cls, gen):
    """W <- R n(W - lr R n(u)), u the base's step from zero; zero matrices stay zero."""
    own = (
        {"weight_decay": 0.0} if cls is baselines.AdamH else {"weight_decay": 0.0, "space": ghor.Euclidean()}
    )
    base = torch.optim.AdamW if cls is baselines.AdamH else ghor.optim.Muon
    W, zero = parameter(randn((6, 4), gen)), parameter(torch.zeros(5, 3, dtype=torch.float64))
    Z = parameter(torch.zeros(6, 4, dtype=torch.float64))
    opt, other = cls([W, zero], lr=0.1, **own), base([Z], lr=0.1, **own)
    X, R = W.detach().clone(), float(W.detach().norm())
    for _ in range(5):
        W.grad, zero.grad = randn((6, 4), gen), torch.zeros(5, 3, dtype=torch.float64)
        Z.grad = W.grad.clone()
        with torch.no_grad():
            Z.zero_()
        opt.step()
        other.step()
        X = X + 0.1 * R * Z.detach() / Z.detach().norm()
        X = R * X / X.norm()
        torch.testing.assert_close(W.detach(), X, rtol=0, atol=1e-6)  # Muon iterates in bfloat16
        assert not zero.any()


def test_unit_rows_is_adam_and_a_division(gen):
    """Padding rows of zeros stay zero."""
    W = parameter(torch.nn.functional.normalize(randn((6, 4), gen), dim=-1))
    with torch.no_grad():
        W[0] = 0
    Z = parameter(W.detach())
    opt, other = (
        cls([p], lr=0.1, weight_decay=0.0) for cls, p in ((baselines.UnitRowsAdam, W), (torch.optim.AdamW, Z))
    )
    for _ in range(5):
        G = randn((6, 4), gen)
        G[0] = 0
        W.grad, Z.grad = G, G.clone()
        opt.step()
        other.step()
        with torch.no_grad():
            Z[1:] /= Z[1:].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(W, Z, rtol=0, atol=1e-15)
