"""The lift: Algorithm 3 around any optimizer."""

import math

import pytest
import torch
from helpers.steps import beside_torch, sections
from helpers.table import name, randn

import ghor

CLASSES = [getattr(ghor.optim, n) for n in ghor.optim.__all__]
TORCH = [c for c in CLASSES if c.Base.__module__.startswith("torch")]
ST = ghor.Stiefel()
by_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)

# Options that change the arithmetic, for every optimizer that has them.
OPTIONS = {
    "plain": {},
    "maximize": {"maximize": True},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "decay": {"weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "momentum": {"momentum": 0.9},
    "centered": {"centered": True, "momentum": 0.5},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "tensor_lr": {"lr": torch.tensor(1e-2)},
}


def knows(cls, options):
    try:
        cls.Base([torch.nn.Parameter(torch.zeros(2))], **options)
    except (TypeError, ValueError):
        return False
    return True


COMBINATIONS = [(c, o) for c in CLASSES for o in OPTIONS if knows(c, OPTIONS[o])]


def learning_rate(cls):
    return {"Adadelta": 1.0, "Adagrad": 0.1, "SGD": 0.05}.get(cls.__name__, 0.01)


@pytest.mark.filterwarnings("ignore:Muon was given bare tensors")
@pytest.mark.parametrize(
    ("cls", "option"), COMBINATIONS, ids=lambda v: v if isinstance(v, str) else v.__name__
)
def test_euclidean_parameters_are_torchs_bit_for_bit(cls, option, gen):
    """Over 100 steps, 30 with further options, with weights on a manifold in the same optimizer."""
    options = OPTIONS[option]
    steps = 100 if option == "plain" else 30
    beside_torch(
        lambda groups: cls(groups, **options), lambda params: cls.Base(params, **options), gen, steps
    )


@by_class
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@sections
def test_every_optimizer_descends_and_stays(cls, retraction, section, gen):
    target = ST.random(3, 49, 7, generator=gen, dtype=torch.float64)
    Y = torch.nn.Parameter(ST.random(3, 49, 7, generator=gen, dtype=torch.float64))
    opt = cls([Y], space=ST, lr=learning_rate(cls), retraction=retraction, section=section)
    losses = []
    for _ in range(100):
        opt.zero_grad()
        loss = ((Y - target) ** 2).sum()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        assert ST.residual(Y.detach()).max() < 1e-14 * 7
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("option", ["plain", "momentum", "amsgrad", "foreach", "fused"])
@by_class
@sections
def test_a_stack_is_its_weights_one_by_one(cls, option, section, gen):
    """8 weights, gradients missing at irregular steps: one optimizer for all = one optimizer each.

    Products of a batch and of a single matrix differ in the last bit at most, and 40 steps do not amplify it.
    Rules other than Adam, and options, have fewer steps, in which Y is polished.
    """
    if not knows(cls, OPTIONS[option]):
        pytest.skip("no such option")
    count, steps = (4, 16) if option != "plain" else (8, 40 if cls is ghor.optim.Adam else 24)
    start = ST.random(count, 11, 3, generator=gen, dtype=torch.float64)
    together, alone = ([torch.nn.Parameter(y.clone()) for y in start] for _ in range(2))
    options = {"lr": min(learning_rate(cls), 0.01), "space": ST, "section": section, **OPTIONS[option]}
    opt, single = cls(together, **options), [cls([p], **options) for p in alone]
    gap = 0.0
    for step in range(steps):
        for i, (p, q) in enumerate(zip(together, alone, strict=True)):
            missing = (step * (i + 3)) % 7 == 2
            p.grad = None if missing else randn((11, 3), gen)
            q.grad = None if missing else p.grad.clone()
        before = [p.detach().clone() for p in together]
        opt.step()
        for s in single:
            s.step()
        for b, p, q in zip(before, together, alone, strict=True):
            gap = max(gap, float((p - q).detach().abs().max()))
            assert p.grad is not None or torch.equal(b, p)
    # Adam divides by a second moment that may be near 0: a bit in the gradient becomes sqrt(eps) there at
    # worst.
    assert gap <= 4 * torch.finfo(torch.float64).eps * (
        1 if "Ada" not in cls.__name__ and cls.__name__ != "Rprop" else 1e3
    )
    for p, q, s in zip(together, alone, single, strict=True):
        assert opt.state[p].keys() == s.state[q].keys()


@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
def test_on_the_group_lifted_adam_is_adam_in_coordinates(retraction, gen):
    """n = N: Y <- Y R(W) with W from a plain Adam that sees the skew matrix Y^T G - G^T Y."""
    space, N = ghor.SpecialOrthogonal(), 5
    Y = torch.nn.Parameter(space.random(N, N, generator=gen, dtype=torch.float64))
    opt = ghor.optim.Adam([Y], space=space, lr=0.02, retraction=retraction)
    Z, m, v = (
        Y.detach().clone(),
        torch.zeros(N, N, dtype=torch.float64),
        torch.zeros(N, N, dtype=torch.float64),
    )
    I = torch.eye(N, dtype=torch.float64)
    for t in range(1, 101):
        G = randn((N, N), gen)
        Y.grad = G.clone()
        opt.step()
        B = Z.mT @ G - G.mT @ Z
        m, v = 0.9 * m + 0.1 * B, 0.999 * v + 0.001 * B * B
        W = -0.02 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        R = (
            torch.linalg.matrix_exp(W)
            if retraction == "geodesic"
            else torch.linalg.solve(I - W / 2, I + W / 2)
        )
        Z = Z @ R
        assert (Y.detach() - Z).abs().max() < 1e-10  # the error of torch.linalg.matrix_exp, 100 times
    assert torch.linalg.det(Y.detach()) > 0.99


def test_lifted_adam_is_the_dense_algorithm_3(gen):
    """N x N matrices throughout, written from the paper: Omega, Lambda^-1 Omega Lambda, Adam on all N^2
    entries."""
    N, n = 9, 3
    Y = torch.nn.Parameter(ST.random(N, n, generator=gen, dtype=torch.float64))
    opt = ghor.optim.Adam([Y], space=ST, lr=0.02, section="transported")
    y, I = Y.detach().clone(), torch.eye(N, dtype=torch.float64)
    Lambda = ST.section(y).clone()
    m, v = torch.zeros(N, N, dtype=torch.float64), torch.zeros(N, N, dtype=torch.float64)
    for t in range(1, 101):
        G = randn((N, n), gen)
        Y.grad = G.clone()
        opt.step()
        Delta = G - y @ G.mT @ y
        Pi = I - y @ y.mT / 2
        Omega = Pi @ Delta @ y.mT - y @ Delta.mT @ Pi
        B = Lambda.mT @ Omega @ Lambda
        assert B[n:, n:].abs().max() < 1e-13
        B = (B - B.mT) / 2
        B[n:, n:] = 0
        m, v = 0.9 * m + 0.1 * B, 0.999 * v + 0.001 * B * B
        W = -0.02 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        Lambda = Lambda @ torch.linalg.solve(I - W / 2, I + W / 2)
        y = Lambda[:, :n]
        assert (Y.detach() - y).abs().max() < 1e-12


@sections
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_grassmann_step_does_not_depend_on_the_representative(section, momentum, gen):
    space = ghor.Grassmann()
    C = randn((12, 12), gen)
    C = C + C.mT
    R = ghor.SpecialOrthogonal().random(4, 4, generator=gen, dtype=torch.float64)
    start = space.random(12, 4, generator=gen, dtype=torch.float64)
    a, b = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start @ R)
    optimizers = [
        ghor.optim.SGD([p], space=space, lr=0.01, momentum=momentum, section=section) for p in (a, b)
    ]
    for _ in range(50):
        for p, opt in zip((a, b), optimizers, strict=True):
            opt.zero_grad()
            (p.mT @ C @ p).trace().backward()
            opt.step()
    projectors = [p.detach() @ p.detach().mT for p in (a, b)]
    assert (projectors[0] - projectors[1]).abs().max() < 1e-12
    assert ((a.mT @ C @ a).trace() < (start.mT @ C @ start).trace()).item()


