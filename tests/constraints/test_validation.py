"""Weights that no space takes: an error that names the weight, the numbers and the way out, and nothing is
changed."""

import re
import warnings
from collections import Counter

import pytest
import torch
from helpers.refusals import Holder, groups_of, raises, refused, same_groups, text
from helpers.table import (
    FIRST,
    MANIFOLDS,
    accepts,
    can_be_left,
    each_section,
    each_shape,
    each_space,
    has_complex,
    has_frame,
    is_graph,
    kinds,
    name,
    point,
    spoiled,
)
from torch import nn

import ghor
from ghor.constraints.validation import check_fit, check_on_space, kind

# of spaces that can be left: with radius="start" all vectors but 0 are points
LEFT = [(s, shape) for s, shape in FIRST if can_be_left(s)]
each_left = pytest.mark.parametrize(("space", "shape"), LEFT, ids=name)

SHAPES = [  # that a space does not have, with the way out
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
]


def unfit(space, shape):
    """Weights that the space does not take: values, error and words beside the name and the space."""
    Y, inf = space.random(*shape), float("inf")
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
        if not (dtype.is_complex and has_complex(space)):
            yield Y.to(dtype), TypeError, [text(shape), str(dtype), "floating point", repr(space)]
    yield Y.to_sparse(), TypeError, [text(shape), "torch.sparse_coo", "to_dense()", repr(space)]
    for i in range(len(shape)):
        empty = (*shape[:i], 0, *shape[i + 1 :])
        yield torch.zeros(empty), ValueError, [text(empty), repr(space)]
    yield torch.zeros(0, *shape), ValueError, [text((0, *shape)), repr(space)]
    low = () if accepts(space, (7,)) else (7,)
    way_out = ["ghor.Sphere()"] if low and has_frame(space) else []
    yield torch.ones(low), ValueError, [text(low), *way_out, repr(space)]
    for value in (float("nan"), inf, -inf):
        X = Y.clone()
        X.view(-1)[-1] = value
        yield X, ValueError, [text(shape), "1 entries", "NaN or infinite", "initialise"]
    for other, bad, way_out in SHAPES:
        if other == space:
            yield torch.ones(bad), ValueError, [text(bad), way_out, repr(space)]


@pytest.mark.parametrize(("space", "shape"), [*FIRST, (ghor.Stiefel(flatten=3), (4, 1, 3, 3))], ids=name)
def test_weights_that_a_space_does_not_take(space, shape):
    """Refused by optimizers and by constrain, which leave them as they are."""
    for X, error, words in unfit(space, shape):
        p = nn.Parameter(X, requires_grad=X.is_floating_point() or X.is_complex())
        refused({"params": [("proj.weight", p)], "space": space}, error, "proj.weight", *words)
        module = nn.ParameterDict({"weight": p})
        patterns = [f"^weight.*{re.escape(word)}" for word in words]
        raises(error, patterns, lambda m=module: ghor.constrain(m, "weight", space), p)
        assert "_ghor_spaces" not in vars(module)


@each_space
def test_weights_without_a_shape(space):
    module = nn.ParameterDict({"weight": nn.parameter.UninitializedParameter()})
    for call in (
        lambda: ghor.constrain(module, "weight", space),
        lambda: ghor.optim.SGD([("weight", module["weight"])], space=space),
    ):
        raises(ValueError, ["^weight has no shape yet: call the lazy module once"], call)


@each_left
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
def test_weight_off_its_space(space, shape, dtype, gen):
    """The message gives the distance and the call that brings the weight there; after that call it is
    taken."""
    module = Holder(spoiled(space, point(space, shape, gen), 0.1).to(dtype))
    measured = module.weight.detach().to(torch.float32 if dtype == torch.bfloat16 else dtype)
    off = f"{float(space.residual(measured).max()):.1e} off {space!r}"
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


@pytest.mark.parametrize("space", [s for s in MANIFOLDS if can_be_left(s)], ids=name)
def test_every_point_of_a_weight_counts(space, gen):
    shape = (3, *kinds(space)[-1])
    Y = point(space, shape, gen)
    Y[1] = spoiled(space, Y[1], 0.1)
    refused({"params": [nn.Parameter(Y)], "space": space}, ValueError, f"off {space!r}")


