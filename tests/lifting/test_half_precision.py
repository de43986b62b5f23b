"""Weights in half precision: the point behind them is in float32, and so are section, moments and steps."""

import warnings

import loops
import pytest
import torch
from loops import OPTIMIZERS, furthest
from steps import sections
from table import each_shape_and_section, is_flat, name, one, point, points, randn
from torch import nn

import ghor


@each_shape_and_section
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_half_precision_weights_are_float32_inside(space, shape, section, dtype, gen):
    """The weight is the float32 point, rounded; so it is off by eps/2 in each entry, which takes Y* Y off I
    by eps ||Y||_2 ||Y||_F at most."""
    Y = nn.Parameter(space.project(point(space, shape, gen, torch.float32)).to(dtype))
    start = Y.detach().clone()
    opt = ghor.optim.Adam([Y], lr=1e-2, space=space, section=section)
    for _ in range(30):
        Y.grad = randn(shape, gen, dtype)
        opt.step()
    assert Y.dtype == dtype
    state = opt.state[Y]
    tensors = {k: v for k, v in state.items() if v.dim() > 0}
    assert {"exp_avg", "exp_avg_sq"} < tensors.keys()
    assert all(v.dtype == torch.float32 for v in tensors.values())
    E = space.E(shape, dtype=torch.float32)
    exact = space.apply_section(state["section"], E) if "section" in state else state["master"]
    exact = exact if "section" in state else points(space, exact.reshape(points(space, Y).shape))
    exact = exact.reshape(shape)
    assert torch.equal(Y.detach(), exact.to(dtype))
    size = torch.linalg.vector_norm(exact.double(), dim=one(space, exact)).amax()
    off = space.residual(exact.double()).max()
    assert off <= 2e-6 * size**2  # in float32, relative where the group is not compact
    assert space.residual(Y.detach().double()).max() <= torch.finfo(dtype).eps * size**2 + off
    assert not torch.equal(Y, start)


@each_shape_and_section
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_the_first_step_starts_at_the_point_behind_the_weight(space, shape, section, dtype, gen):
    """Which is on the space to float32's digits. A weight that does not move keeps its bits, though these are
    not those of its point, rounded again."""
    Y, Z = (nn.Parameter(point(space, shape, gen).to(dtype)) for _ in range(2))
    start = Z.detach().clone()
    opt = ghor.optim.SGD([Y, Z], lr=1e-6, space=space, section=section)
    Y.grad, Z.grad = randn(shape, gen, dtype), torch.zeros_like(Z)
    opt.step()
    state = opt.state[Y]
    exact = space.apply_section(state["section"], Y.float()) if "section" in state else state["master"]
    exact = exact if "section" in state else points(space, exact)
    assert space.residual(exact.double()).max() <= 2e-6 * exact.norm() ** 2
    assert torch.equal(Z, start)


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
def test_half_precision_follows_the_float32_run(section, dtype, gen):
    """Steps far below one ulp of the weight add up in the section: 200 steps of 1e-4 end where float32
    ends."""
    start = point(ghor.Stiefel(), (9, 3), gen, torch.float32).to(dtype)
    Z = nn.Parameter(ghor.Stiefel().project(start.float()))
    Y = nn.Parameter(start.clone())
    opts = [ghor.optim.SGD([p], lr=1e-4, space=ghor.Stiefel(), section=section) for p in (Y, Z)]
    G = randn((9, 3), gen, dtype)
    for _ in range(200):
        Y.grad, Z.grad = G, G.float()
        for opt in opts:
            opt.step()
    assert (Z.detach() - start.float()).abs().max() > 1e-2  # it went somewhere
    assert (Y.detach() - Z.detach()).abs().max() <= torch.finfo(
        dtype
    ).eps  # |Y| <= 1, so an ulp is eps at most


def test_float32_gradient_of_a_half_weight_and_the_other_way_round(gen):
    """torch allows no other dtype in p.grad, so the gradient's dtype is the weight's; in the step it is
    float32."""
    Y = nn.Parameter(ghor.Stiefel().project(point(ghor.Stiefel(), (9, 3), gen, torch.float32)).half())
    opt = ghor.optim.SGD([Y], lr=1.0, space=ghor.Stiefel())
    Y.grad = torch.full_like(Y, 6e4)  # sums of products of it overflow in float16, not in float32
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a velocity of length .* was clipped")
        opt.step()
    assert torch.isfinite(Y).all()
    assert torch.isfinite(opt.state[Y]["section"]).all()


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
