"""ghor.minimize and the tests of derivatives: laws over all spaces, figures of known problems."""

import pytest
import torch
from helpers.problems import STIEFEL, brockett, each_method, gen, smooth, values_of, with_gradient
from helpers.steps import same
from helpers.table import RETRACTIONS, SPACES, randn, shapes

import ghor
from ghor.solve.iterate import Ray
from ghor.solve.problem import Problem
from ghor.solve.result import Log
from ghor.solve.trust_region import steihaug
from ghor.spaces.retraction import by_name

F, X, _ = brockett(20, 3)
CASES = [(space, shape) for space in SPACES for shape in shapes(space)[:4]]


def of_projections(shape):
    """A loss that is a function of the two planes of a flag."""
    N = max(shape[-2:])
    C = torch.randn(2, N, N, generator=gen(3), dtype=torch.float64)

    def loss(Y):
        Y = Y if Y.shape[-2] == N else Y.mT
        return sum(
            torch.sin(Y[..., i : i + 2] @ Y[..., i : i + 2].mT + c).sum()
            for i, c in zip((0, 2), C, strict=True)
        )

    return loss


def start(space, shape):
    return space.random(*shape, generator=gen(5), dtype=torch.float64)


@pytest.mark.parametrize(("space", "shape"), CASES, ids=str)
def test_slopes_of_the_expansions_on_every_space(space, shape):
    x = start(space, shape)
    assert ghor.check_gradient(smooth(shape), x, space, generator=gen(1)).ok
    assert ghor.check_hessian(smooth(shape), x, space, generator=gen(1)).ok


def test_a_wrong_gradient_is_found():
    wrong, x = with_gradient(lambda Y: Y.pow(3).sum(), lambda Y: 2.9 * Y**2), start(STIEFEL, (7, 3))
    found = ghor.check_gradient(wrong, x, STIEFEL, generator=gen(1))
    assert not found.ok
    assert abs(found.slope - 1) < 0.1
    assert str(found) == f"Slope(gradient NOT ok: slope {found.slope:.2f}, right derivatives have 2)"
    right = ghor.check_hessian(smooth((7, 3)), x, STIEFEL, generator=gen(1))
    assert repr(right) == f"Slope(Hessian ok: slope {right.slope:.2f}, right derivatives have 3)"
    assert not ghor.check_hessian(lambda Y: Y.detach().pow(3).mul(Y).sum(), x, STIEFEL, generator=gen(1)).ok


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize(("space", "shape"), CASES, ids=str)
def test_the_slope_along_a_step_is_the_derivative(space, shape, retraction):
    """<G, y_t'> against central differences of f(Lambda R(t W) E); 1e-7: their error at steps of 1e-5."""
    f = (
        of_projections if isinstance(space, ghor.Flag) else smooth
    )  # along Cayley a basis turns within its subspace
    for section in ["transported", "implicit"] if space.implicit else ["transported"]:
        problem = Problem(f(shape), start(space, shape), space, by_name(retraction), section)
        it = problem.start()
        ray, t, h = Ray(problem.space, it, -it.gradient / it.norm * 0.8), 0.9, 1e-5
        trials = ray.at(t)
        found = ray.slope(trials, problem.sample([trial.y for trial in trials]).G)
        values = [problem.value([trial.y for trial in ray.at(s)]) for s in (t - h, t + h)]
        assert abs(found - (values[1] - values[0]) / (2 * h)) <= 1e-7


@each_method
@pytest.mark.parametrize(("space", "shape"), [c for c in CASES if c[0].compact], ids=str)
def test_every_method_finds_a_critical_point_on_every_compact_space(space, shape, method):
    result = ghor.minimize(smooth(shape), start(space, shape), space, method, tol=1e-7)
    assert result.success, result.status
    assert result.gradient_norm <= 1e-7
    assert float(space.residual(result.x).max()) <= 1e-13
    assert values_of(result)[-1] < values_of(result)[0]


@pytest.mark.parametrize("method", ["lbfgs", "trust-region"])
def test_brockett_to_the_last_digits(method):
    """1e-10 of the optimum; L-BFGS in fewer evaluations than pymanopt's conjugate gradients (991 + 371
    gradients), the trust region in at most 1.2 x pymanopt's 18 outer iterations. benchmarks/problems.py has
    them side by side."""
    f, x, best = brockett(150, 5)
    result = ghor.minimize(f, x, STIEFEL, method, rtol=1e-6, tol=0)
    assert result.success
    assert result.evaluations < 991 if method == "lbfgs" else result.iterations <= 21
    closer = ghor.minimize(f, result.x, STIEFEL, method, tol=1e-6)
    assert abs(closer.value - best) <= 1e-10 * abs(best)
    assert closer.gradient_norm <= 1e-6


