"""Rules without a frame: the same weights as with one, a state of 1.3 times the weight, and no drift."""

import copy
import io
import sys

import pytest
import torch
from helpers.table import name, randn
from torch import nn

import ghor
from ghor.baselines import ScalarMomentAdam
from ghor.spaces.frames import ClosedForm, Stored
from ghor.spaces.tangent import Tangent

ST = ghor.Stiefel()
F64, C128 = torch.float64, torch.complex128
CASES = [
    (ST, (49, 7), F64),
    (ST, (8, 6), F64),
    (ST, (40, 33), F64),  # by rows
    (ST, (2, 3, 12), F64),
    (ghor.Stiefel(blocks=3), (30, 4), F64),
    (ghor.Stiefel(blocks=2, along="columns"), (3, 16), F64),
    (ghor.Stiefel(flatten=3), (5, 3, 3, 3), F64),
    (ST, (20, 4), C128),
    (ghor.Grassmann(), (40, 5), F64),
    (ghor.Grassmann(), (9, 4), C128),
    (ghor.Flag((2, 1)), (9, 3), F64),
    (ghor.Sphere(), (30, 6), C128),
]
RULES = {
    "Muon": lambda p, **more: ghor.optim.Muon(p, lr=0.02, **more),
    "Muon without Nesterov": lambda p, **more: ghor.optim.Muon(p, lr=0.02, nesterov=False, **more),
    "SGD": lambda p, **more: ghor.optim.SGD(p, lr=0.05, **more),
    "momentum": lambda p, **more: ghor.optim.SGD(p, lr=0.05, momentum=0.9, **more),
    "Nesterov": lambda p, **more: ghor.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, **more),
    "one moment": lambda p, **more: ScalarMomentAdam(p, lr=0.05, **more),
    "decay": lambda p, **more: ghor.optim.SGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.3, anchor="start", **more
    ),
    "Muon with decay": lambda p, **more: ghor.optim.Muon(
        p, lr=0.02, weight_decay=0.3, anchor="start", **more
    ),
    "short steps": lambda p, **more: ghor.optim.SGD(p, lr=5.0, momentum=0.9, max_angle=0.1, **more),
}
cases = pytest.mark.parametrize(("space", "shape", "dtype"), CASES, ids=name)
rules = pytest.mark.parametrize("rule", RULES)


class Run:
    """Two weights with gradients that change."""

    def __init__(self, rule, space, shape, dtype, **options):
        gen = torch.Generator().manual_seed(1)
        self.params = [nn.Parameter(space.random(*shape, generator=gen, dtype=dtype)) for _ in range(2)]
        self.G = [(randn(shape, gen, dtype), 0.5 * randn(shape, gen, dtype)) for _ in range(2)]
        self.build = lambda params: RULES[rule](params, space=space, **options)
        self.space, self.opt = space, self.build(self.params)

    def run(self, steps):
        for _ in range(steps):
            for p, (A, B) in zip(self.params, self.G, strict=True):
                p.grad = A + B * p.detach()
            self.opt.step()
        return self

    def values(self):
        return torch.stack([p.detach() for p in self.params])

    @property
    def frame(self):
        (batch,) = self.opt._batches
        return batch.frame


@cases
@rules
def test_a_rule_without_a_frame_moves_as_with_one(space, shape, dtype, rule):
    retraction = "geodesic" if rule in ("Nesterov", "Muon without Nesterov") else "cayley"
    options = space, shape, dtype
    free = Run(rule, *options, retraction=retraction).run(50)
    stored = Run(rule, *options, retraction=retraction, section="transported").run(50)
    assert type(free.frame) is Tangent
    assert type(stored.frame) is Stored
    assert (free.values() - stored.values()).abs().max() <= 1e-11
    assert space.residual(free.values()).max() <= 1e-13


@rules
def test_closed_forms_stay_a_choice(rule):
    free, closed = (Run(rule, ST, (20, 4), F64, section=s).run(20) for s in ("auto", "implicit"))
    assert type(closed.frame) is ClosedForm
    assert (free.values() - closed.values()).abs().max() <= 1e-11


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [(ghor.SpecialOrthogonal(), (6, 6), F64), (ghor.Unitary(), (4, 4), C128), (ghor.Sphere(), (5, 9), F64)],
    ids=name,
)
def test_where_a_frame_is_as_small_it_stays(space, shape, dtype):
    assert type(Run("momentum", space, shape, dtype).run(1).frame) is not Tangent


def test_state_is_the_momentum(gen):
    """K in the weight's shape, A beside it: live views."""
    for space, shape, of_A in ((ST, (49, 7), (7, 7)), (ghor.Stiefel(blocks=3), (30, 4), (3, 4, 4))):
        run = Run("momentum", space, shape, F64).run(3)
        state = run.opt.state[run.params[0]]
        assert set(state) == {"momentum_buffer", "momentum_buffer.A", "moves"}
        K, A = state["momentum_buffer"], state["momentum_buffer.A"]
        assert K.shape == shape
        assert A.shape == of_A
        assert torch.equal(A, -A.mT)
        y, k = space.layout.points(run.params[0].detach()), space.layout.points(K)
        assert (y.mT @ k).abs().max() <= 1e-14
        before = K.clone()
        run.run(1)
        assert not torch.equal(run.opt.state[run.params[0]]["momentum_buffer"], before)
        assert run.opt.state[run.params[0]]["momentum_buffer"] is K
    run = Run("momentum", ghor.Grassmann(), (12, 4), F64).run(3)
    assert set(run.opt.state[run.params[0]]) == {"momentum_buffer", "moves"}


