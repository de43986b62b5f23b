"""Gradients that are NaN or infinite: the weight stays and a warning says so, or error_if_nonfinite raises
first."""

import copy
import warnings

import pytest
import torch
from helpers.refusals import Holder
from helpers.steps import STIEFEL, frame_of, take_steps, weight
from helpers.table import each_shape_and_section, one, point, points, randn
from torch import nn

import ghor


def trained(space, shape, gen, section, steps=3, Optimizer=ghor.optim.Adam, **options):
    module = ghor.constrain(Holder(point(space, shape, gen)), "weight", space)
    opt = Optimizer(module, lr=1e-2, section=section, **options)
    take_steps(opt, gen, steps)
    return module, opt


def steps(opts, count):
    for _ in range(count):
        for opt in opts:
            opt.step()


def finite(opt, p):
    return all(torch.isfinite(v).all() for v in opt.state[p].values() if torch.is_tensor(v))


@each_shape_and_section
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite(space, shape, section, value, gen):
    """The weight and its section stay, one warning; the Euclidean weight does what it does in torch."""
    module, opt = trained(space, shape, gen, section)
    twin = nn.Parameter(module.free.detach().clone())
    torch_opt = torch.optim.Adam([twin], lr=1e-2)
    torch_opt.load_state_dict({**torch_opt.state_dict(), "state": {0: copy.deepcopy(opt.state[module.free])}})
    Y, Lambda = module.weight.detach().clone(), frame_of(opt, module.weight)
    module.weight.grad.view(-1)[0] = module.free.grad[0] = value
    twin.grad = module.free.grad
    with pytest.warns(
        UserWarning, match=r"velocity of weight is not finite.*stays where it is.*constrain"
    ) as caught:
        steps([opt, torch_opt], 2)
    assert len(caught) == 1
    now, first = frame_of(opt, module.weight), (0,) * (Y.dim() - len(one(space, Y)))  # the others move on
    assert torch.equal(points(space, module.weight)[first], points(space, Y)[first])
    for key, value in Lambda.items():
        torch.testing.assert_close(now[key][first], value[first], rtol=0, atol=0)
    torch.testing.assert_close(module.free, twin, rtol=0, atol=0, equal_nan=True)


def test_a_nan_in_one_weight_leaves_the_others_to_the_bit(gen):
    weights = [nn.Parameter(point(ghor.Stiefel(), (7, 3), gen)) for _ in range(4)]
    twins = [nn.Parameter(p.detach().clone()) for p in weights]
    opts = [ghor.optim.Adam(ps, lr=0.1, space=ghor.Stiefel()) for ps in (weights, twins)]
    for p, q in zip(weights, twins, strict=True):
        p.grad = randn((7, 3), gen)
        q.grad = p.grad.clone()
    stays = weights[2].detach().clone()
    weights[2].grad[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="velocity of parameter 2 of group 0"):
        steps(opts, 2)
    assert [torch.equal(p, q) for p, q in zip(weights, twins, strict=True)] == [True, True, False, True]
    assert torch.equal(weights[2], stays)


def test_a_warning_turned_into_an_error_leaves_a_finished_step(gen):
    Y, Z = weight(5, 3), weight(7, 3)
    opt = ghor.optim.SGD([Y, Z], lr=1.0, space=STIEFEL)
    Y.grad, Z.grad = torch.full((5, 3), float("nan")), randn((7, 3), gen, torch.float32)
    start = Z.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not finite"):
            opt.step()
    moved = Z.detach().clone()
    assert not torch.equal(moved, start)
    Y.grad, Z.grad = torch.zeros(5, 3), torch.zeros(7, 3)
    opt.step()
    assert torch.equal(Z, moved)  # the velocity is not applied twice


# -- and how to go on ----------------------------------------------------------------------------------------


@each_shape_and_section
def test_load_state_dict_recovers_from_nan(space, shape, section, gen):
    """After loading what was saved before, the run is the one without the NaN, bit for bit."""
    module, opt = trained(space, shape, gen, section)
    saved = copy.deepcopy(opt.state_dict()), copy.deepcopy(module.state_dict())
    take_steps(opt, torch.Generator().manual_seed(5), 4)
    expected = module.weight.detach().clone()
    module.weight.grad.fill_(float("nan"))
    with pytest.warns(UserWarning, match="velocity of weight is not finite"):
        opt.step()
    assert not finite(opt, module.weight)
    module.load_state_dict(saved[1])
    opt.load_state_dict(saved[0])
    take_steps(opt, torch.Generator().manual_seed(5), 4)
    assert torch.equal(module.weight, expected)


@each_shape_and_section
def test_constrain_again_recovers_from_nan(space, shape, section, gen):
    """The moments start from zero, and the weight moves again."""
    module, opt = trained(space, shape, gen, section)
    module.weight.grad.fill_(float("inf"))
    with pytest.warns(UserWarning, match="velocity of weight is not finite"):
        opt.step()
    ghor.constrain(module, "weight", space)
    Y = module.weight.detach().clone()
    with pytest.warns(UserWarning, match="weight changed outside.*start from zero"):
        take_steps(opt, gen, 1)
    assert finite(opt, module.weight)
    take_steps(opt, gen, 3)
    assert finite(opt, module.weight)
    # Adam's first steps are lr long in every coordinate; 1e-3 is a tenth of one
    assert (module.weight - Y).abs().max() > 1e-3
    assert (
        space.residual(module.weight.detach()).max() <= 1e-12
    )  # a few steps of float64 rounding, ||Y|| < 10


# -- error_if_nonfinite --------------------------------------------------------------------------------------


@each_shape_and_section
def test_error_if_nonfinite_raises_before_anything_moves(space, shape, section, gen):
    module, opt = trained(space, shape, gen, section, error_if_nonfinite=True)
    for culprit in ("weight", "free"):
        take_steps(opt, gen, 1)
        p = getattr(module, culprit)
        p.grad.view(-1)[-1] = float("nan")
        before = copy.deepcopy((opt.state_dict()["state"], module.state_dict()))
        with pytest.raises(RuntimeError, match=f"gradient of {culprit} is not finite; nothing was moved"):
            opt.step()
        torch.testing.assert_close((opt.state_dict()["state"], module.state_dict()), before, rtol=0, atol=0)
    take_steps(opt, gen, 2)
    assert finite(opt, module.weight)


def test_error_if_nonfinite_by_group(gen):
    """Only the groups that ask for it are looked at."""
    Y, Z = (nn.Parameter(point(ghor.Stiefel(), (5, 2), gen)) for _ in range(2))
    groups = [{"params": [Y], "error_if_nonfinite": True}, {"params": [Z]}]
    opt = ghor.optim.SGD(groups, lr=0.1, space=ghor.Stiefel())
    Y.grad, Z.grad = torch.ones_like(Y), torch.full_like(Z, float("nan"))
    with pytest.warns(UserWarning, match="velocity of parameter 0 of group 1 is not finite"):
        opt.step()
    before = Y.detach().clone()
    Y.grad = Z.grad
    with pytest.raises(RuntimeError, match="gradient of parameter 0 of group 0"):
        opt.step()
    assert torch.equal(Y, before)


def test_sparse_gradient_that_is_not_finite_raises_too():
    e = ghor.constrain(nn.Embedding(6, 4, sparse=True), "weight", ghor.Sphere())
    opt = ghor.optim.SGD(e, lr=0.1, error_if_nonfinite=True)
    (e(torch.tensor([1])).sum() * float("nan")).backward()
    with pytest.raises(RuntimeError, match="gradient of weight is not finite"):
        opt.step()
