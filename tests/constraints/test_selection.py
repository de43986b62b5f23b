"""Which parameters `constrain` selects: by names, patterns and functions; and what is said where there are
none."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import ghor
from ghor.constraints.registry import declared_space

ST = ghor.Stiefel()


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)


def test_patterns_and_predicates():
    model = encoder()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moved = ghor.constrain(model, "layers.*.linear?.weight", ST)
    names = [f"layers.{i}.linear{j}.weight" for i in (0, 1) for j in (1, 2)]
    assert list(moved) == names
    for n in names:
        change = (model.get_parameter(n) - before[n]).detach()
        assert moved[n] == pytest.approx(float(change.norm()), rel=1e-5)
    chosen = ghor.constrain(model, lambda n, p: n.endswith("in_proj_weight"), ghor.Stiefel(blocks=(3, 2)))
    assert list(chosen) == [f"layers.{i}.self_attn.in_proj_weight" for i in (0, 1)]
    assert list(ghor.constrain(model, ["layers.0.linear1.weight", "layers.1.lin*1.weight"], ST)) == names[::2]
    assert f"{chosen['layers.0.self_attn.in_proj_weight']:.1e}" in ghor.check(copy.deepcopy(model))


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ("head.w*", ["head.weight"]),
        ("head*.weight", ["head.weight", "heads.a.weight"]),
        ("*.weight", ["emb.weight", "heads.a.weight"]),
        (["head.weight", "*.weight"], ["head.weight", "heads.a.weight"]),
        (["e*", "head.w*"], ["emb.weight"]),
        (["e*", "head.weight"], ["emb.weight", "head.weight"]),
    ],
)
def test_patterns_find_a_tied_weight_by_each_name_and_select_it_once(which, names):
    model = nn.ModuleDict({"emb": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["heads"] = nn.ModuleDict({"a": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["emb"].weight
    assert list(ghor.constrain(model, which, ST)) == names
    assert declared_space(model["emb"].weight) == ST


@pytest.mark.parametrize("tied", ["weight", "module"])
def test_a_weight_with_two_names_has_moved_by_both(tied):
    net = nn.Module()
    net.a, net.b = nn.Linear(8, 8), nn.Linear(8, 8)
    if tied == "weight":
        net.b.weight = net.a.weight
    else:
        net.b = net.a
    before = net.a.weight.detach().clone()
    moved = ghor.constrain(net, ["a.weight", "b.weight"], ST)
    distance = float(torch.dist(net.a.weight.detach(), before))
    assert moved["a.weight"] == moved["b.weight"] == pytest.approx(distance)
    assert ghor.check(net).weights["a.weight"].moved == moved["a.weight"]
    again = ghor.constrain(net, ["b.weight"], ghor.Sphere())  # the last move counts, by whichever name
    assert ghor.check(net).weights["a.weight"].moved == again["b.weight"] != moved["b.weight"]


def test_the_space_may_depend_on_the_weight():
    model = nn.ModuleDict({"q": nn.Linear(8, 16), "k": nn.Linear(8, 8)})
    ghor.constrain(model, "?.weight", lambda name, p: ghor.Stiefel(blocks=len(p) // 4))
    assert declared_space(model["q"].weight) == ghor.Stiefel(blocks=4)
    assert declared_space(model["k"].weight) == ghor.Stiefel(blocks=2)


def linear():
    layer = nn.Linear(3, 3)
    layer.register_buffer("table", torch.eye(3))
    return layer


def computed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.utils.parametrizations.orthogonal(model[1])
    return model


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(torch.jit.script(nn.Linear(4, 3)))


ABSENT = ("wieght", "weight.data", "proj.weight", "training", "", "table")


@pytest.mark.parametrize(
    ("make", "which", "space", "error", "words"),
    [
        *(
            (linear, n, ST, ValueError, f"^Linear has no parameter '{n}'; it has: weight, bias$")
            for n in ABSENT
        ),
        (
            encoder,
            "layers.0.linear.weight",
            ST,
            ValueError,
            r"'; it has: layers.*\.linear1\.weight.* others$",
        ),
        (encoder, "layer.*", ST, ValueError, r"no parameter like 'layer\.\*'"),
        (encoder, lambda n, p: False, ST, ValueError, "the function selects none of the 24 parameters"),
        (computed, "1.weight", ST, ValueError, r"1\.weight of Sequential is computed by a param.*from_param"),
        (lambda: computed()[1], "weight", ST, ValueError, "weight of .*Linear is computed by a parametriz"),
        (scripted, "0.weight", ST, TypeError, r"^0\.weight is a weight of a scripted module.*then script it"),
        (scripted, lambda n, p: p.dim() == 2, ST, TypeError, r"^0\.weight is a weight of a scripted module"),
        (linear, ST, "weight", TypeError, r"which parameters.*then the space; got Stiefel\(\)"),
        (linear, 0, ST, TypeError, r"which parameters.*got 0"),
        (linear, ["weight", 1], ST, TypeError, r"which parameters.*got 1"),
        (linear, linear().weight, ST, TypeError, r"which parameters.*got a Parameter.*pass its name"),
        (linear, "weight", ghor.Stiefel, TypeError, r"got <class '.*Stiefel'>: write Stiefel\(\)"),
        (linear, "?eight", "Stiefel", TypeError, r"such as ghor\.Stiefel\(\), got 'Stiefel'"),
        (lambda: nn.Linear(3, 1), "*", ST, ValueError, "^bias"),  # where one cannot be moved, none is
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_selects_nothing(make, which, space, error, words):
    """Nothing has moved, nothing is declared, and other models can be."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error) as info:
        ghor.constrain(model, which, space)
    assert re.search(words, str(info.value)), str(info.value)
    assert str(info.value).count("weight") < 6  # three of the 24 names
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(declared_space(p) is None for p in model.parameters())
    layer = ghor.constrain(nn.Linear(4, 3), "weight", ST)
    assert declared_space(layer.weight) == ST
