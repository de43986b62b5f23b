"""Compare our adapters with peft's: a small transformer pre-trained on Fashion-MNIST, adapted to MNIST.

    python benchmarks/adapters.py                           # 3 seeds, 3 rates: 20 minutes on one core
    python benchmarks/adapters.py --seeds 1 --rates 6e-3 --only "ghor|OFT"

Every adapter sits on all linear layers of the blocks, and a new head is trained beside it. Every method uses
the best of the same learning rates, by its accuracy on 5,000 digits held out from training. "off" is the
largest ||R^T R - I||_F, in float64, of a block that the layer multiplies with; "merged" is the largest
difference between the logits of the merged model and those before merging. peft is tried if it is installed.
Fashion-MNIST and MNIST are found or downloaded as in the lab.
"""

from __future__ import annotations

import argparse
import copy
import re
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import commit, write_json
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ghor
from ghor import adapters
from ghor_lab.data import DATASETS, load
from ghor_lab.train import machine

DIM, HEADS, BLOCKS, PATCH = 64, 4, 2, 7
HELD_OUT = 5000
LINEAR = ["q", "k", "v", "o", "up", "down"]
try:
    import peft
except ImportError:
    peft = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        q, k, v = (layer(z).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Images (B, 28, 28) to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(PATCH * PATCH, DIM), nn.Linear(DIM, 10)
        self.place = nn.Parameter(0.02 * torch.randn((28 // PATCH) ** 2, DIM))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, images: Tensor) -> Tensor:
        x = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        return self.head(self.blocks(self.embed(x) + self.place).mean(1))


@cache
def images(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load(DATASETS[name])
    scale = [x.float().div_(x.max()).sub_(0.3) for x in (data.train_images, data.test_images)]
    return scale[0], data.train_labels, scale[1], data.test_labels


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, ...], steps: int) -> float:
    """Train; returns seconds per step."""
    gen = torch.Generator().manual_seed(1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    began = time.perf_counter()
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (64,), generator=gen)
        optimizer.zero_grad()
        cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        optimizer.step()
        schedule.step()
    return (time.perf_counter() - began) / steps


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(1000)])


def off(R: Tensor) -> float:
    R = R.detach().double()
    return float((R.mT @ R - torch.eye(R.shape[-1], dtype=R.dtype)).norm(dim=(-2, -1)).max())


# -- contenders ----------------------------------------------------------------------------------------------

Made = tuple[
    nn.Module, type[torch.optim.Optimizer], Callable[[], float | None], Callable[[], nn.Module] | None
]


def only_the_head(model: nn.Module) -> Made:
    for n, p in model.named_parameters():
        p.requires_grad_(n.startswith("head."))
    return model, torch.optim.AdamW, lambda: None, None


def all_weights(model: nn.Module) -> Made:
    return model, torch.optim.AdamW, lambda: None, None


def ours(adapter: adapters.Rotation | adapters.LowRank) -> Callable[[nn.Module], Made]:
    def make(model: nn.Module) -> Made:
        adapters.adapt(model, LINEAR, adapter, train=["head.*"])

        def merged() -> nn.Module:
            adapters.merge(model)
            return model

        def worst() -> float:
            return max(off(p) for n, p in model.named_parameters() if n.rpartition(".")[2] in ("R", "U", "V"))

        return model, ghor.optim.AdamW, worst, merged

    return make


def theirs(kind: str, **options: object) -> Callable[[nn.Module], Made]:
    def make(model: nn.Module) -> Made:
        config = getattr(peft, kind)(target_modules=LINEAR, modules_to_save=["head"], **options)
        wrapped = peft.get_peft_model(model, config)

        def rotations() -> Iterator[Tensor]:
            for layer in wrapped.modules():
                if type(layer).__name__ == "OFTRotationModule":
                    terms = layer.use_cayley_neumann, layer.num_cayley_neumann_terms
                    yield layer._cayley_batch(layer.weight, layer.block_size, *terms)

        worst = (lambda: max(map(off, rotations()))) if kind == "OFTConfig" else (lambda: None)
        return wrapped, torch.optim.AdamW, worst, wrapped.merge_and_unload

    return make


CONTENDERS: dict[str, Callable[[nn.Module], Made]] = {
    "the head alone": only_the_head,
    "all weights": all_weights,
    "ghor Rotation(32)": ours(adapters.Rotation(32)),
    "ghor LowRank(4)": ours(adapters.LowRank(4)),
}
if peft is not None:
    CONTENDERS |= {
        "peft OFT, default": theirs("OFTConfig"),
        "peft OFT, Cayley": theirs("OFTConfig", use_cayley_neumann=False),
        "peft LoRA, r=4": theirs("LoraConfig", r=4),
    }


# -- runs ----------------------------------------------------------------------------------------------------


def accuracy(out: Tensor, labels: Tensor) -> float:
    """Accuracy in percent."""
    return 100 * float((out.argmax(1) == labels).double().mean())


def pretrained(seed: int, steps: int) -> Transformer:
    torch.manual_seed(seed)
    base, fashion = Transformer(), images("fashion-mnist")
    train(base, torch.optim.AdamW(base.parameters(), lr=2e-3), fashion, steps)
    total = sum(p.numel() for p in base.parameters())
    right = accuracy(logits(base, fashion[2]), fashion[3])
    print(f"seed {seed}: pre-trained, {right:.2f} % on Fashion-MNIST, {total} parameters", flush=True)
    nn.init.zeros_(base.head.weight)
    return base


def run(name: str, base: nn.Module, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """Adapt to all digits except the last HELD_OUT, which choose the rate later."""
    x, labels, test_x, test_labels = images("mnist")
    torch.manual_seed(1000 + seed)
    model, Optimizer, worst, merged = CONTENDERS[name](copy.deepcopy(base))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = Optimizer(params, lr=lr, weight_decay=0.0)
    took = train(model, optimizer, (x[:-HELD_OUT], labels[:-HELD_OUT]), steps)
    out = logits(model, test_x)
    found: dict[str, Any] = {"name": name, "seed": seed, "lr": lr, "trained": sum(p.numel() for p in params)}
    found |= {"validation": accuracy(logits(model, x[-HELD_OUT:]), labels[-HELD_OUT:])}
    found |= {"test": accuracy(out, test_labels), "ms": 1e3 * took, "off": worst()}
    return found | {"merged": None if merged is None else float((logits(merged(), test_x) - out).abs().max())}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per contender at its best validation rate, over the seeds.

    Accuracies, the worst "off" and "merged", and the time.
    """
    rows = []
    for name in dict.fromkeys(r["name"] for r in runs):
        rates: dict[float, list[dict[str, Any]]] = {}
        for r in runs:
            if r["name"] == name:
                rates.setdefault(r["lr"], []).append(r)
        best = max(rates.values(), key=lambda rs: median(r["validation"] for r in rs))
        row = {k: best[0][k] for k in ("name", "lr", "trained")} | {"test": sorted(r["test"] for r in best)}
        for key in ("off", "merged"):
            row[key] = None if best[0][key] is None else max(r[key] for r in best)
        rows.append(row | {"ms": median(r["ms"] for rs in rates.values() for r in rs)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pretrain", type=int, default=1000)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 6e-3, 2e-2])
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--only", default="", help="contenders whose names match this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="peft")
    if peft is None:
        print("peft is not installed: its rows are left out")
    names, runs = [n for n in CONTENDERS if re.search(args.only, n)], []
    for seed in range(args.seeds):
        base = pretrained(seed, args.pretrain)
        for name, lr in product(names, args.rates):
            runs.append(run(name, base, lr, seed, args.steps))
            print(
                f"  {name:18} lr {lr:<6g} {runs[-1]['test']:.2f} %  {runs[-1]['ms']:.1f} ms a step",
                flush=True,
            )
    rows = summary(runs)
    for r in rows:
        off_, merged = ("-" if r[k] is None else f"{r[k]:.1e}" for k in ("off", "merged"))
        right = f"{median(r['test']):.2f} % ({r['test'][0]:.2f} to {r['test'][-1]:.2f})"
        shown = f"{right}  off {off_:8} merged {merged:8} {r['trained']:6} trained  {r['ms']:.1f} ms a step"
        print(f"{r['name']:18} lr {r['lr']:<6g} {shown}")
    if args.out:
        versions = {"torch": torch.__version__, "peft": peft and peft.__version__}
        found = {
            "benchmark": "adapters",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
        }
        found |= {"machine": machine(), "threads": torch.get_num_threads(), "versions": versions}
        write_json(found | {"options": vars(args) | {"out": None}, "rows": rows, "runs": runs}, args.out)


if __name__ == "__main__":
    main()
