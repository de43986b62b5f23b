"""Long vectors, and gradients that are asked for or not: retractions go forward, values stay the same, and no
optimizer takes a weight off its space."""

import warnings

import pytest
import torch
from functions import ON_POINTS, arguments, called
from table import MANIFOLDS, RETRACTIONS, SPACES, has, is_compact, name, point, shapes, tangent

import ghor

OPEN = [(s, shape) for s in SPACES if not is_compact(s) for shape in shapes(s)[:2]]


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize(("space", "shape"), [c for c in OPEN if has(c[0], "log")], ids=name)
def test_longer_vectors_lead_further(space, shape, retraction, gen):
    """Where points can be arbitrarily far away. Cayley alone has a pole, and beyond it comes back.

    Up to 3: rotations turn back at pi, and positive definite matrices have digits for not much more.
    """
    for _ in range(3):
        Y = point(space, shape, gen)
        V = tangent(space, Y, gen)
        before = torch.zeros(())
        for length in [
            0.1,
            0.5,
            1.0,
            1.5,
            2.0,
            2.5,
            3.0,
            *([4.0, 6.0, 20.0] if has(space, "to_ball") else []),
        ]:
            Z = space.retract(Y, length * V, retraction)
            assert (space.residual(Z) <= space.tolerance(Z)).all()
            far = space.dist(Y, Z).min()
            assert far > before, length
            before = far


@pytest.mark.parametrize(("space", "shape"), [c for c in OPEN if not has(c[0], "log")], ids=name)
def test_cayley_leads_about_as_far_as_the_geodesic(space, shape, gen):
    """Where some directions are those of rotations, and no distance tells how far it is. Before its pole,
    Cayley stretches by (1 + 3/4)/(1 - 3/4) = 7 at most, where the geodesic does by exp(3/2) = 4.5."""
    for _ in range(3):
        Y = point(space, shape, gen)
        V = tangent(space, Y, gen)
        for length in (1.0, 2.0, 3.0, 4.0, 6.0, 10.0):
            ends = [space.retract(Y, length * V, r) for r in RETRACTIONS]
            for Z in ends:
                assert (space.residual(Z) <= space.tolerance(Z)).all()
            ratio = float(ends[0].norm() / ends[1].norm())
            assert 0.4 < ratio < 2.5, length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize("space", SPACES, ids=name)
def test_values_do_not_depend_on_requires_grad(space, dtype, gen):
    """Short and long vectors: what is held or continued is so in both cases."""
    Y = point(space, shapes(space)[0], gen, dtype)
    U, V = (tangent(space, Y, gen, 0.5) for _ in range(2))
    for size in (1.0, 6.0):
        plain = arguments(space, Y, U, V) | {"V": size * V}
        asked = {k: x.detach().clone().requires_grad_() for k, x in plain.items()}
        for what in (f for f in ON_POINTS if has(space, f)):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "a weight on .* has come to")
                one, other = called(space, what, plain), called(space, what, asked).detach()
            error = (one.double() - other.double()).abs().max()
            assert error <= 20 * torch.finfo(dtype).eps * (1 + one.double().abs().max()), what


@pytest.mark.parametrize("cls", ghor.optim.__all__)
@pytest.mark.parametrize("space", MANIFOLDS, ids=name)
def test_no_optimizer_leaves_the_space(space, cls, gen):
    """Uphill, in float32, at learning rates up to 1e3; measured in float64, in which points are as stored."""
    for lr, maximize in ((1.0, True), (1e3, True), (1e3, False)):
        Y = torch.nn.Parameter(point(space, shapes(space)[0], gen, torch.float32))
        G = torch.randn(Y.shape, generator=gen)
        options = {} if cls in ("PaperAdam", "Muon") else {"maximize": maximize}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(was clipped to|has come|has grown|is held)")
            opt = getattr(ghor.optim, cls)([Y], space=space, lr=lr, **options)
            for k in range(12):
                Y.grad = G * (1 + k % 3)
                opt.step()
        y = Y.detach()
        assert torch.isfinite(y).all()
        assert (space.residual(y.double()) <= space.tolerance(y)).all()
        ghor.optim.SGD([Y], space=space)  # a new optimizer takes it
