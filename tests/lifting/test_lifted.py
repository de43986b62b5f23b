"""`ghor.lift`: what users write runs, and what has a better way says so."""

import copy
import pickle

import lion_pytorch
import pytest
import pytorch_optimizer as po
import torch
from helpers.rules import Rule, descend, drawn, loss_to
from helpers.steps import STIEFEL, take_steps, weight
from helpers.table import randn
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ghor


class Noisy(Rule):
    def velocity(self, p, g):
        return g + 1e-3 * torch.randn_like(g)


class Decaying(Rule):
    def velocity(self, p, g):
        return g + 0.01 * p


class Centred(Rule):
    def velocity(self, p, g):
        return g - g.mean()


class Normalised(Rule):
    def velocity(self, p, g):
        return g / g.norm()


class Mixing(Rule):
    def velocity(self, p, g):
        return g.cumsum(-1)


class Replacing(Rule):
    """Binds p.data anew."""

    def move(self, group, p, g):
        p.data = p.data - group["lr"] * g


class Required(Rule):
    """An argument without default."""

    def __init__(self, params, rate):
        super().__init__(params, lr=rate)


@pytest.mark.parametrize("Base", [Noisy, Decaying, Centred, Normalised, Mixing, Replacing, lion_pytorch.Lion])
def test_rules_of_users_descend_and_stay(Base, gen):
    Y, T = drawn(gen, (9, 3)), STIEFEL.random(9, 3, generator=gen, dtype=torch.float64)
    rate = 0.02 if Base in (Normalised, lion_pytorch.Lion) else 0.05
    values = descend(ghor.lift(Base)([Y], lr=rate, space=STIEFEL), Y, loss_to(T), 200)
    assert values[-1] < 0.5 * values[0]
    assert STIEFEL.residual(Y.detach()) <= 1e-13


@pytest.mark.parametrize("Base", [Rule, Replacing, Required])
def test_the_simplest_rule_is_sgd(Base, gen):
    Y, T = drawn(gen), STIEFEL.random(49, 7, generator=gen, dtype=torch.float64)
    Z = nn.Parameter(Y.detach().clone())
    mine = descend(ghor.lift(Base)([Y], 0.05, space=STIEFEL), Y, loss_to(T), 20)
    theirs = descend(ghor.optim.SGD([Z], lr=0.05, space=STIEFEL, section="transported"), Z, loss_to(T), 20)
    assert mine == theirs
    assert torch.equal(Y, Z)


@pytest.mark.filterwarnings("ignore:a velocity of length")
@pytest.mark.parametrize("Base", [po.NovoGrad, po.Adai, Normalised], ids=lambda v: v.__name__)
def test_norms_are_those_of_each_weight(Base, gen):
    """A weight moves as in an optimizer of its own, whatever the size of its neighbours' gradients."""
    params = [drawn(gen, (9, 3)) for _ in range(3)]
    singles = [nn.Parameter(p.detach().clone()) for p in params]
    Lifted = ghor.lift(Base)
    opts = [Lifted(params, lr=0.1, space=STIEFEL), *(Lifted([p], lr=0.1, space=STIEFEL) for p in singles)]
    for _ in range(5):
        for i, (p, q) in enumerate(zip(params, singles, strict=True)):
            p.grad = 10.0**i * randn((9, 3), gen)
            q.grad = p.grad.clone()
        for opt in opts:
            opt.step()
    assert Base is po.Adai or all(map(torch.equal, params, singles))  # Adai's mean is over all weights
    assert all(STIEFEL.residual(p.detach()) <= 1e-13 for p in params)


@pytest.mark.parametrize("Base", [lion_pytorch.Lion, po.AdaBelief, po.SOAP], ids=lambda v: v.__name__)
def test_euclidean_weights_are_the_bases_bit_for_bit(Base, gen):
    p = nn.Parameter(randn((6, 3), gen, torch.float32))
    q, Y = nn.Parameter(p.detach().clone()), weight(5, 2)
    opts = [
        ghor.lift(Base)([{"params": [p]}, {"params": [Y], "space": STIEFEL}], lr=0.01),
        Base([q], lr=0.01),
    ]
    for _ in range(10):
        p.grad, Y.grad = randn((6, 3), gen, torch.float32), randn((5, 2), gen, torch.float32)
        q.grad = p.grad.clone()
        for opt in opts:
            opt.step()
    assert torch.equal(p, q)


