"""Adapters beside those of peft: a small transformer pre-trained on Fashion-MNIST, adapted to MNIST.

    python benchmarks/adapters.py [--steps 1000] [--pretrain 1000] [--rates 1e-3 3e-3 1e-2] [--only "ghor|OFT"]

Every adapter sits on all linear layers of the blocks, the head is trained anew beside it, and every method has the best
of the same learning rates, by its test accuracy. "off" is the largest ||R^T R - I||_F of a block that the layer
multiplies with, in float64; "merged" is the largest difference between the logits of the merged model and of the model
before. peft is tried if it is installed. Fashion-MNIST and MNIST are found or fetched as the lab does.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ghor
from ghor import adapters
from ghor_lab.data import load

DIM, HEADS, BLOCKS, PATCH = 64, 4, 2, 7
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


def images(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load(name)
    scale = [x.float().div_(x.max()).sub_(0.3) for x in (data.train_images, data.test_images)]
    return scale[0], data.train_labels, scale[1], data.test_labels


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, ...], steps: int) -> float:
    """Seconds a step."""
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


# ---------------------------------------------------------------------------------------------------- contenders

Made = tuple[nn.Module, type[torch.optim.Optimizer], Callable[[], float | None], Callable[[], nn.Module] | None]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pretrain", type=int, default=1000)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--only", default="", help="contenders whose names match this")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="peft")
    if peft is None:
        print("peft is not installed: its rows are left out")
    torch.manual_seed(0)
    base, fashion, digits = Transformer(), images("fashion-mnist"), images("mnist")
    train(base, torch.optim.AdamW(base.parameters(), lr=2e-3), fashion, args.pretrain)
    accuracy = float((logits(base, fashion[2]).argmax(1) == fashion[3]).double().mean())
    total = sum(p.numel() for p in base.parameters())
    print(f"pre-trained: {100 * accuracy:.2f} % on Fashion-MNIST, {total} parameters", flush=True)
    nn.init.zeros_(base.head.weight)
    rows = []
    for name, make in ((n, make) for n, make in CONTENDERS.items() if re.search(args.only, n)):
        best: dict[str, object] = {}
        for lr in args.rates:
            torch.manual_seed(1)
            model, Optimizer, worst, merged = make(copy.deepcopy(base))
            params = [p for p in model.parameters() if p.requires_grad]
            took = train(model, Optimizer(params, lr=lr, weight_decay=0.0), digits, args.steps)
            out = logits(model, digits[2])
            accuracy = float((out.argmax(1) == digits[3]).double().mean())
            if accuracy > float(str(best.get("accuracy", -1))):
                best = {"name": name, "lr": lr, "accuracy": accuracy, "ms": 1e3 * took, "off": worst()}
                best["trained"] = sum(p.numel() for p in params)
                best["merged"] = None if merged is None else float((logits(merged(), digits[2]) - out).abs().max())
        rows.append(best)
        right, shown = 100 * float(str(best["accuracy"])), {k: f"{v:.1e}" for k, v in best.items() if type(v) is float}
        print(
            f"{name:18} lr {shown['lr']}  accuracy {right:.2f} %  off {shown.get('off', '-'):8} merged "
            f"{shown.get('merged', '-'):8} {best['trained']:6} trained  {best['ms']:.1f} ms a step",
            flush=True,
        )
    if args.out:
        with open(args.out, "w") as file:  # noqa: PTH123
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
