"""Hyperbolic space: two points against 60 digits, digits far out, long steps, the ball, padding."""

import itertools
import math
import warnings

import mpmath as mp
import pytest
import torch

import ghor

H = ghor.Hyperbolic()
F64 = torch.float64
EPS = {t: torch.finfo(t).eps for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
RADII = {F64: (1e-8, 1e-3, 0.5, 3.0, 8.0, 14.0, 20.0), torch.float32: (1e-4, 0.1, 1.0, 3.0, 5.0, 8.0, 10.0)}
ANGLES = (0.0, 1e-6, 1e-3, 0.1, 1.0, 2.6, 3.14159, math.pi)
far = pytest.mark.filterwarnings("ignore:a weight on Hyperbolic", "ignore:a velocity of length")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(60):
        yield


def at(r, angle, dtype=F64):
    """The point of the hyperbolic plane at distance r and angle, lifted from its rounded spatial part."""
    xs = torch.tensor([0.0, math.sinh(r) * math.cos(angle), math.sinh(r) * math.sin(angle)], dtype=F64)
    return H.project(xs.to(dtype))


def radius(Y):
    return math.log(2 * float(Y.detach()[..., 0].max()))


# -- two points, in the hyperbolic plane, as functions of exact numbers --------------------------------------


def exact(X):
    return [mp.mpf(t) for t in (X.tolist() if isinstance(X, torch.Tensor) else X)]


def lifted(xs):
    return [mp.sqrt(1 + sum(t * t for t in xs)), *xs]


def minkowski(a, b):
    return sum(p * q for p, q in zip(a[1:], b[1:], strict=True)) - a[0] * b[0]


def norm(v):
    return mp.sqrt(sum(t * t for t in v))


def coordinates(x, V):
    """Of a tangent vector at x, in the boost frame: there lengths are those of the space."""
    return [v - p * V[0] / (1 + x[0]) for p, v in zip(x[1:], V[1:], strict=True)]


def vector(x, b):
    a = sum(p * q for p, q in zip(x[1:], b, strict=True))
    return [a, *(q + p * a / (1 + x[0]) for p, q in zip(x[1:], b, strict=True))]


def dist(u):
    return [mp.acosh(max(mp.mpf(1), -minkowski(lifted(u[:2]), lifted(u[2:]))))]


def log(u):
    y, z = lifted(u[:2]), lifted(u[2:])
    c = -minkowski(y, z)
    ratio = mp.acosh(c) / mp.sqrt(c * c - 1)
    return [ratio * (q - p * (c + z[0]) / (1 + y[0])) for p, q in zip(y[1:], z[1:], strict=True)]


def transport(u):
    """Coordinates of the transported vector, from the spatial part of y, and of Delta and V all entries."""
    y = lifted(u[:2])
    b, m = coordinates(y, u[2:5]), coordinates(y, u[5:8])
    t, V = norm(b), vector(y, m)
    z = [mp.cosh(t) * p + mp.sinh(t) / t * q for p, q in zip(y, vector(y, b), strict=True)]
    f = minkowski(V, z) / (1 - minkowski(y, z))
    return coordinates(z, [v + f * (p + q) for v, p, q in zip(V, y, z, strict=True)])


def condition(f, u):
    """sum_i |u_i| |df/du_i|: how far f moves, relative to eps, if each number of u is rounded."""
    start, total = f(u), mp.mpf(0)
    for i in (i for i, t in enumerate(u) if t):
        h = u[i] * mp.mpf(10) ** -28
        moved = f([*u[:i], u[i] + h, *u[i + 1 :]])
        total += norm([(p - q) / h for p, q in zip(moved, start, strict=True)]) * abs(u[i])
    return total


def condition_of_two(f, u):
    """The least of the conditions in y and z, in y and z - y, and in z and z - y: differences are exact."""
    D = [u[2] - u[0], u[3] - u[1]]
    return min(
        condition(f, u),
        condition(lambda v: f([*v[:2], v[0] + v[2], v[1] + v[3]]), [*u[:2], *D]),
        condition(lambda v: f([v[0] - v[2], v[1] - v[3], *v[:2]]), [*u[2:], *D]),
    )


def size(x, V):
    """What the rounding of the entries of V moves its coordinates by, relative to eps."""
    return norm(V[1:]) + norm(x[1:]) * abs(V[0]) / (1 + x[0])


def pairs(dtype):
    """Points at all distances from the origin and from each other."""
    for r1, r2, angle in itertools.product(RADII[dtype], RADII[dtype], ANGLES):
        y, z = at(r1, 0.4, dtype), at(r2, 0.4 + angle, dtype)
        yield from () if torch.equal(y, z) else ((y, z),)
    for r, apart in itertools.product(RADII[dtype], (1e-12, 1e-9, 1e-6, 1e-4, 1e-2)):
        y = at(r, 0.4, dtype)
        z = H.project(y * (1 + apart) + torch.tensor([0.0, 0, apart / 10], dtype=dtype))
        yield from () if torch.equal(y, z) else ((y, z),)


@each_dtype
def test_distances_and_logarithms(dtype):
    """Of the same rounded points: errors of at most 16 eps times the condition; distances both ways."""
    for y, z in pairs(dtype):
        u = [*exact(y[1:]), *exact(z[1:])]
        d, Y, V = dist(u)[0], lifted(u[:2]), exact(H.log(y, z))
        slack = 16 * EPS[dtype] * (condition_of_two(dist, u) + d)
        there, back = float(H.dist(y, z)), float(H.dist(z, y))
        assert abs(there - d) <= slack, (y, z)
        assert abs(there - back) <= 4 * EPS[dtype] * there, (y, z)
        off = norm([p - q for p, q in zip(coordinates(Y, V), log(u), strict=True)])
        assert off <= 16 * EPS[dtype] * (condition_of_two(log, u) + size(Y, V)), (y, z)


@each_dtype
def test_transport(dtype, gen):
    """In every direction, up to 10 from the origin in float32 and 20 in float64: the vector to 16 eps times
    its condition, and its length to the rounding of the entries alone, which is eps e^r."""
    for r, part, angle in itertools.product(RADII[dtype], (1e-6, 0.1, 1.0, 5.0, None, 0), ANGLES):
        t = {None: r, 0: 2 * r}.get(part, part)
        if math.cosh(r) * math.cosh(t) + math.sinh(r) * math.sinh(t) * math.cos(angle) > 0.1 / EPS[dtype]:
            continue  # it would be held
        y, m = at(r, 0.4, dtype), torch.randn(2, generator=gen, dtype=F64)
        Y = lifted(exact(y[1:]))
        b = (t * math.cos(0.4 + angle), t * math.sin(0.4 + angle))
        Delta, V = (torch.tensor([*map(float, vector(Y, exact(v)))], dtype=F64).to(dtype) for v in (b, m))
        u = [*Y[1:], *exact(Delta), *exact(V)]
        Z, moved = lifted(exact(H.exp(y, Delta)[1:])), exact(H.transport(y, Delta, V))
        found = coordinates(Z, moved)
        off = norm([p - q for p, q in zip(found, transport(u), strict=True)])
        assert off <= 16 * EPS[dtype] * (condition(transport, u) + size(Z, moved)), (r, t, angle)
        stretch = abs(norm(found) - norm(coordinates(Y, u[5:])))
        assert stretch <= 4 * EPS[dtype] * (size(Z, moved) + size(Y, u[5:])), (r, t, angle)


@each_dtype
def test_the_gradient_of_dist(dtype):
    """A unit vector away from the other point, for both of them, in the boost frame."""
    for y, z in pairs(dtype):
        pair = y.requires_grad_(), z.requires_grad_()
        H.dist(*pair).backward()
        for one, other in (pair, pair[::-1]):
            u = [*exact(one[1:]), *exact(other[1:])]
            x, d, b = lifted(u[:2]), dist(u)[0], log(u)
            got = coordinates(x, exact(H.rgrad(one.detach(), one.grad)))
            off = norm([p + q / d for p, q in zip(got, b, strict=True)])
            assert off <= 16 * EPS[dtype] * (condition_of_two(log, u) / d + 1 + 2 * x[0]), (y, z)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, forwards
def test_derivatives_of_dist(gen):
    """As a function of spatial parts: forwards, backwards, twice, in batches; and where points coincide."""

    def f(xs, zs):
        return H.dist(*(torch.cat([(1 + v.square().sum(-1, keepdim=True)).sqrt(), v], -1) for v in (xs, zs)))

    xs, zs = (torch.randn(5, 3, generator=gen, dtype=F64, requires_grad=True) for _ in range(2))
    forwards = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(f, (xs, zs), check_batched_grad=True, **forwards)
    assert torch.autograd.gradgradcheck(f, (xs, zs))
    x, z = H.random(4, 3, generator=gen, dtype=F64), H.random(2, 1, 3, generator=gen, dtype=F64)
    assert torch.equal(H.dist(x, z), torch.stack([H.dist(x, z[0, 0].expand(4, 3)), H.dist(x, z[1])]))
    assert torch.equal(torch.func.vmap(H.dist)(x, x.flip(0)), H.dist(x, x.flip(0)))
    y = x.clone().requires_grad_()
    H.dist(y, x).sum().backward()
    assert not y.grad.any()


@pytest.mark.filterwarnings("error::UserWarning", "ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("of", [H.dist, H.log], ids=["dist", "log"])
def test_dist_and_log_compile_as_one_graph(of, gen):
    x, z = (H.random(50, 5, generator=gen, dtype=F64) for _ in range(2))
    z.requires_grad_()
    compiled = torch.compile(of, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x, z), of(x, z), rtol=1e-12, atol=1e-12)
    for G, K in zip(*(torch.autograd.grad(f(x, z).sum(), z) for f in (compiled, of)), strict=True):
        assert torch.allclose(G, K, rtol=1e-12, atol=1e-12)


# -- the hold where digits end -------------------------------------------------------------------------------


@far
@pytest.mark.parametrize("section", ["implicit", "transported"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_long_steps_are_held_where_the_digits_of_the_weight_end(dtype, section):
    """A weight that is pulled outwards by steps of any length stays at eps x_0 = 1/4, on the space; a warning
    says so, and what is left to try."""
    Y = torch.nn.Parameter(H.E((3,), dtype=dtype))
    opt = ghor.optim.SGD([Y], space=H, lr=0.9, section=section)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(60):
            Y.grad = torch.tensor([0.0, -1, 0], dtype=dtype)
            opt.step()
    assert bool((H.residual(Y.detach()) <= H.tolerance(Y.detach())).all())
    assert 0.2 < float(Y.detach()[0]) * EPS[dtype] < 0.3
    way_out = "lower the learning rate" if dtype == F64 else "use float64"
    assert any("no digits left" in str(w.message) and way_out in str(w.message) for w in said)


@far
@each_dtype
def test_exp_is_exact_up_to_where_the_digits_end_and_held_beyond(dtype):
    """With and without a gradient, at any length."""
    Y, limit = H.E((3,), dtype=dtype), math.log(0.5 / EPS[dtype])
    for length in (13.9, 15.0, limit - 0.01, limit + 1, 90.0, 800.0, 1e4):
        Delta = torch.tensor([0.0, length, 0.0], dtype=dtype)
        out = H.exp(Y, Delta)
        assert torch.equal(out, H.exp(Y, Delta.clone().requires_grad_()).detach())
        assert abs(radius(out) - min(length, limit)) < 1e-5


@far
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64], ids=str)
def test_transport_ends_where_exp_does(dtype, gen):
    """Also where a long step is held, by the digits of the weight and not of what computes."""
    Y, V = H.E((3,), dtype=dtype), torch.tensor([0.0, 0.3, 0.4], dtype=dtype)
    for length in (1.0, 10.0, 100.0):
        Delta = torch.tensor([0.0, length, 0.0], dtype=dtype)
        Z, moved = H.exp(Y, Delta).double(), H.transport(Y, Delta, V).double()
        along = moved[2:] - V.double()[2:], torch.stack([Z[1], Z[0]]) * 0.3 - moved[:2]
        assert max(float(x.abs().max()) for x in along) <= 4 * torch.finfo(dtype).eps * float(Z[0])


def test_it_warns_of_digits_where_they_end_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        H.exp(H.E((3,)), torch.tensor([0.0, 15.0, 0.0]))
    with pytest.warns(
        UserWarning, match=r"distance 15.2 .* torch.float32 has no digits left, .* use float64"
    ):
        H.exp(H.E((3,)), torch.tensor([0.0, 16.0, 0.0]))
    with pytest.warns(UserWarning, match=r"distance 4.2 .* torch.bfloat16"):
        H.exp(H.E((3,), dtype=torch.bfloat16), torch.tensor([0.0, 16.0, 0.0], dtype=torch.bfloat16))


def test_a_way_inwards_is_free():
    """From beyond the limit, too: the hold is no trap. Straight inwards x_0 + o is 1/(2 x_0), which rounding
    may make negative."""
    Y = at(35.5, 0.3)
    back = H.exp(Y, H.log(Y, at(34.0, 0.3)))
    assert abs(radius(back) - 34.0) < 0.5  # what eps x_0 = 1/4 allows
    one = torch.ones(1, 1, 1)
    for angle in range(40):
        x = at(14.0, angle, torch.float32)[:, None]
        b = -25 * x[1:] / x[1:].norm()
        share = H.geometry.shortening(x[:1], (x[1:] * b).sum() * one, 25 * one, EPS[torch.float32], 1)
        assert 0.5 < float(share) <= 1.000001


def test_cayley_goes_on_for_long_vectors():
    """2 artanh(|b|/2) up to 1, then with the speed that it has there: outwards at every length, smoothly."""
    lengths = torch.linspace(0.01, 12, 1200, dtype=F64)
    Delta = torch.stack([0 * lengths, 0.6 * lengths, 0.8 * lengths], -1)
    E = H.E((1200, 3), dtype=F64)
    way = H.dist(E, H.retract(E, Delta))
    short = lengths <= 1
    torch.testing.assert_close(way[short], 2 * torch.atanh(lengths[short] / 2), rtol=1e-13, atol=0)
    speed = way.diff() / lengths.diff()
    assert float(speed.min()) > 1 - 1e-9
    assert float(speed.diff().abs().max()) < 0.02
    directions = H.retract(E, Delta)[:, 1:] / Delta[:, 1:]
    assert float((directions[:, 0] / directions[:, 1] - 1).abs().max()) < 1e-12


# -- runs ----------------------------------------------------------------------------------------------------


def worst_loss(section, seed, count, flat, steps, lr=1.0):
    """Of `count` points that go to targets by Adam, the largest squared distance in R^11 before and after."""
    gen = torch.Generator().manual_seed(seed)
    origin = H.E((count, 10), dtype=F64)
    V, Z = (torch.randn(count, 10, generator=gen, dtype=F64) * (2 if flat else 1) for _ in range(2))
    for X in (V, Z):
        X[:, 0] = 0
        X[:, 3:] *= 1e-3 if flat else 1
    x, target = torch.nn.Parameter(H.exp(origin, V)), H.exp(origin, Z)
    start = float((x - target).detach().square().sum(-1).max())
    opt = ghor.optim.Adam([x], lr=lr, space=H, section=section)
    for _ in range(steps):
        opt.zero_grad()
        loss = (x - target).square().sum(-1)
        loss.sum().backward()
        opt.step()
    return start, float(loss.detach().max())


@far
def test_adam_with_long_steps_does_not_run_away():
    """At lr = 1 every step is as long as may be, and this frame turns as far as the point goes. The loss of
    the worst point stays within the reach of the transported section's, where nothing turns."""
    ends = {s: worst_loss(s, 5, 20, False, 600)[1] for s in ("implicit", "transported")}
    assert ends["implicit"] <= 100 * ends["transported"]


@far
def test_adam_with_long_steps_comes_back_from_far_out():
    """Points and targets near a plane of the coordinates, where the gradient is along one and momentum turns
    into the other: with squares of their own, 160 of 1000 went out for ever, at the same angle in each
    step."""
    start, end = worst_loss("implicit", 3, 100, True, 200)
    assert end < start


# -- points --------------------------------------------------------------------------------------------------


def test_nan_goes_through_dist():
    for space in (H, ghor.Sphere()):
        Y = space.random(4, 3, dtype=F64)
        bad = Y.clone()
        bad[1] = math.nan
        for pair in ((Y, bad), (bad, Y), (bad, bad)):
            assert space.dist(*pair).isnan().tolist() == [False, True, False, False]


def test_the_ball_is_open():
    u = torch.tensor([[0.3, 0.4], [1.2, 0.0]], dtype=F64)
    assert float((H.to_ball(H.from_ball(u[:1])) - u[:1]).abs().max()) < 1e-15
    assert torch.equal(torch.vmap(H.from_ball)(u[:1]), H.from_ball(u[:1]))
    for bad in (u, u[1:] / 1.2):
        for f in (H.from_ball, torch.vmap(H.from_ball)):
            with pytest.raises(ValueError, match="open unit ball, got one of norm 1"):
                f(bad)


@pytest.mark.parametrize("apart", [0.1, 1.0])
@pytest.mark.parametrize("r", [2.0, 14.0, 16.0, 18.0, 20.0])
def test_the_mean_of_points_far_out(r, apart):
    """Four points around one at distance r. Logarithms cancel at the mean up to rounding, eps x_0."""
    angle = 2 * math.asin(math.sinh(apart / 2) / math.sinh(r))
    points = [at(r, 0.3 - angle / 2), at(r, 0.3 + angle / 2), at(r + apart / 2, 0.3), at(r - apart / 2, 0.3)]
    points = H.project(torch.stack(points))
    M = H.mean(points).expand_as(points)
    assert float(H.norm(M[0], H.log(M, points).mean(0))) < 2 * EPS[F64] * math.cosh(r)
    assert float(H.dist(M[0], at(r, 0.3))) < apart


@pytest.mark.parametrize("space", [ghor.Hyperbolic, ghor.Sphere], ids=lambda c: c.__name__)
@pytest.mark.parametrize("section", ["implicit", "transported"])
def test_the_padding_row_is_left_alone(space, section, gen):
    padded, plain = space(padding_idx=1), space()
    X = plain.random(5, 4, generator=gen, dtype=F64)
    X[1] = torch.tensor([0.5, 7.0, 0.0, -1.0])
    assert torch.equal(padded.project(X)[1], X[1])
    assert float(padded.residual(X).max()) < 1e-14 < float(plain.residual(X).max())
    Y, Z = torch.nn.Parameter(X.clone()), torch.nn.Parameter(plain.E((5, 4), dtype=F64))
    Z.data[[0, 2, 3, 4]] = X[[0, 2, 3, 4]]
    opts = [ghor.optim.Adam([p], space=s, lr=0.1, section=section) for p, s in ((Y, padded), (Z, plain))]
    for _ in range(5):
        G = torch.randn(5, 4, generator=gen, dtype=F64)
        for p, opt in zip((Y, Z), opts, strict=True):
            p.grad = G.clone()
            opt.step()
    assert torch.equal(Y[1], X[1])
    assert torch.equal(Y[[0, 2, 3, 4]], Z[[0, 2, 3, 4]])
    assert repr(padded) == f"{space.__name__}(padding_idx=1)"
    with pytest.raises(ValueError, match="has no row 5"):
        space(padding_idx=5).check_shape((5, 4))


def test_points_of_half_precision():
    """300 squared overflows float16, which has digits up to x_0 = 1024."""
    Y = H.project(torch.tensor([0.0, 300.0, 20.0], dtype=torch.float16))
    assert float(H.residual(Y)) <= float(H.tolerance(Y))
    with pytest.raises(
        ValueError, match=r"at distance 8 .* torch.float16 has no digits left; scale it down, or"
    ):
        H.project(5 * Y)


@each_dtype
@pytest.mark.parametrize("r", [0.0, 3.0, 5.0])
def test_tangent_vectors_far_out(r, dtype, gen):
    """What `tangent` and `log` return is tangent, and what is off by a part of itself is not."""
    Y = at(r, 0.3, dtype).expand(20, 3)
    V = H.tangent(Y, torch.randn(20, 3, generator=gen, dtype=dtype))
    assert H.is_tangent(Y, V)
    assert H.is_tangent(Y, H.log(Y, H.random(20, 3, generator=gen, dtype=dtype)))
    assert not H.is_tangent(Y, V + 0.1 * Y * (V.norm(dim=-1, keepdim=True) / Y.norm(dim=-1, keepdim=True)))
