"""The formulas that spheres and hyperbolic spaces share, against dense matrices written here."""

import pytest
import torch
from table import close, randn
from torch.utils._python_dispatch import TorchDispatchMode

import ghor
from ghor.linalg import norms, ones
from ghor.retraction import RETRACTIONS, Retraction
from ghor.spaces import rank_one
from ghor.spaces.rank_one import Step, one, pull

F64 = torch.float64
H, S = ghor.Hyperbolic(), ghor.Sphere()
curvatures = pytest.mark.parametrize(("k", "sign"), [(1, 1), (1, -1), (-1, 1)])
retractions = pytest.mark.parametrize("retraction", list(RETRACTIONS.values()), ids=str)


def frame(k, y, r):
    """[y, Q], Q x = (-k r y_2.x, x - k r p y_2 (y_2.x))."""
    y2, p = y[1:], 1 / (r + y[0])
    Q = torch.cat([-k * r * y2[None], torch.eye(len(y2), dtype=F64) - k * r * p * torch.outer(y2, y2)])
    return torch.cat([y[:, None], Q], 1)


def algebra(k, b):
    """W = [[0, -k b^T], [b, 0]]."""
    W = torch.zeros(len(b) + 1, len(b) + 1, dtype=F64)
    W[1:, 0], W[0, 1:] = b, -k * b
    return W


def dense(k, b, retraction):
    W = algebra(k, b)
    if retraction.name == "geodesic":
        return torch.linalg.matrix_exp(W)
    I = torch.eye(len(W), dtype=F64)
    return torch.linalg.solve(I - W / 2, I + W / 2)


@curvatures
@retractions
@pytest.mark.parametrize("length", [1e-3, 0.4, 0.95])
def test_a_step_is_that_of_dense_matrices(k, sign, retraction, length, gen):
    """Lambda R(W) = Lambda(y+) diag(1, T), and squares become sum_j T_ij^2 s_j."""
    y = (S if k == 1 else H).random(6, generator=gen, dtype=F64)
    y[0] = y[0].abs() * sign
    b = randn((5,), gen)
    b, s = b * (length / b.norm()), randn((5,), gen).square()
    r = torch.tensor([float(sign)], dtype=F64) if k == 1 else None
    step = Step(k, y, b, retraction, r)
    moved = frame(k, y, sign) @ dense(k, b, retraction)
    close(torch.cat([step.y1, step.point()]), moved[:, 0], 1e-14)
    T = torch.linalg.solve(frame(k, moved[:, 0], 1.0 if r is None else float(step.sign)), moved)[1:, 1:]
    close(torch.stack([step.turned(e) for e in torch.eye(5, dtype=F64)], 1), T, 2e-14)
    close(step.spread(s), T.square() @ s, 2e-14)
    G = randn((6,), gen)
    close(pull(k, y, G, 1 / (sign + y[:1]), r), frame(k, y, sign)[:, 1:].mT @ G, 1e-14)


@curvatures
def test_a_retraction_of_ones_own(k, sign, gen):
    """By its thin form, as everywhere: here Cayley under another name."""
    y, b = (S if k == 1 else H).random(6, generator=gen, dtype=F64), 0.3 * randn((5,), gen)
    cayley = RETRACTIONS["cayley"]
    other = Retraction("another", cayley.dense, cayley.right, cayley.thin)
    r = torch.tensor([1.0 if y[0] > 0 else -1.0], dtype=F64) if k == 1 else None
    one, two = Step(k, y, b, cayley, r), Step(k, y, b, other, r)
    close(one.point(), two.point(), 1e-15)
    close(one.turned(b), two.turned(b), 1e-15)


@pytest.mark.parametrize("x0", [1e3, 1e6])
def test_vectors_turn_by_a_rotation_far_out(x0, gen):
    """T keeps lengths to rounding at any distance in float32: nothing large is subtracted."""
    xs = randn((100, 5), gen, torch.float32)
    y = H.project(torch.cat([xs[:, :1], x0 * xs / xs.norm(dim=-1, keepdim=True)], -1)[:, : 1 + 5])
    b, m = randn((100, 5), gen, torch.float32) / 5, randn((100, 5), gen, torch.float32)
    turned = Step(-1, y, b, RETRACTIONS["cayley"]).turned(m)
    assert float((turned.norm(dim=-1) / m.norm(dim=-1) - 1).abs().max()) < 2e-6