@each_left
def test_unnamed_weights_are_named_by_place(space, shape, gen):
    good = nn.Parameter(point(space, shape, gen))
    bad = nn.Parameter(spoiled(space, point(space, shape, gen), 1.0))
    with pytest.raises(ValueError, match="parameter 1 of group 1 of shape"):
        ghor.optim.Adam([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [good, bad], "space": space}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
def test_reflection_is_not_in_so(dtype, gen):
    Y = ghor.SpecialOrthogonal().random(5, 5, generator=gen, dtype=torch.float64)
    Y[:, 0] *= -1
    module = Holder(Y.to(dtype))
    refused(
        {"params": [module.weight], "space": ghor.SpecialOrthogonal()},
        ValueError,
        "2.0e+00 off",
        "ghor.constrain(",
    )
    for size in (1.0, 1e-3):  # also a multiple, as nn.init.orthogonal_ with a gain draws it
        module = Holder(Y.to(dtype) * size)
        with pytest.warns(
            UserWarning, match=r"weight was orthogonal with determinant -1.*reflected.*Stiefel\(\)"
        ):
            ghor.constrain(module, "weight", ghor.SpecialOrthogonal())
        assert torch.linalg.det(module.weight.detach().double()) > 0.9
        ghor.optim.SGD(module)
    X = torch.randn(
        5, 5, generator=gen, dtype=torch.float64
    )  # has a nearest rotation, whatever its determinant
    X[0] *= -torch.linalg.det(X).sign()
    ghor.constrain(Holder(X.to(dtype)), "weight", ghor.SpecialOrthogonal())


class Hinting(ghor.SpecialOrthogonal):
    def hint(self, Y):
        return f"determinant {float(torch.linalg.det(Y)):.0f}: use Stiefel()"


def test_a_space_can_say_why_a_point_is_off():
    flip = torch.diag(torch.tensor([1.0, 1.0, -1.0]))
    with pytest.raises(
        ValueError, match=r"2\.0e\+00 off Hinting\(\) \(determinant -1: use Stiefel\(\)\); call"
    ):
        ghor.optim.SGD([nn.Parameter(torch.eye(3)), nn.Parameter(flip)], space=Hinting())


# -- many weights at once ----------------------------------------------------------------------------------


def admitted(params, space, names):
    check_fit(params, space, names)
    check_on_space(params, space, names)


@each_left
def test_a_stack_is_checked_as_its_members_are(space, shape, gen):
    """The error is the one that the first bad weight alone would give, whatever is wrong with it."""
    good = [nn.Parameter(point(space, shape, gen)) for _ in range(4)]
    names = [f"w{i}" for i in range(6)]
    admitted(good, space, names[:4])
    off, nan = spoiled(space, point(space, shape, gen), 1.0), point(space, shape, gen)
    nan.view(-1)[0] = float("nan")
    expanded = nn.Parameter(good[0].detach().select(0, 0).expand(shape)) if shape[0] > 1 else None
    for bad in filter(lambda p: p is not None, (off, nan, expanded)):
        params = [*good[:2], bad, good[3]]
        with pytest.raises(ValueError, match=r"^w2 of shape") as stacked:
            admitted(params, space, names[:4])
        with pytest.raises(ValueError, match=r"^w2 of shape") as alone:
            (check_on_space if bad is off else check_fit)([bad], space, ["w2"])
        assert str(stacked.value) == str(alone.value)


def test_the_cost_of_checking_does_not_grow_with_the_number_of_weights(gen, monkeypatch):
    """As many calls for 50 weights of a kind as for one, and the residual of all in one."""
    counts = Counter()
    for method in ("check_shape", "check_dtype", "residual", "tolerance"):
        plain = getattr(ghor.Stiefel, method)

        def counted(self, *args, plain=plain, method=method):
            counts[method] += 1
            return plain(self, *args)

        monkeypatch.setattr(ghor.Stiefel, method, counted)
    params = [nn.Parameter(ghor.Stiefel().random(6, 3, generator=gen)) for _ in range(50)]
    counts.clear()
    admitted(params[:1], ghor.Stiefel(), ["w0"])
    one = Counter(counts)
    counts.clear()
    admitted(params, ghor.Stiefel(), [f"w{i}" for i in range(50)])
    assert counts == one
    assert (counts["residual"], counts["tolerance"]) == (1, 1)
    assert len({kind(p) for p in params}) == 1
    others = [params[0].double(), params[0].mT.contiguous(), params[0].to("meta"), params[0].to_sparse()]
    assert len({kind(p) for p in others} | {kind(params[0])}) == 5


# -- memory, layout, device --------------------------------------------------------------------------------


def test_weights_that_share_memory(gen):
    """Entries, or whole weights: torch's own steps would add up in them."""
    for space in MANIFOLDS:
        for shape in kinds(space):
            X = point(space, shape, gen, torch.float32)
            copies = nn.Parameter(X.expand(3, *shape))
            words = [f"^w of shape {re.escape(str(tuple(copies.shape)))} is expanded", "clone"]
            raises(ValueError, words, lambda p=copies, s=space: ghor.optim.SGD([("w", p)], space=s), copies)
            module = nn.Module()
            module.w = copies
            raises(ValueError, words, lambda m=module, s=space: ghor.constrain(m, "w", s), copies)
            a, b = nn.Parameter(X), nn.Parameter(X.view(shape))
            words = ["b and a are two parameters that share memory", "use one parameter for both"]
            raises(
                ValueError, words, lambda a=a, b=b, s=space: ghor.optim.SGD([("a", a), ("b", b)], space=s), a
            )
            pieces = torch.stack([X, X])  # pieces of one buffer that do not overlap are fine
            ghor.optim.SGD([nn.Parameter(pieces[0]), nn.Parameter(pieces[1])], space=space)


def test_views_that_are_conjugated_or_negated_in_name(gen):
    Y = ghor.Unitary().random(3, 3, generator=gen, dtype=torch.complex128)
    neg = torch.complex(torch.zeros(2, 2), -torch.eye(2)).conj().imag  # I, in memory -I
    assert neg.is_neg()
    for space, view in ((ghor.Unitary(), Y.mH), (ghor.Stiefel(), neg)):
        p = nn.Parameter(view)
        words = [f"^w of shape {re.escape(str(tuple(p.shape)))}", r"resolve_conj\(\)"]
        raises(ValueError, words, lambda p=p, s=space: ghor.optim.SGD([("w", p)], space=s), p)
        ghor.optim.SGD([nn.Parameter(view.resolve_conj().resolve_neg())], space=space)


@each_section
def test_meta_device(space, section, gen):
    """An optimizer can be built there, as torch's can. Its step has nothing to go from: refused, nothing
    moved."""
    shape = kinds(space)[-1]
    free = nn.Parameter(torch.zeros(3))
    p = nn.Parameter(torch.empty(shape, device="meta"))
    opt = ghor.optim.Adam(
        [{"params": [("w", p)], "space": space}, {"params": [("free", free)]}], section=section
    )
    p.grad, free.grad = torch.empty(shape, device="meta"), torch.ones(3)
    with pytest.raises(
        ValueError, match=r"^w is on the meta device.*materialise the module, then build the optimizer"
    ):
        opt.step()
    assert not free.any()
    assert not opt.state


# -- constrain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("space", "shape"), [case for case in FIRST if is_graph(case[0])], ids=name)
def test_constrain_what_always_has_a_point_near(space, shape):
    module = ghor.constrain(Holder(torch.zeros(shape, dtype=torch.float64)), "weight", space)
    assert (space.residual(module.weight.detach()) == 0).all()


@pytest.mark.parametrize(("space", "shape"), [case for case in FIRST if not is_graph(case[0])], ids=name)
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


# -- weights that are given twice, or do not move ----------------------------------------------------------


@each_shape
def test_a_frozen_weight_waits(space, shape, gen):
    p = nn.Parameter(point(space, shape, gen), requires_grad=False)
    opt = ghor.optim.Adam([{"params": [("proj.weight", p)], "space": space}])
    before = p.detach().clone()
    opt.step()
    assert torch.equal(p, before)


@each_shape
def test_the_same_weight_twice_in_a_group(space, shape, gen):
    p = nn.Parameter(point(space, shape, gen))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "optimizer contains a parameter group with duplicate"
        )  # torch's own
        refused(
            {"params": [("proj.weight", p), ("proj.weight", p)], "space": space},
            ValueError,
            "proj.weight",
            text(shape),
            "twice",
            "once",
        )


