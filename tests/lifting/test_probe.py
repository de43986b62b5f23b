"""The probe: verdicts belong to classes; any rate, rounding, words, blocks, and what a verdict costs."""

import gc
import weakref

import pytest
import pytorch_optimizer as po
import torch
from liftable import NO, ST, Rule, points, refusal
from table import randn
from torch.optim import Optimizer

import ghor
from ghor.lifting import probe
from ghor.lifting.probe import Case, gradients, not_in_ghor

GR, SP, SO = ghor.Grassmann(), ghor.Sphere(), ghor.SpecialOrthogonal()


# -- verdicts belong to class objects ------------------------------------------------------------------------


def define(bad):
    class Cell(Rule):
        def velocity(self, g, group):
            return g.cumsum(-1) if bad else g

    return Cell


def test_a_class_defined_again_is_tried_again():
    ghor.lift(define(bad=False))
    with pytest.raises(ValueError, match="not odd and elementwise"):
        ghor.lift(define(bad=True))
    ghor.lift(define(bad=False))


def test_parities_belong_to_class_objects():
    def make(power):
        class Moment(Rule):
            def move(self, group, p, g):
                state = self.state[p]
                state.setdefault("m", torch.zeros_like(p)).add_(g**power)
                p.sub_(group["lr"] * g)

        return Moment

    assert probe.parity(make(1), {}) == {"m": "vector"}
    assert probe.parity(make(2), {}) == {"m": "square"}


def test_verdicts_keep_no_class_alive():
    Base = define(bad=False)
    probe.refuse_unless_it_lifts(Base, {})
    probe.parity(Base, {})
    gone = weakref.ref(Base)
    assert Base in probe._verdicts
    del Base
    gc.collect()
    assert gone() is None


def test_vectors_that_are_kept_elsewhere_do_not_turn():
    """A moment on the optimizer, not in the state: a frame that turns cannot take it along."""

    class Hidden(Rule):
        def move(self, group, p, g):
            self.m = 0.9 * getattr(self, "m", 0) + g
            p.sub_(group["lr"] * self.m)

    with pytest.raises(ValueError, match="keeps vectors that are not state tensors"):
        probe.parity(Hidden, {})


# -- rates ---------------------------------------------------------------------------------------------------


class Renamed(Rule):
    def __init__(self, params, speed=0.1):
        Optimizer.__init__(self, params, {"speed": speed})

    def move(self, group, p, g):
        p.sub_(group["speed"] * g)


class Constant(Rule):
    def __init__(self, params):
        Optimizer.__init__(self, params, {})

    def move(self, group, p, g):
        p.sub_(0.01 * g)


