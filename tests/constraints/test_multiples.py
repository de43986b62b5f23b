"""Weights s Q: the scale at the start, a number, or learned; and what a released model has of them."""

import copy
import pickle

import pytest
import torch
from helpers.conv1d import Conv1D
from helpers.refusals import raises
from helpers.steps import through_a_file
from helpers.table import randn
from torch import nn

import ghor

ST = ghor.Stiefel()
FLOAT32 = 2e-6


CASES = {
    "plain": (lambda: nn.Linear(9, 4), ST, lambda W: [W]),
    "blocks": (lambda: nn.Linear(8, 12), ghor.Stiefel(blocks=3), lambda W: W.chunk(3)),
    "columns": (lambda: Conv1D(12, 8), ghor.Stiefel(blocks=3, along="columns"), lambda W: W.chunk(3, 1)),
    "kernel": (lambda: nn.Conv1d(3, 4, 5), ghor.Stiefel(flatten=2), lambda W: [W.flatten(1)]),
    "rotation": (lambda: nn.Linear(4, 4), ghor.SpecialOrthogonal(), lambda W: [W]),
}


def off(M, s):
    """||Q^T Q - I|| of Q = M/s, written without the library."""
    Q = M.detach().double() / s
    Q = Q if Q.shape[0] >= Q.shape[1] else Q.T
    return float((Q.T @ Q - torch.eye(Q.shape[1])).norm())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", ["start", 0.3])
@pytest.mark.parametrize("learn", [False, True])
def test_multiples(case, scale, learn, gen):
    """Each matrix is s times an orthonormal one; s is what it was, unless it is learned; training moves Q."""
    make, space, matrices = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = make()
    before = layer.weight.detach().clone()
    norms = [M.norm() for M in matrices(before)]
    moved = ghor.constrain_multiples(layer, "weight", space, scale, learn)
    assert moved == {"weight": pytest.approx(float((layer.weight - before).norm().detach()), rel=1e-5)}
    start = [float(M.norm().detach()) for M in matrices(layer.weight)]
    n = [min(M.shape) for M in matrices(before)]
    s = [float(N) / k**0.5 if scale == "start" else scale for N, k in zip(norms, n, strict=True)]
    assert start == pytest.approx([x * k**0.5 for x, k in zip(s, n, strict=True)], rel=1e-5)
    opt = ghor.optim.Adam(layer, lr=0.05)
    x = randn(
        (4, 3, 9) if case == "kernel" else (6, 9 if case == "plain" else 4 if case == "rotation" else 8), gen
    )
    for _ in range(12):
        opt.zero_grad()
        (layer(x.float()) - 1).square().sum().backward()
        opt.step()
    end = [float(M.norm().detach()) for M in matrices(layer.weight)]
    s = [N / k**0.5 for N, k in zip(end, n, strict=True)]
    assert all(off(M, x) <= FLOAT32 for M, x in zip(matrices(layer.weight), s, strict=True))
    same = [a == pytest.approx(b, rel=1e-6) for a, b in zip(start, end, strict=True)]
    assert not any(same) if learn else all(same)
    assert not torch.allclose(layer.weight, before, atol=1e-2)
    assert ghor.check(layer).ok


def test_released_multiples_are_ordinary_weights(gen):
    layer = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 4))
    keys, x = set(layer.state_dict()), randn((3, 9), gen, torch.float32)
    ghor.constrain_multiples(layer, "*.weight", ST)
    y = layer(x)
    again = copy.deepcopy(layer)
    again.load_state_dict(through_a_file(layer.state_dict()))
    assert torch.equal(again(x), y)
    ghor.release(layer)
    assert torch.equal(again(x), y)  # a copy, which has the same classes, keeps its multiples
    assert len(ghor.check(again).weights) == 2
    assert set(layer.state_dict()) == keys
    assert torch.equal(layer(x), y)
    assert b"ghor" not in pickle.dumps(layer)
    assert type(layer[0]) is nn.Linear


@pytest.mark.parametrize("names", [["a.weight", "b.weight"], ["b.weight", "a.weight"]])
def test_a_module_with_two_names_is_scaled_once(names):
    net = nn.Module()
    net.a = net.b = nn.Linear(8, 8)
    size = net.a.weight.norm()
    moved = ghor.constrain_multiples(net, names, ST)
    assert list(moved) == names
    assert moved["a.weight"] == moved["b.weight"] > 0
    torch.testing.assert_close(net.a.weight.norm(), size)
    assert len(net.a.parametrizations.weight) == 1


