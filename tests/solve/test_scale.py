"""No result of a solver depends on the scale of the loss, on the unit of positions, or on a sphere's radius.

Powers of two commute with rounding: scaled by them a run is the same to the last bit.
"""

import pytest
import torch
from helpers.problems import STIEFEL, brockett, closure, each_method, gen, values_of, with_gradient

import ghor

POSES = [
    (ghor.SpecialEuclidean(), (3, 4), (..., -1)),
    (ghor.PositionsOrientations(), (2, 3), (..., 0, slice(None))),
]


def counts(run):
    return run.iterations, run.evaluations, run.hessian_products


def same_run(a, b, factor=1.0):
    assert counts(a) == counts(b)
    assert a.success
    assert b.success
    assert torch.equal(a.x * factor, b.x)


@pytest.mark.parametrize(("dtype", "powers"), [(torch.float64, (-60, 60)), (torch.float32, (-40, 40))])
@each_method
def test_the_scale_of_the_loss(method, dtype, powers):
    f, x, _ = brockett(12, 2)
    x = STIEFEL.project(x.to(dtype))

    def run(scale):
        return ghor.minimize(lambda Y: f(Y.double()).to(dtype) * scale, x, STIEFEL, method)

    one = run(1.0)
    for power in powers:
        same_run(one, run(2.0**power))


@each_method
def test_no_step_goes_uphill_beyond_rounding(method):
    """In float32, and where the values are small: the absolute slack of a trust region would let it climb."""
    S, weights = torch.diag(torch.linspace(1, 2, 20)), torch.tensor([3.0, 2.0, 1.0])
    x = STIEFEL.random(20, 3, generator=gen(0))
    for scale in (1e-12, 1e-6, 1.0, 1e6, 1e12):
        result = ghor.minimize(lambda Y, c=scale: -(Y * (S @ Y) * weights).sum() * c, x, STIEFEL, method)
        values = values_of(result)
        assert float(values.diff().max()) <= 10 * torch.finfo(torch.float32).eps * float(values.abs().max())
        assert result.success, result.status
        assert result.iterations <= 100
        assert abs(result.value / scale + 2 * 3 + 37 / 19 * 2 + 36 / 19) <= 1e-5  # the largest eigenvalues


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


def far(x):
    return (x - 1).square().sum() + (x**4).sum() / 10


@pytest.mark.parametrize(
    ("f", "x"), [(rosenbrock, [-1.2, 1.0]), (far, [0.0, 0.0, 0.0]), (far, [3.0, -1e3, 1.0])]
)
@each_method
def test_the_unit_of_length(method, f, x):
    x = torch.tensor(x, dtype=torch.float64)
    one = ghor.minimize(f, x, method=method)
    for power in (-40, 40):
        unit = 2.0**power
        same_run(one, ghor.minimize(lambda x, unit=unit: f(x / unit), x * unit, method=method), unit)


@each_method
def test_a_minimum_far_away(method):
    """A radius of one unit would need a thousand iterations."""
    for far in (1e-6, 1e3, 1e9):
        result = ghor.minimize(
            lambda x, far=far: (x - far).square().sum(), torch.zeros(3).double(), method=method
        )
        assert result.success
        assert result.evaluations <= 10
        assert float((result.x / far - 1).abs().max()) <= 1e-9


@pytest.mark.parametrize(("space", "shape", "way"), POSES, ids=str)
@each_method
def test_a_pose_far_away(method, space, shape, way):
    """Turns have a longest step, positions have none."""
    target, x = (space.random(*shape, generator=gen(i), dtype=torch.float64) for i in (1, 2))
    for far in (1e-4, 1.0, 1e4):
        goal = target.clone()
        goal[way] *= far
        result = ghor.minimize(lambda X, goal=goal: (X - goal).square().sum(), x, space, method)
        assert result.success, result.status
        assert result.evaluations <= 50
        assert float((result.x - goal).norm()) <= 1e-9 * (1 + float(goal.norm()))


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_the_unit_of_a_factor(start):
    """A subspace times free coefficients in units from 1 to 1000: iterations within a factor of two."""
    N, M, r, space = 100, 80, 3, ghor.Grassmann()
    left, right, first = (
        torch.randn(shape, generator=gen(i), dtype=torch.float64)
        for i, shape in enumerate([(N, r), (r, M), (r, M)])
    )
    seen = torch.rand(N, M, generator=gen(3)) < 0.4
    Y = space.random(N, r, generator=gen(4), dtype=torch.float64)
    counts = []
    for unit in (1.0, 10.0, 100.0, 1000.0):

        def f(x, unit=unit):
            return (seen * (x["Y"] @ x["V"] - unit * left @ right)).square().sum()

        x = {"Y": Y, "V": first * unit * start}
        result = ghor.minimize(f, x, {"Y": space}, "lbfgs", rtol=1e-6)
        assert result.success
        counts.append(result.iterations)
    assert max(counts) <= 2 * min(counts)
    assert max(counts) <= 120


# -- spheres of other radii

STRETCH = torch.diag(torch.arange(1.0, 6, dtype=torch.float64))  # y^T STRETCH y is 1 at the least


