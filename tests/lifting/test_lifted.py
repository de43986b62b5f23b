"""What lifts: rules that are odd, elementwise and do not look at the weight; others are refused, with the
reason."""

import copy
import pickle

import lion_pytorch
import pytest
import pytorch_optimizer as po
import torch
from rules import DEPENDS, NOT_ELEMENTWISE, Plain, descend, drawn, lifted_or_refused, loss_to
from steps import STIEFEL, take_steps, weight
from table import randn
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ghor


class Noisy(Plain):
    def velocity(self, p, g):
        return g + 1e-3 * torch.randn_like(g)


class Dropout(Plain):
    def velocity(self, p, g):
        return g * (torch.rand_like(g) < 0.9)


class Decaying(Plain):
    def velocity(self, p, g):
        return g + 0.01 * p


class ByNorm(Plain):
    def velocity(self, p, g):
        return g * (p.norm() + 1e-3)


class Relu(Plain):
    def velocity(self, p, g):
        return g.clamp_min(0)


class Centred(Plain):
    def velocity(self, p, g):
        return g - g.mean()


class Normalised(Plain):
    def velocity(self, p, g):
        return g / g.norm()


class Mixing(Plain):
    def velocity(self, p, g):
        return g.cumsum(-1)


class Still(Plain):
    def velocity(self, p, g):
        return torch.zeros_like(g)


class NaNs(Plain):
    def velocity(self, p, g):
        return g / p


