"""A wave equation in few variables: linear symplectic bases (PSD) against one optimised on symplectic
Stiefel.

q' = p, p' = c^2 q_xx on 60 points of a circle, c near 1. The state z = (q, p) in R^120, a travelling bump, is
approximated by U y, y in R^10. With U+ U = I the reduced system is Hamiltonian and keeps its energy; proper
orthogonal decomposition (POD) does not. PSD needs one basis for both q and p: twice the size for waves that
travel one way.
"""

import torch
from matplotlib.figure import Figure

import ghor

SPACE, N, n, F64 = ghor.SymplecticStiefel(), 60, 5, torch.float64
COLORS = {"POD": "#8a8a8a", "PSD": "#e08214", "symplectic Stiefel": "#3f51b5"}


def wave(c: float) -> torch.Tensor:
    """A, z' = A z, on a circle of length 1."""
    A, I = torch.zeros(2 * N, 2 * N, dtype=F64), torch.eye(N, dtype=F64)
    A[:N, N:], A[N:, :N] = I, (I.roll(1, 0) + I.roll(-1, 0) - 2 * I) * (c * N) ** 2
    return A


def solve(A: torch.Tensor, z: torch.Tensor, steps: int = 400, h: float = 0.01) -> torch.Tensor:
    """The midpoint rule, which is symplectic: (2N, steps + 1)."""
    I = torch.eye(len(A), dtype=F64)
    step, way = torch.linalg.solve(I - h / 2 * A, I + h / 2 * A), [z]
    for _ in range(steps):
        way.append(step @ way[-1])
    return torch.stack(way, 1)


def start(c: float) -> torch.Tensor:
    """A bump that travels one way: p = -c q_x."""
    x = torch.arange(N, dtype=F64) / N
    q = torch.exp(-((x - 0.5) ** 2) / 0.02)
    return torch.cat([q, c * (x - 0.5) / 0.01 * q])


def energy(A: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """|p|^2/2 + c^2 |q_x|^2/2."""
    return (z[N:].square().sum(0) - (z[:N] * (A[N:, :N] @ z[:N])).sum(0)) / 2


def optimised(U: torch.Tensor, X: torch.Tensor, steps: int) -> torch.Tensor:
    """Adam on |X - U U+ X|^2."""
    U = torch.nn.Parameter(U.clone())
    opt = ghor.optim.Adam([U], space=SPACE, lr=1e-2)
    for step in range(steps):
        opt.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        opt.zero_grad()
        (X - U @ (SPACE.star(U) @ X)).square().mean().backward()
        opt.step()
    return U.detach()


def run(steps: int = 600) -> Figure:
    """Bases from 0 < t < 1 at three speeds; solutions for 0 < t < 4 at another speed."""
    X = torch.cat([solve(wave(c), start(c), 100)[:, ::2] for c in (0.9, 1.0, 1.1)], 1)
    X[N:] /= 2 * torch.pi  # p and q of one size: the units of time are free
    Phi = torch.linalg.svd(torch.cat([X[:N], X[N:]], 1))[0][:, :n]
    bases = {"POD": torch.linalg.svd(X)[0][:, : 2 * n], "PSD": torch.block_diag(Phi, Phi)}
    bases["symplectic Stiefel"] = optimised(bases["PSD"], X, steps)
    A, z0, scale = wave(0.95), start(0.95), torch.ones(2 * N, dtype=F64)
    scale[N:] = 2 * torch.pi
    z = solve(A, z0)
    figure = Figure(figsize=(4, 5), layout="constrained")
    titles = ("relative error", "energy, relative change")
    error, power = (
        figure.add_subplot(2, 1, k + 1, xlabel="t", yscale="log", title=titles[k]) for k in (0, 1)
    )
    for name, U in bases.items():
        inverse = U.mT if name == "POD" else SPACE.star(U)
        V, Vi = scale[:, None] * U, inverse / scale
        y = V @ solve(Vi @ A @ V, Vi @ z0)
        off, drift = (
            (y - z).norm(dim=0) / z.norm(dim=0),
            (energy(A, y) / energy(A, y[:, :1]) - 1).abs() + 1e-16,
        )
        lost = float((X - U @ (inverse @ X)).norm() / X.norm())
        print(
            f"{name}: {lost:.1e} of the data lost, error {off.mean():.1e}, energy off by {drift.max():.1e} "
            "at most"
        )
        for axes, line in ((error, off), (power, drift)):
            axes.plot(torch.arange(len(line)) * 0.01, line, label=name, color=COLORS[name])
    error.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run().savefig("wave_reduction.png")