def on_the_ellipsoid(y):
    """For every row its own multiple, so that points of a batch are no copies."""
    weights = torch.arange(1, y.numel() // 5 + 1, dtype=y.dtype)
    return ((y @ STRETCH.to(y.dtype) * y).sum(-1) * weights).sum()


def rows(count, dtype=torch.float64):
    return ghor.Sphere().random(count, 5, generator=gen(0), dtype=dtype)


# Of one number, of each point's own, and of several in one batch.
RADII = [
    *((2.0, 2.0**power, 2.0 ** (power - 1)) for power in (-30, 31)),
    *(("start", "start", torch.tensor(powers).exp2()) for powers in ([[30.0]] * 3, [[-20.0], [0.0], [20.0]])),
]


@pytest.mark.parametrize(("radius", "other", "factor"), RADII, ids=["small", "large", "start", "several"])
@each_method
def test_the_radius_of_a_sphere(method, radius, other, factor):
    x = rows(3) * (2 if radius == 2 else 1)
    one = ghor.minimize(on_the_ellipsoid, x, ghor.Sphere(radius=radius), method)
    two = ghor.minimize(lambda y: on_the_ellipsoid(y / factor), x * factor, ghor.Sphere(radius=other), method)
    same_run(one, two, factor)
    assert one.gradient_norm == two.gradient_norm  # by radians


@pytest.mark.parametrize(("radius", "other", "factor"), RADII, ids=["small", "large", "start", "several"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_the_radius_of_a_sphere_in_the_optimizer(search, radius, other, factor):
    ends = []
    for space, scale in ((radius, 1.0), (other, factor)):
        y = torch.nn.Parameter(rows(3) * (2 if radius == 2 else 1) * scale)
        opt = ghor.optim.LBFGS([y], space=ghor.Sphere(radius=space), max_iter=60, line_search_fn=search)
        opt.step(closure(opt, lambda y=y, scale=scale: on_the_ellipsoid(y / scale)))
        ends.append((y.detach() / scale, opt.state[y]["n_iter"], opt.state[y]["func_evals"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]
    assert ends[0][1] < 60


@pytest.mark.parametrize(
    ("dtype", "radii"), [(torch.float64, (1e-3, 1e3)), (torch.float32, (1e-3, 1e3, 1e8))], ids=str
)
@each_method
def test_a_sphere_of_any_radius_is_as_the_unit_sphere(method, dtype, radii):
    """To rounding, which may take an iteration more. The value is 6 at the least: 1 + 2 + 3."""
    x = rows(3, dtype)
    one = ghor.minimize(on_the_ellipsoid, x, ghor.Sphere(), method)
    for r in radii:
        for radius in (r, "start"):
            space = ghor.Sphere(radius=radius)
            two = ghor.minimize(lambda y, r=r: on_the_ellipsoid(y / r), x * r, space, method)
            assert two.success
            assert abs(two.iterations - one.iterations) <= 3
            assert abs(two.value - 6) <= 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_method
def test_a_run_from_the_minimum_is_a_success(method, dtype):
    """The first gradient is rounding, and cannot be reduced any more."""
    S = torch.diag(torch.arange(1.0, 13, dtype=dtype))
    x = STIEFEL.random(12, 2, generator=gen(0), dtype=dtype)
    for _ in range(3):
        result = ghor.minimize(lambda Y: (Y * (S @ Y)).sum(), x, STIEFEL, method)
        assert result.success, result.status
        x = result.x


@pytest.mark.parametrize("method", ["auto", "trust-region"])
def test_a_run_from_where_the_value_is_zero_but_for_rounding_is_a_success(method):
    """Nothing can be compared with the value there; Newton's step is lost in the rounding of x."""
    A = torch.randn(10, 4, generator=gen(0), dtype=torch.float64)
    b, x = A @ torch.randn(4, generator=gen(1), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for _ in range(3):
        result = ghor.minimize(lambda x: (A @ x - b).square().sum(), x, method=method)
        assert result.success, result.status
        x = result.x
    assert (A @ x - b).norm() <= 1e-14 * b.norm()


def test_a_wrong_gradient_is_no_success():
    """Where no step lowers the value, and rounding is not the reason."""
    wrong = with_gradient(lambda Y: Y.pow(3).sum(), lambda Y: -3 * Y**2)
    result = ghor.minimize(
        wrong, STIEFEL.random(7, 3, generator=gen(0), dtype=torch.float64), STIEFEL, "lbfgs"
    )
    assert not result.success
    assert result.status.startswith("no step lowers the value")


def test_a_tolerance_of_the_users_is_absolute():
    """In the units of f, whatever rounding says."""
    f, x, _ = brockett(20, 3)
    for scale, met in ((1.0, False), (1e-20, True)):
        result = ghor.minimize(lambda Y, c=scale: c * f(Y), x, STIEFEL, tol=1e-18)
        assert result.success is met


@pytest.mark.parametrize("start", [0.0, 1e-300, 1e-30, 1e-12, 1e-9, 1e-3])
@each_method
def test_a_start_near_zero(method, start):
    """There the size of x says nothing about f: neither that its gradient is rounding, nor that it is not."""
    x = torch.full((3,), start, dtype=torch.float64)
    result = ghor.minimize(lambda x: (x - 1).square().sum(), x, method=method)
    assert result.success
    assert float((result.x - 1).abs().max()) <= 1e-10
    uphill = with_gradient(lambda x: (x - 1).square().sum(), torch.ones_like)  # wherever x is below 1
    assert not ghor.minimize(uphill, x, method=method).success


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_method
def test_a_run_from_a_euclidean_minimum_is_a_success(method, dtype):
    A = torch.randn(10, 4, generator=gen(0), dtype=torch.float64).to(dtype)
    b, x = torch.randn(10, generator=gen(1), dtype=torch.float64).to(dtype), torch.zeros(4, dtype=dtype)
    for unit in (1.0, 1e-6, 1e6):
        for _ in range(3):
            result = ghor.minimize(lambda x, u=unit: (A @ x / u - b).square().sum(), x, method=method)
            assert result.success, result.status
            x = result.x
        x = x / unit