def test_adamw_is_adam_on_a_manifold(gen):
    a, b = (torch.nn.Parameter(ST.random(9, 3, generator=torch.Generator().manual_seed(1))) for _ in range(2))
    adam = ghor.optim.Adam([a], space=ST, lr=0.01)
    adamw = ghor.optim.AdamW([b], space=ST, lr=0.01)  # weight_decay = 0.01 by default
    for _ in range(20):
        a.grad = randn((9, 3), gen, torch.float32)
        b.grad = a.grad.clone()
        adam.step()
        adamw.step()
    assert torch.equal(a, b)


def test_the_papers_adam_formula(gen):
    """Against the two lines of the paper; and it is torch's Adam but for where delta stands."""
    p, q = torch.nn.Parameter(randn((4, 3), gen)), None
    q = p.detach().clone()
    opt = ghor.optim.PaperAdam([p], lr=0.1, betas=(0.9, 0.99), delta=1e-3, space=ghor.Euclidean())
    m, v = torch.zeros_like(q), torch.zeros_like(q)
    for t in range(1, 21):
        g = randn((4, 3), gen)
        p.grad = g.clone()
        opt.step()
        m = (0.9 - 0.9**t) / (1 - 0.9**t) * m + 0.1 / (1 - 0.9**t) * g
        v = (0.99 - 0.99**t) / (1 - 0.99**t) * v + 0.01 / (1 - 0.99**t) * g * g
        q = q - 0.1 * m / (v + 1e-3).sqrt()
        assert (p.detach() - q).abs().max() < 1e-14
    a, b = (
        torch.nn.Parameter(ST.random(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        for _ in range(2)
    )
    paper = ghor.optim.PaperAdam([a], space=ST, lr=0.01, betas=(0.9, 0.99), delta=1e-30)
    torchs = ghor.optim.Adam([b], space=ST, lr=0.01, betas=(0.9, 0.99), eps=1e-15)
    for _ in range(20):
        a.grad = randn((9, 3), gen)
        b.grad = a.grad.clone()
        paper.step()
        torchs.step()
    assert (a - b).abs().max() < 1e-12


def test_first_steps_known_in_closed_form(gen):
    """The first Adam step is lr sign(B); k steps of momentum on constant B are lr B (1 - a^k)/(1 - a)."""
    Y = torch.nn.Parameter(ST.E((5, 2), dtype=torch.float64))
    opt = ghor.optim.Adam([Y], space=ST, lr=0.01, eps=1e-30, retraction="geodesic", section="transported")
    Y.grad = randn((5, 2), gen)
    B = torch.cat([Y.grad[:2] - Y.grad[:2].mT, Y.grad[2:]])
    opt.step()
    assert (Y.detach() - ST.exp(ST.E((5, 2), dtype=torch.float64), -0.01 * torch.sign(B))).abs().max() < 1e-15
    y = torch.nn.Parameter(ghor.Sphere().E((3,), dtype=torch.float64))
    opt = ghor.optim.SGD(
        [y], space=ghor.Sphere(), lr=0.01, momentum=0.5, retraction="geodesic", section="transported"
    )
    angle = 0.0
    for k in range(1, 6):
        t = float(torch.atan2(*y.detach()[[1, 0]]))
        y.grad = torch.tensor(
            [math.sin(t), -math.cos(t), 0.0], dtype=torch.float64
        )  # constant in the moving frame
        opt.step()
        angle += 0.01 * (1 - 0.5**k) / (1 - 0.5)
        assert abs(float(torch.atan2(*y.detach()[[1, 0]])) - angle) < 1e-14


@pytest.mark.parametrize("retraction", ["cayley", pytest.param("geodesic", marks=pytest.mark.slow)])
def test_symplectic_stiefel_12_x_4(retraction, gen):
    """Adam, 2,000 steps in float64: the structure stays to 1e-11 and the loss falls."""
    space = ghor.SymplecticStiefel()
    U = torch.nn.Parameter(space.random(12, 4, generator=gen, dtype=torch.float64))
    target = space.random(12, 4, generator=gen, dtype=torch.float64)
    opt = ghor.optim.Adam([U], space=space, lr=1e-2, retraction=retraction)
    losses, worst = [], 0.0
    for _ in range(2000):
        opt.zero_grad()
        loss = ((U - target) ** 2).sum()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        worst = max(worst, float(space.residual(U.detach())))
    assert worst <= 1e-11
    assert sum(losses[-100:]) / 100 < 0.05 * losses[0]  # a mean: a fixed-step Adam orbits its minimum


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (ST, (2, 9)),
        (ST, (3, 2, 9)),
        (ghor.Stiefel(flatten=3), (4, 2, 3, 3)),
        (ghor.Stiefel(flatten=3), (20, 2, 3, 3)),
        (ghor.Sphere(), (3, 4)),
        (ghor.Grassmann(), (2, 5)),
    ],
    ids=name,
)
@sections
def test_layouts(space, shape, section, gen):
    """Wide matrices, kernels, vectors: state in the weight's shape, the same step as that of the tall
    matrix."""
    Y = torch.nn.Parameter(space.random(*shape, generator=gen, dtype=torch.float64))
    points = space.layout.points
    tall = torch.nn.Parameter(points(Y.detach()).clone())
    plain = ST if tall.shape[-1] == 1 or space.flatten > 1 else type(space)()
    a = ghor.optim.Adam([Y], space=space, lr=0.01, section=section)
    b = ghor.optim.Adam([tall], space=plain, lr=0.01, section=section)
    for _ in range(20):
        Y.grad = randn(shape, gen)
        tall.grad = points(Y.grad).clone()
        a.step()
        b.step()
        assert (points(Y.detach()) - tall.detach()).abs().max() < 1e-13
    assert a.state[Y]["exp_avg"].shape == Y.shape
    assert space.residual(Y.detach()).max() < 1e-14 * 10


