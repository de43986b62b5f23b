"""What the paper compares with: scalar-moment Adam."""

import copy

import pytest
import torch
from helpers.steps import Net, beside_torch, gradients, same, sections, through_a_file, train
from helpers.table import MANIFOLD_CASES, has_frame, name, point, randn

import ghor
from ghor.baselines import ScalarMomentAdam

ST = ghor.Stiefel()
FRAMES = [(s, shape) for s, shape in MANIFOLD_CASES if has_frame(s)]
ORTHOGONAL = [(s, shape) for s, shape in FRAMES if s.compact]
ORTHOGONAL += [(ghor.Stiefel(flatten=3), (6, 2, 2, 3)), (ghor.Stiefel(flatten=2), (12, 2, 2))]
OTHERS = [(s, shape) for s, shape in FRAMES if not s.compact]
norms = pytest.mark.parametrize("norm", ["canonical", "frobenius"])
over = lambda cases: pytest.mark.parametrize(("space", "shape"), cases, ids=name)  # noqa: E731


def parameter(Y):
    return torch.nn.Parameter(Y.clone())


def skew_of(space):
    """What the space makes of a block A."""

    def skew(A):
        W = A.clone()
        space.geometry.hor_(W, 1)
        return W

    return skew


def dense_step(skew, Lambda, n, G, cache, t, lr, betas, eps, norm, retraction):
    """One step with N x N matrices throughout, from the formulas of the paper; returns Lambda (M, N, N) and
    cache.

    `skew` says what the block A may be; with A skew, Delta is G - Y G^T Y, with A = 0 it is G - Y Y^T G.
    """
    Y, I = Lambda[..., :n], torch.eye(Lambda.shape[-1], dtype=Lambda.dtype)
    Delta = G - Y @ Y.mT @ G + Y @ skew(Y.mT @ G)
    P = I - Y @ Y.mT / 2
    Omega = P @ Delta @ Y.mT - Y @ Delta.mT @ P
    B = Lambda.mT @ Omega @ Lambda
    square = B.square().sum((-2, -1)) / 2 if norm == "canonical" else B[..., :n].square().sum((-2, -1))
    m, v = betas[0] * cache[0] + (1 - betas[0]) * B, betas[1] * cache[1] + (1 - betas[1]) * square
    root = torch.sqrt(v / (1 - betas[1] ** t)) + eps
    W = -lr * (m / (1 - betas[0] ** t)) / root[:, None, None]
    if retraction == "cayley":
        R = torch.linalg.solve(I - W / 2, I + W / 2)
    else:  # exp by eigenvalues: torch.matrix_exp is good to 1e-12 only
        w, V = torch.linalg.eigh(1j * (W - W.mT) / 2)
        R = ((V * torch.exp(-1j * w).unsqueeze(-2)) @ V.mH).real
    return Lambda @ R, (m, v)


@pytest.mark.parametrize(
    ("section", "norm"),
    [("auto", "canonical"), ("auto", "frobenius"), ("transported", "frobenius"), ("implicit", "canonical")],
)
@over(ORTHOGONAL)
def test_it_is_the_dense_algorithm(space, shape, section, norm, gen):
    """25 steps of random gradients, a section of QR's: the rule sees norms only, so every completion is as
    good."""
    retraction = "geodesic" if len(shape) % 2 else "cayley"
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "norm": norm, "retraction": retraction}
    Y = parameter(point(space, shape, gen))
    opt = ScalarMomentAdam([Y], space=space, section=section, **options)
    _, n = space.layout.size(shape)
    tall = space.layout.points(Y.detach())
    Lambda = torch.cat([tall, torch.linalg.qr(tall, mode="complete")[0][..., n:]], -1)
    cache = 0.0, 0.0
    for t in range(1, 26):
        Y.grad = randn(shape, gen) * (1 + t % 3)
        opt.step()
        G = space.layout.points(Y.grad)
        Lambda, cache = dense_step(skew_of(space), Lambda, n, G, cache, t, **options)
    # steps of length 0.05 sqrt(2n) or so; rounding of either side grows to some 50 eps
    torch.testing.assert_close(space.layout.points(Y.detach()), Lambda[..., :n], rtol=0, atol=5e-13)
    torch.testing.assert_close(opt.state[Y]["exp_avg_sq"].flatten(), cache[1], rtol=5e-12, atol=0)


