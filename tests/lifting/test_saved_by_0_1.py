"""State dicts that version 0.1.0 has saved load, and training goes on as it did there.

`data/state-0.1.pt` was written by version 0.1.0 with `write` below. It is not to be written anew: what counts
is that files of that version can be read.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ghor
from ghor.baselines import ScalarMomentAdam

FILE = Path(__file__).parent / "data" / "state-0.1.pt"
BEFORE, AFTER = 7, 10  # steps before the state was saved, and after

# name: shape, dtype, group
WEIGHTS: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "stiefel": ((6, 3), torch.float32, {"space": ghor.Stiefel(), "section": "transported"}),
    "implicit": ((8, 2), torch.float32, {"space": ghor.Stiefel(), "section": "implicit"}),
    "sphere": ((5,), torch.float32, {"space": ghor.Sphere()}),
    "symplectic": ((6, 2), torch.float32, {"space": ghor.SymplecticStiefel()}),
    "half": ((6, 3), torch.bfloat16, {"space": ghor.Stiefel(), "section": "transported"}),
    "half implicit": ((8, 2), torch.bfloat16, {"space": ghor.Stiefel(), "section": "implicit"}),
    "bias": ((4,), torch.float32, {"space": ghor.Euclidean()}),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (ghor.optim.Adam, {"lr": 0.03, "betas": (0.8, 0.95)}),
    "SGD": (ghor.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "ScalarMomentAdam": (ScalarMomentAdam, {"lr": 0.05, "norm": "frobenius"}),
}


def optimizer(name: str, weights: dict[str, Tensor], **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], **WEIGHTS[key][2]} for key, p in weights.items()]
    return OPTIMIZERS[name][0](groups, **options)


def steps(
    opt: torch.optim.Optimizer, weights: dict[str, Tensor], grads: dict[str, Tensor], first: int, last: int
) -> None:
    for t in range(first, last):
        for key, p in weights.items():  # the weights miss a gradient each, at different steps
            p.grad = None if t % 8 == 1 + list(WEIGHTS).index(key) else grads[key][t].to(p.dtype)
        opt.step()


def write(path: Path) -> None:
    """How the file was made."""
    gen = torch.Generator().manual_seed(0)
    grads = {
        key: torch.randn(BEFORE + AFTER, *shape, generator=gen) for key, (shape, _, _) in WEIGHTS.items()
    }
    out: dict[str, Any] = {"version": ghor.__version__, "gradients": grads}
    for name, (_, options) in OPTIMIZERS.items():
        weights = {}
        for key, (shape, dtype, group) in WEIGHTS.items():
            point = group["space"].random(*shape, generator=gen)
            weights[key] = nn.Parameter(point.to(dtype))
        opt = optimizer(name, weights, **options)
        steps(opt, weights, grads, 0, BEFORE)
        saved = {"weights": {key: p.detach().clone() for key, p in weights.items()}}
        saved["state_dict"] = opt.state_dict()
        # views of other tensors are saved whole
        saved["state_dict"]["state"] = {
            i: {k: v.clone() if torch.is_tensor(v) else v for k, v in entries.items()}
            for i, entries in saved["state_dict"]["state"].items()
        }
        steps(opt, weights, grads, BEFORE, BEFORE + AFTER)
        out[name] = {**saved, "after": {key: p.detach().clone() for key, p in weights.items()}}
    torch.save(out, path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_as_it_did(name: str) -> None:
    file = torch.load(FILE, weights_only=True)
    assert file["version"] == "0.1.0"
    weights = {key: nn.Parameter(w) for key, w in file[name]["weights"].items()}
    opt = optimizer(name, weights)  # lr and the rest come with the state
    opt.load_state_dict(file[name]["state_dict"])
    steps(opt, weights, file["gradients"], BEFORE, BEFORE + AFTER)
    for key, p in weights.items():
        then = file[name]["after"][key]
        assert p.dtype == then.dtype
        off = (p.detach().double() - then.double()).abs().max() / torch.finfo(p.dtype).eps
        assert off <= 16, f"{key}: {float(off):.0f} eps"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
