"""Rigid motions, positions and orientations: steps in any unit of length, and which mean it is."""

import contextlib

import pytest
import torch
from table import close, name, randn

import ghor
from ghor._torch.values import as_on_an_accelerator

SE, PO = ghor.SpecialEuclidean(), ghor.PositionsOrientations()
SHAPES = {SE: (4, 3, 4), PO: (4, 2, 3)}
F64 = torch.float64
each_space = pytest.mark.parametrize("space", SHAPES, ids=name)


def parts(space, W):
    """Turns (omega, or w) and ways v; views."""
    return (W[..., :-1], W[..., -1]) if space == SE else (W[..., 1, :], W[..., 0, :])


@each_space
def test_only_turns_count_for_the_longest_step(space, gen):
    W = space.hor(randn(SHAPES[space], gen))
    turn, way = parts(space, W)
    length = space.step_length(W)
    close(length, torch.linalg.vector_norm(turn.flatten(1), dim=1), 1e-15)
    way *= 1e300
    assert torch.equal(space.step_length(W), length)
    turn.zero_()
    assert (space.step_length(W) > 0).all()  # it moves
    assert (space.step_length(W) < 1e-300).all()
    assert (space.step_length(0 * W) == 0).all()
    for bad in (torch.inf, torch.nan):
        way[1, 0] = bad
        assert space.step_length(W).isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("blind", [False, True], ids=["cpu", "accelerator"])
@each_space
def test_screw_motions_of_any_pitch(space, blind, gen):
    """The exponential of [[omega, v], [0, 0]] is linear in v; by squarings, v = 1e6 would take 21."""
    Y = space.random(*SHAPES[space], generator=gen, dtype=F64)
    Lambda, W = space.section(Y), space.hor(randn(SHAPES[space], gen))
    turn, way = parts(space, W)
    way *= 1e6
    with as_on_an_accelerator() if blind else contextlib.nullcontext():
        moved = space.update_section(Lambda, W, "geodesic")
    if space == PO:
        a, b, c = turn.unbind(-1)
        o = torch.zeros_like(a)
        turn = torch.stack([o, -c, b, c, o, -a, -b, a, o], -1).view(-1, 3, 3)
        R, t = torch.stack([Lambda[:, 2], Lambda[:, 3], Lambda[:, 1]], -1), Lambda[:, 0]
    else:
        R, t = Y[..., :-1], Y[..., -1]
    X = torch.zeros(4, 4, 4, dtype=F64)
    X[:, :3, :3], X[:, :3, 3] = turn, way / 1e6
    M = torch.linalg.matrix_exp(X)[:, :3]
    position = moved[..., -1] if space == SE else moved[..., 0, :]
    close(position / 1e6, t / 1e6 + (R @ M[..., 3:]).squeeze(-1), 1e-14)


@each_space
def test_the_mean_is_that_of_the_group(space, gen):
    """Logarithms sum to 0; the sum of squared distances has its minimum elsewhere."""
    Y = space.random(*SHAPES[space][1:], generator=gen, dtype=F64)
    V = space.tangent(Y, 0.8 * randn((6, *Y.shape), gen))
    X = space.exp(Y.expand_as(V), V)
    mean = space.mean(X)
    close(space.log(mean.expand_as(X), X).sum(0), 0 * mean, 1e-13)

    def squares(Y):
        return space.dist(Y, X).square().sum()

    frechet = ghor.minimize(squares, mean, space)
    assert frechet.success
    assert squares(frechet.x) < squares(mean) - 0.01
    other = space.mean(X, kind="frechet")
    assert squares(other) <= squares(frechet.x) + 1e-12
    close(other, frechet.x, 1e-5)
    assert "They differ" in SE.mean.__doc__
    assert "SpecialEuclidean.mean" in PO.mean.__doc__
    with pytest.raises(ValueError, match="mean is of kind 'group' or 'frechet', got 'karcher'"):
        space.mean(X, kind="karcher")


@each_space
def test_the_frechet_mean_of_far_points(space, gen):
    """Far apart, where whole steps lead over a ridge, to a worse minimum than descent from the group mean."""
    ridge = torch.Generator().manual_seed(0 if space == PO else 2)
    X = space.random(5, *SHAPES[space][1:], generator=ridge, dtype=F64)
    X[..., 0, :] *= 30 if space == PO else 1
    X[..., -1] *= 30 if space == SE else 1

    def squares(Y):
        return float(space.dist(Y, X).square().sum())

    other = space.mean(X, kind="frechet")
    start = space.mean(X)
    descent = ghor.minimize(lambda Y: space.dist(Y.expand_as(X), X).square().sum(), start, space)
    assert squares(other) <= descent.value * (1 + 1e-9) < squares(start)
    V = randn((10, *other.shape), gen)
    for v in V:
        v = space.tangent(other, v)
        assert squares(space.exp(other, 1e-3 * v / space.norm(other, v))) > squares(other)


@each_space
def test_the_frechet_mean_of_batches_and_with_weights(space, gen):
    """Each member of a batch as it is alone; a weight counts a point as often as it says; it moves with the
    world; in float32 to its rounding."""
    Y = space.random(*SHAPES[space][1:], generator=gen, dtype=F64)
    V = space.tangent(Y, 0.5 * randn((3, 2, *Y.shape), gen))
    X = space.exp(Y.expand_as(V), V)
    both = space.mean(X, kind="frechet")
    weights = torch.tensor([2.0, 1.0, 0.0], dtype=F64)
    for i in (0, 1):
        close(both[i], space.mean(X[:, i], kind="frechet"), 1e-7)
        twice = space.mean(torch.cat([X[:1, i], X[:2, i]]), kind="frechet")
        close(space.mean(X[:, i], weights, kind="frechet"), twice, 1e-7)
    close(space.mean(X.float(), kind="frechet").double(), both, 1e-5)


@each_space
def test_empty_batches(space):
    Y = torch.empty(0, *SHAPES[space][1:])
    assert space.project(Y).shape == space.exp(Y, Y).shape == space.random(*Y.shape).shape == Y.shape
    assert space.log(Y, Y).shape == Y.shape
    assert space.dist(Y, Y).shape == (0,)


@each_space
def test_nan_goes_through(space, gen):
    Y, Z = space.random(2, *SHAPES[space], generator=gen, dtype=F64)
    parts(space, Z)[1][1, 0] = torch.nan
    assert space.dist(Y, Z).isnan().tolist() == [False, True, False, False]
    assert space.norm(Y, Z).isnan().tolist() == [False, True, False, False]
