"""Weights that were loaded, unpickled, swapped, cast, frozen or written to: the next step knows."""

import copy
import io
import pickle

import pytest
import torch
from helpers.table import randn
from torch import nn

import ghor

ST = ghor.Stiefel()


def weight(*shape, space=ST, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return nn.Parameter(space.random(*shape, generator=gen, dtype=dtype))


def step(opt, *params, seed=1, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = scale * randn(tuple(p.shape), gen).to(p.dtype)
    opt.step()


# -- wrong results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_weight_that_was_loaded_is_kept(section, dtype):
    """Also where it differs by less than a rounding error from what the optimizer had left there."""
    torch.manual_seed(0)
    layer = ghor.constrain(nn.Linear(8, 64, bias=False, dtype=dtype), "weight", ST)
    opt = ghor.optim.Adam(layer, lr=1e-3, section=section)
    step(opt, layer.weight)
    saved = copy.deepcopy(layer.state_dict())
    for seed in range(2, 5):
        step(opt, layer.weight, seed=seed)
    differ = (layer.weight != saved["weight"]).sum()
    assert differ > 100
    layer.load_state_dict(saved)
    opt.param_groups[0]["lr"] = 1e-9
    with pytest.warns(UserWarning, match="changed outside"):
        step(opt, layer.weight)
    # a weight of this precision is off its space: of the nearest point some entries round to the next number
    before, now = saved["weight"].float(), layer.weight.float()
    assert ((now - before).abs() <= torch.finfo(dtype).eps * before.abs().clamp_min(0.1)).all()
    assert (now != before).sum() < 0.1 * now.numel()


# -- silent surprises --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (ghor.Sphere(flatten=2), (256, 1024)),
        (ghor.Sphere(flatten=2), (1024, 1024)),
        (ST, (200_000, 2)),
        (ST, (2, 300_000)),
        (ghor.Grassmann(), (1_000_000, 2)),
    ],
    ids=str,
)
def test_long_columns_in_float32(space, shape):
    """Sums of 1e6 terms lose four digits of float32; constrain, step, copy and go on all the same."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(shape))
    ghor.constrain(layer, "weight", space)

    def off():
        return float(space.residual(layer.weight.detach().double()))

    assert off() <= 1e-6
    opt = ghor.optim.Adam(layer, lr=1e-3)
    for seed in range(3):
        step(opt, layer.weight, seed=seed)
        assert off() <= 4e-6  # 10 eps a step, of one radian for the longest
    twin, opt_2 = copy.deepcopy((layer, opt))
    step(opt_2, twin.weight)


@pytest.mark.parametrize("angle", [0.49, 3.9])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_long_steps_stay_on_short_spheres_in_float32(n, angle):
    """Nearly to the pole of the frame and beyond a step multiplies what the point is off; nobody else is
    blamed."""
    space, gen = ghor.Sphere(), torch.Generator().manual_seed(0)
    Y = nn.Parameter(space.random(5000, n, generator=gen))
    opt = ghor.optim.SGD([Y], space=space, lr=1.0)
    for _ in range(35):
        G = space.tangent(Y.detach(), torch.randn(5000, n, generator=gen))
        Y.grad = G / G.norm(dim=-1, keepdim=True) * angle
        opt.step()  # warnings are errors
        assert space.residual(Y.detach().double()).max() <= 5e-6


def test_bare_parameters_find_the_records_of_an_unpickled_module():
    layer = ghor.constrain(nn.Linear(7, 3), "weight", ST)
    again = pickle.loads(pickle.dumps(layer))
    fresh = ghor.constrain(nn.Linear(7, 3), "weight", ST)
    opt = ghor.optim.SGD([*again.parameters(), *fresh.parameters()], lr=0.1)
    assert opt.param_groups[0]["space"] == (ST, ghor.Euclidean(), ST, ghor.Euclidean())


def test_bare_parameters_find_the_record_after_load_with_assign():
    layer = ghor.constrain(nn.Linear(7, 3), "weight", ST)
    other = ghor.constrain(nn.Linear(7, 3), "weight", ST)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert ghor.optim.SGD(layer.parameters(), lr=0.1).param_groups[0]["space"] == (ST, ghor.Euclidean())


@pytest.mark.parametrize("shape", [(600, 4), (4, 600)])
def test_an_implicit_section_sees_every_write_through_data(shape):
    p = weight(*shape)
    opt = ghor.optim.Adam([p], space=ST, lr=1e-2, section="implicit")
    for seed in range(4):
        step(opt, p, seed=seed)
    good = p.detach().clone()
    p.data.mul_(1.5)
    with pytest.raises(ValueError, match="off Stiefel"):
        step(opt, p)
    p.data.copy_(good)
    step(opt, p)
    other = weight(*shape, seed=7)
    p.data.copy_(other.detach())
    with pytest.warns(UserWarning, match="changed outside"):
        step(opt, p)
    p.data.copy_(p.data.flip(0))  # the same numbers in another order
    opt._warn.said.clear()
    with pytest.warns(UserWarning, match="changed outside"):
        step(opt, p)
    assert ST.residual(p.detach().double()) < 1e-6


def saved_after_steps(section):
    p = weight(9, 3)
    opt = ghor.optim.Adam([p], space=ST, lr=1e-2, section=section)
    for seed in range(3):
        step(opt, p, seed=seed)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    return p, opt, torch.load(buffer, weights_only=True)


def test_options_of_a_checkpoint_that_differ_are_said():
    p, _, saved = saved_after_steps("implicit")
    opt = ghor.optim.Adam([p], space=ST, retraction="geodesic", section="transported")
    with pytest.warns(UserWarning, match="it is taken over") as caught:
        opt.load_state_dict(saved)
    said = " ".join(str(w.message) for w in caught)
    assert "section='implicit'" in said
    assert "retraction='cayley'" in said
    assert (opt.param_groups[0]["section"], opt.param_groups[0]["retraction"]) == ("implicit", "cayley")


# -- refused though valid ----------------------------------------------------------------------------------


def test_distributed_checkpoints_of_momentum_free_sgd_in_a_mixed_network():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    torch.manual_seed(0)

    def build():
        net = nn.Sequential(nn.Linear(7, 3))
        ghor.constrain(net, "0.weight", ST)
        return net, ghor.optim.SGD(net, lr=0.1)

    net, opt = build()
    step(opt, *net.parameters())
    other, fresh = build()
    other.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(net, opt))
    step(opt, *net.parameters(), seed=5)
    step(fresh, *other.parameters(), seed=5)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_parameters_can_be_swapped():
    """No weak reference to a declared weight is kept."""
    layer = ghor.constrain(nn.Linear(7, 3), "weight", ST)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert layer.weight.dtype == torch.float64
    assert [s for *_, s in ghor.constraints.declared_spaces(layer)] == [ST, ghor.Euclidean()]


def test_frozen_weights_wait():
    net = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 2))
    ghor.constrain(net, "0.weight", ST)
    frozen = [net[0].weight.requires_grad_(False), net[1].bias.requires_grad_(False)]
    opt = ghor.optim.Adam(net, lr=0.1)
    before = [p.clone() for p in frozen]
    x = torch.ones(4, 7)
    net(x).square().sum().backward()
    opt.step()
    assert all(map(torch.equal, frozen, before))
    net[0].weight.requires_grad_(True)
    net(x).square().sum().backward()
    opt.step()
    assert not torch.equal(net[0].weight, before[0])
    assert ST.residual(net[0].weight.detach()) < 1e-5


def test_a_group_without_names_joins_those_of_a_module():
    net = ghor.constrain(nn.Linear(7, 3), "weight", ST)
    opt = ghor.optim.Adam(net, lr=0.1)
    more = weight(5, 2, seed=3)
    opt.add_param_group({"params": [more], "space": ST})
    step(opt, *net.parameters(), more)
    assert ST.residual(more.detach()) < 1e-5


def test_a_change_of_dtype_is_an_occasion_to_project():
    net = ghor.constrain(nn.Linear(16, 8), "weight", ST).double()  # as Lightning's "64-true" has it
    with pytest.warns(UserWarning, match=r"float64 and was .* off Stiefel\(\).*projected"):
        opt = ghor.optim.Adam(net, lr=0.1)
    assert ST.residual(net.weight.detach()) < 1e-13
    step(opt, *net.parameters())
    net.weight.data.add_(1e-3)
    with pytest.raises(ValueError, match="off Stiefel"):
        step(opt, *net.parameters())
