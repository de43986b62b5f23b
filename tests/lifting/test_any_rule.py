"""Rules that read their weight, take it whole, or keep state that does not turn: on every kind of space."""

import copy
import io
import pickle
import sys

import pytest
import pytorch_optimizer as po
import torch
from helpers.table import randn
from lion_pytorch import Lion
from torch import nn

import ghor

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

SPACES = {
    "stiefel": (ghor.Stiefel(), (12, 4)),
    "wide": (ghor.Stiefel(), (4, 12)),
    "batch": (ghor.Stiefel(), (3, 12, 4)),
    "blocks": (ghor.Stiefel(blocks=3), (18, 4)),
    "columns": (ghor.Sphere(along="columns"), (2, 12, 5)),
    "large": (ghor.Stiefel(), (520, 8)),
    "grassmann": (ghor.Grassmann(), (12, 4)),
    "sphere": (ghor.Sphere(), (12, 5)),
    "radius": (ghor.Sphere(radius=2.5), (12, 5)),
    "spd": (ghor.SPD(), (2, 4, 4)),
    "hyperbolic": (ghor.Hyperbolic(), (12, 5)),
    "poses": (ghor.SpecialEuclidean(), (3, 4)),
    "orientations": (ghor.PositionsOrientations(), (2, 3)),
    "symplectic": (ghor.SymplecticStiefel(), (8, 4)),
}
RULES = {
    po.Prodigy: 1.0,
    po.DAdaptAdam: 1.0,
    po.ScheduleFreeAdamW: 0.02,
    po.SOAP: 0.02,
    po.Shampoo: 0.02,
    po.CAME: 0.02,
    po.Lamb: 0.02,
    po.LARS: 0.1,
    po.MADGRAD: 0.02,
    po.Adan: 0.02,
    Lion: 0.02,
    torch.optim.ASGD: 0.05,
    torch.optim.Adafactor: 0.02,
}
MOST = ["stiefel", "wide", "radius", "spd", "poses"]
READING = [po.Prodigy, po.Lamb, po.ScheduleFreeAdamW, torch.optim.ASGD]
label = lambda v: v.__name__ if isinstance(v, type) else str(v).removeprefix("torch.")  # noqa: E731
rules = pytest.mark.parametrize("Base", list(RULES), ids=label)
spaces = pytest.mark.parametrize("where", list(SPACES))