class Replacing(Plain):
    """Binds p.data anew: the shadow would no longer be where the stack looks."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize(
    ("Base", "reason"),
    [
        (Noisy, ""),
        (Dropout, ""),
        (Decaying, DEPENDS),
        (ByNorm, DEPENDS),
        (Relu, NOT_ELEMENTWISE),
        (Centred, NOT_ELEMENTWISE),
        (Mixing, NOT_ELEMENTWISE),
        (Normalised, ""),
        (Still, ""),
        (NaNs, "not finite"),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_user_written_rules_that_do_not_lift(Base, reason):
    with pytest.raises(ValueError, match=f"{Base.__name__} cannot be lifted to manifolds: .*{reason}"):
        ghor.lift(Base)


@pytest.mark.parametrize("Base", [po.NovoGrad, Normalised], ids=lambda v: v.__name__)
def test_norms_over_a_tensor_lift_one_by_one(Base, gen):
    """The way out that the refusal names: with stack=False a weight moves as in an optimizer of its own."""
    with pytest.raises(ValueError, match=r"norm or mean over the whole tensor.*stack=False"):
        ghor.lift(Base)
    Lifted = ghor.lift(Base, stack=False)
    assert Lifted is ghor.lift(Base, stack=False)
    params = [drawn(gen, (9, 3)) for _ in range(3)]
    singles = [nn.Parameter(p.detach().clone()) for p in params]
    opts = [Lifted(params, space=STIEFEL), *(Lifted([p], space=STIEFEL) for p in singles)]
    for _ in range(5):
        for i, (p, q) in enumerate(zip(params, singles, strict=True)):
            p.grad = 10.0**i * randn((9, 3), gen)
            q.grad = p.grad.clone()
        for opt in opts:
            opt.step()
    for p, q in zip(params, singles, strict=True):
        assert torch.equal(p, q)
        assert STIEFEL.residual(p.detach()) <= 1e-13
    take_steps(copy.deepcopy(opts[0]), gen)


def test_user_written_rule_lifts_and_is_sgd(gen):
    Y = drawn(gen)
    Z = nn.Parameter(Y.detach().clone())
    T = STIEFEL.random(49, 7, generator=gen, dtype=torch.float64)
    mine = descend(ghor.lift(Plain)([Y], lr=0.05, space=STIEFEL), Y, loss_to(T), 20)
    theirs = descend(ghor.optim.SGD([Z], lr=0.05, space=STIEFEL), Z, loss_to(T), 20)
    assert mine == theirs
    assert torch.equal(Y, Z)


def test_a_rule_that_binds_data_anew_moves_or_is_refused(gen):
    """Never in silence: the weight moves as with SGD, or lift says no."""
    Lifted = lifted_or_refused(Replacing)
    if Lifted is None:
        return
    Y = drawn(gen, (9, 3))
    Z = nn.Parameter(Y.detach().clone())
    opts = [Lifted([Y], lr=0.1, space=STIEFEL), ghor.optim.SGD([Z], lr=0.1, space=STIEFEL)]
    for _ in range(3):
        Y.grad = randn((9, 3), gen)
        Z.grad = Y.grad.clone()
        for opt in opts:
            opt.step()
    # lr g - 0 and 0 - lr g round alike
    assert torch.equal(Y, Z)


class Counted(Plain):
    """Momentum with a step count of shape (1,), which belongs to no coordinate."""

    def velocity(self, p, g):
        s = self.state[p]
        if not s:
            s["t"], s["m"] = torch.zeros(1, dtype=p.dtype), torch.zeros_like(p)
        s["t"] += 1
        return s["m"].mul_(0.9).add_(g) / s["t"]


def test_state_of_other_shapes_is_shared_saved_and_split(gen):
    def make():
        return [weight(9, 3, seed=i) for i in range(3)]

    a, b = make(), make()
    first, second = ghor.lift(Counted)(a, space=STIEFEL), ghor.lift(Counted)(b, space=STIEFEL)
    for opt in (first, second):
        take_steps(opt, torch.Generator().manual_seed(1), 3)
    third = ghor.lift(Counted)(b, space=STIEFEL)
    third.load_state_dict(second.state_dict())
    for ps, opt in ((a, first), (b, third)):
        g = torch.Generator().manual_seed(2)
        for t in range(4):
            for i, p in enumerate(ps):
                p.grad = randn((9, 3), g, torch.float32) if (t + i) % 3 else None
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


class Required(Plain):
    """An argument without default: nothing can be tried before an instance is made."""

    def __init__(self, params, rate, noise=0.0):
        super().__init__(params, lr=rate)
        self.noise = noise

    def velocity(self, p, g):
        return g + self.noise * torch.randn_like(g)


def test_arguments_without_default_are_tried_at_construction(gen):
    Lifted, Y = ghor.lift(Required), drawn(gen, (9, 3))
    opt = Lifted([Y], 0.1, space=STIEFEL)
    Y.grad = randn((9, 3), gen)
    before = Y.detach().clone()
    opt.step()
    assert not torch.equal(Y, before)
    with pytest.raises(ValueError, match="Required cannot be lifted to manifolds: "):
        Lifted([Y], 0.1, noise=0.1, space=STIEFEL)


# -- optimizers of torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Base", "words"),
    [
        (torch.optim.ASGD, ("averages", "ghor.optim.SGD", "swa_utils")),
        (torch.optim.SparseAdam, ("sparse", "ghor.optim.Adam")),
        (torch.optim.Adafactor, ("row and column", "ghor.optim.Adam")),
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
    """Every optimizer of torch is in ghor.optim or is refused with a reason; LBFGS takes closures, and stands
    apart."""
    theirs = {
        n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n, None), type) and n != "Optimizer"
    }
    refused = {n for n in theirs if n not in ghor.optim.__all__}
    assert refused == {"ASGD", "LBFGS", "SparseAdam", "Adafactor"}
    assert set(ghor.optim.__all__) - theirs == {"PaperAdam"}


# -- lift itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [torch.optim.Adam([torch.zeros(1)]), "Adam", nn.Linear, torch.optim.lr_scheduler.StepLR, None],
    ids=["instance", "string", "module", "scheduler", "None"],
)
def test_lift_of_what_is_no_optimizer_class(wrong):
    with pytest.raises(TypeError, match=r"lift takes a class of torch optimizers.* got "):
        ghor.lift(wrong)


@pytest.mark.parametrize("Base", [torch.optim.Adam, torch.optim.SGD, lion_pytorch.Lion, po.AdaBelief, Plain])
def test_lift_is_a_projection(Base):
    Lifted = ghor.lift(Base)
    assert ghor.lift(Lifted) is Lifted
    assert ghor.lift(Base) is Lifted
    assert issubclass(Lifted, Base)
    assert Lifted.__name__ == Base.__name__
    assert Lifted is not Base


def test_lift_of_torchs_own_is_the_class_in_optim():
    for n in ghor.optim.__all__:
        cls = getattr(ghor.optim, n)
        assert ghor.lift(cls.Base) is cls


class Fresh(Plain):
    """Lifted for the first time in the test below, so that the probe runs there."""

    def velocity(self, p, g):
        torch.rand(3)  # uses the global generator; the velocity does not depend on it
        return g


def test_the_probe_leaves_no_trace():
    """The global random state is as before, and no step hook has fired."""
    fired = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *a: fired.append("pre")),
        register_optimizer_step_post_hook(lambda *a: fired.append("post")),
    ]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        Lifted = ghor.lift(Fresh)
        with pytest.raises(ValueError, match="cannot be lifted"):
            ghor.lift(Noisy)
        Lifted([nn.Parameter(torch.eye(3, 2))], lr=0.3, space=STIEFEL)
    finally:
        for hook in hooks:
            hook.remove()
    assert fired == []
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


class Stepped(torch.optim.SGD):
    """An optimizer of someone's own."""


class Mine(ghor.lift(Stepped)):
    """A subclass of what `lift` makes, with a method of its own."""

    def mine(self):
        return True


def test_a_subclass_of_a_lifted_class_is_copied_as_itself(gen):
    opt = Mine([nn.Parameter(ghor.Stiefel().random(5, 2, generator=gen))], space=ghor.Stiefel(), lr=0.1)
    take_steps(opt, gen)
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert type(again) is Mine
        assert again.mine()
        take_steps(again, gen)


def test_options_of_a_class_that_is_lifted_already():
    assert ghor.lift(ghor.optim.SGD) is ghor.optim.SGD
    assert ghor.lift(ghor.optim.Muon, blocks=True) is ghor.optim.Muon
    one_by_one = ghor.lift(Stepped, stack=False)
    assert ghor.lift(one_by_one, stack=False) is one_by_one
    for options in ({"blocks": True}, {"stack": False}):
        with pytest.raises(TypeError, match="SGD is lifted already, and computes with stack=True"):
            ghor.lift(ghor.optim.SGD, **options)