def test_non_contiguous_weights_keep_their_layout(gen):
    base = ST.random(7, 20, generator=gen)
    Y = torch.nn.Parameter(base.mT)
    assert not Y.is_contiguous()
    strides, pointer = Y.stride(), Y.data_ptr()
    Z = torch.nn.Parameter(base.mT.contiguous())
    opts = [ghor.optim.Adam([p], space=ST, fused=True) for p in (Y, Z)]
    for _ in range(5):
        Y.grad = randn((20, 7), gen, torch.float32)
        Z.grad = Y.grad.clone()
        for opt in opts:
            opt.step()
    assert (Y.stride(), Y.data_ptr()) == (strides, pointer)
    assert (Y - Z).abs().max() < 1e-6


def test_one_weight_and_many_on_each_device(device, gen):
    space = ghor.Stiefel()
    weights = [torch.nn.Parameter(space.random(9, 3, generator=gen).to(device)) for _ in range(3)]
    opt = ghor.optim.Adam(weights, space=space, lr=0.01)
    target = torch.zeros(9, 3, device=device)
    for _ in range(30):
        opt.zero_grad()
        sum(((p - target) ** 4).sum() for p in weights).backward()
        opt.step()
    assert all(space.residual(p.detach().cpu().double()) < 2e-6 for p in weights)
    assert all(opt.state[p]["exp_avg"].device == p.device for p in weights)