class Kernels(TorchDispatchMode):
    """Counts what is dispatched, views apart."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        self.count += (
            not view and "record_function" not in str(function) and "scalar_dense" not in str(function)
        )
        return out


@pytest.mark.parametrize(
    ("space", "most"),
    [(S, 39), (ghor.Sphere(radius=2.5), 49), (ghor.Sphere(radius="start"), 49), (H, 80)],
    ids=str,
)
def test_kernels_of_a_step(space, most, gen):
    """A step of Adam between two polishings, with short steps."""
    Y = torch.nn.Parameter(space.random(40, 8, generator=gen))
    opt = ghor.optim.Adam([Y], space=space, lr=1e-3)
    for _ in range(12):
        Y.grad = randn((40, 8), gen, torch.float32)
        opt.step()
    with Kernels() as kernels:
        opt.step()
    assert kernels.count <= most


def trained(space, parts, grads, optimizer="Adam"):
    """Weights after steps with given gradients, as tensors of the sizes `parts` with an optimizer each."""
    gen = torch.Generator().manual_seed(1)
    start, found = space.random(*grads[0].shape, generator=gen, dtype=F64), []
    start[..., 0] *= 1 + 1e-15  # off by rounding, which points that do not move keep
    for rows in torch.arange(len(start)).split(parts):
        Y = torch.nn.Parameter(start[rows].clone())
        opt = getattr(ghor.optim, optimizer)([Y], space=space, lr=2e-3)
        for G in grads:
            Y.grad = G[rows].clone()
            opt.step()
        found.append([Y.detach(), *(v for v in opt.state[Y].values() if v.shape == Y.shape)])
    return start, [torch.cat(tensors) for tensors in zip(*found, strict=True)]


@pytest.mark.parametrize("space", [S, H], ids=str)
def test_many_points_move_as_few_do(space, gen):
    """Narrow rows are added up in another way from 1000 on, and hyperbolic squares spread in another way."""
    grads = [randn((1002, 4), gen) for _ in range(3)]
    for G in grads:
        G[::2] = 0
    start, many = trained(space, 1002, grads)
    _, few = trained(space, 501, grads)
    for a, b in zip(many, few, strict=True):
        close(a, b, 1e-15 * float(b.abs().max()) + 1e-15)
    assert torch.equal(many[0][::2], start[::2])


@pytest.mark.parametrize(
    ("space", "shape"),
    [(S, (30, 40)), (H, (1500, 4)), (ghor.Sphere(flatten=2, radius=2.5), (30, 40))],
    ids=str,
)
def test_pieces_move_as_the_whole_does(space, shape, gen, monkeypatch):
    """Tensors larger than the cache are cut by rows, one long vector anywhere."""
    grads = [randn(shape, gen) for _ in range(3)]
    _, whole = trained(space, len(grads[0]), grads)
    monkeypatch.setattr(rank_one, "LARGE", 100)
    monkeypatch.setattr(rank_one, "CACHED", 170)
    assert len(rank_one.pieces(grads[0], 0)) > 3
    _, cut = trained(space, len(grads[0]), grads)
    for a, b in zip(cut, whole, strict=True):
        close(a, b, 1e-14 * float(b.abs().max()))


@pytest.mark.parametrize("N", [4, 20])
@pytest.mark.parametrize("M", [1500, 40_000])  # few are compared as numbers, many as pairs of them
@pytest.mark.parametrize("place", [2, 3])
@pytest.mark.parametrize("change", [-1.0, 1.5], ids=["sign", "size"])
def test_one_number_written_among_many_is_noticed(change, place, M, N, gen):
    Y = torch.nn.Parameter(ghor.Sphere(radius="start").random(M, N, generator=gen))
    opt = ghor.optim.Adam([Y], space=ghor.Sphere(radius="start"), lr=1e-3)
    Y.grad = randn((M, N), gen, torch.float32)
    opt.step()
    Y.data[700, place] *= change
    with pytest.warns(UserWarning, match="changed outside"):
        opt.step()


def test_norms_of_long_and_of_many_vectors(gen):
    for shape in ((2, 1_500_003), (5000,), (1001, 15), (2, 4, 7)):
        X = randn(shape, gen, torch.float32)
        exact = X.double().norm(dim=-1)
        assert float((norms(X) / exact - 1).abs().max()) < 3e-7


def test_constants_kept_from_inference_mode_meet_autograd():
    """Both are cached by the first call, whatever mode that is in."""
    for cached in (ones, one):
        cached.cache_clear()
    with torch.inference_mode():
        norms(torch.ones(1001, 3))
        one(torch.float32, torch.device("cpu"))
    X = torch.ones(1001, 3, requires_grad=True)
    norms(X).sum().backward()
    torch.testing.assert_close(X.grad, torch.full((1001, 3), 3**-0.5))
    assert not one(torch.float32, torch.device("cpu")).is_inference()