class Counted(Rule):
    """Momentum with a step count of shape (1,), which belongs to no coordinate."""

    def velocity(self, p, g):
        s = self.state[p]
        if not s:
            s["t"], s["m"] = torch.zeros(1, dtype=p.dtype), torch.zeros_like(p)
        s["t"] += 1
        return s["m"].mul_(0.9).add_(g) / s["t"]


def test_state_of_other_shapes_is_saved_and_split():
    a, b = ([weight(9, 3, seed=i) for i in range(3)] for _ in range(2))
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


# -- what wants more than a lift gives -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Base", "error"), [(po.LOMO, AttributeError), (po.AdamMini, AttributeError), (po.Lookahead, ValueError)]
)
def test_what_takes_a_model_or_an_optimizer_says_what_it_is_given(Base, error):
    with pytest.raises(error) as info:
        ghor.lift(Base)([weight(5, 2)], space=STIEFEL, **({"lr": 0.1} if Base is po.LOMO else {}))
    assert f"ghor.lift({Base.__name__}) builds {Base.__name__}(params, ...)" in info.value.__notes__[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("Base", [po.StableAdamW, po.AdaBelief], ids=lambda v: v.__name__)
def test_a_bfloat16_model_with_one_weight_on_a_manifold(Base, gen):
    """Velocities are float32: a rule that takes all of a group in one call gets them by themselves."""
    Y, b = weight(6, 2, dtype=torch.bfloat16), nn.Parameter(randn((4, 3), gen, torch.bfloat16))
    opt = ghor.lift(Base)([{"params": [Y, b], "space": [STIEFEL, None]}], lr=0.01)
    before = b.detach().clone()
    take_steps(opt, gen, 3)
    assert not torch.equal(b, before)
    assert STIEFEL.residual(Y.detach().float()) <= 0.05


def test_what_is_in_optim():
    """Every optimizer of torch that others can replace in a training loop and that reads no weight."""
    theirs = {
        n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n, None), type) and n != "Optimizer"
    }
    assert theirs - set(ghor.optim.__all__) == {"ASGD", "LBFGS", "SparseAdam", "Adafactor"}
    assert set(ghor.optim.__all__) - theirs == {"PaperAdam"}
    with pytest.raises(AttributeError, match=r"no Adafactor; ghor.lift\(torch.optim.Adafactor\) takes it"):
        _ = ghor.optim.Adafactor
    with pytest.raises(AttributeError, match="no Adom; did you mean Adam"):
        _ = ghor.optim.Adom
    with pytest.raises(AttributeError, match=r"no Lion; .*ghor\.lift"):
        _ = ghor.optim.Lion


# -- lift itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [torch.optim.Adam([torch.zeros(1)]), "Adam", nn.Linear, torch.optim.lr_scheduler.StepLR, None],
    ids=["instance", "string", "module", "scheduler", "None"],
)
def test_lift_of_what_is_no_optimizer_class(wrong):
    with pytest.raises(TypeError, match=r"lift takes a class of torch optimizers.* got "):
        ghor.lift(wrong)


@pytest.mark.parametrize("Base", [torch.optim.Adam, torch.optim.SGD, lion_pytorch.Lion, po.AdaBelief, Rule])
def test_lift_is_a_projection(Base):
    Lifted = ghor.lift(Base)
    assert ghor.lift(Lifted) is Lifted
    assert ghor.lift(Base) is Lifted
    assert issubclass(Lifted, torch.optim.Optimizer)
    assert Lifted.Base is Base
    assert Lifted.__name__ == Base.__name__


def test_lift_of_torchs_own_is_the_class_in_optim():
    for n in ghor.optim.__all__:
        cls = getattr(ghor.optim, n)
        assert ghor.lift(cls.Base) is cls


def test_asking_leaves_no_trace():
    """The global random state is as before, and no step hook has fired."""
    fired = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *a: fired.append("pre")),
        register_optimizer_step_post_hook(lambda *a: fired.append("post")),
    ]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        opt = ghor.lift(Noisy)([weight(3, 2)], lr=0.3, space=STIEFEL)
        opt._traits(opt._roster.weights[0])
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
    opt = Mine([weight(5, 2)], space=STIEFEL, lr=0.1)
    take_steps(opt, gen)
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert type(again) is Mine
        assert again.mine()
        take_steps(again, gen)
