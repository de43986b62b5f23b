"""Rotations: determinants, and the two parallel transports of the group."""

import pytest
import torch
from helpers.table import point, tangent

import ghor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_determinant_minus_one_is_named(dtype):
    space, Y = ghor.SpecialOrthogonal(), torch.diag(torch.tensor([1.0, 1.0, -1.0])).to(dtype)
    assert "determinant -1: use ghor.Stiefel()" in space.hint(torch.stack([-Y, Y]))
    assert space.hint(-Y) == space.hint(space.project(Y)) == ""


@pytest.mark.parametrize("size", [1e-40, 1.0, 1e40])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_determinant_beyond_the_range_of_floats_has_a_sign(sign, size, gen):
    """That of 1e-40 X is 1e-400, which is 0 in float64."""
    space = ghor.SpecialOrthogonal()
    X = space.random(10, 10, generator=gen, dtype=torch.float64) * torch.linspace(
        1, 2, 10, dtype=torch.float64
    )
    X[0] *= sign
    torch.testing.assert_close(space.project(size * X), space.project(X))
    differentiated = (size * X).requires_grad_()
    if sign < 0:
        with pytest.raises(ValueError, match="a matrix with det < 0 has no derivative here"):
            space.project(differentiated)
    else:
        assert space.project(differentiated).requires_grad


def covariant_derivative_of_transport(transport, A, B, t, h=1e-4):
    """d/dt (Y^T V) + [A, Y^T V]/2 along Y = exp(t A): zero for the Levi-Civita connection of a group."""
    Y = torch.linalg.matrix_exp(t * A)
    left = [torch.linalg.matrix_exp(s * A).mT @ transport(s) for s in (t - h, t + h)]
    b = Y.mT @ transport(t)
    return (left[1] - left[0]) / (2 * h) + (A @ b - b @ A) / 2


def test_levi_civita_solves_its_equation_and_is_an_isometry(gen):
    space = ghor.SpecialOrthogonal()
    I = torch.eye(4, dtype=torch.float64)
    A, B = tangent(space, I, gen), tangent(space, I, gen)
    residual = covariant_derivative_of_transport(lambda t: space.levi_civita(I, A, B, t), A, B, 0.7)
    assert residual.abs().max() < 1e-7  # central differences, h = 1e-4
    moved = space.levi_civita(I, A, B)
    Z = space.exp(I, A)
    assert space.is_tangent(Z, moved)
    assert abs(space.norm(Z, moved) - space.norm(I, B)) < 1e-14
    assert (space.levi_civita(I, A, A) - space.transport(I, A, A)).abs().max() < 1e-14  # geodesics agree
    assert (moved - space.transport(I, A, B)).abs().max() > 1e-2  # torsion: elsewhere they do not


@pytest.mark.parametrize(("space", "shape"), [(ghor.Sphere(), (3,)), (ghor.Grassmann(), (5, 2))])
def test_on_symmetric_spaces_transport_is_levi_civita(space, shape, gen):
    """No torsion and metric: the tangential derivative of a transported vector along the curve vanishes."""
    Y = point(space, shape, gen)
    V, U, h = tangent(space, Y, gen), tangent(space, Y, gen), 1e-4
    ahead, behind = space.transport(Y, (0.5 + h) * V, U), space.transport(Y, (0.5 - h) * V, U)
    derivative = (ahead - behind) / (2 * h)
    assert space.tangent(space.exp(Y, 0.5 * V), derivative).abs().max() < 1e-7


def test_holonomy_of_the_sphere():
    """Around a triangle with three right angles a vector turns by pi/2, the area enclosed."""
    space = ghor.Sphere()
    x, y, z = torch.eye(3, dtype=torch.float64)
    v, at = z.clone(), x
    for to in (y, z, x):
        step = space.log(at, to)
        v, at = space.transport(at, step, v), to
    assert (v - torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64)).abs().max() < 1e-14