def test_points_by_name_on_several_spaces():
    """min |Y s b - Z|: a rotation, a direction and a number."""
    Z = torch.randn(6, generator=gen(0), dtype=torch.float64)
    x0 = {
        "Y": start(STIEFEL, (6, 3)),
        "s": start(ghor.Sphere(), (3,)),
        "b": torch.ones((), dtype=torch.float64),
    }
    result = ghor.minimize(
        lambda x: (x["Y"] @ x["s"] * x["b"] - Z).square().sum(),
        x0,
        {"Y": STIEFEL, "s": ghor.Sphere()},
        tol=1e-8,
    )
    assert set(result.x) == {"Y", "s", "b"}
    assert result.value <= 1e-14
    assert abs(abs(float(result.x["b"])) - float(Z.norm())) <= 1e-7


def test_how_a_run_ends(capsys):
    seen = []
    stopped = ghor.minimize(F, X, STIEFEL, callback=lambda record: seen.append(record) or len(seen) == 3)
    assert stopped.status == "the callback asked to stop"
    assert len(seen) == 3
    assert "max_iterations" in ghor.minimize(F, X, STIEFEL, max_iterations=2, progress=True).status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(seen[0])
    assert len(lines) == 4
    assert len(set(map(len, lines))) == 1  # the columns are aligned
    assert "max_seconds" in ghor.minimize(F, X, STIEFEL, max_seconds=0).status
    assert "max_evaluations" in ghor.minimize(F, X, STIEFEL, max_evaluations=5).status


def test_a_callback_with_two_arguments_gets_the_point():
    """In the form of x0, at every iteration including the last; the history keeps numbers only."""
    seen = []

    def callback(record, x):
        seen.append((record["value"], F(x["Y"]).item()))

    result = ghor.minimize(lambda x: F(x["Y"]), {"Y": X}, STIEFEL, callback=callback)
    assert [a for a, _ in seen] == [h["value"] for h in result.history]
    assert all(a == b for a, b in seen)
    assert all(isinstance(v, int | float) for h in result.history for v in h.values())
    records = []
    ghor.minimize(F, X, STIEFEL, callback=records.append)  # a builtin, of one argument
    assert len(records) == result.iterations + 1


def test_spd_makes_no_identity_on_the_meta_device(monkeypatch):
    """torch.eye there imports 800 modules, which takes more than a second, at the first call."""
    eye = torch.eye

    def checked(*args, **kwargs):
        assert str(kwargs.get("device")) != "meta"
        return eye(*args, **kwargs)

    monkeypatch.setattr(torch, "eye", checked)
    x = eye(3, dtype=torch.float64)
    assert ghor.minimize(lambda X: (X - 2 * x).square().sum(), x, ghor.SPD()).success


NO_SENSE = [  # f computes with torch, so a start that is no tensor is not converted
    ((F, X, STIEFEL, "newton"), {}, ValueError, "unknown method 'newton'; there are"),
    ((F, 2 * X, STIEFEL), {}, ValueError, r"x of shape \(20, 3\) is .* off Stiefel"),
    ((lambda x: x[0].sum(), [X, X], [STIEFEL]), {}, ValueError, "2 points and 1 spaces"),
    ((lambda Y: Y, X, STIEFEL), {}, ValueError, "one real number"),
    ((lambda Y: torch.ones(()), X, STIEFEL), {}, ValueError, "does not depend on x"),
    ((F, X, STIEFEL), {"section": "implict"}, ValueError, "unknown section 'implict'"),
    (
        (F, X, STIEFEL, "bfgs"),
        {"section": "implicit"},
        ValueError,
        r"section 'implicit' for method 'bfgs'; there are \['auto', 'transported'\]",
    ),
    (
        (F, torch.eye(3), ghor.SPD()),
        {"section": "implicit"},
        ValueError,
        r"SPD\(\) has no implicit section; use section='transported'",
    ),
    ((F, X, STIEFEL), {"memory": 0}, ValueError, "memory counts curvature pairs, 1 or more, got 0"),
    ((F, X, ghor.Stiefel), {}, TypeError, r"the class Stiefel, not a space: write Stiefel\(\)"),
    ((F, X, "stiefel"), {}, TypeError, "the string 'stiefel', not a space"),
    ((F, torch.arange(3)), {}, TypeError, "x is torch.int64; points are floating point"),
    ((STIEFEL, X, F), {}, TypeError, r"first comes the function of the points.*got Stiefel\(\)"),
    *(
        ((F, x, STIEFEL), {}, TypeError, rf"x0 is a {type(x).__name__}; .* torch\.as_tensor\(x0\)")
        for x in (X.numpy(), X.tolist(), X[:, 0].tolist(), 1.0)
    ),
    *(
        ((lambda x: F(x[0]), x, STIEFEL), {}, TypeError, r"is a ndarray on Stiefel.*torch\.as_tensor")
        for x in ([X, X.numpy()], {"a": X, "b": X.numpy()})
    ),
]


