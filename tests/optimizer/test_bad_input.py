"""What bad input gets: an error that names the weight, the numbers and the way out, and nothing left changed."""

import copy
import re
import warnings

import pytest
import torch
from table import MANIFOLDS, RETRACTIONS, SHAPES, accepts, name, point, randn
from torch import nn

import ghor
from ghor.spaces.orthogonal import Orthogonal

spaces = pytest.mark.parametrize("space", MANIFOLDS, ids=name)
retractions = pytest.mark.parametrize("retraction", RETRACTIONS)
TABLE = [pytest.param(s, next(x for x in SHAPES if accepts(s, x)), id=name(s)) for s in MANIFOLDS]
each_space = pytest.mark.parametrize(("space", "shape"), TABLE)


def sections(space):
    return ["transported", "implicit"] if isinstance(space, Orthogonal) else ["transported"]


SECTION_TABLE = [pytest.param(*t.values, s, id=f"{t.id}-{s}") for t in TABLE for s in sections(t.values[0])]
each_section = pytest.mark.parametrize(("space", "shape", "section"), SECTION_TABLE)


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
    """The group is refused by the constructor and by add_param_group, with all the words, and nothing has changed."""
    weights = [p for _, p in group["params"]] if isinstance(group["params"][0], tuple) else group["params"]
    before = [p.detach().clone() for p in weights]
    with pytest.raises(error) as at_once:
        Optimizer([dict(group)], **options)
    gen = torch.Generator().manual_seed(1)
    Y, b = nn.Parameter(ghor.Stiefel().random(5, 2, generator=gen)), nn.Parameter(torch.zeros(3))
    good = [{"params": [("Y", Y)], "space": ghor.Stiefel()}, {"params": [("b", b)], "space": ghor.Euclidean()}]
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


def text(shape):
    return str(tuple(shape))


# -- weights that no space takes ---------------------------------------------------------------------------------------


@each_space
def test_empty_tensor(space, shape):
    for i in range(len(shape)):
        bad = (*shape[:i], 0, *shape[i + 1 :])
        refused(
            {"params": [("proj.weight", nn.Parameter(torch.zeros(bad)))], "space": space},
            ValueError,
            "proj.weight",
            text(bad),
            repr(space),
        )


@each_space
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=name)
def test_wrong_kind_of_numbers(space, shape, dtype):
    p = nn.Parameter(torch.ones(shape).to(dtype), requires_grad=dtype.is_complex)
    refused(
        {"params": [("proj.weight", p)], "space": space},
        TypeError,
        "proj.weight",
        text(shape),
        str(dtype),
        repr(space),
        "floating point",
    )


@spaces
def test_too_few_dimensions(space):
    bad = () if isinstance(space, ghor.Sphere) else (7,)
    words = ["proj.weight", text(bad), repr(space)] + (["ghor.Sphere()"] if bad else [])
    refused({"params": [("proj.weight", nn.Parameter(torch.ones(bad)))], "space": space}, ValueError, *words)


@pytest.mark.parametrize(
    ("space", "bad", "way_out"),
    [
        (ghor.SpecialOrthogonal(), (4, 3), "ghor.Stiefel()"),
        (ghor.SpecialOrthogonal(), (2, 3, 4), "ghor.Stiefel()"),
        (ghor.SymplecticStiefel(), (6, 3), "even sides"),
        (ghor.SymplecticStiefel(), (5, 2), "even sides"),
        (ghor.SymplecticStiefel(), (3, 6), "even sides"),
        (ghor.Grassmann(), (4, 4), "ghor.Stiefel()"),
        (ghor.Stiefel(), (1, 1), "does not move"),
        (ghor.Sphere(), (1,), "N >= 2"),
        (ghor.Sphere(), (3, 1), "N >= 2"),
        (ghor.Stiefel(flatten=3), (4, 9), "4 or more dimensions"),
    ],
    ids=name,
)
def test_shapes_a_space_does_not_have(space, bad, way_out):
    p = nn.Parameter(torch.ones(bad))
    refused(
        {"params": [("proj.weight", p)], "space": space}, ValueError, "proj.weight", text(bad), repr(space), way_out
    )
    module = nn.Module()
    module.w = p
    with pytest.raises(ValueError, match=re.escape(f"w: {space}")):
        ghor.constrain(module, "w", space)
    assert torch.equal(p, torch.ones(bad))