@each_shape
def test_the_same_weight_in_two_groups(space, shape, gen):
    p, q = (nn.Parameter(point(space, shape, gen)) for _ in range(2))
    opt = ghor.optim.Adam([("proj.weight", p)], space=space)
    groups = groups_of(opt)
    message = (
        "some parameters appear in more than one parameter group"  # torch's words, which its users match
    )
    with pytest.raises(ValueError, match=message) as later:
        opt.add_param_group({"params": [("other", q), ("proj.weight", p)]})
    assert same_groups(opt.param_groups, groups)
    with pytest.raises(ValueError, match=message) as at_once:
        ghor.optim.Adam([{"params": [("proj.weight", p)]}, {"params": [("again", p)]}], space=space)
    assert "proj.weight" in str(later.value)
    assert "again" in str(at_once.value)
    for info in (later, at_once):
        assert text(shape) in str(info.value)


@pytest.mark.parametrize(
    "name", ["check", "project", "param_groups", "release", "constrain", "constrain_multiples"]
)
@pytest.mark.parametrize(
    "given", [[torch.zeros(2)], {"weight": torch.zeros(2)}, nn.Parameter(torch.zeros(2))]
)
def test_what_takes_a_model_says_so(name, given):
    more = ["weight", ghor.Stiefel()] if "constrain" in name else []
    with pytest.raises(TypeError, match=rf"ghor.{name} takes a model, .* got a {type(given).__name__}"):
        getattr(ghor, name)(given, *more)