class Run:
    """Two weights on a space and a Euclidean one, drawn to targets."""

    def __init__(self, where, Base, dtype=torch.float32, **options):
        gen = torch.Generator().manual_seed(1)
        self.Base, self.options = Base, {"lr": RULES[Base], **options}
        self.space, shape = SPACES[where]
        draw = lambda: self.space.random(*shape, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
        self.params = [nn.Parameter(draw()), nn.Parameter(draw()), nn.Parameter(randn((4, 3), gen, dtype))]
        self.targets = [draw(), draw()]
        self.opt = self.build()

    def build(self):
        groups = [{"params": self.params[:2], "space": self.space}, {"params": self.params[2:]}]
        return ghor.lift(self.Base)(groups, **self.options)

    def run(self, steps):
        *curved, flat = self.params
        for k in steps:
            for p, t in zip(curved, self.targets, strict=True):
                p.grad = (0.5 + k % 3) * (-t if self.space.compact else 0.5 * (p.detach() - t))
            noise = randn(
                (4, 3), torch.Generator().manual_seed(k), flat.dtype
            )  # Shampoo wants several directions
            flat.grad = flat.detach() * 2 + 0.1 * noise
            torch.manual_seed(k)  # some draw
            self.opt.step()
        return self

    def twin(self):
        new = copy.copy(self)
        new.params = [nn.Parameter(p.detach().clone()) for p in self.params]
        new.opt = new.build()
        return new

    def values(self):
        return [p.detach().clone() for p in self.params]

    def on_space(self):
        for p in self.params[:2]:
            assert bool(p.isfinite().all())
            assert bool((self.space.residual(p.detach()) <= self.space.tolerance(p.detach())).all())
        return self


def same(a, b):
    return all(map(torch.equal, a, b))


def resumes(run):
    """On the space; a run from a file is the run, to the bit."""
    start = run.values()
    run.run(range(12)).on_space()
    assert run.params[0].dtype == torch.bfloat16 or not any(map(torch.equal, run.values(), start))
    twin, file = run.twin(), io.BytesIO()
    torch.save(run.opt.state_dict(), file)
    file.seek(0)
    twin.opt.load_state_dict(torch.load(file, weights_only=False))
    run.run(range(12, 24)).on_space()
    twin.run(range(12, 24))
    assert same(run.values(), twin.values())


@spaces
@rules
def test_on_the_space_and_resume_to_the_bit(where, Base):
    resumes(Run(where, Base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=label)
@pytest.mark.parametrize("where", MOST)
@rules
def test_other_dtypes(where, Base, dtype):
    resumes(Run(where, Base, dtype))


@pytest.mark.parametrize("where", ["stiefel", "sphere", "spd"])
@rules
def test_copies_go_on_to_the_bit(where, Base):
    run = Run(where, Base).run(range(6))
    for copied in (copy.deepcopy(run.opt), pickle.loads(pickle.dumps(run.opt))):
        others = []
        for opt in (copy.deepcopy(run.opt), copied):
            other = copy.copy(run)
            other.opt, other.params = opt, [p for group in opt.param_groups for p in group["params"]]
            others.append(other.run(range(6, 14)).values())
        assert same(*others)


@pytest.mark.parametrize("Base", READING, ids=label)
@spaces
def test_a_write_and_a_missing_gradient_leave_the_others_alone(where, Base):
    a, b = Run(where, Base).run(range(6)), Run(where, Base).run(range(6))
    with torch.no_grad():
        a.params[1].copy_(a.targets[1])
    a.run(range(6, 12)).on_space()
    b.run(range(6, 12))
    assert a.opt.state[a.params[0]]["developed"].shape == a.params[0].shape
    if Base is not po.Prodigy:  # whose step size is one for all
        assert float((a.params[0] - b.params[0]).abs().max()) < 1e-5


@spaces
def test_the_average_of_schedule_free(where):
    """eval() steps to the average, which is on the space; train() steps back."""
    run = Run(where, po.ScheduleFreeAdamW).run(range(60))
    before = run.values()
    run.opt.eval()
    average = run.on_space().values()
    assert not any(map(torch.equal, before, average))
    run.opt.eval()
    assert same(average, run.values())
    run.opt.train()
    assert all(
        float((x - y).abs().max()) < 1e-4 for x, y in zip(before, run.on_space().values(), strict=True)
    )
    run.run(range(60, 64)).on_space()


def loss_of(run, p, t):
    """How much more of p's loss there is than at t, where it is least: that of `Run.run`."""
    p = p.detach()
    return float(-(p * t).sum() + (t * t).sum()) if run.space.compact else float((p - t).square().sum())


@pytest.mark.parametrize("where", ["stiefel", "sphere", "hyperbolic", "poses"])
def test_prodigy_needs_no_rate(where):
    """At lr = 1 it ends where Adam does at a good rate."""
    run = Run(where, po.Prodigy, torch.float64)
    at_first = loss_of(run, run.params[0], run.targets[0])
    run.run(range(300)).on_space()
    assert loss_of(run, run.params[0], run.targets[0]) < 1e-3 * at_first


@pytest.mark.parametrize("Base", [po.ScheduleFreeAdamW, po.Lamb, po.SOAP, po.LaProp], ids=label)
def test_weight_decay_does_nothing_on_a_manifold(Base):
    """Whether a rule decays before its step or after."""
    RULES.setdefault(Base, 0.02)
    a, b = Run("stiefel", Base), Run("stiefel", Base, weight_decay=0.1)
    a.run(range(10))
    b.run(range(10)).on_space()
    assert same(a.values()[:2], b.values()[:2])
    assert all(group["weight_decay"] == 0.1 for group in b.opt.param_groups)


def test_a_weight_is_developed(gen):
    """H_0 = E, H_t = H_(t-1) + W_t: one step, by the dense formula."""
    run = Run("stiefel", po.Lamb, torch.float64)
    p, I = run.params[0], torch.eye(12, dtype=torch.float64)
    Lambda = ghor.Stiefel().section(p.detach())
    run.run(range(1))
    W = torch.cat([run.opt.state[p]["developed"] - I[:, :4], torch.zeros(12, 8, dtype=torch.float64)], -1)
    assert torch.allclose(W[:4, :4], -W[:4, :4].mT, rtol=0, atol=1e-15)
    W[:4, 4:] = -W[4:, :4].mT
    moved = Lambda @ torch.linalg.solve(I - W / 2, I + W / 2)
    torch.testing.assert_close(p.detach(), moved[:, :4], rtol=0, atol=1e-14)


# -- frames --------------------------------------------------------------------------------------------------


def test_a_frame_that_would_be_large_is_an_error_with_a_way_out(gen):
    p = nn.Parameter(ghor.Sphere().random(200, 300, generator=gen))
    p.grad = randn((200, 300), gen, torch.float32)
    with pytest.raises(ValueError, match=r"300 x 300 numbers for each of 200 points.*section='transported'"):
        ghor.lift(po.Lamb)([p], space=ghor.Sphere(), lr=0.1).step()
    opt = ghor.lift(po.Lamb)([p], space=ghor.Sphere(), lr=0.1, section="transported")
    opt.step()
    assert "section" in opt.state[p]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"section": "implicit"}, "use section='transported'"), ({"anchor": "start"}, "leave out anchor")],
    ids=["implicit", "anchor"],
)
def test_what_makes_no_sense_for_a_rule_that_reads_its_weight(options, words, gen):
    p = nn.Parameter(ghor.Stiefel().random(12, 4, generator=gen))
    with pytest.raises(ValueError, match=words):
        ghor.lift(po.Lamb)([p], space=ghor.Stiefel(), lr=0.1, weight_decay=0.1, **options)


