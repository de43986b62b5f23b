"""No drift off the manifold: short runs always, the long ones of the README behind the marker `slow`."""

import pytest
import torch
from helpers.steps import sections
from helpers.table import name

import ghor

ST, SYMPLECTIC = ghor.Stiefel(), ghor.SymplecticStiefel()


def worst_distances(dtype, steps, section="transported", retraction="cayley", weights=16, schedule=False):
    """max ||Y^T Y - I||_F in float64 at every step, of Adam at lr 1e-3 with noisy gradients on St(7, 49)."""
    gen = torch.Generator().manual_seed(0)
    Y = torch.nn.Parameter(ST.random(weights, 49, 7, generator=gen, dtype=dtype))
    target = ST.random(weights, 49, 7, generator=gen, dtype=dtype)
    opt = ghor.optim.Adam([Y], space=ST, lr=1e-3, section=section, retraction=retraction)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    out = torch.empty(steps, dtype=torch.float64)
    for t in range(steps):
        Y.grad = Y.detach() - target + torch.randn(weights, 49, 7, generator=gen, dtype=dtype)
        opt.step()
        if schedule:
            decay.step()
        out[t] = ST.residual(Y.detach().double()).max()
    return out


@sections
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 2.5e-15)], ids=name)
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
def test_1000_steps(section, retraction, dtype, bound):
    assert worst_distances(dtype, 1000, section, retraction, weights=4).max() <= bound


@sections
def test_steps_that_shrink_to_an_ulp(section):
    """A learning rate that decays to 0: increments near one ulp round the same way every time."""
    assert worst_distances(torch.float32, 1500, section, weights=4, schedule=True).max() <= 2e-6


def test_large_rotations():
    """N = 128 after 20 steps, just polished: the rounding of the entries. Products in float32 leave 2e-6."""
    space, gen = ghor.SpecialOrthogonal(), torch.Generator().manual_seed(0)
    Y = torch.nn.Parameter(space.random(128, 128, generator=gen))
    opt = ghor.optim.Adam([Y], space=space, lr=5e-3)
    for _ in range(20):
        Y.grad = torch.randn(128, 128, generator=gen)
        opt.step()
    assert float(space.residual(Y.detach().double())) <= 6e-7


STORED = [
    (ghor.Stiefel(), (12, 3), lambda L: L.mT @ L),
    (
        SYMPLECTIC,
        (12, 4),
        lambda L: torch.cat([SYMPLECTIC.star(L[..., :4]), SYMPLECTIC.star(L[..., 4:])], -2) @ L,
    ),
    (ghor.Hyperbolic(), (7,), lambda S: S[..., 1:, 1:].mT @ S[..., 1:, 1:]),
    (ghor.PositionsOrientations(), (2, 3), lambda L: L[..., :3].mT @ L[..., :3]),
]


@pytest.mark.parametrize(("space", "shape", "gram"), STORED, ids=[str(space) for space, *_ in STORED])
def test_the_whole_frame_is_back_on_its_group(space, shape, gram, gen):
    """After 600 steps, a multiple of every period: not the point alone, of which the weights would tell.

    2 eps sqrt(side) is one Newton-Schulz step's rounding. Without the repair of Lambda these are 8 to 13
    times further off.
    """
    Y = torch.nn.Parameter(space.random(8, *shape, generator=gen))
    opt = ghor.optim.SGD([Y], space=space, lr=3e-3, section="transported")
    for _ in range(600):
        Y.grad = torch.randn(Y.shape, generator=gen)
        opt.step()
    off = gram(opt.state[Y]["section"].double())
    side = off.shape[-1]
    off = off - torch.eye(side, dtype=off.dtype)
    assert torch.linalg.matrix_norm(off).max() <= 2 * torch.finfo(Y.dtype).eps * side**0.5


@pytest.mark.slow
@sections
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 2.5e-15)], ids=name)
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
def test_20000_steps_without_growth(section, retraction, dtype, bound):
    distances = worst_distances(dtype, 20_000, section, retraction)
    tenths = distances.view(10, -1).amax(1)
    by_tenths = [f"{x:.1e}" for x in tenths]
    print(f"{section} {retraction} {dtype}: worst {distances.max():.2e}, by tenths {by_tenths}")
    assert distances.max() <= bound
    assert tenths[-1] <= 1.5 * tenths[1]


@pytest.mark.slow
@sections
def test_100000_steps_without_growth(section):
    distances = worst_distances(torch.float32, 100_000, section, weights=1)
    tenths = distances.view(10, -1).amax(1)
    print(f"{section}: worst {distances.max():.2e}, by tenths {[f'{x:.1e}' for x in tenths]}")
    assert distances.max() <= 2e-6
    assert tenths[-1] <= 1.5 * tenths[1]
