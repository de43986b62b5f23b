"""Optimizers from elsewhere: those that lift work, those that would do something else than they say are refused."""

import copy
import inspect
import io
import pickle
import warnings

import lion_pytorch
import pytest
import pytorch_optimizer as po
import torch
from table import randn
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ghor

STIEFEL = ghor.Stiefel()

# Elementwise, odd, independent of the weight: (class, learning rate at which Procrustes below falls in 100 steps)
LIFT = [
    (lion_pytorch.Lion, 1e-2),
    (po.AdaBelief, 5e-2),
    (po.AdEMAMix, 5e-2),
    (po.Lion, 1e-2),
    (po.LaProp, 5e-2),
    (po.Adan, 5e-2),
    (po.DiffGrad, 5e-2),
    (po.QHAdam, 5e-2),
    (po.PID, 1e-2),
    (po.SignSGD, 1e-2),
    (po.Tiger, 1e-2),
]
lifting = pytest.mark.parametrize(
    ("Base", "lr"), LIFT, ids=lambda v: f"{v.__module__}.{v.__name__}" if isinstance(v, type) else ""
)


def loss_to(target):
    return lambda Y: (Y - target).square().sum()


def descend(opt, Y, loss, steps):
    values = []
    for _ in range(steps):
        opt.zero_grad()
        value = loss(Y)
        value.backward()
        opt.step()
        values.append(float(value.detach()))
    return values


def weight(gen, shape=(49, 7)):
    return nn.Parameter(STIEFEL.random(*shape, generator=gen, dtype=torch.float64))


def lifted_or_refused(Base):
    """lift(Base), or None where it is refused as such; any other error is an error."""
    try:
        return ghor.lift(Base)
    except ValueError as error:
        if f"{Base.__name__} cannot be lifted to manifolds: " in str(error):
            return None
        raise


@lifting
@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_lifted_third_party_optimizers_descend_and_stay(Base, lr, section, gen):
    """||Y - T||^2 to a T on the space, so that the minimum is 0; a random start is 2 n = 14 away on average."""
    Y, T = weight(gen), STIEFEL.random(49, 7, generator=gen, dtype=torch.float64)
    opt = ghor.lift(Base)([Y], lr=lr, space=STIEFEL, section=section)
    values = descend(opt, Y, loss_to(T), 100)
    assert values[-1] < 0.5 * values[0]
    assert STIEFEL.distance(Y.detach()) <= 1e-13  # the bound for float64
    assert isinstance(opt, Base)
    Z = nn.Parameter(Y.detach().clone())
    plain = Base([Z], lr=lr)
    Z.grad = Y.grad
    plain.step()

    def shapes(state):
        return {k: v.shape for k, v in state.items() if torch.is_tensor(v) and k not in ("section", "anchor", "moves")}

    assert shapes(opt.state[Y]) == shapes(plain.state[Z])


@lifting
def test_euclidean_weights_are_the_bases_bit_for_bit(Base, lr, gen):
    p = nn.Parameter(randn((6, 3), gen))
    q = nn.Parameter(p.detach().clone())
    opts = [ghor.lift(Base)([p], lr=lr, space=ghor.Euclidean()), Base([q], lr=lr)]
    for _ in range(10):
        p.grad = randn((6, 3), gen)
        q.grad = p.grad.clone()
        for opt in opts:
            opt.step()
    assert torch.equal(p, q)


def everything_in_the_collection():
    """Every optimizer of pytorch_optimizer that needs no further argument and that `lift` takes."""
    out = []
    for n in sorted(dir(po)):
        Base = getattr(po, n)
        if inspect.isclass(Base) and issubclass(Base, Optimizer) and not Base.__module__.startswith("torch."):
            rest = list(inspect.signature(Base.__init__).parameters.values())[2:]
            if all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in rest):
                out.append(pytest.param(Base, id=n))
    return out


