"""Spheres, k = 1, and hyperbolic space, k = -1: steps of their closed forms beside dense matrices."""

import pytest
import torch
from helpers.table import close, randn

import ghor
from ghor.spaces import frames
from ghor.spaces.retraction import RETRACTIONS, geodesic

F64 = torch.float64
SPACES = [ghor.Sphere().geometry, ghor.Hyperbolic().geometry]
each_space = pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
each_way = pytest.mark.parametrize("R", list(RETRACTIONS.values()), ids=list(RETRACTIONS))
PATHS = [(20, 6), (1200, 3), (1200, 17)]  # by rows, coordinate by coordinate, and many long ones


def dense(space, y, r):
    """Lambda = [y, Q] of the closed form, (M, N, N)."""
    k, y1, y2 = space.k, y[:, :1], y[:, 1:]
    first = -k * r * y2.mT
    lower = torch.eye(y2.shape[-2], dtype=y.dtype) - k * y2 @ y2.mT / (1 + r * y1)
    return torch.cat([y, torch.cat([first, lower], -2)], -1)


def algebra(k, w):
    """W = [[0, -k b^T], [b, 0]], (M, N, N)."""
    W = torch.zeros(*w.shape[:2], w.shape[1], dtype=w.dtype)
    W[:, 1:, 0], W[:, 0, 1:] = w[:, 1:, 0], -k * w[:, 1:, 0]
    return W


def dense_step(W, R):
    I = torch.eye(W.shape[-1], dtype=W.dtype)
    return torch.linalg.matrix_exp(W) if R is geodesic else torch.linalg.solve(I - W / 2, I + W / 2)


def inverse(k, L):
    """J L^T J, J = diag(1, k, ..., k)."""
    J = torch.diag(torch.tensor([1.0] + [float(k)] * (L.shape[-1] - 1), dtype=L.dtype))
    return J @ L.mT @ J


def in_ghor(frame, y, gen, size):
    w = frame.zeros().copy_(randn(y.shape, gen))
    w[:, 0] = 0
    return w.mul_(size)


@each_space
@each_way
@pytest.mark.parametrize(("M", "N"), PATHS)
@pytest.mark.parametrize("cached", [1 << 17, 100])
def test_a_step_is_that_of_matrices(space, R, M, N, cached, gen, monkeypatch):
    """Of the point, of vectors, which turn by T = Lambda(y+)^-1 Lambda(y) R(W), and of squares, which spread
    by T_ij^2 far and wide; through changes of the sign r; in pieces that fit into the cache."""
    monkeypatch.setattr(frames, "CACHED", cached)
    y = space.draw(randn((M, N, 1), gen))
    frame = space.frame(y, "implicit", {}, torch.finfo(F64).eps)
    k, flips = space.k, 0
    for step in range(12):
        w, m, v = (in_ghor(frame, y, gen, 1) for _ in range(3))
        w *= (1.2 if k == 1 else 0.04) / frame.length(w)  # short: in hyperbolic space squares spread alone
        v.abs_()
        G, out = randn(y.shape, gen), frame.zeros()
        y, r = frame.point(), frame.points(frame.r).clone()
        L = dense(space, y, r)
        frame.pull(G, out)
        close(out[:, 1:], (L.mT @ G)[:, 1:], 1e-12)
        moved = L @ dense_step(algebra(k, w.clone()), R)
        before = w.clone(), m.clone(), v.clone()
        frame.step(w, frame.length(w), R, [m], [v])
        close(frame.point(), moved[..., :1], 1e-12)
        sign = frame.points(frame.r)
        flips += int((sign != r).sum())
        T = (inverse(k, dense(space, frame.point(), sign)) @ moved)[:, 1:, 1:]
        close(T @ T.mT, torch.eye(N - 1, dtype=F64).expand_as(T), 1e-11)
        close(m[:, 1:], T @ before[1][:, 1:], 1e-11)
        expected = before[2][:, 1:] if k == 1 else T.square() @ before[2][:, 1:]
        close(v[:, 1:], expected, 1e-11)
        assert not m[:, 0].any()
        frame.repair(step % 2 == 0, frame.length(before[0]) > 0)
    assert (flips > 0) == (k == 1)


