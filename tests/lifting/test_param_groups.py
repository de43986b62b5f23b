"""Options that nobody knows or that make no sense, given to the constructor, in a group, or written there
later."""

import copy
import re
import warnings

import pytest
import torch
from helpers.refusals import Holder, raises, refused
from helpers.steps import STIEFEL, same, take_steps, weight
from helpers.table import MANIFOLDS, SPACES, accepts, each_section, each_shape, kinds, on, point
from torch import nn

import ghor

# -- spaces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    ["Stiefel", ghor.Stiefel, 3, object(), {"space": "Stiefel"}, [ghor.Stiefel], ["Stiefel"]],
    ids=["string", "class", "number", "object", "dict", "list of classes", "list of strings"],
)
def test_space_of_a_wrong_type(wrong, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    refused(
        {"params": [("proj.weight", Y)], "space": wrong}, TypeError, "proj.weight", "ghor.Stiefel()", "got"
    )
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 must be a ghor space"):
        ghor.optim.Adam([Y], space=wrong)
    if not isinstance(wrong, list):
        module = Holder(Y.detach().clone())
        with pytest.raises(TypeError, match=r"such as ghor\.Stiefel\(\), got"):
            ghor.constrain(module, "weight", wrong)
        assert "_ghor_spaces" not in vars(module)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_number_of_spaces(count, gen):
    params = [nn.Parameter(point(ghor.Stiefel(), (5, 2), gen)) for _ in range(2)]
    words = ("2 parameters", f"{count} spaces", "one for all")
    refused({"params": params, "space": [ghor.Stiefel()] * count}, ValueError, *words)


@each_shape
def test_group_that_contradicts_the_declaration(space, shape, gen):
    module = ghor.constrain(Holder(point(space, shape, gen)), "weight", space)
    for other in [s for s in SPACES if s != space and accepts(s, shape)]:
        words = ("weight", f"declared on {space!r}", repr(other), "leave 'space' out")
        refused({"params": [("weight", module.weight)], "space": other}, ValueError, *words)
    assert ghor.optim.Adam(module).param_groups[0]["space"][0] == space


@pytest.mark.parametrize(
    "kind", [ghor.Stiefel, ghor.Grassmann, ghor.SpecialOrthogonal, ghor.Sphere, ghor.SPD]
)
def test_sizes_come_from_the_weight(kind):
    """As in pymanopt Stiefel(5, 3): not `flatten` and `blocks` by mistake."""
    with pytest.raises(TypeError, match=r"no sizes, got|1 positional argument"):
        kind(5, 3)


def test_an_unknown_option_names_the_optimizer():
    with pytest.raises(TypeError, match=r"Adam\.__init__\(\).*unexpected keyword argument 'lrr'"):
        ghor.optim.Adam([torch.nn.Parameter(torch.zeros(3))], lrr=1)


# -- keys and values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "wrong", "error", "words"),
    [
        ("retraction", "caley", ValueError, ("'caley'", "cayley", "geodesic")),
        ("retraction", None, ValueError, ("None", "cayley", "geodesic")),
        ("retraction", ["cayley"], ValueError, ("['cayley']", "geodesic")),
        ("section", "transport", ValueError, ("'transport'", "auto", "transported", "implicit")),
        ("section", None, ValueError, ("None", "auto", "transported", "implicit")),
        ("max_angle", 0, ValueError, ("0", "positive number of radians")),
        ("max_angle", "0.1", ValueError, ("'0.1'", "positive number of radians")),
        ("max_angle", True, ValueError, ("True", "positive number of radians")),
        ("max_angle", float("nan"), ValueError, ("nan", "positive number of radians")),
        ("error_if_nonfinite", "yes", TypeError, ("'yes'", "True or False")),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_unknown_values_of_our_options(option, wrong, error, words, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    refused({"params": [Y], "space": ghor.Stiefel(), option: wrong}, error, "group", *words)
    with pytest.raises(error, match=re.escape(words[0])):
        ghor.optim.SGD([Y], space=ghor.Stiefel(), **{option: wrong})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sapce", "space"),
        ("spaces", "space"),
        ("retract", "retraction"),
        ("retractions", "retraction"),
        ("sections", "section"),
        ("max_angles", "max_angle"),
        ("error_if_non_finite", "error_if_nonfinite"),
    ],
)
def test_misspelt_group_key(key, meant, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    refused(
        {"params": [Y], "space": ghor.Stiefel(), key: "cayley"},
        ValueError,
        repr(key),
        "group",
        f"mean {meant!r}",
    )


def test_an_option_of_the_rule_may_look_like_ours(gen):
    class Rule(torch.optim.SGD):
        def __init__(self, params, lr=0.1, sections=2):
            super().__init__(params, lr)
            self.defaults["sections"] = sections
            for group in self.param_groups:
                group.setdefault("sections", sections)

    Y = nn.Parameter(point(STIEFEL, (5, 2), gen))
    opt = ghor.lift(Rule)([{"params": [Y], "space": STIEFEL, "sections": 3}])
    assert opt.param_groups[0]["sections"] == 3


@pytest.mark.parametrize("given", [list, iter], ids=["list", "iterator"])
def test_a_weight_in_two_groups_has_both_of_its_names(given, gen):
    """Also if the groups can be read but once."""
    Y = nn.Parameter(point(STIEFEL, (5, 2), gen))
    groups = [{"params": given([Y]), "space": STIEFEL} for _ in range(2)]
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 .* is parameter 0 of group 0, too"):
        ghor.optim.SGD(given(groups))


@pytest.mark.parametrize("cls", ghor.optim.__all__)
@pytest.mark.parametrize("option", ["sapce", "retract", "trust_ratio"])
def test_option_that_nobody_knows(cls, option, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        getattr(ghor.optim, cls)([Y], space=ghor.Stiefel(), **{option: 1})


def test_options_that_other_optimizers_know(gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    with pytest.raises(TypeError, match="momentum"):
        ghor.optim.Adam([Y], space=ghor.Stiefel(), momentum=0.9)
    with pytest.raises(TypeError, match="betas"):
        ghor.optim.SGD([Y], space=ghor.Stiefel(), betas=(0.9, 0.99))


@pytest.mark.parametrize("cls", [c for c in ghor.optim.__all__ if c not in ("Muon", "PaperAdam")])
def test_differentiable(cls, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    Optimizer = getattr(ghor.optim, cls)
    opt, before = Optimizer([Y], space=ghor.Stiefel(), differentiable=True), Y.detach().clone()
    Y.grad = torch.ones_like(Y)
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0 is on Stiefel\(\): differentiable=True does not"
    ):
        opt.step()
    assert torch.equal(Y, before)
    opt.param_groups[0]["differentiable"] = False
    opt.step()
    assert not torch.equal(Y, before)
    Optimizer(
        [nn.Parameter(torch.zeros(2))], space=ghor.Euclidean(), differentiable=True
    )  # torch's own business


OPTIONS = [
    (ghor.optim.Adam, {"lr": -1e-3}, "Invalid learning rate: -0.001"),
    (ghor.optim.Adam, {"lr": float("nan")}, "Invalid learning rate: nan"),
    (ghor.optim.Adam, {"betas": (-0.1, 0.9)}, "Invalid beta parameter at index 0: -0.1"),
    (ghor.optim.Adam, {"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    (ghor.optim.Adam, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    (ghor.optim.Adam, {"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    (ghor.optim.SGD, {"lr": -1e-3}, "Invalid learning rate: -0.001"),
    (ghor.optim.SGD, {"momentum": -0.9}, "Invalid momentum value: -0.9"),
    (ghor.optim.RMSprop, {"alpha": -0.9}, "Invalid alpha value: -0.9"),
    (ghor.optim.Rprop, {"etas": (1.5, 1.2)}, "Invalid eta values: 1.5, 1.2"),
    (ghor.optim.PaperAdam, {"lr": -1e-3}, "Invalid learning rate: -0.001"),
    (ghor.optim.PaperAdam, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    (ghor.optim.PaperAdam, {"delta": -1.0}, "Invalid delta: -1.0"),
]


@pytest.mark.parametrize(
    ("cls", "options", "words"), OPTIONS, ids=lambda v: getattr(v, "__name__", "") or str(v)[:24]
)
def test_options_out_of_range(cls, options, words, gen):
    """In torch's words, on every space."""
    for space in MANIFOLDS:
        Y = nn.Parameter(point(space, kinds(space)[-1], gen, torch.float32))
        raises(ValueError, [f"^{re.escape(words)}$"], lambda Y=Y, s=space: cls([Y], space=s, **options), Y)


# -- sections ----------------------------------------------------------------------------------------------


@each_shape
def test_implicit_section_where_there_is_none(space, shape, gen):
    p = nn.Parameter(point(space, shape, gen))
    group = {"params": [("proj.weight", p)], "space": space, "section": "implicit"}
    if space.implicit:
        assert ghor.optim.Adam([group]).param_groups[0]["section"] == "implicit"
    else:
        refused(group, ValueError, "proj.weight", repr(space), "section='transported'")


def test_implicit_section_for_centered_rmsprop(gen):
    """Its first moment would turn with the frame and its second would not: the difference goes NaN."""
    Y = nn.Parameter(point(ghor.Stiefel(), (9, 3), gen))
    group = {"params": [("proj.weight", Y)], "space": ghor.Stiefel(), "section": "implicit"}
    words = ("proj.weight", "RMSprop", "moment", "section='transported'")
    refused(group, ValueError, *words, Optimizer=ghor.optim.RMSprop, centered=True)
    ghor.optim.RMSprop([group], centered=False)
    ghor.optim.RMSprop([group | {"section": "transported"}], centered=True)


# -- written into a group later ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("retraction", "qr"), ("section", "explicit"), ("max_angle", -1.0), ("error_if_nonfinite", 1)],
)
def test_a_bad_option_set_live_is_refused_before_anything_moves(key, value, gen):
    Y, b = weight(9, 3), nn.Parameter(torch.zeros(3))
    opt = ghor.optim.SGD([{"params": [Y], "space": STIEFEL}, {"params": [b]}], lr=0.1, momentum=0.9)
    take_steps(opt, gen)
    good, before = opt.param_groups[0][key], [Y.detach().clone(), b.detach().clone()]
    opt.param_groups[0][key] = value
    with pytest.raises((ValueError, TypeError), match="in group 0"):
        take_steps(opt, gen)
    assert torch.equal(Y, before[0])
    assert torch.equal(b, before[1])
    opt.param_groups[0][key] = good
    take_steps(opt, gen)


@each_section
@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1e-2, 1e30])
def test_learning_rates_set_live(space, section, lr, gen):
    """torch looks at a learning rate in the constructor only. Negative: uphill. Huge: on. Not finite:
    held."""
    shape = kinds(space)[-1]
    Y = nn.Parameter(point(space, shape, gen))
    opt = ghor.optim.SGD([("w0", Y)], lr=1e-2, space=space, section=section)
    take_steps(opt, gen)
    (Z,), down = copy.deepcopy(((Y,), opt))
    opt.param_groups[0]["lr"] = lr
    start = Y.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    said = [re.search("not finite|clipped", str(w.message)).group() for w in caught]
    assert on(space, Y)
    if lr == -1e-2:
        assert not said
        Z.grad = -Y.grad
        down.step()
        same(Y, Z, 1e-15)
    elif lr == 1e30:
        assert said == ["clipped"]
    else:
        assert said == ["not finite"]
        assert torch.equal(Y, start)
    opt.param_groups[0]["lr"] = 1e-2  # and it goes on: SGD has no moments that could be lost
    opt.step()
    assert not torch.equal(Y, start)
    assert on(space, Y)