@norms
@over(OTHERS)
def test_it_is_the_dense_algorithm_in_the_coordinates_of_the_space(space, shape, norm, gen):
    """The same with the space's own section and coordinates, and the Cayley transform of the full N x N
    matrix."""
    Y = parameter(point(space, shape, gen))
    opt = ScalarMomentAdam([Y], space=space, norm=norm, lr=0.01)
    n = space.layout.points(Y.detach()).shape[-1]
    Lambda = space.section(Y.detach()).reshape(-1, *[space.layout.size(shape)[0]] * 2).clone()
    I = torch.eye(Lambda.shape[-1], dtype=torch.float64)
    m = v = 0.0
    for t in range(1, 51):
        Y.grad = randn(shape, gen)
        B = Lambda.mT @ space.layout.points(Y.grad)
        space.geometry.hor_(B, 1)
        opt.step()
        weight = torch.full(B.shape[-2:], 1.0, dtype=torch.float64)
        weight[:n] = 0.5 if norm == "canonical" else 1.0
        m = 0.9 * m + 0.1 * B
        v = 0.999 * v + 0.001 * (weight * B * B).sum((-2, -1), keepdim=True)
        W = space.geometry.algebra(-0.01 * m / (1 - 0.9**t) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-8))
        Lambda = Lambda @ torch.linalg.solve(I - W / 2, I + W / 2)
    torch.testing.assert_close(space.layout.points(Y.detach()), Lambda[..., :n], rtol=0, atol=1e-12)


@sections
def test_euclidean_weights_are_torchs_adam_to_the_bit(section, gen):
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}
    beside_torch(
        lambda groups: ScalarMomentAdam(groups, section=section, **options),
        lambda params: torch.optim.Adam(params, **options),
        gen,
        50,
    )


@norms
@sections
@pytest.mark.parametrize(("space", "shape"), [(ST, (7, 3)), (ST, (2, 6)), (ghor.Sphere(), (4, 5))], ids=name)
def test_a_stack_is_its_weights_one_by_one(space, shape, section, norm, gen):
    """Also where one has no gradient at times. Gradients differ in size by 1e4: a norm over the stack would
    show."""
    start = [space.random(*shape, generator=gen, dtype=torch.float64) for _ in range(5)]
    stacked, alone = ([parameter(Y) for Y in start] for _ in range(2))
    opt = ScalarMomentAdam(stacked, space=space, section=section, norm=norm, lr=0.01)
    ones = [ScalarMomentAdam([p], space=space, section=section, norm=norm, lr=0.01) for p in alone]
    for step in range(30):
        for i, (p, q) in enumerate(zip(stacked, alone, strict=True)):
            p.grad = None if i == 1 and step in (7, 8) else 10.0 ** (i - 2) * randn(shape, gen)
            q.grad = None if p.grad is None else p.grad.clone()
        opt.step()
        for one in ones:
            one.step()
    for p, q, one in zip(stacked, alone, ones, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)
        torch.testing.assert_close(opt.state[p]["exp_avg_sq"], one.state[q]["exp_avg_sq"], rtol=1e-13, atol=0)


def test_on_so2_the_norms_differ_by_the_root_of_2(gen):
    """g^hor of SO(2) has one entry, written twice: half of the squares is Adam's, all of them twice that."""
    space = ghor.SpecialOrthogonal()
    start = space.random(2, 2, generator=gen, dtype=torch.float64)
    runs = {}
    for key, cls, options in (
        ("adam", ghor.optim.Adam, {"lr": 0.02}),
        ("canonical", ScalarMomentAdam, {"lr": 0.02}),
        ("frobenius", ScalarMomentAdam, {"lr": 0.02 * 2**0.5, "eps": 1e-8 * 2**0.5, "norm": "frobenius"}),
    ):
        Y = parameter(start)
        opt = cls([Y], space=space, **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(100):
            Y.grad = randn((2, 2), generator)
            opt.step()
        runs[key] = Y.detach()
    torch.testing.assert_close(runs["canonical"], runs["adam"], rtol=0, atol=1e-13)
    torch.testing.assert_close(runs["frobenius"], runs["adam"], rtol=0, atol=1e-13)


@norms
@sections
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name)
def test_resume_is_exact(section, norm, dtype):
    """Through a file read with weights_only, and by deepcopy; the norm is in the checkpoint."""
    net = Net(dtype)
    opt, then = ScalarMomentAdam(net, lr=0.01, section=section, norm=norm), gradients(net, 7, 2)
    train(net, opt, gradients(net, 7, 1))
    weights, state = through_a_file([net.state_dict(), opt.state_dict()])
    twin = Net(dtype)
    twin.load_state_dict(weights)
    other = ScalarMomentAdam(twin, lr=1.0, section=section)
    other.load_state_dict(state)
    third, fourth = copy.deepcopy((net, opt))
    for n, o in ((net, opt), (twin, other), (third, fourth)):
        train(n, o, then)
    for n, o in ((twin, other), (third, fourth)):
        same(dict(net.named_parameters()), dict(n.named_parameters()))
        same(opt.state_dict()["state"], o.state_dict()["state"])


