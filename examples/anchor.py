"""Fine-tune an orthogonal layer on a shifted task, with weight decay towards its start, and draw the result.

    python examples/anchor.py --out anchor.png --record anchor.json

A layer on St(12, 20) and a linear head learn to classify points of R^20. Then the inputs are turned, and the
layer alone is tuned on 60 samples of the new task by AdamW with anchor="start", for several weight decays.
The figure shows, over some problems, how far the layer has moved, and its accuracy on the new and the old
task.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import ghor

DECAYS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 80.0)
CLASSES, FEW, MANY = 4, 60, 2000


def fit(model: nn.Sequential, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def accuracy(model: nn.Sequential, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(-1) == y).float().mean())


def experiment(seed: int, tuning: int = 200) -> list[tuple[float, float, float]]:
    """For each decay: distance from the start, accuracy on the new task, accuracy on the old one."""
    torch.manual_seed(seed)
    rule = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    model = nn.Sequential(nn.Linear(20, 12, bias=False), nn.Tanh(), nn.Linear(12, CLASSES))
    ghor.constrain(model[0], "weight", ghor.Stiefel())
    X = torch.randn(20, 20)
    turn = torch.linalg.matrix_exp(0.06 * (X - X.mT))  # the shift
    x = torch.randn(3 * MANY, 20)
    with torch.no_grad():
        y = rule(3 * x).argmax(-1)
    fit(model, ghor.optim.Adam(model, lr=1e-2), x[:MANY], y[:MANY], 300)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    out = []
    for decay in DECAYS:
        model.load_state_dict(start)
        layer = model[0].weight
        opt = ghor.optim.AdamW([layer], lr=1e-2, weight_decay=decay, anchor="start")
        fit(model, opt, x[:FEW] @ turn, y[:FEW], tuning)
        gone = float((layer.detach() - start["0.weight"]).norm())
        old, new = (x[MANY:], y[MANY:]), (x[MANY:] @ turn, y[MANY:])
        out.append((gone, accuracy(model, *new), accuracy(model, *old)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the picture goes")
    parser.add_argument("--record", type=Path, help="write the numbers to this file")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    results = torch.tensor([experiment(seed) for seed in range(args.seeds)])  # (seeds, decays, 3)
    mean, sd = results.mean(0), results.std(0, correction=int(args.seeds > 1))
    print(f"{'weight decay':>12}{'distance':>18}{'new task':>18}{'old task':>18}")
    for decay, m, s in zip(DECAYS, mean.tolist(), sd.tolist(), strict=True):
        print(f"{decay:>12g}" + "".join(f"{a:>10.3f} +-{b:>5.3f}" for a, b in zip(m, s, strict=True)))
    if args.record:
        names = ("distance", "new_task", "old_task")
        rows = [
            {"weight_decay": decay, **dict(zip(names, zip(m, s, strict=True), strict=True))}
            for decay, m, s in zip(DECAYS, mean.tolist(), sd.tolist(), strict=True)
        ]
        about = {"ghor": ghor.__version__, "torch": torch.__version__, "seeds": args.seeds}
        args.record.write_text(json.dumps({"example": "anchor", **about, "rows": rows}, indent=1) + "\n")
    if args.out:
        import matplotlib.pyplot as plt

        _, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
        places = range(len(DECAYS))
        axes[0].errorbar(places, mean[:, 0], sd[:, 0], capsize=3)
        for k, title in ((1, "new task"), (2, "old task")):
            axes[1].errorbar(places, mean[:, k], sd[:, k], capsize=3, label=title)
        for ax, title in zip(axes, ("distance from the start", "accuracy"), strict=True):
            ax.set(
                xlabel="weight decay",
                ylabel=title,
                xticks=list(places),
                xticklabels=[f"{d:g}" for d in DECAYS],
            )
        axes[1].legend()
        plt.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
