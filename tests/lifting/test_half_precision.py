"""Weights in half precision: the point behind them is in float32, and so are section, moments and steps."""

import pytest
import torch
from helpers import loops
from helpers.loops import OPTIMIZERS, furthest
from helpers.steps import sections
from helpers.table import is_flat, name, point, randn
from torch import nn

import ghor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@sections
def test_a_weight_loaded_beside_another_state_counts(dtype, section, gen):
    """Not the point that the state has: a weight that is not near it was loaded from elsewhere."""
    Y, Z = (nn.Parameter(ghor.Stiefel().random(9, 3, generator=gen, dtype=dtype)) for _ in range(2))
    old, new = (
        ghor.optim.SGD([p], lr=1e-6, momentum=0.9, space=ghor.Stiefel(), section=section) for p in (Y, Z)
    )
    Y.grad = randn((9, 3), gen, dtype)
    old.step()
    new.load_state_dict(old.state_dict())
    start, Z.grad = Z.detach().clone(), randn((9, 3), gen, dtype)
    with pytest.warns(UserWarning, match="parameter 0 of group 0 changed outside"):
        new.step()
    assert (Z - start).abs().max() <= 4 * torch.finfo(dtype).eps  # rounded, and what was rounded projected


@sections
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize(
    ("space", "shape"),
    [(ghor.Stiefel(), (9, 3)), (ghor.Stiefel(blocks=2), (6, 9))],
    ids=["tall", "wide blocks"],
)
def test_half_precision_follows_the_float32_run(space, shape, section, dtype, gen):
    """Steps far below one ulp of the weight add up in the section, however points lie in the weight: 200
    steps of 1e-4 end where float32 ends."""
    start = point(space, shape, gen, torch.float32).to(dtype)
    Z = nn.Parameter(space.project(start.float()))
    Y = nn.Parameter(start.clone())
    opts = [ghor.optim.SGD([p], lr=1e-4, space=space, section=section) for p in (Y, Z)]
    G = randn(shape, gen, dtype)
    for _ in range(200):
        Y.grad, Z.grad = G, G.float()
        for opt in opts:
            opt.step()
    assert (Z.detach() - start.float()).abs().max() > 1e-2  # it went somewhere
    assert (Y.detach() - Z.detach()).abs().max() <= torch.finfo(
        dtype
    ).eps  # |Y| <= 1, so an ulp is eps at most


@sections
def test_large_gradients_of_half_weights_are_computed_in_float32(section, gen):
    """Sums of products of them overflow in float16."""
    Y = nn.Parameter(point(ghor.Stiefel(), (9, 3), gen, torch.float32).half())
    opt = ghor.optim.SGD([Y], lr=1.0, momentum=0.9, space=ghor.Stiefel(), section=section)
    Y.grad, start = torch.full_like(Y, 6e4), Y.detach().clone()
    with pytest.warns(UserWarning, match="a velocity of length .* was clipped"):
        opt.step()
    assert not torch.equal(Y, start)
    assert all(torch.isfinite(v).all() for v in (Y, *opt.state[Y].values()))
    assert opt.state[Y]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda c: c.__name__)
@sections
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=name)
def test_a_run_in_each_dtype_follows_float32(cls, section, dtype):
    """The same gradients to weights of each dtype, 40 steps: half precision weights are the float32 run's,
    rounded; moments are float32 there, and the float64 run differs by float32's rounding."""
    nets = loops.Net(), loops.Net()
    nets[0].to(dtype)
    if dtype == torch.float64:
        ghor.project(nets[0])  # what is on its space to float32's rounding is off it in float64
    else:
        nets[1].load_state_dict(nets[0].state_dict())
        assert max(ghor.project(nets[1]).values()) > 1e-4  # half precision was that far off
    opts = [cls(net, lr=0.01, section=section) for net in nets]
    gen = torch.Generator().manual_seed(2)
    for _ in range(40):
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            q.grad = randn(tuple(p.shape), gen, torch.float16).bfloat16().float()
            p.grad = q.grad.to(dtype)
        for opt in opts:
            opt.step()
    on_spaces = [n for n, _, s in ghor.constraints.declared_spaces(nets[0]) if not is_flat(s)]
    for n in on_spaces:
        p, q = nets[0].get_parameter(n), nets[1].get_parameter(n)
        assert p.dtype == dtype
        # |q| <= 1: half an ulp of it, and what float32 has lost in 40 steps
        assert (p.detach().double() - q.detach().double()).abs().max() <= torch.finfo(dtype).eps / 2 + 1e-5
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert all(v.dtype == wide for v in opts[0].state[p].values() if v.dim() > 0)
    assert furthest(nets[0]) <= (1e-13 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps)