def test_state_is_one_number_a_matrix(gen):
    """Beside Adam's first moment, a frame if there is one and two counters: (1, 1) for each point."""
    net = Net(torch.float32)
    opt = ScalarMomentAdam(net, lr=0.01)
    train(net, opt, gradients(net, 2))
    shapes = {n: tuple(opt.state[p]["exp_avg_sq"].shape) for n, p in net.named_parameters()}
    assert shapes == {"a": (1, 1), "b": (1, 1), "wide": (1, 1), "sphere": (4, 1, 1), "bias": (4,)}
    assert set(opt.state[net.a]) == {"step", "exp_avg", "exp_avg.A", "exp_avg_sq", "moves"}
    for section, frame in (("auto", 7 * 7), ("transported", 49 * 49), ("implicit", 7 * 7)):
        Y = [parameter(ST.random(49, 7, generator=gen)) for _ in range(3)]
        opt = ScalarMomentAdam(Y, space=ST, section=section)
        for p in Y:
            p.grad = randn((49, 7), gen, torch.float32)
        opt.step()
        numbers = sum(v.numel() for p in Y for v in opt.state[p].values() if v.dim() > 0)
        assert numbers == 3 * (49 * 7 + 1 + frame)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"norm": "spectral"},
            ValueError,
            "unknown norm 'spectral' in group 0; there are .'canonical', 'frobenius'.",
        ),
        ({"amsgrad": True}, TypeError, "ScalarMomentAdam has no option 'amsgrad'"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1"),
        ({"section": "none"}, ValueError, "unknown section"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_it_does_not_know_it_refuses(options, error, words, gen):
    with pytest.raises(error, match=words):
        ScalarMomentAdam([parameter(ST.random(5, 2, generator=gen))], **{"space": ST} | options)


@pytest.mark.parametrize(
    ("option", "value"), [("maximize", True), ("amsgrad", True), ("weight_decay", 0.1)], ids=str
)
def test_options_of_adam_in_a_group_are_not_ignored(option, value, gen):
    """Euclidean weights take them; where a weight on a manifold would not, nothing moves."""
    Y, b = parameter(ST.random(5, 2, generator=gen)), parameter(torch.ones(3))
    flat = {"params": [b], "space": ghor.Euclidean(), option: value}
    opt = ScalarMomentAdam([{"params": [Y], "space": ST, "anchor": Y.detach()}, flat])
    before = Y.detach().clone()
    Y.grad, b.grad = randn((5, 2), gen, torch.float32), torch.ones(3)
    opt.step()
    assert not torch.equal(Y, before)
    before, state = [p.detach().clone() for p in (Y, b)], copy.deepcopy(opt.state_dict())
    opt.param_groups[0][option] = value
    with pytest.raises(RuntimeError, match=rf"on Stiefel\(\), where .* has no {option}; nothing was moved"):
        opt.step()
    same([p.detach() for p in (Y, b)], before)
    same(opt.state_dict()["state"], state["state"])


def test_groups_have_norms_of_their_own_and_other_states_are_refused(gen):
    Y, Z = (parameter(ST.random(5, 2, generator=gen)) for _ in range(2))
    opt = ScalarMomentAdam([{"params": [Y], "norm": "frobenius"}], space=ST)
    opt.add_param_group({"params": [Z]})
    assert [g["norm"] for g in opt.param_groups] == ["frobenius", "canonical"]
    Y.grad = Z.grad = randn((5, 2), gen, torch.float32)
    opt.step()
    adam = ghor.optim.Adam([{"params": [Y]}, {"params": [Z]}], space=ST)
    adam.step()
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="not a state of ScalarMomentAdam: its group 0 has no 'norm'"):
        opt.load_state_dict(adam.state_dict())
    same(opt.state_dict()["state"], before["state"])
