"""Models and optimizers whose pickles and state dicts version 0.1.0 has written, see test_saved_by_0_1.py."""

import io
import pickle
import sys
from pathlib import Path

import torch
from torch import nn

import ghor
from ghor.baselines import ScalarMomentAdam

SPACES = {
    "Stiefel": (ghor.Stiefel(), (6, 3)),
    "wide": (ghor.Stiefel(), (2, 5)),
    "blocks": (ghor.Stiefel(blocks=3), (6, 4)),
    "kernel": (ghor.Stiefel(flatten=3), (2, 2, 3, 3)),
    "Grassmann": (ghor.Grassmann(), (6, 2)),
    "Flag": (ghor.Flag((2, 1)), (6, 3)),
    "Sphere": (ghor.Sphere(), (4, 5)),
    "padded": (ghor.Sphere(padding_idx=1), (4, 5)),
    "SO": (ghor.SpecialOrthogonal(), (4, 4)),
    "Unitary": (ghor.Unitary(), (3, 3)),
    "SymplecticStiefel": (ghor.SymplecticStiefel(), (6, 2)),
    "SymplecticGrassmann": (ghor.SymplecticGrassmann(), (6, 2)),
    "Hyperbolic": (ghor.Hyperbolic(), (4, 3)),
    "SPD": (ghor.SPD(), (3, 3)),
    "SE": (ghor.SpecialEuclidean(), (3, 4)),
    "PositionsOrientations": (ghor.PositionsOrientations(), (4, 2, 3)),
    "Euclidean": (ghor.Euclidean(), (4,)),
}


def some(model, *names):
    return [model.ws[k] for k in names]


def all_but(model, *names):
    return [p for k, p in model.ws.items() if k not in names]


def lbfgs(model):
    spaces = [SPACES[k][0] for k in model.ws if k != "padded"]
    return ghor.optim.LBFGS(all_but(model, "padded"), lr=0.1, max_iter=3, space=spaces)


def implicit(model):
    groups = [{"params": some(model, "Stiefel", "wide", "Sphere"), "section": "implicit"}]
    return ghor.optim.Adam(groups, lr=0.02)


def anchored(model):
    return ghor.optim.AdamW(
        [{"params": some(model, "Stiefel", "SO"), "anchor": "start"}], lr=0.02, weight_decay=0.1
    )


OPTIMIZERS = {
    "Adam": lambda m: ghor.optim.Adam(m, lr=0.02),
    "Adam implicit": implicit,
    "AdamW anchor": anchored,
    "SGD": lambda m: ghor.optim.SGD(m, lr=0.02, momentum=0.9),
    "Adagrad": lambda m: ghor.optim.Adagrad(m, lr=0.02),
    "Muon": lambda m: ghor.optim.Muon(m, lr=0.02),
    "ScalarMomentAdam": lambda m: ScalarMomentAdam(all_but(m, "blocks", "padded"), lr=0.02),
    "lift unstacked": lambda m: ghor.lift(torch.optim.RMSprop, stack=False)(m, lr=0.02),
    "LBFGS": lbfgs,
}


class Model(nn.Module):
    def __init__(self, gen):
        super().__init__()
        self.ws = nn.ParameterDict()
        for k, (s, shape) in SPACES.items():
            dtype = torch.complex128 if k == "Unitary" else torch.float64
            self.ws[k] = nn.Parameter(s.random(*shape, generator=gen, dtype=dtype))
        for k, (s, _) in SPACES.items():
            if k != "Euclidean":
                ghor.constrain(self.ws, k, s)


def loss(model, targets):
    out = sum((p - targets[k]).abs().square().sum() for k, p in model.ws.items() if k != "padded")
    rows = [0, 2, 3]
    return out + (model.ws["padded"][rows] - targets["padded"][rows]).square().sum()


def steps(model, opt, targets, count):
    for _ in range(count):

        def closure():
            model.zero_grad()
            out = loss(model, targets)
            out.backward()
            return out

        opt.step(closure)


def write(path):
    """How the file was made, with version 0.1.0."""
    gen = torch.Generator().manual_seed(0)
    out = {}
    for name, make in OPTIMIZERS.items():
        model = Model(gen)
        targets = {k: torch.randn(p.shape, generator=gen, dtype=p.dtype) for k, p in model.ws.items()}
        opt = make(model)
        steps(model, opt, targets, 5)
        saved = pickle.dumps((model, opt))
        state = io.BytesIO()
        torch.save(opt.state_dict(), state)
        steps(model, opt, targets, 5)
        end = {k: p.detach().clone() for k, p in model.ws.items()}
        out[name] = {"pickle": saved, "state": state.getvalue(), "targets": targets, "end": end}
    with Path(path).open("wb") as file:
        pickle.dump(out, file)


if __name__ == "__main__":
    import pickles  # so that the classes are found by this name

    pickles.write(sys.argv[1])