@pytest.mark.parametrize(("args", "options", "error", "words"), NO_SENSE, ids=range(len(NO_SENSE)))
def test_what_makes_no_sense(args, options, error, words):
    with pytest.raises(error, match=words):
        ghor.minimize(*args, **options)


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("method", ["lbfgs", "cg", "trust-region"])
def test_kernels_in_any_order_of_memory(method, section):
    """channels_last points and gradients, with the same values."""
    space = ghor.Stiefel(flatten=3)
    Y, C = space.random(12, 4, 3, 3, generator=gen(0), dtype=torch.float64), randn((12, 4, 3, 3), gen(1))
    last = {"memory_format": torch.channels_last}
    values = [
        ghor.minimize(lambda Y, C=D: (Y * C).sum(), Z, space, method, section=section).value
        for Z, D in ((Y, C), (Y, C.to(**last)), (Y.to(**last), C), (Y.to(**last), C.to(**last)))
    ]
    same(torch.tensor(values), torch.full((4,), -float(torch.linalg.svdvals(C.flatten(1)).sum())), rtol=1e-6)


@pytest.mark.parametrize("method", ["lbfgs", "trust-region"])
def test_float32_ends_where_its_digits_do(method):
    x = brockett(20, 3)[1]
    S = torch.diag(torch.linspace(1, 2, 20))
    result = ghor.minimize(
        lambda Y: -(Y * (S @ Y) * torch.tensor([3.0, 2.0, 1.0])).sum(), x.float(), STIEFEL, method
    )
    assert result.iterations < 500
    assert result.gradient_norm < 1e-4
    assert (
        result.success
        or "beyond rounding" in result.status
        or result.status.startswith("no step lowers the value")
    )


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("method", ["lbfgs", "cg", "trust-region"])
def test_points_of_two_dtypes(method, section):
    """What counts as rounding is that of the coarser one."""
    start = {"a": STIEFEL.random(20, 3, generator=gen(1)), "b": X}
    result = ghor.minimize(
        lambda x: F(x["a"].double()) + F(x["b"]), start, STIEFEL, method, tol=3e-5, section=section
    )
    assert result.success, result.status
    assert result.x["a"].dtype == torch.float32


def test_second_derivatives_of_complex_points():
    Y = STIEFEL.random(9, 3, generator=gen(0), dtype=torch.complex128)
    Z = STIEFEL.random(9, 3, generator=gen(1), dtype=torch.complex128)
    assert ghor.check_hessian(lambda Y: (Y**3 - 1j * Z).abs().square().sum(), Y, STIEFEL, generator=gen(2)).ok


def test_time_is_over_within_a_newton_step():
    """No time at all: one product with the Hessian, and not as many as it takes."""
    for seconds, few in ((None, False), (0.0, True)):
        log = Log(Problem(torch.sum, torch.ones(2), None), 0.0, 1e-12, max_seconds=seconds, first=(0.0, 1.0))
        H, products = torch.arange(1, 11, dtype=torch.float64), []
        steihaug(torch.ones_like(H), lambda v, H=H, products=products: products.append(v) or H * v, 1e3, log)
        assert (len(products) == 1) is few


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lbfgs", "trust-region"])
def test_a_hundred_thousand_rows(method):
    """Nothing of size N^2: a tridiagonal matrix with ten low eigenvalues."""
    N, n = 100_000, 10
    i = torch.arange(N)
    diagonal = torch.linspace(0, 1, N, dtype=torch.float64)
    diagonal[:n] -= torch.arange(n, 0, -1) + 1
    index = torch.cat([torch.stack([i, i]), torch.stack([i[1:], i[:-1]]), torch.stack([i[:-1], i[1:]])], 1)
    values = torch.cat([diagonal, torch.full((2 * N - 2,), -0.05, dtype=torch.float64)])
    S = torch.sparse_coo_tensor(index, values, (N, N), check_invariants=True).coalesce()
    weights = torch.arange(1, n + 1, dtype=torch.float64)
    x = STIEFEL.random(N, n, generator=gen(0), dtype=torch.float64)
    result = ghor.minimize(
        lambda Y: (Y * torch.sparse.mm(S, Y) * weights).sum(), x, STIEFEL, method, rtol=1e-6, tol=0, memory=10
    )
    assert result.success
    assert float(STIEFEL.residual(result.x)) <= 1e-13
