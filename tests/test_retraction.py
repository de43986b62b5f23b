"""Retractions against dense N x N references, written here and in 40 digits where float64 is not enough."""

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import name

import ghor
from ghor._torch.values import as_on_an_accelerator
from ghor.linalg import log_rotation, phi
from ghor.retraction import RETRACTIONS, by_name

EPS = torch.finfo(torch.float64).eps
SHAPES = [(8, 3), (8, 1), (8, 7), (9, 8), (6, 6), (3, 8), (20, 3), (2, 6, 2), (2, 1, 5, 4)]


def dense_reference(W: torch.Tensor, retraction: str) -> torch.Tensor:
    """exp(W) or (I - W/2)^-1 (I + W/2) of one N x N matrix in 40 digits."""
    with mpmath.workdps(40):
        M, I = mpmath.matrix(W.tolist()), mpmath.eye(W.shape[0])
        R = mpmath.expm(M, method="taylor") if retraction == "geodesic" else (I - M / 2) ** -1 * (I + M / 2)
        return torch.tensor([[float(x) for x in row] for row in R.tolist()], dtype=torch.float64)


def skew_from_columns(H: torch.Tensor) -> torch.Tensor:
    """[[A, -B^T], [B, 0]] of H = [A; B], entry by entry."""
    N, n = H.shape
    W = torch.zeros(N, N, dtype=H.dtype)
    for i in range(N):
        for j in range(n):
            W[i, j] = H[i, j]
            if i >= n:
                W[j, i] = -H[i, j]
    return W


def coordinates(shape: tuple[int, ...], size: float, seed: int = 0) -> torch.Tensor:
    """Random [A; B] tall, with ||B||_2 = size (||A||_2 = size where B is empty)."""
    g = torch.Generator().manual_seed(seed)
    N, n = max(shape[-2:]), min(shape[-2:])
    H = torch.randn(*shape[:-2], N, n, generator=g, dtype=torch.float64)
    H[..., :n, :] = (H[..., :n, :] - H[..., :n, :].mT) / 2
    part = H[..., n:, :] if N > n else H
    return H * (size / torch.linalg.matrix_norm(part, 2)[..., None, None])


@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("retraction", list(RETRACTIONS))
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0, 30.0, 1e3])
def test_equal_the_dense_references(shape, retraction, size):
    """To 10 eps max(1, ||W||), in sections and on points, for every kind of shape."""
    space, H = ghor.Stiefel(), coordinates(shape, size)
    flat = H.reshape(-1, *H.shape[-2:])
    N, n = flat.shape[-2:]
    wide = shape[-2] < shape[-1]
    for h in flat:
        W = skew_from_columns(h)
        R = dense_reference(W, retraction)
        bound = 10 * EPS * max(1.0, float(torch.linalg.matrix_norm(W, 2)))
        I = torch.eye(N, dtype=torch.float64)
        assert (space.update_section(I, h.mT if wide else h, retraction) - R).abs().max() <= bound
        E, Delta = I[:, :n], h
        if wide:
            E, Delta = E.mT, Delta.mT
        moved = space.retract(E, Delta, retraction)
        assert ((moved.mT if wide else moved) - R[:, :n]).abs().max() <= bound
    # the batch is what its members are
    E = space.E(shape, dtype=torch.float64)
    together = space.retract(E, space.unmatrix(H, shape), retraction).reshape(-1, *shape[-2:])
    for e, h, z in zip(E.reshape(-1, *shape[-2:]), flat, together, strict=True):
        one = space.retract(e, h.mT if wide else h, retraction)
        norm = float(torch.linalg.matrix_norm(skew_from_columns(h), 2))
        assert (one - z).abs().max() <= 20 * EPS * max(1.0, norm)  # twice the bound above


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name)
def test_authors_reference_values(dtype):
    """20 x 3 lifts with ||B|| from 0.66 to 384 equal the dense exponential; zero gives exactly I."""
    space = ghor.Stiefel()
    for size in (0.66, 6.0, 60.0, 384.0):
        H = coordinates((20, 3), size).to(dtype)
        R = dense_reference(skew_from_columns(H.double()), "geodesic")
        Y = space.exp(torch.eye(20, 3, dtype=dtype), H)
        assert space.residual(Y.double()) < (1e-12 if dtype == torch.float64 else 1e-4)
        assert (Y - R[:, :3]).abs().max() < (1e-10 if dtype == torch.float64 else 1e-4)
    I = torch.eye(20, dtype=dtype)
    for retraction in RETRACTIONS:
        assert torch.equal(space.update_section(I, torch.zeros(20, 3, dtype=dtype), retraction), I)


