"""No drift off the manifold: short runs always, the long ones of the README behind the marker `slow`."""

import pytest
import torch
from table import name, randn

import ghor

ST = ghor.Stiefel()


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
        out[t] = ST.distance(Y.detach().double()).max()
    return out


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=name)
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
def test_1000_steps(section, retraction, dtype, bound):
    assert worst_distances(dtype, 1000, section, retraction, weights=4).max() <= bound


@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_steps_that_shrink_to_an_ulp(section):
    """A learning rate that decays to 0: increments near one ulp round the same way every time."""
    assert worst_distances(torch.float32, 1500, section, weights=4, schedule=True).max() <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=name)
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
def test_20000_steps_without_growth(section, retraction, dtype, bound):
    distances = worst_distances(dtype, 20_000, section, retraction)
    tenths = distances.view(10, -1).amax(1)
    print(f"{section} {retraction} {dtype}: worst {distances.max():.2e}, by tenths {[f'{x:.1e}' for x in tenths]}")
    assert distances.max() <= bound
    assert tenths[-1] <= 1.5 * tenths[1]


@pytest.mark.slow
@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_100000_steps_without_growth(section):
    distances = worst_distances(torch.float32, 100_000, section, weights=1)
    tenths = distances.view(10, -1).amax(1)
    print(f"{section}: worst {distances.max():.2e}, by tenths {[f'{x:.1e}' for x in tenths]}")
    assert distances.max() <= 2e-6
    assert tenths[-1] <= 1.5 * tenths[1]


HUGE = [
    (ghor.SpecialOrthogonal(), (7, 7)),
    (ST, (10, 9)),
    (ST, (49, 7)),
    (ST, (200, 3)),
    (ghor.Grassmann(), (49, 7)),
    (ghor.Sphere(), (30,)),
]


@pytest.mark.parametrize(("space", "shape"), HUGE, ids=name)
@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize(
    ("cls", "lr", "scale"),
    [("SGD", 1e3, 1e30), ("SGD", 1.0, 1e6), ("SGD", 1.0, 30.0), ("SGD", 1.0, 1.0), ("Adam", 1e3, 1e30)],
)
@pytest.mark.filterwarnings("ignore:a velocity of length")
def test_no_learning_rate_leaves_the_manifold(space, shape, section, retraction, cls, lr, scale, gen):
    """Entries of the velocity from 1 to 1e33, small ones in the same stack: <= 1e-5, nothing non-finite."""
    weights = [torch.nn.Parameter(space.random(*shape, generator=gen)) for _ in range(3)]
    opt = getattr(ghor.optim, cls)(weights, space=space, lr=lr, section=section, retraction=retraction)
    for _ in range(5):
        for p, size in zip(weights, (scale, 1e-3 * scale, 1e-6), strict=True):
            p.grad = size * randn(shape, gen, torch.float32)
        opt.step()
        for p in weights:
            assert torch.isfinite(p).all()
            assert space.distance(p.detach().double()).max() <= 1e-5
            frame = opt.state[p].get("section")
            if frame is not None:
                assert (frame.double().mT @ frame.double() - torch.eye(len(frame))).abs().max() <= 1e-5


def test_a_shortened_velocity_is_said_once(gen):
    Y = torch.nn.Parameter(ST.random(9, 3, generator=gen))
    opt = ghor.optim.SGD([Y], space=ST, lr=1e3)
    Y.grad = 1e30 * randn((9, 3), gen, torch.float32)
    with pytest.warns(UserWarning, match="shortened to 1e\\+06") as caught:
        opt.step()
    assert caught[0].filename == __file__  # points at the caller
    opt.step()