@each_space
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weight_that_is_not_finite(space, shape, value, gen):
    Y = point(space, shape, gen)
    Y.view(-1)[-1] = value
    module = Holder(Y)
    words = ("weight", text(shape), "1 entries", "NaN or infinite", "initialise")
    refused({"params": [("weight", module.weight)], "space": space}, ValueError, *words)
    with pytest.raises(ValueError, match="NaN or infinite"):
        ghor.constrain(module, "weight", space)
    torch.testing.assert_close(module.weight.detach(), Y, rtol=0, atol=0, equal_nan=True)
    assert "_ghor_spaces" not in vars(module)


@each_space
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
def test_weight_off_its_space(space, shape, dtype, gen):
    """The message gives the distance and the call that brings the weight there; after that call it is taken."""
    module = Holder((1.1 * point(space, shape, gen)).to(dtype))
    measured = module.weight.detach().to(torch.float32 if dtype == torch.bfloat16 else dtype)
    off = f"{float(space.distance(measured).max()):.1e} off {space!r}"
    refused(
        {"params": [("weight", module.weight)], "space": space},
        ValueError,
        "weight",
        text(shape),
        off,
        "ghor.constrain(",
    )
    opt = ghor.optim.Adam(ghor.constrain(module, "weight", space))
    assert opt.param_groups[0]["space"] == (space, ghor.Euclidean())


