"""Numbers of 60 digits to compare with: inputs are exact for both sides, so only what is lost is seen."""

import mpmath as mp
import torch

mp.mp.dps = 60


def exact(X):
    return mp.matrix(X.detach().double().tolist())


def rounded(X, dtype):
    return torch.tensor([[float(x) for x in row] for row in X.tolist()], dtype=torch.float64).to(dtype)


def error(X, true):
    return float(mp.norm(exact(X) - true))


def hat(w):
    """The matrix of the cross product with w, or for one number of a turn of the plane."""
    if len(w) == 1:
        return mp.matrix([[0, -w[0]], [w[0], 0]])
    a, b, c = w
    return mp.matrix([[0, -c, b], [c, 0, -a], [-b, a, 0]])


def nearest_rotation(R):
    """Of a rounded one, by Newton's iteration."""
    for _ in range(5):
        R = R * (3 * mp.eye(R.rows) - R.T * R) / 2
    return R


def vector(R):
    """The axis times the angle of the rotation next to R, by an eigenvector: the quaternion q of 4 q q^T."""
    if R.rows == 2:
        return mp.matrix([mp.atan2(R[1, 0] - R[0, 1], R[0, 0] + R[1, 1])])
    R = nearest_rotation(R)
    t = R[0, 0] + R[1, 1] + R[2, 2]
    M = mp.matrix(4, 4)
    for i in range(3):
        for j in range(3):
            M[i + 1, j + 1] = R[i, j] + R[j, i] - (t if i == j else 0)
    for i, (a, b) in enumerate(((2, 1), (0, 2), (1, 0))):
        M[0, i + 1] = M[i + 1, 0] = R[a, b] - R[b, a]
    M[0, 0] = t
    Q = mp.eigsy(M)[1]
    q = Q[:, 3] * (-1 if Q[0, 3] < 0 else 1)
    v = q[1:, 0]
    size = mp.norm(v)
    return v * (2 * mp.atan2(size, q[0]) / size) if size else 0 * v
