"""Laws of every function of points, whatever it computes: of members, layouts, digits, threads and NaN."""

import warnings

import pytest
import torch
from helpers.functions import arguments, called, functions
from helpers.table import (
    COMPLEX_CASES,
    MANIFOLDS,
    OPTIONS,
    SPACES,
    accepts,
    close,
    eps,
    keeps_any_radius,
    kinds,
    name,
    point,
    shapes,
)
from helpers.threads import threads

import ghor

F64 = torch.float64
CASES = [(s, kinds(s)[i], F64) for s in SPACES + OPTIONS for i in sorted({0, len(kinds(s)) - 1})]
CASES += [(s, shape, torch.complex128) for s, shape in COMPLEX_CASES]
each_case = pytest.mark.parametrize(("space", "shape", "dtype"), CASES, ids=name)
pytestmark = pytest.mark.filterwarnings("ignore:a weight on .* has come")


def calls(space, shape, dtype, gen):
    """Every function that the space has, what it takes and gives, and arguments for it."""
    Y = point(space, shape, gen, dtype).contiguous()
    for what, of in functions(space).items():
        yield what, of, arguments(space, what, of, Y, gen)


def difference(a, b):
    """The largest difference, beside the size of b; True and False are as far apart as 0 and 1."""
    a, b = (x.to(torch.promote_types(x.dtype, F64)) for x in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1)) if b.numel() else 0.0


# -- members of a batch --------------------------------------------------------------------------------------


def stacked(of, given):
    """Three members: the arguments, and twice those of another call."""
    return [torch.stack(members) for members in zip(*given, strict=True)]


@each_case
def test_a_batch_is_its_members_one_by_one(space, shape, dtype, gen):
    first, second, third = (list(calls(space, shape, dtype, gen)) for _ in range(3))
    for (what, of, a), (_, _, b), (_, _, c) in zip(first, second, third, strict=True):
        if what in ("mean", "is_tangent"):  # of stacks, and of all points together
            continue
        batch, alone = (
            called(space, what, stacked(of, (a, b, c))),
            [called(space, what, x) for x in (a, b, c)],
        )
        assert batch.shape[0] == 3, what
        assert difference(batch, torch.stack(alone)) <= 1e-12, what


@each_case
def test_shapes_are_broadcast(space, shape, dtype, gen):
    """One point and several vectors, or several points."""
    first, second = list(calls(space, shape, dtype, gen)), list(calls(space, shape, dtype, gen))
    for (what, of, a), (_, _, b) in zip(first, second, strict=True):
        if of.startswith("x") or len(a) < 2 or what == "is_tangent":
            continue
        last = torch.stack([a[-1], b[-1]])
        whole = called(space, what, [*(x.expand_as(last) for x in a[:-1]), last])
        same(called(space, what, [*a[:-1], last]), whole, what)


@each_case
def test_nan_stays_in_its_member(space, shape, dtype, gen):
    """It gives NaN or an error there, never a number; the members beside it do not change by a bit."""
    for (what, of, a), (_, _, b) in zip(
        calls(space, shape, dtype, gen), list(calls(space, shape, dtype, gen)), strict=True
    ):
        if what == "mean":
            with pytest.raises(ValueError, match="NaN"):
                space.mean(a[0] * torch.nan)
            continue
        for i in range(len(a)):
            given = stacked(of, (a, b))
            spoiled = [x.clone() for x in given]
            spoiled[i][1].view(-1)[0] = torch.nan
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    out = called(space, what, spoiled)
                except ValueError:  # as `project`, which says so
                    continue
            if not is_indifferent(space, what, given, i):
                number = out if what == "is_tangent" else torch.isfinite(out[1]).all()
                assert not bool(number), (what, i)
            if what != "is_tangent":
                same(out[0], called(space, what, given)[0], (what, i))


def is_indifferent(space, what, given, i):
    """Whether the result does not depend on this number, as the metric of poses does not on positions."""
    near = [x.clone() for x in given]
    near[i][1].view(-1)[0] += 1e-9
    return difference(called(space, what, given), called(space, what, near)) <= 1e-13


