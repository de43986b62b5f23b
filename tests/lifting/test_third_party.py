"""Optimizers of other libraries: those that lift work; those that would become another rule are refused."""

import contextlib
import copy
import inspect
import pickle
import warnings

import lion_pytorch
import pytest
import pytorch_optimizer as po
import torch
from rules import DEPENDS, NOT_ELEMENTWISE, descend, drawn, lifted_or_refused, loss_to
from steps import STIEFEL, sections, through_a_file
from table import randn
from torch import nn
from torch.optim import Optimizer

import ghor

# Elementwise, odd, independent of the weight: (class, learning rate at which Procrustes below falls in 100
# steps)
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


@lifting
@sections
def test_lifted_third_party_optimizers_descend_and_stay(Base, lr, section, gen):
    """||Y - T||^2 to a T on the space, so that the minimum is 0; a random start is 2 n = 14 away on
    average."""
    Y, T = drawn(gen), STIEFEL.random(49, 7, generator=gen, dtype=torch.float64)
    opt = ghor.lift(Base)([Y], lr=lr, space=STIEFEL, section=section)
    values = descend(opt, Y, loss_to(T), 100)
    assert values[-1] < 0.5 * values[0]
    assert STIEFEL.residual(Y.detach()) <= 1e-13
    assert isinstance(opt, Base)
    Z = nn.Parameter(Y.detach().clone())
    plain = Base([Z], lr=lr)
    Z.grad = Y.grad
    plain.step()

    def shapes(state):
        return {
            k: v.shape
            for k, v in state.items()
            if torch.is_tensor(v) and k not in ("section", "frame_anchor", "moves")
        }

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
    """Every optimizer of pytorch_optimizer that can be built from a list of parameters."""
    out, weight = [], nn.Parameter(torch.zeros(3, 2))
    for n in sorted(dir(po)):
        Base = getattr(po, n)
        if inspect.isclass(Base) and issubclass(Base, Optimizer) and not Base.__module__.startswith("torch."):
            rest = list(inspect.signature(Base.__init__).parameters.values())[2:]
            if all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in rest):
                with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                    Base([weight])
                    out.append(pytest.param(Base, id=n))
    return out


def takes(Lifted, Y, space=STIEFEL, **options):
    """Why a lifted optimizer refuses two weights like Y, or None."""
    params = [nn.Parameter(Y.detach().clone()) for _ in range(2)]
    try:
        Lifted(params, space=space, **options)
    except ValueError as error:
        if f"{Lifted.__name__} cannot be lifted to manifolds: " in str(error):
            return str(error)
        raise
    return None


@pytest.mark.parametrize("Base", everything_in_the_collection())
def test_whatever_lifts_closes(Base):
    """Weights that are computed together move as they do one by one, and all of them move.

    Gradients of different sizes, over weights and over time, with a part that is always the same: so norms
    over a tensor, statistics over all tensors, and rules that look at how far a weight has come, show
    themselves.
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
        if Lifted is None or takes(Lifted, starts[0]) is not None:
            return
        params, singles = ([nn.Parameter(Y.clone()) for Y in starts] for _ in range(2))
        together = run([Lifted(params, space=STIEFEL)], params)
        one_by_one = run([Lifted([p], space=STIEFEL) for p in singles], singles)
    # batched products of 9 x 3 matrices are those of one, up to the order of sums: 12 steps of a few eps,
    # ||W|| <= 100
    assert (together - one_by_one).abs().max() <= 1e-12
    assert all(not torch.equal(Y, start) for Y, start in zip(together, starts, strict=True))
    assert STIEFEL.residual(together).max() <= 1e-12


# -- copies and checkpoints ----------------------------------------------------------------------------------


@lifting
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_lifted_third_party_optimizers_go_on_alike(Base, lr, how, gen):
    """A copy keeps what the class has set on itself; torch's own copies of these optimizers lose it."""
    Y, b = drawn(gen, (9, 3)), nn.Parameter(randn((4,), gen))
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
        other = through_a_file(opt, weights_only=False)
    assert type(other) is type(opt)
    for o in (opt, other):
        train(o, gradients[3:])
    for group, twin in zip(opt.param_groups, other.param_groups, strict=True):
        assert group["params"][0] is not twin["params"][0]
        assert torch.equal(group["params"][0], twin["params"][0])


@lifting
def test_state_dicts_of_lifted_third_party_optimizers_resume(Base, lr, gen):
    Y = drawn(gen, (9, 3))
    Z = nn.Parameter(Y.detach().clone())
    gradients = [randn((9, 3), gen) for _ in range(8)]

    def train(opt, p, gradients):
        for g in gradients:
            p.grad = g.clone()
            opt.step()

    opt = ghor.lift(Base)([Y], lr=lr, space=STIEFEL)
    train(opt, Y, gradients[:4])
    saved = through_a_file(opt.state_dict())
    with torch.no_grad():
        Z.copy_(Y)
    other = ghor.lift(Base)([Z], lr=lr, space=STIEFEL)
    other.load_state_dict(saved)
    train(opt, Y, gradients[4:])
    train(other, Z, gradients[4:])
    assert torch.equal(Y, Z)


# -- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Base", "reason"),
    [
        (po.Lamb, DEPENDS),
        (po.LARS, DEPENDS),
        (po.AdamP, DEPENDS),
        (po.SGDP, DEPENDS),
        (po.Fromage, DEPENDS),
        (po.ScheduleFreeAdamW, "train and an eval mode"),
        (po.ScheduleFreeSGD, "use ghor.optim.AdamW"),
        (po.MADGRAD, DEPENDS),
        (po.DAdaptSGD, DEPENDS),
        (po.Prodigy, DEPENDS),  # its step size grows with the way from the start, which is 0 in g^hor
        (po.Ranger, NOT_ELEMENTWISE),  # gradient centralisation
        (po.Shampoo, NOT_ELEMENTWISE),
        (po.SOAP, NOT_ELEMENTWISE),
        (po.CAME, NOT_ELEMENTWISE),
        (po.SM3, NOT_ELEMENTWISE),
        (po.AdaFactor, NOT_ELEMENTWISE),
        (po.AdaHessian, "second derivatives"),
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
    """They keep g^hor, but would take the norm of a whole stack for that of one weight."""
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
    """A rule may lift by default but not with an option; the constructor tries the options it is given."""
    Lifted, Y = ghor.lift(Base), drawn(gen, (9, 3))
    if reason is None:
        Lifted([Y], space=STIEFEL, **options)
    else:
        with pytest.raises(ValueError, match=reason):
            Lifted([Y], space=STIEFEL, **options)