def test_switches_that_are_turned_later_are_asked_anew(gen):
    """Momentum that starts later turns with a closed form, as momentum from the start does."""
    start, target = (ghor.Stiefel().random(20, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    ends = []
    for section in ("implicit", "transported"):
        p = nn.Parameter(start.clone())
        opt = ghor.lift(po.SGDW)([p], space=ghor.Stiefel(), section=section, lr=0.1)
        for k in range(20):
            if k == 5:
                opt.param_groups[0]["momentum"] = 0.9
            p.grad = 0.1 * p.detach() ** 2 - target
            opt.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-13)


def test_interrupts_of_developed_weights():
    """At every 17th line of a step: whole weights, and a run that goes on."""
    files = ("lifted.py", "batch.py", "frames.py", "lamb.py")
    for at in range(1, 4000, 17):
        run, count = Run("stiefel", po.Lamb, torch.float64).run(range(3)), [0]

        def trace(frame, event, arg, at=at, count=count):
            if frame.f_code.co_filename.rsplit("/", 1)[-1] not in files:
                return None
            if event == "line":
                count[0] += 1
                if count[0] == at:
                    raise KeyboardInterrupt
            return trace

        for p, t in zip(run.params, [*run.targets, run.params[2].detach()], strict=True):
            p.grad = -t
        sys.settrace(trace)
        try:
            run.opt.step()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        run.on_space()
        copy.deepcopy(run.opt).state_dict()
        run.run(range(4, 8)).on_space()
    assert at > 200
