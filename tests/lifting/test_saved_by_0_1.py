"""State dicts that version 0.1.0 has saved load, and training goes on as it did there.

`data/state-0.1.pt` was written by version 0.1.0 with `write` below. It is not to be written anew: what counts
is that files of that version can be read.
"""

import functools
import io
import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

import lifting.pickles as pickles
import pytest
import torch
from torch import Tensor, nn

import ghor
from ghor.baselines import ScalarMomentAdam

FILE = Path(__file__).parent / "data" / "state-0.1.pt"
PICKLES = FILE.with_name("pickles-0.1.pkl.xz")  # written by pickles.py
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


@functools.cache
def pickled() -> dict[str, Any]:
    sys.modules.setdefault("pickles", pickles)  # where the file looks for its model
    return pickle.loads(lzma.decompress(PICKLES.read_bytes()))


def continues(record: dict[str, Any], model: nn.Module, opt: torch.optim.Optimizer) -> None:
    pickles.steps(model, opt, record["targets"], 5)
    for key, p in model.ws.items():
        # to the bit on the machine that wrote it; the order of sums differs between machines
        assert (p.detach() - record["end"][key]).abs().max() <= 1e-10, key


@pytest.mark.parametrize("name", pickles.OPTIMIZERS)
def test_a_pickled_optimizer_goes_on_as_it_did(name: str) -> None:
    """Modules have moved since, and keys of the state have other names."""
    record = pickled()[name]
    continues(record, *pickle.loads(record["pickle"]))


@pytest.mark.parametrize("name", pickles.OPTIMIZERS)
def test_a_state_dict_beside_a_pickled_model_goes_on(name: str) -> None:
    record = pickled()[name]
    model, _ = pickle.loads(record["pickle"])
    opt = pickles.OPTIMIZERS[name](model)
    opt.load_state_dict(torch.load(io.BytesIO(record["state"]), weights_only=True))
    continues(record, model, opt)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
