"""Checks that a refusal names everything it should and leaves everything as it was."""

import copy
import re

import pytest
import torch
from torch import nn

import ghor


class Holder(nn.Module):
    """A weight on a space and a Euclidean one."""

    def __init__(self, Y):
        super().__init__()
        self.weight = nn.Parameter(Y)
        self.free = nn.Parameter(torch.linspace(-1, 1, 4, dtype=Y.dtype))


def groups_of(opt):
    return [{**g, "params": list(g["params"])} for g in opt.param_groups]


def same_groups(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys()
        and all(p is q for p, q in zip(x["params"], y["params"], strict=True))
        and all(x[k] == y[k] for k in x if k != "params")
        for x, y in zip(a, b, strict=True)
    )


def refused(group, error, *words, Optimizer=ghor.optim.Adam, **options):
    """The group is refused by the constructor and by add_param_group, with all the words, and nothing has
    changed."""
    weights = [p for _, p in group["params"]] if isinstance(group["params"][0], tuple) else group["params"]
    before = [p.detach().clone() for p in weights]
    with pytest.raises(error) as at_once:
        Optimizer([dict(group)], **options)
    gen = torch.Generator().manual_seed(1)
    Y, b = nn.Parameter(ghor.Stiefel().random(5, 2, generator=gen)), nn.Parameter(torch.zeros(3))
    good = [
        {"params": [("Y", Y)], "space": ghor.Stiefel()},
        {"params": [("b", b)], "space": ghor.Euclidean()},
    ]
    opt = Optimizer(
        good if isinstance(group["params"][0], tuple) else [g | {"params": [g["params"][0][1]]} for g in good]
    )
    Y.grad, b.grad = torch.ones_like(Y), torch.ones_like(b)
    opt.step()
    groups, state, point = groups_of(opt), copy.deepcopy(opt.state_dict()["state"]), Y.detach().clone()
    with pytest.raises(error) as later:
        opt.add_param_group(dict(group) | options)
    for info in (at_once, later):
        for word in words:
            assert word in str(info.value)
    assert same_groups(opt.param_groups, groups)
    torch.testing.assert_close(opt.state_dict()["state"], state, rtol=0, atol=0)
    assert torch.equal(Y, point)
    for p, old in zip(weights, before, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=0, atol=0, equal_nan=True)
    opt.step()  # and it goes on
    assert not torch.equal(Y, point)


def raises(error, words, call, *weights):
    """`call` raises, with the words (patterns), and leaves the weights as they were."""
    before = [w.detach().clone() for w in weights]
    with pytest.raises(error) as info:
        call()
    for word in words:
        assert re.search(word, str(info.value)), (word, str(info.value))
    for w, old in zip(weights, before, strict=True):
        torch.testing.assert_close(w.detach(), old, rtol=0, atol=0, equal_nan=True)


def text(shape):
    return str(tuple(shape))