@settings(max_examples=60)
@given(
    N=st.integers(2, 9),
    n=st.integers(1, 9),
    log_size=st.floats(-6, 2),
    seed=st.integers(0, 2**16),
    retraction=st.sampled_from(sorted(RETRACTIONS)),
)
def test_any_shape_and_size_stays_on_the_manifold(N, n, log_size, seed, retraction):
    N, n = max(N, n), min(N, n)
    H = coordinates((N, n), 10**log_size, seed) if N > 1 else torch.zeros(1, 1, dtype=torch.float64)
    if not bool(torch.isfinite(H).all()):
        return  # N = n = 1 has no size
    space = ghor.Stiefel()
    Lambda = space.section(
        space.random(N, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    )
    moved = space.update_section(Lambda, H, retraction)
    bound = 100 * EPS * max(1.0, float(torch.linalg.matrix_norm(skew_from_columns(H), 2))) * N
    assert (moved.mT @ moved - torch.eye(N, dtype=torch.float64)).abs().max() <= bound


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 100.0])
def test_phi_is_the_series(size):
    """exp(X) = I + X phi(X) for matrices of any kind, and phi(0) = I exactly."""
    X = size * torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 5
    with mpmath.workdps(60):
        M = mpmath.matrix(X.tolist())
        term = total = mpmath.eye(5)
        for k in range(2, 400):
            term = term * M / k
            total = total + term
        reference = torch.tensor([[float(x) for x in row] for row in total.tolist()], dtype=torch.float64)
    assert (phi(X) - reference).abs().max() <= 100 * EPS * max(1.0, size) * reference.abs().max()
    if size == 0:
        assert torch.equal(phi(X), torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.5, 3.0, 3.14])
def test_log_rotation_inverts_exp(angle):
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(6, 6, generator=g, dtype=torch.float64))[0]
    S = torch.zeros(6, 6, dtype=torch.float64)
    for i, a in ((0, angle), (2, angle / 2)):  # a repeated zero angle too
        S[i, i + 1], S[i + 1, i] = a, -a
    S = Q @ S @ Q.mT
    # near pi the logarithm's condition is 1/(pi - angle)
    assert (log_rotation(torch.linalg.matrix_exp(S)) - S).abs().max() <= 1e-13 / min(1.0, 3.1416 - angle)


def test_names():
    assert by_name("cayley") is RETRACTIONS["cayley"]
    assert by_name(RETRACTIONS["geodesic"]) is RETRACTIONS["geodesic"]
    with pytest.raises(ValueError, match=r"unknown retraction 'qr'; there are \['cayley', 'geodesic'\]"):
        ghor.Stiefel().retract(torch.eye(3, 2), torch.zeros(3, 2), "qr")


def test_cut_locus_is_refused():
    y = torch.tensor([1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="antipodal"):
        ghor.Sphere().log(y, -y)
    Y = torch.eye(4, 2)
    with pytest.raises(ValueError, match="pi/2"):
        ghor.Grassmann().log(Y, torch.eye(4)[:, 2:])
    with pytest.raises(ValueError, match="cut locus"):
        ghor.SpecialOrthogonal().log(torch.eye(2), -torch.eye(2))
    with pytest.raises(ValueError, match="cut locus"):
        ghor.Stiefel().log(torch.eye(2), torch.diag(torch.tensor([1.0, -1.0])))  # the other component of O(2)


@pytest.mark.parametrize("size", [0.1, 40.0, 1000.0])
def test_phi_does_not_depend_on_whether_values_may_be_read(size):
    """As many squarings as a step needs that is not clipped: of ||X|| = 2^12 at most."""
    X = torch.randn(5, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = size * (X - X.mT) / torch.linalg.matrix_norm(X - X.mT, keepdim=True)
    expected = phi(X)
    with as_on_an_accelerator():
        assert torch.equal(phi(X), expected)
