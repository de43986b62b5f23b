"""Positive definite matrices: what is definite in its digits, long steps, derivatives, NaN."""

import math
import warnings

import pytest
import torch
from helpers.table import close, randn

import ghor

SPD = ghor.SPD()
F64 = torch.float64


def near_the_boundary(count, gen):
    """Float32 matrices whose smallest eigenvalue is within 2 n eps of 0, on either side."""
    Q = torch.linalg.qr(torch.randn(count, 3, 3, generator=gen, dtype=F64))[0]
    w = torch.rand(count, 3, generator=gen, dtype=F64)
    w[:, 2] = (4 * w[:, 2] - 2) * 3 * torch.finfo(torch.float32).eps
    w[:, 0] = 1
    P = ((Q * w.unsqueeze(-2)) @ Q.mT).float()
    return (P + P.mT) / 2


# -- what is positive definite -----------------------------------------------------------------------------


def test_indefinite_matrices_are_off_the_space(gen):
    """Of matrices that a Cholesky factorisation in float32 accepts, 1 in 100 is indefinite there."""
    P = near_the_boundary(20_000, gen)
    least = torch.linalg.eigvalsh(P.double())[:, 0]
    on = SPD.residual(P) == 0
    assert (least[on] > 0).all()
    assert on[least > 6 * torch.finfo(torch.float32).eps].all()  # nor is a definite one refused


@pytest.mark.parametrize("power", [-110, -100, -83, -40, 0, 40, 83, 100, 120])
def test_residuals_have_the_unit_of_the_matrix(power, gen):
    """In float32, where squares of 1e-25 and of 1e25 are out of range; units are powers of two."""
    good = SPD.random(3, 3, generator=gen)
    skewed, indefinite = good.clone(), torch.diag(torch.tensor([1.0, -1e-3, 1.0]))
    skewed[0, 2] += 0.1
    unit = 2.0**power
    for X in (good, -good, skewed, indefinite):
        torch.testing.assert_close(SPD.residual(unit * X), unit * SPD.residual(X), rtol=1e-6, atol=1e-44)
        torch.testing.assert_close(SPD.tolerance(unit * X), unit * SPD.tolerance(X), rtol=1e-6, atol=1e-44)
        assert (SPD.residual(unit * X) <= SPD.tolerance(unit * X)) == (X is good)
    ghor.optim.Adam([torch.nn.Parameter(unit * good)], space=SPD)
    for bad in (-good, skewed, indefinite):
        with pytest.raises(ValueError, match=r"off SPD"):
            ghor.optim.Adam([torch.nn.Parameter(unit * bad)], space=SPD)


def test_a_tiny_matrix_hides_no_bad_one():
    """Whose residual is 0, as is what its tolerance is rounded to."""
    tiny = torch.full((1, 1), 1e-44)
    assert SPD.residual(tiny) == SPD.tolerance(tiny) == 0
    for stack in ([tiny, -tiny / tiny], [-tiny / tiny, tiny]):
        with pytest.raises(ValueError, match=r"off SPD"):
            ghor.optim.Adam([torch.nn.Parameter(torch.stack(stack))], space=SPD)


def test_zero_is_off_the_space():
    for n in (1, 3):
        assert SPD.residual(torch.zeros(2, n, n)).tolist() == [math.inf, math.inf]
        with pytest.raises(ValueError, match=r"off SPD"):
            ghor.optim.Adam([torch.nn.Parameter(torch.zeros(n, n))], space=SPD)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_projections_are_on_the_space_and_its_points_stay(dtype, gen):
    X = SPD.project(randn((200, 4, 4), gen, dtype) + torch.eye(4, dtype=dtype))
    assert (SPD.residual(X) == 0).all()
    assert torch.equal(SPD.project(X), X)
    graded = torch.diag(torch.tensor([1.0, 1e-9, 1e-20], dtype=dtype))  # definite in any scale of its rows
    assert SPD.residual(graded) == 0
    assert torch.equal(SPD.project(graded), graded)