def test_state_is_at_most_1_3_times_the_weight():
    for rule in ("momentum", "one moment", "Muon"):
        run = Run(rule, ST, (49, 7), F64).run(1)
        assert sum(v.numel() for v in run.opt.state[run.params[0]].values()) <= 1.3 * 49 * 7


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [*CASES, (ST, (12, 4), torch.bfloat16), (ghor.Stiefel(blocks=3), (30, 4), torch.float16)],
    ids=name,
)
@pytest.mark.parametrize("rule", ["Muon", "momentum", "one moment", "Muon with decay"])
def test_resume_and_copies_to_the_bit(space, shape, dtype, rule):
    run = Run(rule, space, shape, dtype).run(13)
    other, file = copy.copy(run), io.BytesIO()
    other.params = [nn.Parameter(p.detach().clone()) for p in run.params]
    other.opt = other.build(other.params)
    torch.save(run.opt.state_dict(), file)
    file.seek(0)
    other.opt.load_state_dict(torch.load(file, weights_only=True))
    third = copy.copy(run)
    third.opt = copy.deepcopy(run.opt)
    third.params = third.opt.param_groups[0]["params"]
    run.run(13)
    assert torch.equal(run.values(), other.run(13).values())
    assert torch.equal(run.values(), third.run(13).values())


def test_a_run_goes_on_with_the_frame_that_it_began_with():
    """Whatever the group says later."""
    for began, later, kind in (("auto", "transported", Tangent), ("transported", "auto", Stored)):
        run, plain = (Run("momentum", ST, (12, 4), F64, section=began).run(5) for _ in range(2))
        run.opt.param_groups[0]["section"] = later
        assert type(run.run(5).frame) is kind
        assert (run.values() - plain.run(5).values()).abs().max() <= 1e-14


def test_missing_gradients_and_writes(gen):
    """A batch splits; one that is not tangent where its weight was written takes none off the space."""
    run, alone = Run("momentum", ST, (12, 4), F64).run(3), Run("momentum", ST, (12, 4), F64).run(3)
    p, q = run.params
    for _ in range(3):
        p.grad, q.grad = torch.ones_like(p), None
        run.opt.step()
    kept = run.opt.state[q]["momentum_buffer"]
    assert torch.equal(kept, alone.opt.state[alone.params[1]]["momentum_buffer"])
    target = ST.random(12, 4, generator=gen, dtype=F64)
    with torch.no_grad():
        q.copy_(target)
    for _ in range(20):
        assert ST.residual(run.run(1).values()).max() <= 1e-13


# -- rounding ------------------------------------------------------------------------------------------------


def hard_gradients(kind, Y, C, R, gen):
    """With a large part along Y, of low rank, or noise."""
    if kind == "low rank":
        return C @ R + 0.5 * C @ (C.mT @ Y) / len(Y)
    along = Y @ torch.diag(torch.linspace(1, 2, Y.shape[1])) if kind else 0
    return kind * along + randn(tuple(Y.shape), gen, torch.float32)


@pytest.mark.parametrize("shape", [(200, 30), (40, 30)], ids=name)
@pytest.mark.parametrize("kind", [0, 10, 1000, "low rank"], ids=str)
@pytest.mark.parametrize(
    ("rule", "lr"), [("SGD", 1e-3), ("SGD", 1e-2), ("Muon", 2e-3), ("Muon", 2e-2), ("Muon", 0.1)], ids=str
)
@pytest.mark.filterwarnings("ignore:a velocity of length")
def test_float32_stays_on_the_space(shape, kind, rule, lr, gen):
    """Without E = y^H K in the step it is off by more than 1 after 200 steps of SGD, and by 0.7 of Muon."""
    p = nn.Parameter(ST.random(*shape, generator=gen, dtype=torch.float32))
    C, R = randn((shape[0], 3), gen, torch.float32), randn((3, shape[1]), gen, torch.float32)
    options = {"momentum": 0.9} if rule == "SGD" else {}
    opt = getattr(ghor.optim, rule)([p], space=ST, lr=lr, **options)
    worst = 0.0
    for _ in range(200):
        p.grad = hard_gradients(kind, p.detach(), C, R, gen)
        opt.step()
        worst = max(worst, float(ST.residual(p.detach().double())))
    assert type(opt._batches[0].frame) is Tangent
    assert worst <= 1e-5


@pytest.mark.filterwarnings("ignore:the last step was interrupted")
@pytest.mark.parametrize("rule", ["Muon", "momentum", "one moment"])
def test_interrupts_at_every_line(rule):
    """Weights are whole, and after one more step on the space."""
    files = ("lifted.py", "batch.py", "tangent.py", "muon.py", "scalar_moment_adam.py")
    for at in range(1, 4000, 3):
        run, count = Run(rule, ST, (12, 4), F64).run(2), [0]

        def trace(frame, event, arg, at=at, count=count):
            if frame.f_code.co_filename.rsplit("/", 1)[-1] not in files:
                return None
            if event == "line":
                count[0] += 1
                if count[0] == at:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            run.run(1)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert ST.residual(run.values()).max() <= 1e-13
        copy.deepcopy(run.opt).state_dict()
        assert ST.residual(run.run(1).values()).max() <= 1e-13
    assert at > 100
