"""The table of methods, every cell by experiment, and the paper's rows as the paper has them."""

import pytest
import torch
from helpers.lab import randn

import ghor
from ghor_lab import methods
from ghor_lab.methods import METHODS

every = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.key)
RATES = {"li-1": 1e-3, "li-2": 0.05, "scalar": 0.05}  # where lr is not the size of each entry
PAPER = {  # columns as in the paper: SO(N), St(n, N), vector-valued second moment, no projections
    "cheap": (True, False, True, True),
    "kong-5": (True, False, True, True),
    "li-2": (True, True, False, None),
    "kong-2": (True, True, True, False),
    "ghor": (True, True, True, True),
}


def stays(method, shape, gen):
    """Whether 30 steps of random gradients keep a weight on the space; Li's to some 1e-6, which short steps
    give."""
    space = ghor.SpecialOrthogonal() if shape[0] == shape[1] else ghor.Stiefel()
    Y = torch.nn.Parameter(space.random(*shape, generator=gen, dtype=torch.float64))
    before = Y.detach().clone()
    try:
        opt = method.make([Y], lr=RATES.get(method.key, 0.01))
    except (ValueError, RuntimeError):
        return False
    for _ in range(30):
        Y.grad = randn(shape, gen)
        opt.step()
    assert (Y.detach() - before).norm() > 0.02
    return bool(space.residual(Y.detach()) < 1e-5)


@every
def test_on_so(method, gen):
    assert stays(method, (4, 4), gen) == method.so


@every
def test_on_stiefel(method, gen):
    assert stays(method, (7, 3), gen) == method.stiefel


@every
def test_second_moment_by_entry(method, gen):
    """Adam's first step does not see how large an entry of the gradient is: at Y = I, entries (0, 1) and (1,
    0)."""
    G = randn((4, 4), gen)
    G = G - G.mT
    steps = []
    for size in (1.0, 100.0):
        Y = torch.nn.Parameter(torch.eye(4, dtype=torch.float64))
        Y.grad = G.clone()
        Y.grad[0, 1] *= size
        Y.grad[1, 0] *= size
        method.make([Y], lr=0.01).step()
        steps.append(Y.detach() - torch.eye(4))
    assert steps[0].norm() > 1e-3
    same = bool(
        (steps[1] - steps[0]).norm() < 1e-4 * steps[0].norm()
    )  # eps = 1e-8 beside entries of size 0.1
    assert same == method.vector


def off_tangent(method, state, Y):
    """How far from the vector space it came from is what Adam makes of its moments, before anything repairs
    it."""
    moment, square = (
        (state["V"], state["q"]) if method.key == "kong-2" else (state["exp_avg"], state["exp_avg_sq"])
    )
    scaled = moment / (square.sqrt() + 1e-8)
    in_r = method.key in ("kong-2", "qr")  # moments of N x n matrices at Y; else of [A; B], A skew
    A = Y.mT @ scaled if in_r else scaled[: Y.shape[-1]]
    return float((A + A.mT).norm() / scaled.norm())


@every
def test_no_projections(method, gen):
    """In g^hor and so(N) a tangent vector is one after a division by entries: A stays skew. X^T V = 0 does
    not stay."""
    if not method.vector:
        assert method.unprojected is None
        return
    if method.key == "soft":  # R^(N x n) is its own tangent space
        assert method.unprojected
        return
    shape = (7, 3) if method.stiefel else (4, 4)
    space = ghor.Stiefel() if method.stiefel else ghor.SpecialOrthogonal()
    Y = torch.nn.Parameter(space.random(*shape, generator=gen, dtype=torch.float64))
    opt = method.make([Y], lr=0.01)
    for _ in range(10):
        Y.grad = randn(shape, gen)
        opt.step()
    off = off_tangent(method, opt.state[Y], Y.detach())
    assert bool(off < 1e-12) == method.unprojected
    assert method.unprojected or off > 0.1


def test_the_papers_rows_are_the_papers():
    rows = {m.key: (m.so, m.stiefel, m.vector, m.unprojected) for m in METHODS if m.paper}
    assert rows == PAPER


def test_it_is_drawn_in_every_form():
    table = methods.table()
    text = table.markdown()
    assert "| Kong et al. 2022, Algorithm 2 | yes | yes | yes | no | yes |" in text
    assert "| Li et al. 2020, Algorithm 2 | yes | yes | no | not applicable | yes |" in text
    assert len(text.splitlines()) == len(METHODS) + 2