@pytest.mark.parametrize("lr", [0.1, 2.0], ids=["short", "long"])
def test_no_step_leads_out_of_the_cone(lr, gen):
    """Weights that grow for ever in some directions are held while they are definite, with a warning."""
    Y = torch.nn.Parameter(SPD.random(10, 3, 3, generator=gen))
    opt = ghor.optim.RMSprop([Y], space=SPD, lr=lr, maximize=True)
    G = randn((10, 3, 3), gen, torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(40):
            Y.grad = G.clone()
            opt.step()
    assert (torch.linalg.eigvalsh(Y.detach().double()) > 0).all()
    assert (SPD.residual(Y.detach()) == 0).all()
    assert any("no digits left" in str(w.message) for w in said)
    ghor.optim.SGD([Y], space=SPD)  # and they are accepted again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lr", [0.02, 0.3])
def test_steps_of_half_precision_stay_in_the_cone(dtype, lr, gen):
    """The float32 point is held to the weight's digits: as the weight is rounded, it is positive definite."""
    for optimizer in (ghor.optim.SGD, ghor.optim.Adam):
        Y = torch.nn.Parameter(SPD.project(SPD.random(6, 3, 3, generator=gen).to(dtype)))
        T = SPD.random(6, 3, 3, generator=gen).to(dtype)
        opt = optimizer([Y], space=SPD, lr=lr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # velocities are clipped
            for t in range(60):
                Y.grad = 3 * randn((6, 3, 3), gen, dtype) if t % 2 else Y.detach() - T
                opt.step()
                assert (torch.linalg.eigvalsh(Y.detach().double()) > 0).all()
                assert (SPD.residual(Y.detach()) <= SPD.tolerance(Y.detach())).all()


# -- long steps --------------------------------------------------------------------------------------------


def test_cayley_is_continued_by_the_geodesic(gen):
    """Up to ||W|| = 1 it is Cayley, at most (3/e)^2 times the geodesic; beyond, the ratio stays (3/e)^2."""
    I = torch.eye(1, dtype=F64)
    lengths = torch.tensor([0.5, 0.999999, 1.0, 1.000001, 1.5, 2.0, 5.0, 20.0], dtype=F64)
    Delta = 2 * lengths[:, None, None] * I
    ratio = (SPD.retract(I.expand_as(Delta), Delta) / SPD.exp(I.expand_as(Delta), Delta)).flatten()
    close(ratio[0], torch.tensor((1.25 / 0.75) ** 2 / math.e, dtype=F64), 1e-14)
    close(ratio[1:], torch.full_like(ratio[1:], (3 / math.e) ** 2), 1e-5)
    back = (SPD.retract(I.expand_as(Delta), -Delta) * SPD.retract(I.expand_as(Delta), Delta)).flatten()
    close(back, torch.ones_like(back), 1e-12)


# -- derivatives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(5.0, 5.0, 5.0), (0.2, 0.2, 7.0), (1.0, 9.0, 9.0)], ids=str)
def test_distances_are_differentiated_twice_where_singular_values_coincide(values, gen):
    Y = SPD.random(3, 3, generator=gen, dtype=F64)
    L = torch.linalg.cholesky(Y)
    Z = (L @ torch.diag(torch.tensor(values, dtype=F64)) @ L.mT).requires_grad_()
    Y.requires_grad_()

    def f(Y, Z):
        return SPD.dist(SPD.project(Y), SPD.project(Z))

    assert torch.autograd.gradcheck(f, (Y, Z))
    assert torch.autograd.gradgradcheck(f, (Y, Z))


# -- what has no answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -100.0], ids=["inf", "indefinite"])
def test_a_bad_matrix_gives_nan_and_the_others_their_own(bad, gen):
    Y, Z = SPD.random(2, 3, 3, 3, generator=gen, dtype=F64)
    X = Y.clone()
    X[1, 0, 0] = bad
    for f in (SPD.dist, SPD.log, SPD.log_euclidean):
        for out, good in ((f(X, Z), f(Y, Z)), (f(Z, X), f(Z, Y))):
            assert torch.isnan(out[1]).all()
            assert torch.equal(out[::2], good[::2])
    V = SPD.log(Y, Z)
    for f in (SPD.exp, SPD.retract):
        out = f(X, V)
        assert torch.isnan(out[1]).all()
        torch.testing.assert_close(out[::2], f(Y, V)[::2], rtol=1e-14, atol=0)
    if bad != -100:
        out = SPD.exp(Y, torch.where(X == Y, V, bad))
        assert torch.isnan(out[1]).all()
        assert torch.isfinite(out[::2]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_projections_in_half_precision_are_on_the_space(dtype, gen):
    """Rounding to half precision must not make them indefinite again."""
    Q = torch.linalg.qr(torch.randn(50, 4, 4, generator=gen))[0]
    X = ((Q * torch.tensor([1.0, 0.7, -0.3, -0.5])) @ Q.mT).to(dtype)
    for P in (SPD.project(X), SPD.project(X + 1e-2 * torch.randn(X.shape, generator=gen).to(dtype))):
        assert P.dtype == dtype
        assert bool((SPD.residual(P) <= SPD.tolerance(P)).all())
