"""What a step dispatches, counted exactly (benchmarks/kernels.py): a change that adds a kernel shows here."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.table import MANIFOLDS, name, point, sections, shapes
from torch import nn

import ghor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kernels import Count, count, moved
from workloads import counted, ours

S = ghor.Stiefel()
MOST = [  # kernels of one step between two repairs of rounding; one is a copy to compare weights with
    (counted(S, 49, 7, section="transported"), 22),
    (counted(S, 200, 20, section="implicit"), 38),
    (counted(ghor.Grassmann(), 200, 20, section="implicit"), 37),
    (counted(S, 49, 7, count=336), 25),
    (counted(S, 49, 7, count=336, retraction="geodesic"), 88),
    (counted(ghor.SpecialOrthogonal(), 16, 16), 17),
    (counted(ghor.Sphere(), 20, 8), 37),  # numbers of a point, in place of passes over its coordinates
    (counted(ghor.Hyperbolic(), 20, 8), 70),
    (counted(ghor.SPD(), 10, 4, 4), 34),
    (counted(ghor.SpecialEuclidean(), 10, 3, 4), 28),
    (counted(ghor.PositionsOrientations(), 10, 2, 3), 37),
    (counted(ghor.SymplecticStiefel(), 8, 4), 45),  # 11 of them: coordinates that are rounding become 0
    # Without a frame there are half the products; but K and A are two blocks, each with kernels of its own.
    (counted(S, 49, 7, optimizer="Muon"), 72),
    (counted(S, 49, 7, optimizer="Muon", count=336), 75),
    (counted(S, 200, 20, optimizer="Muon"), 72),
    (counted(ghor.SpecialOrthogonal(), 16, 16, optimizer="Muon"), 53),
]


def kernels(workload):
    return count(ours(workload).step, 7)[0].kernels.total()


@pytest.mark.parametrize(("workload", "most"), MOST, ids=lambda x: getattr(x, "name", ""))
def test_kernels(workload, most):
    assert kernels(workload) <= most


def test_traffic():
    x, y = torch.zeros(2, 100)
    p = nn.Parameter(torch.zeros(100))
    p.grad = torch.ones(100)
    fused = torch.optim.Adam([p], fused=True)
    fused.step()
    most = torch.empty(100)

    def in_units(run):
        with Count() as counted:
            run()
        return counted.traffic / (4 * 100)

    assert in_units(lambda: x + y) == 3
    assert in_units(lambda: x.add_(y)) == 3
    assert in_units(lambda: x.copy_(y)) == 2
    assert in_units(lambda: torch.add(x, y, out=most)) == 3
    assert in_units(lambda: x.expand(50, 100) + y) == 52
    assert round(in_units(fused.step)) == 8


def test_kernels_do_not_depend_on_the_number_of_tensors():
    assert kernels(counted(S, 9, 3, count=2)) == kernels(counted(S, 9, 3, count=20))


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, 1), ({"foreach": False}, 0), ({"fused": True, "weight_decay": 0.0}, 1)],
    ids=str,
)
def test_adam_is_fused_on_manifolds_by_default(options, fused, gen):
    """Euclidean weights of the same group take the kernel that torch chooses: they are torch's to the bit."""
    Y, x = nn.Parameter(S.random(9, 3, generator=gen)), nn.Parameter(torch.randn(70, generator=gen))
    twin = nn.Parameter(x.detach().clone())
    opt = ghor.optim.AdamW([Y, x], space=[S, ghor.Euclidean()], **options)
    ref = torch.optim.AdamW([twin], **options)
    for _ in range(3):
        Y.grad, x.grad = (torch.randn(p.shape, generator=gen) for p in (Y, x))
        twin.grad = x.grad.clone()
        with Count() as counted:
            opt.step()
        ref.step()
    assert counted.kernels["_fused_adamw_"] == fused
    assert torch.equal(x, twin)
    assert opt.param_groups[0].get("fused") == options.get("fused")


ON_DEVICES = [(s, k) for s in MANIFOLDS for k in sections(s)]


@pytest.mark.parametrize(("space", "section"), ON_DEVICES, ids=name)
@pytest.mark.parametrize("optimizer", ["Adam", "Muon"])
def test_what_outlives_a_step_stays_in_place_and_the_rate_is_not_read(space, section, optimizer, gen):
    """What a captured CUDA graph needs: a replay finds each tensor where the capture left it, and a learning
    rate that is a tensor is read on the device."""
    Y = nn.Parameter(point(space, shapes(space)[0], gen, torch.float32))
    Y.grad = torch.randn(Y.shape, generator=gen)
    lr = torch.tensor(1e-3)
    opt = getattr(ghor.optim, optimizer)([Y], space=space, section=section, lr=lr)
    for _ in range(3):
        opt.step()
    assert all(moved(opt.step, opt, [Y]) == 0 for _ in range(3))
    before = Y.detach().clone()
    lr.zero_()
    opt.step()
    assert torch.equal(Y, before)
