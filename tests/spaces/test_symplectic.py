"""Symplectic spaces in floating point: points that grow stay on their space."""

import warnings

import pytest
import torch
from helpers.table import frame, horizontal, name, randn
from torch import nn

import ghor
from ghor.spaces.retraction import by_name, geodesic

STIEFEL = ghor.SymplecticStiefel()
SPACES = [STIEFEL, ghor.SymplecticGrassmann()]
SHAPE = (40, 20)
each_space = pytest.mark.parametrize("space", SPACES, ids=name)
each_dtype = pytest.mark.parametrize(
    ("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=name
)


def model_reduction(space, U, X):
    """How much of the data X is not in the symplectic subspace: |X - U U+ X|^2."""
    return (X - U @ (space.star(U) @ X)).square().mean()


def data(gen, dtype, N=40):
    return (torch.linspace(1, 0.01, N, dtype=torch.float64)[:, None] * randn((N, 60), gen)).to(dtype)


def run(space, U, loss, lr, steps, every=10, **options):
    """The largest distance on the way, in units of the tolerance and as it is."""
    opt = ghor.optim.Adam([U], space=space, lr=lr, **options)
    off, relative = 0.0, 0.0
    for i in range(steps):
        opt.zero_grad()
        loss(U).backward()
        opt.step()
        if i % every == every - 1:
            d, allowed = space.residual(U.detach()), space.tolerance(U.detach())
            assert torch.isfinite(U).all()
            off, relative = max(off, float(d.max())), max(relative, float((d / allowed).max()))
    return off, relative


@each_space
def test_points_are_drawn_to_rounding(space, gen):
    for shape in (SHAPE, (50, 8, 4), (400, 200)):
        U = space.random(*shape, generator=gen, dtype=torch.float64)
        assert space.residual(U).max() <= 1e-13


def test_points_are_drawn_with_both_signs(gen):
    """Of every entry, equally often: LAPACK's Q alone has negative diagonals."""
    U = STIEFEL.random(500, 4, 2, generator=gen)
    assert (U > 0).float().mean(0).sub(0.5).abs().max() <= 0.1  # 4.5 deviations of 500 draws


@pytest.mark.parametrize("steps", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@each_dtype
@each_space
def test_no_drift(space, dtype, tol, steps, gen):
    U, X = nn.Parameter(space.random(*SHAPE, generator=gen, dtype=dtype)), data(gen, dtype)
    off, relative = run(space, U, lambda U: model_reduction(space, U, X), 1e-2, steps)
    assert off <= tol
    assert relative < 1


@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name)
@each_space
def test_every_learning_rate_stays_on_the_space(space, dtype, retraction, gen):
    """A loss without a minimum, for which the weight would grow until no digit is left. It says so, once."""
    U, T = nn.Parameter(space.random(12, 4, generator=gen, dtype=dtype)), randn((12, 4), gen, dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        off, relative = run(space, U, lambda U: (U * T).sum(), 10.0, 120, retraction=retraction)
    assert relative < 1
    assert off < 1e-2
    said = [str(w.message) for w in caught]
    assert len([m for m in said if "no digits left, and is held there" in m]) == 1
    assert U.detach().norm() > 40


def moved(frame, w):
    """The frame Lambda exp(w)."""
    frame = frame.copy()
    frame.step(w.clone(), frame.length(w), geodesic, [], [])
    return frame


@each_space
def test_decay_does_not_depend_on_the_size(space, gen):
    """Near the anchor `away` is what leads there, for weights of any size; far away it is one radian."""
    Y0 = space.random(6, 2, generator=gen, dtype=torch.float64)
    L = frame(space, Y0)
    V, out = horizontal(L, gen), L.zeros()
    for _ in range(6):
        L = moved(L, 2 * horizontal(L, gen))
        space.geometry.away(L, moved(L, -1e-6 * V).point(), out)
        assert (out / 1e-6 - V).norm() <= 1e-4 * V.norm()
    assert L.point().norm() > 5  # of an orthogonal point: sqrt(2)
    space.geometry.away(L, Y0[None], out)
    assert float(L.length(out)) == pytest.approx(1)


@each_space
def test_what_grows_is_shortened_and_nothing_else(space, gen):
    L = frame(space, space.random(2, 12, 4, generator=gen))
    G, B, R = randn((2, 12, 4), gen, torch.float32), L.zeros(), by_name("cayley")
    for i in range(60):
        L.pull(G, B)
        W = 0.5 * B / L.length(B)
        if i == 0:
            assert space.shortening(L.L, W, L.length(W)) is None
        L.step(W.clone(), L.length(W), R, [], [])
        G = L.point().clone()  # the direction in which the point grows fastest
    assert (torch.linalg.vector_norm(L.L, dim=(-2, -1)) <= space.limit(L.L) * 1.001).all()
    assert L.held.all()
    assert (space.shortening(L.L, W, L.length(W)) < 0.2).all()
    assert (space.shortening(L.L, -W, L.length(-W)) > 0.4).all()  # the way back is open
    assert (space.shortening(L.L, 0 * W, L.length(0 * W)) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name)
@each_space
def test_nothing_is_lost_over_many_seeds(space, dtype):
    """200 seeds of 200 steps, as one stack, at a learning rate that is too large."""
    gen = torch.Generator().manual_seed(0)
    U = nn.Parameter(space.random(200, *SHAPE, generator=gen, dtype=dtype))
    X = torch.stack([data(gen, dtype) for _ in range(200)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, relative = run(space, U, lambda U: 200 * model_reduction(space, U, X), 0.1, 200)
    assert relative < 1


@each_space
@pytest.mark.parametrize("shape", [(6, 2), (20, 4), (3, 8, 4), (40, 38)], ids=name)
def test_a_section_is_a_function_of_the_point(space, shape, gen):
    """Its eigenvalues are repeated, and which eigenvectors LAPACK returns depends on rounding and threads."""
    for moved in (False, True):
        U = space.random(*shape, generator=gen, dtype=torch.float64)
        if moved:
            U = space.retract(U, space.tangent(U, 0.1 * randn(shape, gen)))
        change = 1e-15 * randn(shape, gen)
        assert (space.section(U + change) - space.section(U)).abs().max() <= 1e-12
    E = space.E(shape, dtype=torch.float64)  # zeros and ones, and columns in another order
    for U in (E, torch.cat([E[..., shape[-2] // 2 :, :], -E[..., : shape[-2] // 2, :]], -2)):
        assert (space.section(U + change) - space.section(U)).abs().max() <= 1e-12


@each_space
def test_tangent_vectors_at_large_points(space, gen):
    """What `tangent` returns is tangent, also where the rounding of U U+ V is 1e6 times that of V."""
    U = space.random(8, 4, generator=gen, dtype=torch.float64)
    U = torch.tensor([1e3, 1, 1, 1, 1e-3, 1, 1, 1], dtype=torch.float64).diag() @ U
    V = space.tangent(U, randn((8, 4), gen))
    assert space.is_tangent(U, V)
    assert not space.is_tangent(U, V + 1e-3 * U * (V.norm() / U.norm()))


# -- coordinates that are rounding ---------------------------------------------------------------------------

LOSSES = {
    "target": lambda Y, T: (Y - T).square().sum(),
    "linear": lambda Y, T: (Y * T).sum(),
    "fourth power": lambda Y, T: Y.pow(4).sum(),
}


SIDES = [(2, 2), (4, 2), (6, 2), (4, 4), (6, 4), (8, 4)]


@pytest.mark.parametrize(
    ("loss", "shape", "momentum_decay"),
    [(loss, x, (4e-3, 6e-3)[(i + j) % 2]) for i, loss in enumerate(LOSSES) for j, x in enumerate(SIDES)],
    ids=name,
)
def test_foreach_is_the_loop(shape, loss, momentum_decay):
    """Coordinates of a gradient that are 0 but for rounding are 0: Adam divides them by themselves.

    Random points are orthogonal, too, so many coordinates are 0; rounding there grew a millionfold a step.

    Where such a point is an unstable one, rounding of the points grows as well, but later.
    """
    ends = []
    for foreach in (True, False):
        gen = torch.Generator().manual_seed(0)
        *starts, T = (STIEFEL.random(*shape, generator=gen, dtype=torch.float64) for _ in range(3))
        params = [nn.Parameter(Y) for Y in starts]
        options = {"lr": 1e-2, "momentum_decay": momentum_decay, "foreach": foreach}
        opt = ghor.optim.NAdam(params, space=STIEFEL, **options)
        for _ in range(7):
            opt.zero_grad()
            sum(LOSSES[loss](p, T) for p in params).backward()
            opt.step()
        ends.append(torch.stack([p.detach() for p in params]))
    assert (ends[0] - ends[1]).abs().max() <= 1e-7


def test_what_is_small_beside_another_column_stays(gen):
    """The bound is that of its own column."""
    Y = STIEFEL.random(8, 4, generator=gen, dtype=torch.float64)
    frame = STIEFEL.geometry.frame(Y[None], "transported", {}, 2e-16)
    g = torch.randn(1, 8, 4, generator=gen, dtype=torch.float64) * torch.tensor([1, 1e-20, 1, 1e-30])
    out = frame.zeros()
    frame.pull(g, out)
    assert bool(out[:, 4:].all())
