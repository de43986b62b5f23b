"""Hyperbolic space: digits far out, long steps, the ball, padding."""

import math
import warnings

import mpmath
import pytest
import torch
from torch import nn

import ghor
from ghor.constraints.validation import check_on_space
from ghor.retraction import cayley, geodesic
from ghor.spaces.rank_one import Step

H = ghor.Hyperbolic()
F64 = torch.float64
EPS = {
    dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
far = pytest.mark.filterwarnings("ignore:a weight on Hyperbolic", "ignore:a velocity of length")


def at(r, angle, dtype=F64):
    """The point of the hyperbolic plane at distance r and angle, lifted from its rounded spatial part."""
    xs = torch.tensor([0.0, math.sinh(r) * math.cos(angle), math.sinh(r) * math.sin(angle)], dtype=F64)
    return H.project(xs.to(dtype))


def radius(Y):
    return math.log(2 * float(Y.detach()[..., 0].max()))


# -- the hold where digits end -------------------------------------------------------------------------------


@far
@pytest.mark.parametrize("section", ["implicit", "transported"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_long_steps_are_held_where_the_digits_of_the_weight_end(dtype, section):
    """A weight that is pulled outwards by steps of any length stays at eps x_0 = 1/4, on the space."""
    Y = torch.nn.Parameter(H.E((3,), dtype=dtype))
    opt = ghor.optim.SGD([Y], space=H, lr=0.9, section=section)
    for _ in range(60):
        Y.grad = torch.tensor([0.0, -1, 0], dtype=dtype)
        opt.step()
    check_on_space([Y.detach()], H, ["Y"])
    assert 0.2 < float(Y.detach()[0]) * EPS[dtype] < 0.3


@far
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_exp_is_exact_up_to_where_the_digits_end_and_held_beyond(dtype):
    """With and without a gradient, at any length."""
    Y, limit = H.E((3,), dtype=dtype), math.log(0.5 / EPS[dtype])
    for length in (13.9, 15.0, limit - 0.01, limit + 1, 90.0, 800.0, 1e4):
        Delta = torch.tensor([0.0, length, 0.0], dtype=dtype)
        out = H.exp(Y, Delta)
        assert torch.equal(out, H.exp(Y, Delta.clone().requires_grad_()).detach())
        assert abs(radius(out) - min(length, limit)) < 1e-5


def test_a_way_inwards_is_free():
    """From beyond the limit, too: the hold is no trap."""
    Y = at(35.5, 0.3)
    back = H.exp(Y, H.log(Y, at(34.0, 0.3)))
    assert abs(radius(back) - 34.0) < 0.5  # what eps x_0 = 1/4 allows
    # x_0 cosh(t) + o sinh(t) <= x_0 up to tanh(t/2) = cos(80 degrees): t = 0.35
    b = torch.tensor([0.0, -math.cos(80 / 180 * math.pi), math.sin(80 / 180 * math.pi)], dtype=F64)
    assert torch.equal(H.hold(H.frame(at(35.5, 0.0)), 0.3 * b, geodesic, F64), 0.3 * b)


@far
def test_a_way_through_the_origin_is_held_by_a_number():
    """Straight inwards x_0 + o is 1/(2 x_0); rounding may make it negative, which has no logarithm."""
    for angle in range(40):
        Y = at(14.0, angle, torch.float32)
        W = -25 * torch.nn.functional.pad(Y[1:] / Y[1:].norm(), (1, 0))
        share = H.hold(H.frame(Y), W, geodesic, torch.float32).norm() / W.norm()
        assert 0.5 < float(share) <= 1.000001


# -- Cayley beyond where it ends -----------------------------------------------------------------------------


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


@far
@pytest.mark.parametrize("lr", [0.2, 5.0])
def test_second_moments_spread_in_short_and_in_long_steps(lr):
    """Adam's first step, with |W| = 0.4 or clipped to 1: exp_avg_sq becomes sum_j T_ij^2 s_j, or m^2/r where
    that is larger, r the largest m^2/s before the turn: here 10, for m = 0.1 B and s = 0.001 B^2. After the
    long step all coordinates have the largest of these."""
    gen = torch.Generator().manual_seed(0)
    start = H.random(6, 5, generator=gen, dtype=F64)
    Y, G = torch.nn.Parameter(start.clone()), torch.randn(6, 5, generator=gen, dtype=F64)
    opt = ghor.optim.Adam([Y], space=H, lr=lr)
    Y.grad = G.clone()
    opt.step()
    B = H.global_grad(H.section(start), G)
    W = -lr * B.sign()
    W = W * (1 / W.norm(dim=-1, keepdim=True)).clamp_max(1)
    step = Step(-1, start.unsqueeze(-2), W[:, None, 1:], cayley)
    T = step.turned(torch.eye(4, dtype=F64).expand(6, 4, 4)).mT
    expected = (T.square() @ (0.001 * B.square())[:, 1:, None]).squeeze(-1)
    m = (T @ (0.1 * B)[:, 1:, None]).squeeze(-1)
    expected = torch.maximum(expected, m.square() / 10)
    expected = expected if lr < 1 else expected.amax(-1, keepdim=True).expand_as(expected)
    torch.testing.assert_close(opt.state[Y]["exp_avg_sq"][:, 1:], expected, rtol=1e-6, atol=0)


# -- log and dist --------------------------------------------------------------------------------------------


def reference(x, z):
    """d and the coordinates of log in the boost frame at x, with 60 digits, from the spatial parts."""
    with mpmath.workdps(60):
        xs, zs = ([mpmath.mpf(float(t)) for t in v[1:]] for v in (x, z))
        x0, z0 = (mpmath.sqrt(1 + sum(t * t for t in v)) for v in (xs, zs))
        c = x0 * z0 - sum(a * b for a, b in zip(xs, zs, strict=True))
        d = mpmath.acosh(c)
        b = [q - p * (c + z0) / (1 + x0) for p, q in zip(xs, zs, strict=True)]
        return float(d), [float(t * d / mpmath.sinh(d)) for t in b]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-2, 1.0, 4.0])
@pytest.mark.parametrize("r", [0.0, 0.5, 1.5, 3.0, 5.0, 8.0])
def test_log_of_points_at_any_distance_and_separation(r, apart, dtype):
    """In the boost frame, where lengths are those of the space, against 60 digits."""
    for direction in (0.0, 0.7, math.pi / 2, 2.5, math.pi):
        x = at(r, 0.4, dtype)
        Lambda = H.frame(x.double())
        b = torch.tensor([0.0, apart * math.cos(direction), apart * math.sin(direction)], dtype=F64)
        z = H.project(H.apply_section(H.update_section(Lambda, b, "geodesic"), x).to(dtype))
        if torch.equal(x, z):
            continue
        d, expected = reference(x, z)
        got = H.global_rep(H.frame(x.double()), H.log(x, z).double())[1:]
        off = (got - torch.tensor(expected, dtype=F64)).norm() / d
        assert float(off) < 8 * EPS[dtype] * (1 + math.cosh(r))
        assert abs(float(H.dist(x, z)) / d - 1) < 8 * EPS[dtype] * (1 + math.cosh(r))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("apart", [1e-4, 1e-2, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("r", [0.0, 0.5, 1.5, 3.0, 5.0, 8.0])
def test_the_gradient_of_dist_at_any_distance_and_separation(r, apart, dtype):
    """A unit vector away from the other point, for both of them, in the boost frame; against 60 digits."""
    if r + apart > 14 and dtype == torch.float32:
        pytest.skip("the digits of float32 end at 15")
    for direction in (0.0, 0.7, math.pi / 2, 2.5, math.pi):
        x = at(r, 0.4, dtype)
        b = torch.tensor([0.0, apart * math.cos(direction), apart * math.sin(direction)], dtype=F64)
        Lambda = H.update_section(H.frame(x.double()), b, "geodesic")
        z = H.project(H.apply_section(Lambda, x).to(dtype))
        if torch.equal(x, z):
            continue
        pair = x.requires_grad_(), z.requires_grad_()
        H.dist(*pair).backward()
        for one, other in (pair, pair[::-1]):
            d, expected = reference(one.detach(), other.detach())
            got = H.global_grad(H.frame(one.detach()), one.grad)[1:].double()
            off = (got + torch.tensor(expected, dtype=F64) / d).norm()
            assert float(off) < 8 * EPS[dtype] * (1 + float(one.detach()[0]))


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


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("of", [H.dist, H.log], ids=["dist", "log"])
def test_dist_and_log_compile_as_one_graph(of, gen):
    x, z = (H.random(50, 5, generator=gen, dtype=F64) for _ in range(2))
    compiled = torch.compile(of, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x, z), of(x, z), rtol=1e-12, atol=1e-12)


def test_nan_goes_through_dist():
    for space in (H, ghor.Sphere()):
        Y = space.random(4, 3, dtype=F64)
        bad = Y.clone()
        bad[1] = math.nan
        for pair in ((Y, bad), (bad, Y), (bad, bad)):
            assert space.dist(*pair).isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("space", [H, ghor.Sphere()], ids=str)
@pytest.mark.parametrize("dtype", [F64, torch.complex128], ids=str)
def test_empty_batches(space, dtype):
    if dtype.is_complex and space == H:
        pytest.skip("real vectors only")
    empty = torch.zeros(0, 4, dtype=dtype)
    assert space.log(empty, empty).shape == (0, 4)
    assert space.dist(empty, empty).shape == (0,)
    assert space.exp(empty, empty).shape == (0, 4)


def test_the_ball_is_open():
    u = torch.tensor([[0.3, 0.4], [1.2, 0.0]], dtype=F64)
    assert float((H.to_ball(H.from_ball(u[:1])) - u[:1]).abs().max()) < 1e-15
    for bad in (u, u[1:] / 1.2):
        with pytest.raises(ValueError, match="open unit ball, got one of norm 1"):
            H.from_ball(bad)


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


# -- padding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [ghor.Hyperbolic, ghor.Sphere], ids=lambda c: c.__name__)
@pytest.mark.parametrize("section", ["implicit", "transported"])
def test_the_padding_row_is_left_alone(space, section):
    gen = torch.Generator().manual_seed(0)
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


def test_it_does_not_warn_inside_the_digits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        H.exp(H.E((3,)), torch.tensor([0.0, 15.0, 0.0]))


def test_adam_with_long_steps_does_not_run_away():
    """At lr = 1 every step is as long as may be, and this frame turns as far as the point goes. The loss of
    the worst point stays within the reach of the transported section's, where nothing turns."""
    ends = {}
    for section in ("implicit", "transported"):
        gen = torch.Generator().manual_seed(5)
        origin = H.E((20, 10), dtype=torch.float64)
        V, Z = (torch.randn(20, 10, generator=gen, dtype=torch.float64) for _ in range(2))
        V[:, 0] = Z[:, 0] = 0
        x, target = nn.Parameter(H.exp(origin, V)), H.exp(origin, Z)
        opt = ghor.optim.Adam([x], lr=1.0, space=H, section=section)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was clipped")
            for _ in range(600):
                opt.zero_grad()
                loss = (x - target).square().sum(-1)
                loss.sum().backward()
                opt.step()
        ends[section] = float(loss.detach().max())
    assert ends["implicit"] <= 100 * ends["transported"]


def test_adam_with_long_steps_comes_back_from_far_out():
    """Points and targets near a plane of the coordinates, where the gradient is along one and momentum turns
    into the other: with squares of their own, 160 of 1000 went out for ever, at the same angle in each step.
    The transported section, where gradients turn through all coordinates, has none."""
    gen = torch.Generator().manual_seed(3)
    origin = H.E((100, 10), dtype=torch.float64)
    V, Z = (2 * torch.randn(100, 10, generator=gen, dtype=torch.float64) for _ in range(2))
    V[:, 0] = Z[:, 0] = 0
    V[:, 3:] *= 1e-3
    Z[:, 3:] *= 1e-3
    x, target = nn.Parameter(H.exp(origin, V)), H.exp(origin, Z)
    start = float((x - target).detach().square().sum(-1).max())
    opt = ghor.optim.Adam([x], lr=1.0, space=H)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was clipped")
        for _ in range(200):
            opt.zero_grad()
            loss = (x - target).square().sum(-1)
            loss.sum().backward()
            opt.step()
    assert float(loss.detach().max()) < start


def test_the_residual_of_float16_is_a_number():
    """300 squared overflows float16, which has digits up to x_0 = 1024."""
    Y = H.project(torch.tensor([0.0, 300.0, 20.0], dtype=torch.float16))
    assert float(H.residual(Y)) <= float(H.tolerance(Y))


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("r", [0.0, 3.0, 5.0])
def test_tangent_vectors_far_out(r, dtype, gen):
    """What `tangent` and `log` return is tangent, and what is off by a part of itself is not."""
    Y = at(r, 0.3, dtype).expand(20, 3)
    V = H.tangent(Y, torch.randn(20, 3, generator=gen, dtype=dtype))
    assert H.is_tangent(Y, V)
    assert H.is_tangent(Y, H.log(Y, H.random(20, 3, generator=gen, dtype=dtype)))
    assert not H.is_tangent(Y, V + 0.1 * Y * (V.norm(dim=-1, keepdim=True) / Y.norm(dim=-1, keepdim=True)))


def test_the_ball_through_torch_func(gen):
    u = 0.5 * torch.rand(4, 2, generator=gen, dtype=F64)
    assert torch.equal(torch.vmap(H.from_ball)(u), H.from_ball(u))
    with pytest.raises(ValueError, match="open unit ball, got one of norm 2"):
        torch.vmap(H.from_ball)(torch.tensor([[0.5, 0.0], [2.0, 0.0]]))
