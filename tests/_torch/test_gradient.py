"""Gradients straight from the engine are those of torch.autograd.grad."""

import torch

from ghor._torch.gradient import gradients


def test_as_torch_has_them(gen):
    """To the bit, with None for what is not used, and differentiable if asked."""
    x, y, z = (torch.randn(4, generator=gen, dtype=torch.float64, requires_grad=True) for _ in range(3))
    value = (x.sin() * y.square()).sum()
    expected = torch.autograd.grad(value, (x, y, z), allow_unused=True, create_graph=True)
    found = gradients(value, [x, y, z], twice=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] is None
    second = (torch.autograd.grad(g[1].sum(), x, retain_graph=True)[0] for g in (found, expected))
    assert torch.equal(*second)
    assert not gradients((x * y).sum(), [x])[0].requires_grad


def test_a_subclass_has_its_own_way(gen):
    asked = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.randn(4, generator=gen).as_subclass(Watched).requires_grad_()
    assert gradients(x.square().sum(), [x])[0] is not None
    assert torch.autograd.grad in asked