@each_way
@pytest.mark.parametrize("length", [0.04, 0.4, 0.9])
def test_squares_are_kept_large_beside_momentum_in_long_steps(R, length, gen):
    """Of hyperbolic space: sum_j T_ij^2 v_j, or m^2/a where that is larger, a the largest m^2/v before the
    step; from a length of 1/2 on all coordinates have the largest of these."""
    space = SPACES[1]
    y = space.draw(randn((50, 5, 1), gen))
    frame = space.frame(y, "implicit", {}, torch.finfo(F64).eps)
    w, m, v = in_ghor(frame, y, gen, 1), in_ghor(frame, y, gen, 1), in_ghor(frame, y, gen, 1).square()
    w *= length / frame.length(w)
    most = (m[:, 1:].square() / v[:, 1:]).amax(1, keepdim=True)
    moved = dense(space, y, 1.0) @ dense_step(algebra(-1, w.clone()), R)
    old = v.clone()
    frame.step(w, frame.length(w), R, [m], [v])
    T = (inverse(-1, dense(space, frame.point(), 1.0)) @ moved)[:, 1:, 1:]
    expected = T.square() @ old[:, 1:]
    if length > 0.05:
        expected = torch.maximum(expected, m[:, 1:].square() / most)
    if length > 0.5:
        expected = expected.amax(1, keepdim=True).expand_as(expected)
    close(v[:, 1:], expected, 1e-11)


@pytest.mark.parametrize("r", [1.0, 10.0, 16.0])
def test_the_frame_turns_by_a_rotation_however_far_out(r, gen):
    """Lengths of momentum stay to rounding, where a boost has entries of e^r."""
    space = SPACES[1]
    y = randn((30, 5, 1), gen)
    y = space.nearest(
        y * (torch.tensor(r, dtype=F64).sinh() / torch.linalg.vector_norm(y[:, 1:], dim=1, keepdim=True))
    )
    for section in ("implicit", "transported"):
        frame = space.frame(y, section, {}, torch.finfo(F64).eps)
        m = in_ghor(frame, y, gen, 1)
        lengths = frame.length(m)
        for _ in range(10):
            w = in_ghor(frame, y, gen, 0.2)
            frame.step(w, frame.length(w), RETRACTIONS["cayley"], [m], [])
        close(frame.length(m) / lengths, torch.ones_like(lengths), 1e-13)
        if section == "transported":
            O = frame.O[..., 1:]
            close(O @ O.mT, torch.eye(4, dtype=F64).expand_as(O), 1e-13)


@each_space
@pytest.mark.parametrize("section", ["implicit", "transported"])
@pytest.mark.parametrize(("M", "N"), PATHS)
def test_where_a_velocity_is_0_no_bit_changes(space, section, M, N, gen):
    y = space.draw(randn((M, N, 1), gen))
    frame = space.frame(y, section, {}, torch.finfo(F64).eps)
    still = torch.arange(M) % 3 == 0
    for R in RETRACTIONS.values():
        w, m, v = in_ghor(frame, y, gen, 0.3), in_ghor(frame, y, gen, 1), in_ghor(frame, y, gen, 1).abs()
        w[still] = 0
        length = frame.length(w)
        before = [x[still].clone() for x in (frame.point(), m, v, *frame.tensors().values())]
        frame.step(w, length, R, [m], [v])
        frame.repair(True, length > 0)
        after = [x[still] for x in (frame.point(), m, v, *frame.tensors().values())]
        assert all(map(torch.equal, before, after))


@each_space
@pytest.mark.parametrize("section", ["implicit", "transported"])
def test_frames_of_no_points(space, section):
    """As those of an empty shard."""
    y = torch.zeros(0, 4, 1)
    frame = space.frame(y, section, {}, 1e-7)
    w, out = frame.zeros(), frame.zeros()
    frame.pull(y, out)
    for R in RETRACTIONS.values():
        frame.step(w, frame.length(w), R, [frame.zeros()], [frame.zeros()])
    frame.repair(True, frame.length(w) > 0)
    frame.take(y)
    assert space.frame(y, section, frame.tensors(), 1e-7).point().shape == (0, 4, 1)