@pytest.mark.filterwarnings("ignore:a velocity of length")
@pytest.mark.parametrize(
    ("Base", "options"),
    [
        (Rule, {"lr": 0.0}),
        (Rule, {"lr": 0}),
        (Rule, {"lr": torch.tensor(0.0)}),
        (Rule, {"lr": 1e30}),
        (Rule, {"lr": 1e-30}),
        (po.Lion, {"lr": 0.0}),
        (Renamed, {"speed": 0.0}),
        (Constant, {}),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else str(v),
)
def test_any_rate_can_be_tried(Base, options, gen):
    """A warm-up begins with 0: the weight does not move, and the rule lifts all the same."""
    Y = points(ST, (9, 3), 1)[0]
    opt = ghor.lift(Base)([Y], space=ST, **options)
    before, Y.grad = Y.detach().clone(), randn((9, 3), gen)
    opt.step()
    moves = max(map(float, options.values()), default=1.0) != 0
    assert torch.equal(Y, before) != (moves and options.get("lr") != 1e-30)
    if Base is po.Lion:
        return
    with pytest.raises(ValueError, match=NO):  # a rule that does not lift does so at no rate
        ghor.lift(type("Bad", (Base,), {"move": lambda self, group, p, g: p.sub_(g.cumsum(-1))}))


# -- rounding breaks no law -------------------------------------------------------------------------------


class Float32Inside(Rule):
    """A float32 copy of the weight is moved and copied back: as RAdam in torch_optimizer and timm."""

    def move(self, group, p, g):
        m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float32))
        copy = p.float()
        copy.sub_(group["lr"] * m.mul_(0.9).add_(g.float()))
        p.copy_(copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stack", [True, False])
def test_rules_that_compute_in_float32_lift(dtype, stack):
    assert refusal(Float32Inside, dtype=dtype, stack=stack) is None
    assert refusal(Float32Inside, dtype=dtype, stack=stack, lr=1e-3) is None


class AlmostFree(Rule):
    def move(self, group, p, g):
        p.sub_(group["lr"] * (g + 1e-3 * p))


def test_a_small_dependence_on_the_weight_is_one():
    with pytest.raises(ValueError, match="depends on the value of the weight"):
        ghor.lift(AlmostFree)


def test_complex_rules_are_tried_with_complex_gradients():
    """VSGD takes the square of a complex gradient for that of its absolute value."""
    assert refusal(po.VSGD) is None
    assert "not odd and elementwise" in refusal(po.VSGD, dtype=torch.complex128)


# -- words ---------------------------------------------------------------------------------------------------


class WithClosure(Rule):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("WithClosure requires closure")


@pytest.mark.parametrize(
    ("Base", "words"),
    [
        (po.ScheduleFreeAdamW, "use ghor.optim.AdamW with a schedule"),
        (po.AdaHessian, "second derivatives"),
        (po.CAME, "not odd and elementwise"),
        (WithClosure, "a closure that it calls itself"),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_words_say_why_and_what_to_use(Base, words):
    with pytest.raises(ValueError, match=f"{Base.__name__} {NO}") as info:
        ghor.lift(Base)
    assert words in str(info.value)


class Long(Rule):
    def velocity(self, g, group):
        return g.cumsum(-1) if g.shape[-1] > 40 else g


def test_the_refusal_names_shape_and_space():
    with pytest.raises(ValueError, match=r"\(tried for weights of shape \(90, 50\) on Stiefel\(\)\)"):
        ghor.lift(Long)(points(ST, (90, 50)), space=ST)


def test_stack_false_is_named_only_where_it_helps():
    class Normalised(Rule):
        def velocity(self, g, group):
            return g / g.norm()

    assert "stack=False" in refusal(Normalised)
    assert refusal(Normalised, stack=False) is None
    assert "stack=False" not in refusal(define(bad=True))


# -- rules of matrices, at any block -------------------------------------------------------------------------


class Spectral(Rule):
    """The gradient over its spectral norm: turns with its matrix, of any shape."""

    def velocity(self, g, group):
        return g / torch.linalg.matrix_norm(g, 2)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (SP, (9,), torch.float64),
        (ghor.Hyperbolic(), (3, 5), torch.float64),
        (ST, (9, 1), torch.float64),
        (ST, (1, 9), torch.float32),
        (ST, (9, 3), torch.complex128),
        (ghor.SpecialEuclidean(), (3, 4), torch.float64),
        (ghor.SPD(), (3, 3), torch.float64),
    ],
    ids=str,
)
def test_blocks_are_tried_as_they_are(space, shape, dtype, gen):
    """With one column A is 0, and on a sphere there is no A: nothing to try, no reason to refuse."""
    params = points(space, shape, dtype=dtype)
    opt = ghor.lift(Spectral, blocks=True)(params, space=space, lr=1e-2)
    before = params[0].detach().clone()
    for p in params:
        p.grad = randn(tuple(p.shape), gen, dtype)
    opt.step()
    assert not torch.equal(params[0], before)
    with pytest.raises(ValueError, match="does not turn"):
        ghor.lift(torch.optim.Adam, blocks=True)


@pytest.mark.parametrize(
    "shape", [(2, 2), (2, 1), (1, 3), (3, 3), (4, 2), (5, 5), (7, 49), (33, 5), (100, 10)], ids=str
)
def test_muon_turns_up_to_bfloat16_and_adam_does_not(shape):
    rows, columns = shape
    muon, adam = (
        Case(Base, {"lr": 0.1}, GR, (rows + columns, columns), blocks=True)
        for Base in (torch.optim.Muon, torch.optim.Adam)
    )
    assert probe._turns(muon) is None
    assert probe._turns(adam) == probe.NOT_TURNING


# -- options that do not change the rule ---------------------------------------------------------------------


@pytest.mark.parametrize("space", [ST, ghor.Hyperbolic()], ids=str)
def test_differentiable_steps_are_refused_by_the_step(space):
    """Not by a crash in the constructor, where the state is tried for its parity."""
    (Y,) = points(space, (9, 3), 1)
    opt = ghor.optim.Adam([Y], space=space, section="implicit", differentiable=True)
    Y.grad = torch.ones_like(Y)
    with pytest.raises(RuntimeError, match="differentiable=True does not go through"):
        opt.step()


# -- the look at a velocity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "shape"), [(ST, (9, 3)), (GR, (9, 3)), (SO, (4, 4)), (ST, (3, 9)), (SP, (9,))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_velocities_off_ghor_are_told(space, shape, dtype):
    W = space.hor(next(gradients(Case(Rule, {}, space, shape, 5, dtype))))
    M = space.matrix(W)
    assert not not_in_ghor(M, space.matrix(space.hor(W)), 2).any()
    if space == SP:
        M[2, 0] = 1e-3
    else:
        M[2, 0, 1] += 1e-3
    off = not_in_ghor(M, space.matrix(space.hor(W)), 2)
    assert off.tolist() == [False, False, True, False, False]
    error = probe.left_ghor(torch.optim.Adam, "proj.weight", space, W[2], space.hor(W)[2])
    for word in ("Adam", "proj.weight", str(space), "on manifolds were not moved", str(tuple(shape))):
        assert word in str(error)


# -- cost ----------------------------------------------------------------------------------------------------


def test_named_optimizers_are_not_tried(monkeypatch):
    monkeypatch.setattr(probe, "_reason_not_to_lift", lambda case: pytest.fail("tried"))
    ghor.optim.Adam(points(ST, (49, 7), 3), space=ST)
    ghor.lift(torch.optim.Adam)(points(ST, (49, 7), 3), space=ST)


def test_a_kind_of_weight_is_tried_once(monkeypatch):
    calls, try_it = [], probe._reason_not_to_lift
    monkeypatch.setattr(probe, "_reason_not_to_lift", lambda case: calls.append(case) or try_it(case))
    Lifted = ghor.lift(define(bad=False))
    for lr in (0.1, 0.2, 0.0):
        Lifted(points(ST, (9, 3), 3) + points(ST, (8, 2)), space=ST, lr=lr)
    assert len(calls) == 3  # at lift, and two shapes


def test_a_subclass_of_a_lifted_optimizers_base_is_tried_anew():
    class Worse(torch.optim.Adam):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad.mean())

    with pytest.raises(ValueError, match="not odd and elementwise"):
        ghor.lift(Worse)
