"""Spheres: the angle and the logarithm at any distance, spheres of other radii, options."""

import copy
import math

import mpmath
import numpy as np
import pytest
import torch
from helpers.table import close, randn

import ghor
from ghor.spaces.retraction import RETRACTIONS

S = ghor.Sphere()
F64 = torch.float64
RADII = [2.5, "start"]


# -- angles and logarithms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("angle", [0.0, 1e-8, 1e-3, 1.0, math.pi / 2, 3.1, math.pi - 1e-7, math.pi])
def test_the_angle_is_exact_everywhere(angle):
    y = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    z = torch.tensor([math.cos(angle), math.sin(angle), 0.0], dtype=F64)
    z = -y if angle == math.pi else z
    y.requires_grad_()
    d = S.dist(y, z)
    assert abs(float(d.detach()) - angle) <= 4e-16 + 4e-16 * angle
    (G,) = torch.autograd.grad(d, y)
    assert torch.isfinite(G).all()
    if 0 < angle < math.pi:
        close(S.rgrad(y.detach(), G), torch.tensor([0.0, -1.0, 0.0], dtype=F64), 1e-8)


def exact_log(y, z):
    """theta K/|K|, K = z - (y.z) y of the normalised vectors, with 40 digits."""
    with mpmath.workdps(40):
        y, z = (mpmath.matrix(x.tolist()) for x in (y, z))
        y, z = y / mpmath.norm(y), z / mpmath.norm(z)
        c = (y.T * z)[0]
        K = z - c * y
        s = mpmath.norm(K)
        return torch.tensor([float(k) for k in K * (mpmath.atan2(s, c) / s)], dtype=F64)