def same(a, b, what):
    """To the bit, NaN where the other is."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=str(what))


@pytest.mark.parametrize(("space", "shape"), [(s, shapes(s)[0]) for s in SPACES], ids=name)
def test_an_empty_batch_gives_empty_results(space, shape, gen):
    one = shape[len(shape) - space.dims :] if space.dims else (2,)
    for what, _, given in calls(space, one, F64, gen):
        if what in ("mean", "project", "is_tangent"):  # there are no such weights, and they say so
            continue
        assert called(space, what, [x.expand(0, *x.shape) for x in given]).shape[0] == 0, what


# -- layouts -------------------------------------------------------------------------------------------------

# The same points in other weights: what takes one to the other, and the spaces of both.
LAYOUTS = [
    (ghor.Stiefel(), (3, 8, 4), ghor.Stiefel(), lambda X: X.mT),
    (ghor.Stiefel(), (3, 8, 4), ghor.Stiefel(blocks=3), lambda X: X.flatten(0, 1)),
    (ghor.Stiefel(), (6, 8, 4), ghor.Stiefel(blocks=(2, 3)), lambda X: X.flatten(0, 1)),
    (ghor.Grassmann(), (3, 8, 4), ghor.Grassmann(blocks=3, along="columns"), lambda X: X.flatten(0, 1).mT),
    (ghor.Stiefel(), (9, 4), ghor.Stiefel(flatten=3), lambda X: X.mT.reshape(4, 1, 3, 3)),
    (ghor.SymplecticStiefel(), (2, 8, 4), ghor.SymplecticStiefel(blocks=2), lambda X: X.flatten(0, 1)),
    (ghor.Flag((2, 1)), (2, 5, 3), ghor.Flag((2, 1), blocks=2), lambda X: X.flatten(0, 1)),
    (ghor.Sphere(), (4, 5), ghor.Sphere(along="columns"), lambda X: X.mT),
    (ghor.Sphere(), (4, 6), ghor.Sphere(flatten=2), lambda X: X.reshape(4, 3, 2)),
    (ghor.Sphere(), (2, 3, 5), ghor.Sphere(blocks=3), lambda X: X.flatten(1, 2)),
]


@pytest.mark.parametrize(
    ("space", "shape", "other", "there"), LAYOUTS, ids=lambda x: "" if callable(x) else name(x)
)
def test_functions_do_not_depend_on_the_layout(space, shape, other, there, gen):
    for what, of, given in calls(space, shape, F64, gen):
        if what == "mean":
            given, expected = [torch.stack([there(x) for x in given[0]])], there(called(space, what, given))
        else:
            out = called(space, what, given)
            takes, gives = of.split(">")
            expected = there(out) if gives in "pv" else out
            given = [there(x) if k in "pv" else x for x, k in zip(given, takes, strict=True)]
        assert difference(called(other, what, given).reshape(expected.shape), expected) <= 1e-14, what


@pytest.mark.parametrize("row", [0, 2, -1])
@pytest.mark.parametrize("cls", [ghor.Sphere, ghor.Hyperbolic], ids=lambda cls: cls.__name__)
def test_a_padding_row_is_no_point(cls, row, gen):
    """It is on the space whatever is in it, no function reads it, and points come back with theirs."""
    space, plain = cls(padding_idx=row), cls()
    for what, of, given in calls(plain, (4, 5), F64, gen):
        takes, gives = of.split(">")
        if what == "mean":
            continue
        expected, given = called(plain, what, given), [x.clone() for x in given]
        for k, x in zip(takes, given, strict=True):
            if k in "pv":
                x[row] = torch.nan
        if what == "project":
            given[0][row] = 7.0  # NaN is an error there
        out = called(space, what, given)
        if out.dim() == 0:
            assert bool(out), what
            continue
        keep = torch.arange(4) != row % 4
        close(out[keep], expected[keep], 1e-15)
        if gives == "p":
            torch.testing.assert_close(out[row], given[0][row], rtol=0, atol=0, equal_nan=True)
        elif gives == "v":
            assert not out[row].any(), what


# -- digits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("space", [s for s in MANIFOLDS if not keeps_any_radius(s)], ids=name)
def test_half_precision_is_computed_in_float32(space, dtype, gen, monkeypatch):
    """To the bit what float32 gives of the same numbers, rounded once; there they are off the space."""
    for what, _, given in calls(space, shapes(space)[0], F64, gen):
        given = [x.to(dtype) for x in given]
        if what in ("tolerance", "is_tangent"):
            continue
        out = called(space, what, given)
        assert out.dtype == dtype, what
        with monkeypatch.context() as patched:
            patched.setattr(type(space), "check_points", lambda *given: None)
            same(out, called(space, what, [x.float() for x in given]).to(dtype), what)


@pytest.mark.parametrize("space", MANIFOLDS, ids=name)
def test_autocast_changes_nothing(space, gen):
    for what, _, given in calls(space, shapes(space)[0], torch.float32, gen):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = called(space, what, given)
        assert torch.equal(out, called(space, what, given)), what


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=name)
@pytest.mark.parametrize("space", SPACES, ids=name)
def test_values_do_not_depend_on_requires_grad(space, dtype, gen):
    for what, _, given in calls(space, shapes(space)[0], dtype, gen):
        out = called(space, what, given)
        other = called(space, what, [x.clone().requires_grad_() for x in given]).detach()
        assert difference(other, out) <= 20 * torch.finfo(dtype).eps, what


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**-20, 2.0**20, 2.0**40], ids=lambda unit: f"{unit:.0e}")
@pytest.mark.parametrize("space", MANIFOLDS, ids=name)
def test_vectors_have_no_unit(space, unit, gen):
    """What is linear in vectors is so to the bit: powers of two round nothing, from 1e-12 to 1e12."""
    linear = {"rgrad": 1, "tangent": 1, "transport": 2, "norm": 1, "Omega": 1, "global_rep": 1, "metric": 2}
    for what, _, given in calls(space, shapes(space)[0], torch.float32, gen):
        if what in linear:
            *fixed, X = given
            f = getattr(space, what)
            assert torch.equal(f(*fixed, unit * X), unit * f(*fixed, X)), what


# -- threads -------------------------------------------------------------------------------------------------

# torch runs a batch of matrices in parallel, and LAPACK may use several threads for one large matrix; neither
# may show. Sides up to 96 and above go different ways (`ghor.linalg._each`).
SMALL = [(3,), (3, 3), (4, 2), (6, 4), (3, 4), (2, 3)]
LARGE = [(170,), (170, 160), (160, 160), (160, 161), (170, 4)]
SIZES = [
    pytest.param(
        s,
        (k, *shape),
        marks=[pytest.mark.slow] if (tried, k) == (LARGE, 1) else [],
        id=f"{name(s)}-{k}x{name(shape)}",
    )
    for s in SPACES
    for tried in (SMALL, LARGE)
    for shape in [x for x in tried if accepts(s, x)][:1]
    for k in ((1, 3) if tried is SMALL else (1, 2))
]


@pytest.mark.parametrize(("space", "shape"), SIZES)
def test_four_threads_give_what_one_gives(space, shape, gen):
    with threads(1):
        Y = space.random(*shape, generator=gen, dtype=F64)
        # a mean takes many logarithms and exponentials, which are here themselves
        known = {f: of for f, of in functions(space).items() if f != "mean" or shape[-1] < 100}
        given = {f: arguments(space, f, of, Y, gen) for f, of in known.items()}
    found = []
    for count in (1, 4):
        with threads(count):
            results = {what: called(space, what, given[what]) for what in known}
            results["retract geodesic"] = space.retract(*given["retract"], "geodesic")
            same = torch.Generator().manual_seed(0)
            results["random"] = space.random(*shape, generator=same, dtype=Y.dtype)
            found.append(results)
    one, four = found
    for what, value in one.items():
        assert difference(four[what], value) <= 100 * shape[-1] * eps(Y), what


def test_every_function_of_points_is_marked():
    """A public method whose first argument is a point says what it takes, so that the laws above run it."""
    for space in SPACES:
        public = {n for n in dir(type(space)) if not n.startswith("_") and space.has(n)}
        taken = {n for n in public if first_argument(getattr(type(space), n)) in ("Y", "X", "Lambda")}
        # `hint` is a sentence, `skew` and `star` are of matrices, `to_ball` has its own tests
        assert taken - functions(space).keys() <= {"hint", "skew", "star", "to_ball"}, space
        assert len(functions(space)) >= 10
        assert space.has("exp")


def first_argument(function):
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code.co_varnames[1] if code is not None and code.co_argcount > 1 else None
