"""Algorithm 3 of the paper as plain torch: Adam for one weight on the Stiefel manifold, with a dense frame.

The library does the same for any rule and any space, with frames that are thin or not stored at all, and for
many weights at once; a test runs it beside these lines. Read them with the paper's section 4:

    Lambda    the section above Y, a rotation: Lambda E = Y, E = [I; 0]
    g^hor     matrices [[A, -B^T], [B, 0]], A skew; they are kept as their first columns [A; B]
    B_t       the gradient, taken to g^hor: where Adam works, coordinate by coordinate
    W         what Adam makes of it: the velocity
"""

import torch
from torch import Tensor


def section(Y: Tensor) -> Tensor:
    """lambda(Y): a rotation whose first columns are Y, by completing them to a basis."""
    N, n = Y.shape
    Q = torch.linalg.qr(torch.cat([Y, torch.eye(N, dtype=Y.dtype)], 1))[0][:, n:N]
    return torch.cat([Y, Q], 1)


def rgrad(Y: Tensor, G: Tensor) -> Tensor:
    """The Riemannian gradient in the canonical metric, of the derivative G."""
    return G - Y @ G.T @ Y


def omega(Y: Tensor, Delta: Tensor) -> Tensor:
    """The element of g^(hor,Y) with Omega(Delta) Y = Delta."""
    P = Delta - Y @ (Y.T @ Delta) / 2
    return P @ Y.T - Y @ P.T


def global_rep(Lambda: Tensor, Delta: Tensor) -> Tensor:
    """Lambda^-1 Omega(Delta) Lambda, an element of g^hor."""
    Y = Lambda[:, : Delta.shape[1]]
    B = Lambda.T @ omega(Y, Delta) @ Lambda
    return (B - B.T) / 2  # exactly skew: Adam would divide what rounding leaves on the diagonal by itself


def whole(W: Tensor) -> Tensor:
    """The matrix [[A, -B^T], [B, 0]] of its first columns [A; B]."""
    N, n = W.shape
    out = torch.zeros(N, N, dtype=W.dtype)
    out[:, :n] = W
    out[:n, n:] = -W[n:].T
    return out


def cayley(X: Tensor) -> Tensor:
    """The Cayley retraction, (I - X/2)^-1 (I + X/2)."""
    I = torch.eye(len(X), dtype=X.dtype)
    return torch.linalg.solve(I - X / 2, I + X / 2)


class Adam:
    """Algorithm 3 with Adam's cache, for one weight Y on the Stiefel manifold."""

    def __init__(
        self, Y: Tensor, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.Lambda, self.n = section(Y), Y.shape[1]
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        self.m, self.v = torch.zeros_like(Y), torch.zeros_like(Y)

    def step(self, G: Tensor) -> Tensor:
        """The next point, from the Euclidean gradient G at this one."""
        Y = self.Lambda[:, : self.n]
        B = global_rep(self.Lambda, rgrad(Y, G))[:, : self.n]  # in g^hor, where no projection is needed
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * B
        self.v = b2 * self.v + (1 - b2) * B**2
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        W = -self.lr * m / (v.sqrt() + self.eps)
        self.Lambda = self.Lambda @ cayley(
            whole(W)
        )  # update_section; the coordinates m and v stay as they are
        return self.Lambda[:, : self.n]


def main() -> None:
    """The largest eigenvectors of a symmetric matrix."""
    torch.manual_seed(0)
    S = torch.diag(torch.arange(12, dtype=torch.float64))
    Y = torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64))[0]
    optimizer = Adam(Y, lr=0.05)
    for step in range(301):
        if step % 100 == 0:
            off = (Y.T @ Y - torch.eye(3)).norm()
            print(f"step {step:3}: tr(Y^T S Y) = {(Y * (S @ Y)).sum():.4f} of 30, ||Y^T Y - I|| = {off:.0e}")
        Y = optimizer.step(-2 * S @ Y)


if __name__ == "__main__":
    main()