@each_space
def test_unnamed_weights_are_named_by_place(space, shape, gen):
    good = nn.Parameter(point(space, shape, gen))
    bad = nn.Parameter(2 * point(space, shape, gen))
    with pytest.raises(ValueError, match="parameter 1 of group 1 of shape"):
        ghor.optim.Adam([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [good, bad], "space": space}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
def test_reflection_is_not_in_so(dtype, gen):
    Y = ghor.SpecialOrthogonal().random(5, 5, generator=gen, dtype=torch.float64)
    Y[:, 0] *= -1
    module = Holder(Y.to(dtype))
    refused(
        {"params": [module.weight], "space": ghor.SpecialOrthogonal()}, ValueError, "2.0e+00 off", "ghor.constrain("
    )
    ghor.constrain(module, "weight", ghor.SpecialOrthogonal())
    assert torch.linalg.det(module.weight.detach().double()) > 0.9
    ghor.optim.SGD(module)


# -- spaces and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    ["Stiefel", ghor.Stiefel, 3, object(), {"space": "Stiefel"}, [ghor.Stiefel], ["Stiefel"]],
    ids=["string", "class", "number", "object", "dict", "list of classes", "list of strings"],
)
def test_space_of_a_wrong_type(wrong, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    refused({"params": [("proj.weight", Y)], "space": wrong}, TypeError, "proj.weight", "ghor.Stiefel()", "got")
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


@each_space
def test_group_that_contradicts_the_declaration(space, shape, gen):
    module = ghor.constrain(Holder(point(space, shape, gen)), "weight", space)
    other = ghor.Euclidean() if not isinstance(space, ghor.Stiefel) else ghor.Grassmann()
    words = ("weight", f"declared on {space!r}", repr(other), "leave 'space' out")
    refused({"params": [("weight", module.weight)], "space": other}, ValueError, *words)
    assert ghor.optim.Adam(module).param_groups[0]["space"][0] == space


@pytest.mark.parametrize(
    ("option", "wrong", "error", "words"),
    [
        ("retraction", "caley", ValueError, ("'caley'", "cayley", "geodesic")),
        ("retraction", None, ValueError, ("None", "cayley", "geodesic")),
        ("retraction", ["cayley"], ValueError, ("['cayley']", "geodesic")),
        ("section", "transport", ValueError, ("'transport'", "auto", "transported", "implicit")),
        ("section", None, ValueError, ("None", "auto", "transported", "implicit")),
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
        ("error_if_non_finite", "error_if_nonfinite"),
    ],
)
def test_misspelt_group_key(key, meant, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    refused({"params": [Y], "space": ghor.Stiefel(), key: "cayley"}, ValueError, repr(key), "group", f"mean {meant!r}")


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


@each_space
def test_frozen_weight(space, shape, gen):
    p = nn.Parameter(point(space, shape, gen), requires_grad=False)
    words = ("proj.weight", text(shape), repr(space), "requires_grad_()", "ghor.param_groups(model)")
    refused({"params": [("proj.weight", p)], "space": space}, ValueError, *words)


@each_space
def test_the_same_weight_twice_in_a_group(space, shape, gen):
    p = nn.Parameter(point(space, shape, gen))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate")  # torch's own
        refused(
            {"params": [("proj.weight", p), ("proj.weight", p)], "space": space},
            ValueError,
            "proj.weight",
            text(shape),
            "twice",
            "once",
        )


@each_space
def test_the_same_weight_in_two_groups(space, shape, gen):
    p, q = (nn.Parameter(point(space, shape, gen)) for _ in range(2))
    opt = ghor.optim.Adam([("proj.weight", p)], space=space)
    groups = groups_of(opt)
    message = "some parameters appear in more than one parameter group"  # torch's words, which its users match
    with pytest.raises(ValueError, match=message) as later:
        opt.add_param_group({"params": [("other", q), ("proj.weight", p)]})
    assert same_groups(opt.param_groups, groups)
    with pytest.raises(ValueError, match=message) as at_once:
        ghor.optim.Adam([{"params": [("proj.weight", p)]}, {"params": [("again", p)]}], space=space)
    assert "proj.weight" in str(later.value)
    assert "again" in str(at_once.value)
    for info in (later, at_once):
        assert text(shape) in str(info.value)


@pytest.mark.parametrize("cls", [c for c in ghor.optim.__all__ if c != "PaperAdam"])
def test_differentiable(cls, gen):
    Y = nn.Parameter(point(ghor.Stiefel(), (5, 2), gen))
    Optimizer = getattr(ghor.optim, cls)
    opt, before = Optimizer([Y], space=ghor.Stiefel(), differentiable=True), Y.detach().clone()
    Y.grad = torch.ones_like(Y)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is on Stiefel\(\): differentiable=True does not"):
        opt.step()
    assert torch.equal(Y, before)
    opt.param_groups[0]["differentiable"] = False
    opt.step()
    assert not torch.equal(Y, before)
    Optimizer([nn.Parameter(torch.zeros(2))], space=ghor.Euclidean(), differentiable=True)  # torch's own business


@each_space
def test_implicit_section_where_there_is_none(space, shape, gen):
    p = nn.Parameter(point(space, shape, gen))
    group = {"params": [("proj.weight", p)], "space": space, "section": "implicit"}
    if isinstance(space, Orthogonal):
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


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [torch.optim.Adam([torch.zeros(1)]), "Adam", nn.Linear, torch.optim.lr_scheduler.StepLR, None],
    ids=["instance", "string", "module", "scheduler", "None"],
)
def test_lift_of_what_is_no_optimizer_class(wrong):
    with pytest.raises(TypeError, match=r"lift takes a class of torch optimizers.* got "):
        ghor.lift(wrong)


@pytest.mark.parametrize(
    ("Base", "words"),
    [
        (torch.optim.ASGD, ("averages", "ghor.optim.SGD", "swa_utils")),
        (torch.optim.LBFGS, ("line search", "ghor.optim.Adam")),
        (torch.optim.SparseAdam, ("sparse", "ghor.optim.Adam")),
        (torch.optim.Adafactor, ("row and column", "ghor.optim.Adam")),
        (torch.optim.Muon, ("orthogonalises", "ghor.optim.Adam")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_optimizers_of_torch_that_do_not_lift_say_why(Base, words):
    with pytest.raises(ValueError, match=f"{Base.__name__} cannot be lifted to manifolds: ") as info:
        ghor.lift(Base)
    for word in words:
        assert word in str(info.value)
    assert not hasattr(ghor.optim, Base.__name__)


def test_what_does_not_lift_is_what_is_not_in_optim():
    """Every optimizer of torch is in ghor.optim or is refused with a reason."""
    theirs = {n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n, None), type) and n != "Optimizer"}
    refused = {n for n in theirs if n not in ghor.optim.__all__}
    assert refused == {"ASGD", "LBFGS", "SparseAdam", "Adafactor", "Muon"}
    assert set(ghor.optim.__all__) - theirs == {"PaperAdam"}


# -- constrain ---------------------------------------------------------------------------------------------------------


def test_constrain_a_parameter_that_is_not_there():
    module = nn.Linear(4, 2)
    for wrong in ("wieght", "weight.data", "proj.weight", "training", ""):
        with pytest.raises(ValueError, match=f"Linear has no parameter '{wrong}'; it has: weight, bias"):
            ghor.constrain(module, wrong, ghor.Stiefel())
    module.register_buffer("table", torch.eye(3))
    with pytest.raises(ValueError, match="no parameter 'table'"):
        ghor.constrain(module, "table", ghor.Stiefel())


@each_space
def test_constrain_what_has_no_point_near(space, shape):
    """Rank 0: no point is nearest. The message says how to initialise, and doing so works."""
    module = Holder(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^weight: ") as info:
        ghor.constrain(module, "weight", space)
    assert f"{space!r}.random{text(shape)}" in str(info.value)
    assert not module.weight.any()
    assert "_ghor_spaces" not in vars(module)
    with torch.no_grad():
        module.weight.copy_(eval(f"ghor.{space!r}.random{text(shape)}"))  # the call as the message has it
    ghor.constrain(module, "weight", space)


# -- gradients that are not finite -------------------------------------------------------------------------------------


def trained(space, shape, gen, section, steps=3, Optimizer=ghor.optim.Adam, **options):
    module = ghor.constrain(Holder(point(space, shape, gen)), "weight", space)
    opt = Optimizer(module, lr=1e-2, section=section, **options)
    train(module, opt, gen, steps)
    return module, opt


def train(module, opt, gen, steps):
    for _ in range(steps):
        for p in module.parameters():
            p.grad = randn(tuple(p.shape), gen, p.dtype)
        opt.step()


def steps(opts, count):
    for _ in range(count):
        for opt in opts:
            opt.step()


def finite(opt, p):
    return all(torch.isfinite(v).all() for v in opt.state[p].values() if torch.is_tensor(v))


def ours(opt, p):
    return {k: v.clone() for k, v in opt.state[p].items() if k in ("section", "anchor")}


@each_section
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite(space, shape, section, value, gen):
    """The weight and its section stay, one warning; the Euclidean weight does what it does in torch."""
    module, opt = trained(space, shape, gen, section)
    twin = nn.Parameter(module.free.detach().clone())
    torch_opt = torch.optim.Adam([twin], lr=1e-2)
    torch_opt.load_state_dict({**torch_opt.state_dict(), "state": {0: copy.deepcopy(opt.state[module.free])}})
    Y, Lambda = module.weight.detach().clone(), ours(opt, module.weight)
    assert Lambda
    module.weight.grad.view(-1)[0] = module.free.grad[0] = value
    twin.grad = module.free.grad
    with pytest.warns(UserWarning, match=r"velocity of weight is not finite.*stays where it is.*constrain") as caught:
        steps([opt, torch_opt], 2)
    assert len(caught) == 1
    assert torch.equal(module.weight, Y)
    torch.testing.assert_close(ours(opt, module.weight), Lambda, rtol=0, atol=0)
    torch.testing.assert_close(module.free, twin, rtol=0, atol=0, equal_nan=True)


@each_section
def test_load_state_dict_recovers_from_nan(space, shape, section, gen):
    """After loading what was saved before, the run is the one without the NaN, bit for bit."""
    module, opt = trained(space, shape, gen, section)
    saved = copy.deepcopy(opt.state_dict()), copy.deepcopy(module.state_dict())
    train(module, opt, torch.Generator().manual_seed(5), 4)
    expected = module.weight.detach().clone()
    module.weight.grad.fill_(float("nan"))
    with pytest.warns(UserWarning, match="velocity of weight is not finite"):
        opt.step()
    assert not finite(opt, module.weight)
    module.load_state_dict(saved[1])
    opt.load_state_dict(saved[0])
    train(module, opt, torch.Generator().manual_seed(5), 4)
    assert torch.equal(module.weight, expected)


@each_section
def test_constrain_again_recovers_from_nan(space, shape, section, gen):
    """The moments start from zero, and the weight moves again."""
    module, opt = trained(space, shape, gen, section)
    module.weight.grad.fill_(float("inf"))
    with pytest.warns(UserWarning, match="velocity of weight is not finite"):
        opt.step()
    ghor.constrain(module, "weight", space)
    Y = module.weight.detach().clone()
    with pytest.warns(UserWarning, match="weight changed outside.*start from zero"):
        train(module, opt, gen, 1)
    assert finite(opt, module.weight)
    train(module, opt, gen, 3)
    assert finite(opt, module.weight)
    # Adam's first steps are lr long in every coordinate; 1e-3 is a tenth of one
    assert (module.weight - Y).abs().max() > 1e-3
    assert space.distance(module.weight.detach()).max() <= 1e-12  # a few steps of float64 rounding, ||Y|| < 10


@each_section
def test_error_if_nonfinite_raises_before_anything_moves(space, shape, section, gen):
    module, opt = trained(space, shape, gen, section, error_if_nonfinite=True)
    for culprit in ("weight", "free"):
        train(module, opt, gen, 1)
        p = getattr(module, culprit)
        p.grad.view(-1)[-1] = float("nan")
        before = copy.deepcopy((opt.state_dict()["state"], module.state_dict()))
        with pytest.raises(RuntimeError, match=f"gradient of {culprit} is not finite; nothing was moved"):
            opt.step()
        torch.testing.assert_close((opt.state_dict()["state"], module.state_dict()), before, rtol=0, atol=0)
    train(module, opt, gen, 2)
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


def test_a_nan_in_one_weight_of_a_stack_stays_there(gen):
    weights = [nn.Parameter(point(ghor.Stiefel(), (7, 3), gen)) for _ in range(4)]
    twins = [nn.Parameter(p.detach().clone()) for p in weights if p is not weights[2]]
    opts = [ghor.optim.Adam(ps, lr=0.1, space=ghor.Stiefel()) for ps in (weights, twins)]
    for p in weights:
        p.grad = randn((7, 3), gen)
    for p, q in zip([weights[i] for i in (0, 1, 3)], twins, strict=True):
        q.grad = p.grad.clone()
    stays = weights[2].detach().clone()
    weights[2].grad[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="velocity of parameter 2 of group 0"):
        steps(opts, 2)
    assert torch.equal(weights[2], stays)
    for p, q in zip([weights[i] for i in (0, 1, 3)], twins, strict=True):
        assert torch.equal(p, q)


# -- too large ---------------------------------------------------------------------------------------------------------

HUGE = [
    (ghor.SpecialOrthogonal(), (7, 7)),
    *[(s, shape) for s in (ghor.Stiefel(), ghor.Grassmann()) for shape in ((10, 9), (49, 7), (200, 3), (3, 200))],
    (ghor.Stiefel(), (7, 7)),
    (ghor.Sphere(), (200,)),
]


@pytest.mark.parametrize(("space", "shape"), HUGE, ids=name)
@pytest.mark.parametrize("section", ["transported", "implicit"])
@retractions
@pytest.mark.parametrize(
    ("Optimizer", "lr", "scale"), [("SGD", 1e3, 1e30), ("SGD", 1e3, 1e3), ("Adam", 1e3, 1e30), ("Adam", 1e3, 1.0)]
)
def test_no_step_is_too_long_for_the_space(space, shape, section, retraction, Optimizer, lr, scale, gen):
    """The issue's bound: 1e-5 in float32, measured in float64, at every step; nothing is lost to overflow."""
    Y = nn.Parameter(space.random(*shape, generator=gen))
    opt = getattr(ghor.optim, Optimizer)([Y], lr=lr, space=space, section=section, retraction=retraction)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a velocity of length .* was shortened")
        for k in range(6):
            Y.grad = randn(shape, gen, torch.float32) * (scale if k < 5 else 1e-3)
            opt.step()
            assert torch.isfinite(Y).all()
            assert space.distance(Y.detach().double()).max() <= 1e-5
            for key in ("section", "anchor"):
                L = opt.state[Y].get(key)
                if L is not None:
                    I = torch.eye(L.shape[-1], dtype=torch.float64)
                    assert (L.double().mT @ L.double() - I).norm() <= 1e-5 * L.shape[-1]  # N columns in place of n


@pytest.mark.parametrize("section", ["transported", "implicit"])
@retractions
def test_a_velocity_of_a_million_in_every_entry(section, retraction, gen):
    """W itself: SGD's velocity is -lr B, so that entries of 1e6 reach the retraction unscaled."""
    for shape in ((7, 7), (10, 9), (49, 7), (200, 3)):
        Y = nn.Parameter(ghor.Stiefel().random(*shape, generator=gen))
        opt = ghor.optim.SGD([Y], lr=1.0, space=ghor.Stiefel(), section=section, retraction=retraction)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a velocity of length .* was shortened")
            for _ in range(5):
                Y.grad = 1e6 * randn(shape, gen, torch.float32)
                opt.step()
                assert ghor.Stiefel().distance(Y.detach().double()) <= 1e-5


@retractions
@pytest.mark.parametrize(("Optimizer", "lr", "scale"), [("SGD", 1e3, 1e30), ("Adam", 1e3, 1.0), ("Adam", 1e-1, 1.0)])
def test_symplectic_steps_stay_finite(retraction, Optimizer, lr, scale, gen):
    """The group is not compact: a point may grow, by e per step at most (max_velocity = 1), and the distance is
    relative to ||U||^2."""
    space = ghor.SymplecticStiefel()
    Y = nn.Parameter(space.random(12, 4, generator=gen))
    opt = getattr(ghor.optim, Optimizer)([Y], lr=lr, space=space, retraction=retraction)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a velocity of length .* was shortened")
        for _ in range(5):
            size = Y.detach().norm()
            Y.grad = scale * randn((12, 4), gen, torch.float32)
            opt.step()
            assert torch.isfinite(Y).all()
            assert Y.detach().norm() <= 3 * size
            assert space.distance(Y.detach().double()) <= 1e-5 * (1 + Y.detach().norm() ** 2)


def test_a_shortened_velocity_warns_once(gen):
    Y = nn.Parameter(ghor.Stiefel().random(9, 3, generator=gen))
    opt = ghor.optim.SGD([("proj", Y)], lr=1e3, space=ghor.Stiefel())
    Y.grad = 1e30 * randn((9, 3), gen, torch.float32)
    with pytest.warns(UserWarning, match=r"velocity of length .* of proj was shortened to 1e\+06") as caught:
        steps([opt], 3)
    assert len(caught) == 1


# -- half precision ----------------------------------------------------------------------------------------------------


@each_section
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_half_precision_weights_are_float32_inside(space, shape, section, dtype, gen):
    """The weight is the float32 point, rounded; so it is off by eps/2 in each entry, which takes Y* Y off I by
    eps ||Y||_2 ||Y||_F at most."""
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
    n = space.size(shape)[1]
    exact = state["section"][..., :n] if "section" in state else space.matrix(state["master"])
    assert torch.equal(space.matrix(Y.detach()), exact.to(dtype))
    size = exact.double().norm(dim=(-2, -1)).amax()
    off = space.distance(space.unmatrix(exact.double(), shape)).max()
    assert off <= 2e-6 * size**2  # the bound for float32, relative where the group is not compact
    assert space.distance(Y.detach().double()).max() <= torch.finfo(dtype).eps * size**2 + off
    assert not torch.equal(Y, start)


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_half_precision_follows_the_float32_run(section, dtype, gen):
    """Steps far below one ulp of the weight add up in the section: 200 steps of 1e-4 end where float32 ends."""
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
    assert (Y.detach() - Z.detach()).abs().max() <= torch.finfo(dtype).eps  # |Y| <= 1, so an ulp is eps at most


def test_float32_gradient_of_a_half_weight_and_the_other_way_round(gen):
    """torch allows no other dtype in p.grad, so the gradient's dtype is the weight's; in the step it is float32."""
    Y = nn.Parameter(ghor.Stiefel().project(point(ghor.Stiefel(), (9, 3), gen, torch.float32)).half())
    opt = ghor.optim.SGD([Y], lr=1.0, space=ghor.Stiefel())
    Y.grad = torch.full_like(Y, 6e4)  # sums of products of it overflow in float16, not in float32
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a velocity of length .* was shortened")
        opt.step()
    assert torch.isfinite(Y).all()
    assert torch.isfinite(opt.state[Y]["section"]).all()
