"""Brockett's function to a relative gradient of 1e-6: our L-BFGS and trust region against pymanopt's.

    python benchmarks/against_pymanopt.py --out out/pymanopt    # 150 x 5, 1000 x 10, 100,000 x 10 (sparse)

min sum_i i y_i^T S y_i on St(n, N), where S is symmetric and normal, or a sparse matrix with ten low
eigenvalues. All methods start at one point, in float64, with f in torch and derivatives by autograd, and each
stops by the norm of its own metric. Every call of f is counted. Ours gets value and gradient from one call;
pymanopt calls f again for each gradient and each product with the Hessian, so its gradients are also listed
separately. L-BFGS keeps 30 pairs, and 10 on the large problem. The gap is the distance from the best value of
the run. CPU seconds depend little on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, write_json
from torch import Tensor

import ghor

Loss = Callable[[Tensor], Tensor]
RELATIVE = 1e-6


def dense(N: int, n: int) -> Loss:
    X = torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S, k = (X + X.mT) / 2, torch.arange(1, n + 1, dtype=torch.float64)
    return lambda Y: (Y * (S @ Y) * k).sum()


def sparse(N: int, n: int) -> Loss:
    """A tridiagonal matrix: n eigenvalues near -n-1, ..., -2, all others in [-0.1, 1.1]."""
    i, k = torch.arange(N), torch.arange(1, n + 1, dtype=torch.float64)
    diagonal = torch.linspace(0, 1, N, dtype=torch.float64)
    diagonal[:n] -= k.flip(0) + 1
    index = torch.cat([torch.stack([i, i]), torch.stack([i[1:], i[:-1]]), torch.stack([i[:-1], i[1:]])], 1)
    values = torch.cat([diagonal, torch.full((2 * N - 2,), -0.05, dtype=torch.float64)])
    S = torch.sparse_coo_tensor(index, values, (N, N), check_invariants=True).coalesce()
    return lambda Y: (Y * torch.sparse.mm(S, Y) * k).sum()


CASES = {
    "150 x 5": (150, 5, dense),
    "1000 x 10": (1000, 10, dense),
    "100000 x 10, sparse": (100_000, 10, sparse),
}


def ours(method: str, f: Loss, start: Tensor) -> dict[str, Any]:
    memory = 30 if start.numel() < 1e6 else 10
    r = ghor.minimize(
        f, start, ghor.Stiefel(), method, tol=0.0, rtol=RELATIVE, max_iterations=10_000, memory=memory
    )
    return {"iterations": r.iterations, "gradients": r.evaluations, "products": r.hessian_products, "x": r.x}


def pymanopt(solver: str, f: Loss, start: Tensor) -> dict[str, Any]:
    import pymanopt as pm

    manifold = pm.manifolds.Stiefel(*start.shape)
    problem = pm.Problem(manifold, pm.function.pytorch(manifold)(f))
    counts = {"gradients": 0, "products": 0}
    gradient, hessian = problem.riemannian_gradient, problem.riemannian_hessian

    def counted(name: str, g: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return g(*args)

        return call

    problem._riemannian_gradient = counted("gradients", gradient)
    problem._riemannian_hessian = counted("products", hessian)
    least = RELATIVE * manifold.norm(start.numpy(), gradient(start.numpy()))
    options = {"max_iterations": 10_000, "max_time": 600, "min_gradient_norm": least, "verbosity": 0}
    r = getattr(pm.optimizers, solver)(**options).run(problem, initial_point=start.numpy())
    return {"iterations": r.iterations, **counts, "x": torch.from_numpy(r.point)}


METHODS: dict[str, Callable[[Loss, Tensor], dict[str, Any]]] = {
    "L-BFGS": lambda f, x: ours("lbfgs", f, x),
    "trust region": lambda f, x: ours("trust-region", f, x),
    "pymanopt CG": lambda f, x: pymanopt("ConjugateGradient", f, x),
    "pymanopt TR": lambda f, x: pymanopt("TrustRegions", f, x),
}


def measure(name: str, methods: list[str]) -> list[dict[str, Any]]:
    N, n, make = CASES[name]
    f, space, rows = make(N, n), ghor.Stiefel(), []
    start = space.random(N, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradient_norm(Y: Tensor) -> float:
        """The norm in the canonical metric, for all methods."""
        Y = Y.detach().requires_grad_()
        (G,) = torch.autograd.grad(f(Y), Y)
        return float(space.norm(Y.detach(), space.rgrad(Y.detach(), G)))

    for method in methods:
        calls = 0

        def counted(Y: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return f(Y)

        METHODS[method](
            dense(6, 2), space.random(6, 2, dtype=torch.float64)
        )  # loads what torch imports at first use
        began = time.perf_counter(), time.process_time()
        try:
            found = METHODS[method](counted, start)
        except MemoryError as error:
            rows.append({"problem": name, "method": method, "error": str(error)})
            continue
        row = {"problem": name, "method": method, "seconds": time.perf_counter() - began[0]}
        row |= {"cpu": time.process_time() - began[1], "calls": calls, **found}
        x = row.pop("x")
        row |= {"value": float(f(x)), "relative": gradient_norm(x) / gradient_norm(start)}
        rows.append(row | {"distance": float(space.residual(x))})
        print(table(rows[-1:]), flush=True)
    best = min(r["value"] for r in rows if "value" in r)
    for row in (r for r in rows if "value" in r):
        row["gap"] = row["value"] - best
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| problem | method | seconds | CPU seconds | iterations | calls of f | gradients | Hessian products "
        "| relative gradient | gap | off the manifold |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['problem']} | {r['method']} | {r['error']} |" + " |" * 8)
            continue
        counts = " | ".join(str(r[k]) for k in ("iterations", "calls", "gradients", "products"))
        digits = " | ".join(f"{r.get(k, math.nan):.1e}" for k in ("relative", "gap", "distance"))
        lines.append(
            f"| {r['problem']} | {r['method']} | {r['seconds']:.2f} | {r['cpu']:.2f} | {counts} | {digits} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/pymanopt"))
    parser.add_argument(
        "--only", default="", help="problems whose name contains this; records of others stay"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    torch.set_num_threads(args.threads)
    rows = [row for name in CASES if args.only in name for row in measure(name, args.methods)]
    args.out.mkdir(parents=True, exist_ok=True)
    path, names = args.out / "pymanopt.json", {r["problem"] for r in rows}
    stamp = {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
    }
    rows = [r | stamp for r in rows]
    rows += [
        r
        for r in (json.loads(path.read_text())["runs"] if path.exists() else [])
        if r["problem"] not in names
    ]
    rows.sort(key=lambda r: list(CASES).index(r["problem"]))
    write_json({"benchmark": "against_pymanopt", "machine": machine(), "runs": rows}, path)
    (args.out / "pymanopt.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