@pytest.mark.parametrize("short_of", [1e-1, 1e-3, 1e-5, 1e-8, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_logarithms_of_nearly_antipodal_points(dtype, short_of, gen):
    """The direction is that of the rounded points, as far as their lengths say: to eps/(pi - angle)."""
    y = S.random(5, generator=gen, dtype=F64)
    v = S.tangent(y, randn((5,), gen))
    z = S.exp(y, v * ((math.pi - short_of) / v.norm())).to(dtype)
    y, eps = y.to(dtype), torch.finfo(dtype).eps
    log = S.log(y, z)
    close(log, exact_log(y, z), 8 * eps * (1 + 0.2 * eps / short_of) if short_of > 8 * eps else 8)
    close(torch.linalg.vector_norm(log), S.dist(y, z), 8 * eps)
    close(S.exp(y, log), z, 8 * eps)
    t = randn((2, 3), gen, dtype)  # an orientation is a point of the sphere
    P, Y, Z = ghor.PositionsOrientations(), torch.stack([t[0], y[:3]]), torch.stack([t[1], -y[:3]])
    Y, Z = P.project(Y), P.project(Z + short_of * randn((2, 3), gen, dtype))
    assert (P.exp(Y, P.log(Y, Z)) - Z).abs().max() <= 100 * eps


def test_an_antipodal_point_is_reached_by_one_of_the_ways(gen):
    """And takes nothing from the others in its batch."""
    Y = S.random(6, 5, generator=gen, dtype=F64)
    Z = S.random(6, 5, generator=gen, dtype=F64)
    expected = S.log(Y, Z)
    Z[2] = -Y[2]
    log = S.log(Y, Z)
    close(torch.linalg.vector_norm(log[2]), torch.tensor(math.pi, dtype=F64), 1e-15)
    assert S.is_tangent(Y, log)
    close(S.exp(Y, log), Z, 1e-15)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(log[others], expected[others])


def test_the_way_to_an_antipodal_point_is_a_constant_for_autograd(gen):
    Y = S.random(3, 5, generator=gen, dtype=F64).requires_grad_()
    Z = S.random(3, 5, generator=gen, dtype=F64)
    Z[1] = -Y.detach()[1]
    Z.requires_grad_()
    grads = torch.autograd.grad(S.log(Y, Z).pow(3).sum(), (Y, Z))
    for G in grads:
        assert torch.isfinite(G).all()
        assert [bool(row.any()) for row in G] == [True, False, True]


def test_the_residual_is_a_distance(gen):
    """In the units of the radius, as the numbers that others compare it with."""
    y = 1.001 * S.random(4, 5, generator=gen, dtype=F64)
    close(ghor.Sphere(radius=2.5).residual(2.5 * y), S.residual(y), 1e-14)


def test_a_point_that_does_not_move_keeps_every_bit(gen):
    Y = torch.nn.Parameter(S.random(8, 5, generator=gen))
    start = Y.detach().clone()
    opt = ghor.optim.SGD([Y], space=S, lr=0.3, momentum=0.9)
    for _ in range(25):
        Y.grad = randn((8, 5), gen, torch.float32)
        Y.grad[::2] = 0
        opt.step()
    assert torch.equal(Y[::2], start[::2])
    assert not opt.state[Y]["momentum_buffer"][::2].any()


# -- radius --------------------------------------------------------------------------------------------------


def quadratic(shape, gen, dtype=F64):
    """The gradient of a quadratic form, as a function of the weight."""
    N = math.prod(shape)
    C = randn((N, N), gen, dtype)
    return lambda Y: (Y.detach().flatten() @ (C + C.mT)).view(shape)


def run(space, start, gradient, steps, optimizer=ghor.optim.Adam, **options):
    Y = torch.nn.Parameter(start.clone())
    opt = optimizer([Y], space=space, **options)
    for _ in range(steps):
        Y.grad = gradient(Y)
        opt.step()
    return Y.detach(), opt


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("flatten", [1, 2])
@pytest.mark.parametrize("retraction", list(RETRACTIONS))
def test_a_sphere_of_another_radius_is_the_unit_sphere_in_other_units(
    radius, section, flatten, retraction, gen
):
    """Y = r y throughout, if y has the learning rate lr/r with Adam, lr/r^2 with SGD, lr with Muon."""
    unit, space = ghor.Sphere(flatten=flatten), ghor.Sphere(flatten=flatten, radius=radius)
    y, grad = unit.random(4, 5, generator=gen, dtype=F64), quadratic((4, 5), gen)
    options = {"section": section, "retraction": retraction}
    for optimizer, lr, power, more in (
        (ghor.optim.Adam, 0.05, 1, {"eps": 0}),
        (ghor.optim.SGD, 0.05, 2, {"momentum": 0.9}),
        (ghor.optim.Muon, 0.05, 0, {"weight_decay": 0.1, "anchor": "start"}),
    ):
        Y, _ = run(space, 2.5 * y, grad, 30, optimizer, lr=lr, **options, **more)
        z, _ = run(
            unit, y, lambda x: 2.5 * grad(2.5 * x), 30, optimizer, lr=lr / 2.5**power, **options, **more
        )
        close(Y, 2.5 * z, 1e-11)
        assert float((Y - 2.5 * y).abs().max()) > 0.1


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("flatten", [1, 2])
def test_the_radius_of_the_start_does_not_drift(section, flatten, gen):
    """1000 steps of Adam in float32, from the lengths that rows or the matrix have: 1e-3 to 1e3."""
    space = ghor.Sphere(flatten=flatten, radius="start")
    start = randn((7, 6), gen, torch.float32) * torch.logspace(-3, 3, 7)[:, None]
    length = space.lengths(start.double())
    Y = torch.nn.Parameter(start.clone())
    opt = ghor.optim.Adam([Y], space=space, lr=1e-3, section=section)
    worst = 0.0
    for _ in range(1000):
        Y.grad = randn((7, 6), gen, torch.float32)
        opt.step()
        worst = max(worst, float((space.lengths(Y.detach().double()) / length - 1).abs().max()))
    assert worst <= 1e-6
    close(opt.state[Y]["radius"].double() / length, torch.ones_like(length), 1e-6)
    assert float((Y.detach() - start).norm()) > 0.1


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("radius", RADII)
def test_a_radius_survives_saving_and_copying(section, radius, gen, tmp_path):
    """A run goes on to the bit, also where the weight is a bit off its sphere, as between two repairs."""
    start = 2.5 * S.random(5, 6, generator=gen)
    grads = [randn((5, 6), gen, torch.float32) for _ in range(25)]
    Y = torch.nn.Parameter(start)
    opt = ghor.optim.Adam([Y], space=ghor.Sphere(radius=radius), lr=0.1, section=section)

    def on(weight, optimizer, some):
        for G in some:
            weight.grad = G.clone()
            optimizer.step()

    on(Y, opt, grads[:7])
    torch.save({"Y": Y.detach(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    Z, other = copy.deepcopy((Y, opt))
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    V = torch.nn.Parameter(saved["Y"])
    resumed = ghor.optim.Adam([V], space=ghor.Sphere(radius=radius), lr=0.3, section=section)
    resumed.load_state_dict(saved["opt"])
    for weight, optimizer in ((Y, opt), (Z, other), (V, resumed)):
        on(weight, optimizer, grads[7:])
        assert torch.equal(weight, Y)
    close(S.residual(Y.detach().double() / 2.5), torch.zeros(5), 2e-6)


@pytest.mark.parametrize("radius", RADII)
def test_max_angle_is_an_angle_on_any_radius(radius, gen):
    start, G = S.random(5, 6, generator=gen, dtype=F64), 1e3 * randn((5, 6), gen)
    Y, _ = run(
        ghor.Sphere(radius=radius), 2.5 * start, lambda Y: G, 1, lr=1.0, max_angle=0.2, retraction="geodesic"
    )
    close(S.dist(start, Y / 2.5), torch.full((5,), 0.2, dtype=F64), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_vectors_of_half_precision(dtype, gen):
    """Whose squares float16 does not hold, as it holds nothing above 65504."""
    space = ghor.Sphere(radius="start")
    y = torch.full((4,), 150.0, dtype=dtype)
    z = y * torch.tensor([1, -1, 1, 1], dtype=dtype)
    eps = torch.finfo(dtype).eps
    for x in (y, 400 * y):  # of length 120000
        assert space.residual(x) <= space.tolerance(x)
    for x in (y * math.inf, 0 * y):
        assert not space.residual(x) <= space.tolerance(x)
    assert space.lengths(y).dtype == space.residual(y).dtype == dtype
    torch.testing.assert_close(space.lengths(y).double(), torch.tensor(300.0, dtype=F64), rtol=eps, atol=0)
    angle = 300 * math.acos(0.5)
    torch.testing.assert_close(space.dist(y, z).double().item(), angle, rtol=4 * eps, atol=0)
    torch.testing.assert_close(space.log(y, z).double().norm().item(), angle, rtol=4 * eps, atol=0)
    rounded = (space.random(9, 40, generator=gen) * 200).to(dtype)
    assert torch.isfinite(space.dist(rounded, rounded.roll(1, -1))).all()  # of one length up to rounding
    start = 3 * randn((4, 50), gen, dtype)
    Y, opt = run(space, start, lambda Y: randn((4, 50), gen, dtype), 200, lr=1e-2)
    (state,) = opt.state.values()
    close(state["radius"].double() / space.lengths(start.double()), torch.ones(4), 1e-6)
    close(space.lengths(Y.double()) / space.lengths(start.double()), torch.ones(4), eps)


@pytest.mark.parametrize("radius", [1.0, 3.0, "start"], ids=str)
def test_a_whole_matrix_of_a_million_entries(radius, gen):
    """Norms of that many float32 entries can be 1e-5 off; points, projections and steps are not."""
    space = ghor.Sphere(flatten=2, radius=radius)
    Y = torch.nn.Parameter(space.random(2304, 768, generator=gen))
    r = float(Y.detach().double().norm()) if radius == "start" else radius
    opt = ghor.optim.Adam([Y], space=space, lr=1e-3)
    for _ in range(3):
        Y.grad = torch.randn(Y.shape, generator=gen)
        opt.step()
    for X in (space.random(2304, 768, generator=gen) if radius != "start" else Y, space.project(Y), Y):
        assert abs(float(X.detach().double().norm()) / r - 1) <= 4e-6
        assert float(space.residual(X.detach())) <= float(space.tolerance(X.detach()))


@pytest.mark.parametrize("size", [1e-25, 1e-21, 1e20, 1e25])
def test_lengths_whose_squares_are_out_of_range(size):
    """Every vector but 0 is a point with radius="start", and angles do not depend on its length."""
    space = ghor.Sphere(radius="start")
    Y, Z = (torch.tensor(v) * size for v in ([3.0, 4.0], [4.0, 3.0]))
    assert float(space.residual(Y)) <= 1e-6
    assert abs(float(space.dist(Y, Z)) / size - 5 * math.acos(0.96)) <= 1e-5
    assert torch.equal(space.project(Y), Y)


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_runs_on_a_radius_whose_square_is_out_of_range(section, size, gen):
    """As on the unit sphere, with short steps and with limited ones."""
    y, exact = S.random(4, 5, generator=gen), quadratic((4, 5), gen)

    def grad(Y):
        return exact(Y.double()).float()

    for lr, decay, more in ((0.02, 0.1, {"anchor": "start"}), (2.0, 0.0, {"max_angle": 0.05})):
        options = {"section": section, **more}
        z, _ = run(S, y, grad, 12, ghor.optim.AdamW, lr=lr, weight_decay=decay, **options)
        for radius in (size, "start"):
            own = {"lr": lr * size, "weight_decay": decay / size, **options}
            space = ghor.Sphere(radius=radius)
            Y, _ = run(space, size * y, lambda Y: grad(Y / size), 12, ghor.optim.AdamW, **own)
            close(Y / size, z, 2e-5)


def test_declared_radii_are_those_of_averages(gen):
    """An average of weights has shorter rows: `check` says so, and `project` gives them their lengths back. A
    padding row has none."""
    layer = torch.nn.Embedding(6, 4, padding_idx=2)
    before = layer.weight.detach().clone()
    space = ghor.Sphere(radius="start", padding_idx=2)
    assert ghor.constrain(layer, ["weight"], space) == {"weight": 0.0}
    assert torch.equal(layer.weight, before)
    average, opt = torch.optim.swa_utils.AveragedModel(layer), ghor.optim.Adam(layer, lr=0.3)
    for _ in range(30):
        layer.weight.grad = randn((6, 4), gen, torch.float32)
        opt.step()
        average.update_parameters(layer)
    length = torch.linalg.vector_norm(before, dim=1)
    for weight in (layer.weight, before):
        close(torch.linalg.vector_norm(weight.detach(), dim=1), length, 1e-6)
    assert "off" not in ghor.check(layer)
    assert torch.linalg.vector_norm(average.module.weight.detach(), dim=1).sub(length).abs().max() > 0.1
    assert "off" in ghor.check(average)
    ghor.project(average)
    close(torch.linalg.vector_norm(average.module.weight.detach(), dim=1), length, 1e-6)
    assert not average.module.weight[2].any()
    with torch.no_grad():
        layer.weight[1] = 0
    for space in (ghor.Sphere(radius="start"), ghor.Sphere(radius=3)):
        with pytest.raises(ValueError, match=r"vector of length 0 .*\.random\(6, 4\)"):
            ghor.constrain(torch.nn.Embedding.from_pretrained(layer.weight.detach()), "weight", space)
        with pytest.raises(ValueError, match="off Sphere"):
            ghor.optim.Adam([torch.nn.Parameter(layer.weight.detach().clone())], space=space)


# -- options -------------------------------------------------------------------------------------------------


def test_what_is_no_radius_is_refused():
    for bad in (0, -1.0, math.inf, math.nan, "begin", True, np.bool_(True), None, torch.ones(2)):
        with pytest.raises(ValueError, match="radius is a positive number or 'start'"):
            ghor.Sphere(radius=bad)
    with pytest.raises(TypeError, match="real floating point"):
        ghor.Sphere(radius=2).random(3, dtype=torch.complex64)
    for radius, dtype in ((1e40, torch.float32), (1e-40, torch.float32), (1e5, torch.float16)):
        space, X = ghor.Sphere(radius=radius), torch.ones(2, 3, dtype=dtype)
        for f in (space.project, lambda X: space.random(*X.shape, dtype=X.dtype)):  # noqa: B023
            with pytest.raises(TypeError, match=r"holds no vectors of length 1e.*use another radius"):
                f(X)
        space.check((2, 3), torch.float64)
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    for f in (ghor.Sphere(radius="start").dist, ghor.Sphere(radius="start").log):
        with pytest.raises(ValueError, match="different spheres"):
            f(a, b)
    assert float(ghor.Sphere(radius="start").dist(a, 0.75 * b)) == pytest.approx(1.5 * math.pi)
    assert ghor.Sphere(radius=1) == S


def test_whole_numbers_and_those_of_numpy_are_radii():
    for r in (2, np.float32(2), np.float64(2), np.int64(2)):
        assert repr(ghor.Sphere(radius=r)) in ("Sphere(radius=2)", "Sphere(radius=2.0)")
        assert ghor.Sphere(radius=r) == ghor.Sphere(radius=2)
        Y = ghor.Sphere(radius=r).project(torch.ones(3, 4))
        close(Y, torch.ones(3, 4), 1e-6)
        close(ghor.Sphere(radius=r).exp(Y, 0 * Y), Y, 1e-6)
        close(ghor.Sphere(radius=r).dist(Y, -Y), torch.full((3,), 2 * math.pi), 1e-5)
        close(ghor.Sphere(radius=r).random(3, 4).norm(dim=1), torch.full((3,), 2.0), 1e-6)


def test_subnormal_vectors_have_their_direction():
    """As of all their digits: 1e-40 has 17 bits left of 24, and so has its length."""
    X = 1e-40 * torch.tensor([[3.0, 4.0, 0.0], [1.0, -2.0, 2.0]])
    assert S.residual(S.project(X).double()).max() <= 2e-7


def test_shapes_that_hold_no_points_are_named():
    for shape, where in (((0, 5), 0), ((4, 0, 5), 1), ((4, 0), 1)):
        with pytest.raises(ValueError, match=rf"dimension {where} of shape .* is empty"):
            S.check_shape(shape)
    with pytest.raises(ValueError, match=r"columns of matrices \(\.\.\., N, K\), got shape \(5,\)"):
        ghor.Sphere(along="columns").check_shape((5,))
    with pytest.raises(ValueError, match="other options beside it"):
        ghor.Sphere(along="columns", flatten=2)
    with pytest.raises(ValueError, match="a real number of length one does not move"):
        S.random(3, 1)
    for bad in (torch.zeros(4, 6), torch.full((4, 6), math.nan)):
        with pytest.raises(ValueError, match=r"vector of length 0 .*\.random\(4, 6\)|NaN or infinite"):
            S.project(bad)
