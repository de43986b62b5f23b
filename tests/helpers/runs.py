"""A run that can be cloned, saved, copied and interrupted: weights on a space, others, given gradients."""

import copy
import io
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ghor

STIEFEL = ghor.Stiefel()
DOUBLE = torch.float64
COMPLEX = {DOUBLE: torch.complex128, torch.float32: torch.complex64}

# Every frame and every layout: space, shape, section
CASES = {
    "stored": (STIEFEL, (9, 4), "auto"),
    "batch": (STIEFEL, (3, 9, 4), "auto"),
    "wide": (STIEFEL, (4, 9), "auto"),
    "blocks": (ghor.Stiefel(blocks=3), (18, 4), "auto"),
    "columns": (ghor.Stiefel(along="columns", blocks=2), (4, 16), "auto"),
    "square": (ghor.SpecialOrthogonal(), (5, 5), "auto"),
    "closed form": (STIEFEL, (20, 4), "implicit"),
    "Grassmann": (ghor.Grassmann(), (9, 4), "auto"),
    "flag": (ghor.Flag((2, 1)), (9, 3), "auto"),
    "sphere": (ghor.Sphere(), (12, 5), "auto"),
    "radius": (ghor.Sphere(radius=2.5), (12, 5), "auto"),
    "any radius": (ghor.Sphere(radius="start"), (12, 5), "auto"),
    "padding": (ghor.Sphere(padding_idx=3), (12, 5), "auto"),
    "short": (ghor.Sphere(), (1500, 3), "auto"),
    "stored sphere": (ghor.Sphere(), (12, 5), "transported"),
    "hyperbolic": (ghor.Hyperbolic(), (12, 5), "auto"),
    "stored hyperbolic": (ghor.Hyperbolic(), (12, 5), "transported"),
    "SPD": (ghor.SPD(), (2, 4, 4), "auto"),
    "poses": (ghor.SpecialEuclidean(), (3, 4), "auto"),
    "orientations": (ghor.PositionsOrientations(), (2, 3), "auto"),
    "symplectic": (ghor.SymplecticStiefel(), (8, 4), "auto"),
    "complex": (STIEFEL, (9, 4), "auto"),
    "complex closed form": (STIEFEL, (20, 4), "implicit"),
}
RULES = {
    "Adam": {},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "RMSprop": {"momentum": 0.5},
    "Adagrad": {},
    "Rprop": {},
    "AdamW": {"amsgrad": True},
    "Muon": {},
}
every = pytest.mark.parametrize("case", CASES)
FRAMES = ["stored", "closed form", "sphere", "radius", "hyperbolic", "stored hyperbolic", "SPD", "complex"]
frames = pytest.mark.parametrize("case", FRAMES)  # one of each kind
# Every case with some rule, every rule with some cases
pairs = pytest.mark.parametrize(
    ("case", "rule"),
    [(case, list(RULES)[(i + k) % len(RULES)]) for i, case in enumerate(CASES) for k in (0, 3)],
)


class Run:
    """Weights, targets, and an optimizer of them."""

    def __init__(self, case, rule="Adam", count=3, dtype=DOUBLE, lr=0.05, flat=1, **options):
        self.space, shape, self.section = CASES[case]
        gen = torch.Generator().manual_seed(1)
        kind = COMPLEX[dtype] if case.startswith("complex") else dtype
        wide = torch.promote_types(kind, DOUBLE)

        def point():
            return self.space.random(*shape, generator=gen, dtype=wide).to(kind)

        self.ps, self.targets = [nn.Parameter(point()) for _ in range(count)], [point() for _ in range(count)]
        self.flat = [
            nn.Parameter(torch.randn(4, 3, generator=gen, dtype=DOUBLE).to(dtype)) for _ in range(flat)
        ]
        self.cls, self.options = (
            getattr(ghor.optim, rule),
            {"lr": lr, "section": self.section, **RULES[rule], **options},
        )
        self.opt = self.make()

    def make(self, **options):
        groups = [{"params": self.ps, "space": self.space}, {"params": self.flat, "space": ghor.Euclidean()}]
        return self.cls(groups if self.flat else groups[:1], **self.options | options)

    def gradients(self, step, on=None):
        for i, (p, target) in enumerate(zip(self.ps, self.targets, strict=True)):
            g = -target + 0.3 * p.detach() ** 2 * math.cos(step) + 0.1 * p.detach().roll(1, 0)
            if not self.space.compact:
                g = 0.5 * (p.detach() - target) * (1 + 0.3 * math.cos(step))
            p.grad = None if on is not None and i not in on else g.to(p.dtype)
        for p in self.flat:
            p.grad = p.detach() * 2 + math.sin(step)

    def run(self, steps, on=None):
        for step in steps:
            self.gradients(step, on)
            self.opt.step()
        return self

    def values(self):
        return [p.detach().clone() for p in self.ps + self.flat]

    def clone(self):
        """The weights, and a new optimizer of them."""
        other = copy.copy(self)
        other.ps, other.flat = ([nn.Parameter(p.detach().clone()) for p in ps] for ps in (self.ps, self.flat))
        other.opt = other.make()
        return other

    def resumed(self):
        """A clone that has loaded the state from a file."""
        other = self.clone()
        other.opt.load_state_dict(through_file(self.opt.state_dict()))
        return other

    def on_space(self, tol=1.0):
        for p in self.ps:
            residual, allowed = self.space.residual(p.detach()), self.space.tolerance(p.detach())
            assert bool((residual <= tol * allowed).all()), float(residual.max())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def apart(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def through_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


OURS = (str(Path(ghor.__file__).parent), str(Path(torch.optim.__file__).parent))


class Stop(BaseException):
    """What an interrupt raises."""


def interrupted(run, at, within=OURS, step="step"):
    """Take a step, and stop it at its line number `at` of those in some files; returns if it got there."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.startswith(within):
            return None
        if event == "line":
            count += 1
            if count == at:
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        getattr(run.opt, step)()
    except Stop:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(
            True
        )  # an interrupt in the exit of torch.no_grad leaves them off, in torch, too
    return False