def test_multiples_leave_a_padding_row_alone(gen):
    net = nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4, padding_idx=0))
    before = net[1].weight.detach().clone()
    ghor.constrain_multiples(net, ["0.weight", "1.weight"], ghor.Sphere())
    torch.testing.assert_close(net[1].weight.detach(), before)
    opt = ghor.optim.SGD(net, lr=0.1)
    net[1](torch.tensor([0, 1, 2])).square().sum().backward()
    net[0].parametrizations.weight.original.grad = randn((4, 4), gen, torch.float32)
    opt.step()
    assert not net[1].weight[0].any()
    assert torch.isfinite(net[1].weight).all()
    net[1].weight = before  # through the inverse of the parametrization
    torch.testing.assert_close(net[1].weight.detach(), before)


def test_weights_keep_their_order():
    """A state dict of an optimizer knows weights by their order."""
    names = ["weight_ih_l0", "weight_hh_l0"]
    lstm = nn.LSTM(4, 4)
    ghor.constrain_multiples(lstm, names, ghor.Sphere())
    found = [n.split(".")[1] for n, _ in lstm.named_parameters() if "original" in n]
    assert found == names


def test_multiples_of_a_constrained_weight():
    """The declaration of the weight itself, and its anchor, are gone: it is Q that is declared now."""
    layer = nn.Linear(4, 4)
    ghor.constrain(layer, "weight", ST, anchor="start")
    ghor.constrain(layer, "bias", ghor.Sphere())
    ghor.constrain_multiples(layer, "weight", ST, scale=2.0)
    assert ghor.check(layer).ok
    assert sorted(ghor.check(layer).weights) == ["bias", "parametrizations.weight.original"]
    ghor.optim.SGD(layer, lr=0.1)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *((torch.float32, size) for size in (1e-30, 1e-25, 1e25, 1e37)),
        (torch.float16, 1e3),
        (torch.bfloat16, 1e37),
    ],
)
def test_a_weight_of_any_size_keeps_it(dtype, size, gen):
    """Also where its norm is beyond its dtype and the scale is not; what is said of the move is exact."""
    layer = nn.Linear(100, 100, bias=False, dtype=dtype)
    layer.weight.data = (randn((100, 100), gen, torch.float64) * size).to(dtype)
    before = layer.weight.detach().double()
    moved = ghor.constrain_multiples(layer, "weight", ST)["weight"]
    after = layer.weight.detach().double()
    near = 1e-5 if dtype == torch.float32 else 2e-2  # bfloat16 has eight bits
    assert float(after.norm() / before.norm()) == pytest.approx(1, rel=near)
    assert 0 < moved == pytest.approx(float((after - before).norm()), rel=1e-6)


def test_a_scale_may_be_out_of_proportion(gen):
    """Here 1/s times the weight is infinite: its point is found without it."""
    layer = nn.Linear(5, 5, bias=False)
    X = randn((5, 5), gen, torch.float32)
    layer.weight.data = 1e20 * X
    ghor.constrain_multiples(layer, "weight", ST, scale=1e-20)
    assert float((1e20 * layer.weight.detach() - ST.project(X)).abs().max()) <= 1e-5


def layers(**more):
    return nn.ModuleDict({"a": nn.Linear(4, 4), "qkv": nn.Linear(8, 24), **more})


def tied():
    model = layers(b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    return model


def zero():
    model = layers(zero=nn.Linear(4, 4))
    nn.init.zeros_(model.zero.weight)
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "error", "words"),
    [
        (zero, ("*.weight", ghor.Stiefel(blocks=1)), ValueError, r"^zero\.weight: a matrix of rank 0"),
        (layers, ("a.weight", ghor.Hyperbolic()), TypeError, r"those of orthogonal.*got Hyperbolic\(\)"),
        *(
            (layers, ("a.weight", ST, wrong), ValueError, f"positive number or 'start', got {wrong!r}")
            for wrong in (0, -1, float("inf"), "begin")
        ),
        *(
            (layers, ("a.weight", ghor.Sphere(radius=r)), ValueError, r"use ghor\.Sphere\(\) in place of")
            for r in (2.0, "start")
        ),
        (lambda: nn.Linear(4, 4, device="meta"), ("weight", ST), ValueError, "^weight is on the meta device"),
        (lambda: nn.LazyLinear(4), ("weight", ST), ValueError, "^weight has no shape yet: call the lazy"),
        (tied, ("a.weight", ST), ValueError, r"^a\.weight is tied to another weight"),
    ],
)
def test_what_cannot_be_a_multiple(make, arguments, error, words):
    model = make()
    before = list(model.state_dict())
    raises(error, [words], lambda: ghor.constrain_multiples(model, *arguments))
    assert list(model.state_dict()) == before


def test_packed_matrices_are_pointed_out():
    with pytest.warns(UserWarning, match=r"^qkv\.weight .* seems to hold several projections") as caught:
        ghor.constrain_multiples(layers(), "qkv.weight", ST)
    assert len(caught) == 1
    ghor.constrain_multiples(nn.Linear(32, 96), "weight", ghor.Stiefel(blocks=3))  # warnings are errors here
