"""Second derivatives above every frame: one symmetric form, the same whichever frame it is seen from."""

import pytest
import torch
from helpers.problems import gen, smooth, with_gradient
from helpers.table import SPACES, name, shapes

import ghor
from ghor.solve.iterate import Ray
from ghor.solve.problem import Problem

CASES = [
    pytest.param(space, shape, section, id=f"{name(space)}-{name(shape)}-{section}")
    for space in SPACES
    for shape in shapes(space)[:2]
    for section in ("transported", "implicit")
    if section == "transported" or space.implicit
]


def of_a_subspace(shape):
    """One that does not depend on the basis: the Hessian of another is none on Grassmann manifolds."""
    N = max(shape[-2:])
    C = torch.randn(N, N, generator=gen(3), dtype=torch.float64)
    return lambda Y: torch.sin(Y @ Y.mT + C).sum() if Y.shape[-2] == N else torch.sin(Y.mT @ Y + C).sum()


def matrix(problem, it):
    """The Hessian of the projections to g^hor of a basis of flat coordinates, and these projections."""
    space, hor = problem.space, []
    for e in torch.eye(problem.space.size, dtype=it.gradient.dtype):
        w = [x.clone() for x in space.elements(e)]
        for part, x in zip(space.parts, w, strict=True):
            part.geometry.hor_(x)
        hor.append(space.flat(lambda k, out, w=w: out.copy_(w[k])))
    return torch.stack([problem.hessian(it)(v) for v in hor]), torch.stack(hor)


@pytest.mark.parametrize(("space", "shape", "section"), CASES)
def test_they_are_symmetric_and_those_of_geodesics(space, shape, section):
    """Against second differences of f along geodesics, whose error is 1e-6 of the values at steps of 1e-3."""
    Y = space.random(*shape, generator=gen(5), dtype=torch.float64)
    problem = Problem(smooth(shape), Y, space, section=section)
    it = problem.start(twice=True)
    H, hor = matrix(problem, it)
    assert (hor @ H.mT - H @ hor.mT).abs().max() <= 1e-11 * H.abs().max()
    d = it.gradient / it.norm
    h, ray = 1e-3, Ray(problem.space, it, d)
    values = [problem.value([trial.y for trial in ray.at(k * h)]) for k in (-2, -1, 1, 2)]
    outer, inner = values[0] + values[3], values[1] + values[2]
    second = (16 * inner - outer - 30 * it.value) / (12 * h * h)
    assert abs(float(d.dot(problem.hessian(it)(d))) - second) <= 1e-7 * (abs(it.value) + H.abs().max())


@pytest.mark.parametrize(
    ("space", "shape", "make"),
    [
        (ghor.Stiefel(), (7, 2), smooth),
        (ghor.Grassmann(), (7, 2), of_a_subspace),
        (ghor.Sphere(), (3, 5), smooth),
        (ghor.Sphere(radius=2.5), (3, 5), smooth),
        (ghor.Sphere(radius="start"), (3, 5), smooth),
        (ghor.Hyperbolic(), (3, 5), smooth),
    ],
    ids=lambda v: getattr(v, "__name__", None) or str(v),
)
def test_every_frame_sees_the_same_eigenvalues(space, shape, make):
    """Frames above one point differ by a rotation. (Of 3 radii: by radians, whatever they are.)"""
    Y = space.random(*shape, generator=gen(5), dtype=torch.float64)
    if getattr(space, "radius", 1) == "start":
        Y = Y * torch.tensor([[0.1], [1.0], [10.0]], dtype=torch.float64)
    found = []
    for section in ("transported", "implicit"):
        problem = Problem(make(shape), Y, space, section=section)
        found.append(torch.linalg.eigvalsh(matrix(problem, problem.start(twice=True))[0]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-11 * float(found[0].abs().max()))


@pytest.mark.parametrize("section", ["auto", "transported", "implicit"])
def test_the_trust_region_needs_no_more_products_above_closed_forms(section):
    """On unit spheres: with second derivatives that are not symmetric it takes eight times as many."""
    C = torch.randn(100, 40, generator=gen(7), dtype=torch.float64)
    x = ghor.Sphere().random(40, generator=gen(7), dtype=torch.float64)
    found = ghor.minimize(lambda y: (C @ y).pow(4).sum(), x, ghor.Sphere(), "trust-region", section=section)
    assert found.success
    assert found.evaluations + found.hessian_products <= 300


def test_second_derivatives_that_are_not_symmetric_are_found():
    """x^T x/2, whose second derivatives are [[1, 1], [-1, 1]] by blocks: <v, H v> is right."""

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, v):
            a, b = v.chunk(2)
            return torch.cat([a + b, b - a])

    x = torch.randn(6, generator=gen(0), dtype=torch.float64)
    skewed = with_gradient(lambda x: x.square().sum() / 2, Turned.apply)
    found = ghor.check_hessian(skewed, x, generator=gen(1))
    assert found.slope >= 2.9
    assert not found.ok
    assert "Hessian NOT ok: <u, H v> and <v, H u> are" in str(found)