@pytest.mark.parametrize("Base", everything_in_the_collection())
def test_whatever_lifts_closes(Base):
    """The law of the lift: weights that are computed together move as they do one by one, and all of them move.

    Gradients of different sizes, over weights and over time, with a part that is always the same: so norms over a
    tensor, statistics over all tensors, and rules that look at how far a weight has come, show themselves.
    """
    gen = torch.Generator().manual_seed(0)
    starts = [STIEFEL.random(9, 3, generator=gen, dtype=torch.float64) for _ in range(3)]
    steady = [randn((9, 3), gen) for _ in range(3)]
    noise = [[randn((9, 3), gen) for _ in range(3)] for _ in range(12)]

    def run(optimizers, params):
        for size, step in zip([1, 4, 0.25, 2, 0.5, 1] * 2, noise, strict=True):
            for i, p in enumerate(params):
                p.grad = 10.0**i * size * (steady[i] + step[i])
            for opt in optimizers:
                opt.step()
        return torch.stack([p.detach() for p in params])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        Lifted = lifted_or_refused(Base)
        if Lifted is None:
            return
        params, singles = ([nn.Parameter(Y.clone()) for Y in starts] for _ in range(2))
        together = run([Lifted(params, space=STIEFEL)], params)
        one_by_one = run([Lifted([p], space=STIEFEL) for p in singles], singles)
    # batched products of 9 x 3 matrices are those of one, up to the order of sums: 12 steps of a few eps, ||W|| <= 100
    assert (together - one_by_one).abs().max() <= 1e-12
    assert all(not torch.equal(Y, start) for Y, start in zip(together, starts, strict=True))
    assert STIEFEL.distance(together).max() <= 1e-12


# -- refused -----------------------------------------------------------------------------------------------------------

DEPENDS = "depends on the value of the weight, or keeps a copy of it"
NOT_ELEMENTWISE = "not odd and elementwise"


