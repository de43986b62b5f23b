"""L-BFGS interrupted at every line of a step: the weights are whole, and the next step goes on."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers.problems import STIEFEL, brockett, closure, gen
from torch import nn

import ghor

SOURCE = str(Path(ghor.__file__).parent)
F = brockett(12, 2)[0]
BUILDS = {
    "stored": {"section": "transported"},
    "closed": {"section": "implicit"},
    "fixed steps": {"line_search_fn": None, "lr": 0.01},
    "bfloat16": {"dtype": torch.bfloat16},
}


class Net(nn.Module):
    """Two weights on one manifold, and one on none."""

    def __init__(self, dtype):
        super().__init__()
        self.Y, self.Z = (
            nn.Parameter(STIEFEL.random(12, 2, generator=gen(i), dtype=torch.float64).to(dtype))
            for i in (0, 1)
        )
        self.b = nn.Parameter(torch.zeros(2, dtype=dtype))
        ghor.constrain(self, ["Y", "Z"], STIEFEL)

    def loss(self):
        """Without the problem's symmetries."""
        Y, Z, b = self.Y.double(), self.Z.double(), self.b.double()
        return F(Y) + F(Z) + (Y * Z).sum() + (b - Y[0]).square().sum()


def stepped(options, steps):
    """A model and its optimizer after some steps, in which the memory has been filled and moved on."""
    options = {"history_size": 4, "max_iter": 3, "line_search_fn": "strong_wolfe", **options}
    net = Net(options.pop("dtype", torch.float64))
    opt = ghor.optim.LBFGS(net, **options)
    evaluated = closure(opt, net.loss)
    for _ in range(steps):
        opt.step(evaluated)
    return net, opt, evaluated


class Interrupt:
    """Raises KeyboardInterrupt at the k-th line of the library that is run, or counts lines."""

    def __init__(self, k=None):
        self.k, self.lines = k, []

    def trace(self, frame, event, arg):
        """Called at every line of the library."""
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if self.k is not None and len(self.lines) == self.k + 1:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        return error[0] is KeyboardInterrupt


def moments_of_every_line(options):
    """When each line of a step is run for the first and for the last time."""
    _, opt, evaluated = stepped(options, 3)
    with Interrupt() as seen:
        opt.step(evaluated)
    first, last = {}, {}
    for k, line in enumerate(seen.lines):
        first.setdefault(line, k)
        last[line] = k
    return sorted({*first.values(), *last.values()})


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BUILDS)
def test_at_every_line_of_a_step(name, every):
    """By default at every twentieth."""
    moments = moments_of_every_line(BUILDS[name])
    assert len(moments) > 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in moments[::every]:
            net, opt, evaluated = stepped(BUILDS[name], 3)
            before = float(net.loss())
            with Interrupt(k):
                opt.step(evaluated)
            tolerance = 0.02 if net.Y.dtype == torch.bfloat16 else 1e-12
            for Y in (net.Y, net.Z):
                assert float(STIEFEL.residual(Y.detach().double())) <= tolerance
            saved = opt.state_dict()
            for _ in range(2):
                opt.step(evaluated)
            assert float(net.loss()) <= before + tolerance
            for Y in (net.Y, net.Z):
                assert float(STIEFEL.residual(Y.detach().double())) <= tolerance
            opt.load_state_dict(saved)
            opt.step(evaluated)