@pytest.mark.parametrize(
    ("Base", "reason"),
    [
        (po.Lamb, DEPENDS),
        (po.LARS, DEPENDS),
        (po.AdamP, DEPENDS),
        (po.SGDP, DEPENDS),
        (po.Fromage, DEPENDS),
        (po.ScheduleFreeAdamW, DEPENDS),
        (po.ScheduleFreeSGD, DEPENDS),
        (po.MADGRAD, DEPENDS),
        (po.DAdaptSGD, DEPENDS),
        (po.Prodigy, DEPENDS),  # its step size grows with the way from the start, which is 0 in g^hor
        (po.Ranger, NOT_ELEMENTWISE),  # gradient centralisation
        (po.Shampoo, NOT_ELEMENTWISE),
        (po.SOAP, NOT_ELEMENTWISE),
        (po.CAME, NOT_ELEMENTWISE),
        (po.SM3, NOT_ELEMENTWISE),
        (po.AdaFactor, NOT_ELEMENTWISE),
        (po.AdaHessian, "could not be tried"),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_refused_with_the_reason(Base, reason):
    with pytest.raises(ValueError, match=f"{Base.__name__} cannot be lifted to manifolds: ") as info:
        ghor.lift(Base)
    assert reason in str(info.value)


@pytest.mark.parametrize(
    "Base", [po.NovoGrad, po.AdaGC, po.StableAdamW, po.AdaNorm, po.AvaGrad, po.Adai], ids=lambda v: v.__name__
)
def test_norms_over_a_tensor_are_refused(Base):
    """They keep g^hor, and would take the norm of a whole stack of weights for that of one."""
    with pytest.raises(ValueError, match="cannot be lifted to manifolds: "):
        ghor.lift(Base)


@pytest.mark.parametrize(
    ("Base", "options", "reason"),
    [
        (po.AdaBelief, {"adanorm": True}, "cannot be lifted"),
        (po.Lion, {"use_gc": True}, NOT_ELEMENTWISE),
        (lion_pytorch.Lion, {"decoupled_weight_decay": True}, None),
        (po.AdaBelief, {"rectify": True}, None),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else next(iter(v)) if isinstance(v, dict) else "",
)
def test_options_are_tried_too(Base, options, reason, gen):
    """What lifts by default may not with an option; the constructor tries the options it is given."""
    Lifted, Y = ghor.lift(Base), weight(gen, (9, 3))
    if reason is None:
        Lifted([Y], space=STIEFEL, **options)
    else:
        with pytest.raises(ValueError, match=reason):
            Lifted([Y], space=STIEFEL, **options)


class Plain(Optimizer):
    """The smallest optimizer a user may write; subclasses give the velocity."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.velocity(p, p.grad), alpha=-group["lr"])

    def velocity(self, p, g):
        return g


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
    with pytest.raises(ValueError, match="stack=False"):
        ghor.lift(Base)
    Lifted = ghor.lift(Base, stack=False)
    params = [weight(gen, (9, 3)) for _ in range(2)]
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


def test_user_written_rule_lifts_and_is_sgd(gen):
    Y = weight(gen)
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
    Y = weight(gen, (9, 3))
    Z = nn.Parameter(Y.detach().clone())
    opts = [Lifted([Y], lr=0.1, space=STIEFEL), ghor.optim.SGD([Z], lr=0.1, space=STIEFEL)]
    for _ in range(3):
        Y.grad = randn((9, 3), gen)
        Z.grad = Y.grad.clone()
        for opt in opts:
            opt.step()
    # lr g - 0 and 0 - lr g round alike
    assert torch.equal(Y, Z)


class Required(Plain):
    """An argument without default: nothing can be tried before an instance is made."""

    def __init__(self, params, rate, noise=0.0):
        super().__init__(params, lr=rate)
        self.noise = noise

    def velocity(self, p, g):
        return g + self.noise * torch.randn_like(g)


def test_arguments_without_default_are_tried_at_construction(gen):
    Lifted, Y = ghor.lift(Required), weight(gen, (9, 3))
    opt = Lifted([Y], 0.1, space=STIEFEL)
    Y.grad = randn((9, 3), gen)
    before = Y.detach().clone()
    opt.step()
    assert not torch.equal(Y, before)
    with pytest.raises(ValueError, match="Required cannot be lifted to manifolds: "):
        Lifted([Y], 0.1, noise=0.1, space=STIEFEL)


# -- lift itself -------------------------------------------------------------------------------------------------------


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


@lifting
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_lifted_third_party_optimizers_go_on_alike(Base, lr, how, gen):
    """A copy keeps what the class has set on itself; torch's own copies of these optimizers lose it."""
    Y, b = weight(gen, (9, 3)), nn.Parameter(randn((4,), gen))
    opt = ghor.lift(Base)([{"params": [Y], "space": STIEFEL}, {"params": [b]}], lr=lr)

    def train(opt, gradients):
        for step in gradients:
            for p, g in zip((p for group in opt.param_groups for p in group["params"]), step, strict=True):
                p.grad = g.clone()
            opt.step()

    gradients = [(randn((9, 3), gen), randn((4,), gen)) for _ in range(6)]
    train(opt, gradients[:3])
    if how == "deepcopy":
        other = copy.deepcopy(opt)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(opt))
    else:
        buffer = io.BytesIO()
        torch.save(opt, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert type(other) is type(opt)
    for o in (opt, other):
        train(o, gradients[3:])
    for group, twin in zip(opt.param_groups, other.param_groups, strict=True):
        assert group["params"][0] is not twin["params"][0]
        assert torch.equal(group["params"][0], twin["params"][0])


@lifting
def test_state_dicts_of_lifted_third_party_optimizers_resume(Base, lr, gen):
    Y = weight(gen, (9, 3))
    Z = nn.Parameter(Y.detach().clone())
    gradients = [randn((9, 3), gen) for _ in range(8)]

    def train(opt, p, gradients):
        for g in gradients:
            p.grad = g.clone()
            opt.step()

    opt = ghor.lift(Base)([Y], lr=lr, space=STIEFEL)
    train(opt, Y, gradients[:4])
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    with torch.no_grad():
        Z.copy_(Y)
    other = ghor.lift(Base)([Z], lr=lr, space=STIEFEL)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    train(opt, Y, gradients[4:])
    train(other, Z, gradients[4:])
    assert torch.equal(Y, Z)


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


def test_a_subclass_of_a_lifted_optimizers_base_is_tried_anew():
    class Worse(torch.optim.Adam):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad.mean())

    with pytest.raises(ValueError, match=NOT_ELEMENTWISE):
        ghor.lift(Worse)
