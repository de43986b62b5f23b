"""Nasty gradients, weights and options: what is promised for each, on every space.

Three tables. A row is a case, how to make it, and the promise:

    moves     as any step; the weight is on its space
    same      the step of the ordinary tensor with these values
    still     no bit of weight, section or moments changes (but counters)
    on        no more than that the weight is finite and on its space
    near      on, and gradient descent does not go further than rounding
    held      the weight stays where it is, a warning says so
    refused   an error that names the weight and the way out; weight and state are as they were
"""

import copy
import re
import warnings

import pytest
import torch
from table import MANIFOLDS, accepts, name, point, randn
from torch import nn

import ghor
from ghor.spaces.orthogonal import Orthogonal

ORTHOGONAL = [s for s in MANIFOLDS if isinstance(s, Orthogonal)]
SECTIONS = [(s, k) for s in MANIFOLDS for k in ("transported", "implicit") if k == "transported" or s in ORTHOGONAL]
each_section = pytest.mark.parametrize(("space", "section"), SECTIONS, ids=name)
each_space = pytest.mark.parametrize("space", MANIFOLDS, ids=name)
F32, F64 = torch.float32, torch.float64


def shapes(space):
    """A matrix or vector of each kind: n = 1, N = n, N = n + 1, N < 2n, wide, a batch, as far as the space has them."""
    return [x for x in ((7,), (7, 1), (5, 5), (9, 8), (6, 4), (2, 10), (2, 3, 6, 2), (4, 4)) if accepts(space, x)]


def on(space, Y):
    """On the space and finite: rounding of a few steps in an N x n matrix of norm sqrt(n) (more on symplectic ones)."""
    Y = Y.detach()
    rounding = 4 * torch.finfo(Y.dtype).eps * (1 + Y.double().norm() ** 2)
    return bool(torch.isfinite(Y).all()) and bool(space.distance(Y.double()).max() <= rounding)


def snapshot(opt):
    weights = [p.detach().clone() for g in opt.param_groups for p in g["params"]]
    return weights, copy.deepcopy(opt.state_dict()["state"])


def frame_of(opt, Y):
    return {k: v.clone() for k, v in opt.state[Y].items() if k in ("section", "anchor")}


def same(a, b, tol=0.0):
    torch.testing.assert_close(a, b, rtol=0, atol=tol, equal_nan=True)


def trained(space, shape, gen, section, cls, dtype=F32, copies=1):
    weights = [nn.Parameter(point(space, shape, gen, dtype)) for _ in range(copies)]
    opt = cls([(f"w{i}", p) for i, p in enumerate(weights)], lr=1e-2, space=space, section=section)
    for p in weights:
        p.grad = randn(shape, gen, dtype)
    opt.step()
    return weights, opt


# -- gradients ---------------------------------------------------------------------------------------------------------


def rank_one(space, Y, gen):
    G = torch.zeros_like(Y)
    space.matrix(G)[..., 0] = 1.0
    return G


def normal_to_the_space(space, Y, gen):
    """(Y*)^T S, S = S*: its coordinates [Y^T G - (Y^T G)*; Q^T G] are rounding, and Adam makes steps of it."""
    M = space.matrix(Y)
    S = torch.ones(M.shape[-1], M.shape[-1], dtype=Y.dtype)
    return space.unmatrix(space.star(M).mT @ (S + space.star(S)), Y.shape).contiguous()


def every_second(X):
    """The values of X between others, so that no dimension is contiguous."""
    wide = torch.full((*X.shape, 2), 7.0, dtype=X.dtype)
    wide[..., 0] = X
    return wide[..., 0]


def backwards(X):
    """The values of X with the dimensions reversed in memory."""
    dims = tuple(reversed(range(X.dim())))
    return X.permute(dims).contiguous().permute(dims)


def times(size):
    return lambda space, Y, gen: size * randn(tuple(Y.shape), gen, Y.dtype)


GRADIENTS = {
    "rank one": ("moves", rank_one),
    "zero": ("on", lambda space, Y, gen: torch.zeros_like(Y)),  # Adam's first moment goes on
    "normal to the space": ("near", normal_to_the_space),
    "1e30": ("on", times(1e30)),
    "1e-30": ("near", times(1e-30)),
    "subnormal": ("near", times(1e-40)),
    "overflows": ("on", lambda space, Y, gen: torch.full_like(Y, torch.finfo(Y.dtype).max)),
    "non-contiguous": ("same", lambda space, Y, gen: every_second(randn(tuple(Y.shape), gen, Y.dtype))),
    "transposed": ("same", lambda space, Y, gen: backwards(randn(tuple(Y.shape), gen, Y.dtype))),
    "expanded": ("same", lambda space, Y, gen: torch.ones((), dtype=Y.dtype).expand(Y.shape)),
    "sparse": ("same", lambda space, Y, gen: randn(tuple(Y.shape), gen, Y.dtype).relu().to_sparse()),
    "sparse and empty": ("on", lambda space, Y, gen: torch.zeros_like(Y).to_sparse()),
}


@pytest.mark.filterwarnings("ignore:a velocity of length .* was shortened")
@pytest.mark.filterwarnings("ignore:the velocity of w0 is not finite")
@pytest.mark.parametrize("case", GRADIENTS)
@each_section
def test_gradients(space, section, case, gen):
    """Three steps with it, after one ordinary step, and an ordinary step after them."""
    promise, make = GRADIENTS[case]
    dtype = F64 if promise == "same" else F32
    for cls in (ghor.optim.SGD, ghor.optim.Adam):
        for shape in shapes(space):
            (Y,), opt = trained(space, shape, gen, section, cls, dtype)
            (Z,), plain = copy.deepcopy(((Y,), opt)) if promise == "same" else ((None,), None)
            start = Y.detach().clone()
            for _ in range(3):
                Y.grad = make(space, Y.detach(), gen)
                opt.step()
                if plain is not None:
                    Z.grad = Y.grad.to_dense().clone(memory_format=torch.contiguous_format)
                    plain.step()
            assert on(space, Y)
            if promise == "moves":
                assert (Y - start).abs().max() > 1e-3  # an lr of 1e-2 and entries of order one
            if promise == "near" and cls is ghor.optim.SGD:
                same(Y.detach(), start, 1e-6)
            if promise == "same":
                same(Y, Z, 1e-13)  # sums in another order: rounding of a few float64 steps
            Y.grad = randn(shape, gen, dtype)
            opt.step()
            assert on(space, Y)


@each_section
@pytest.mark.parametrize("cls", [ghor.optim.SGD, ghor.optim.Adam], ids=lambda c: c.__name__)
def test_no_velocity_is_no_step(space, section, cls, gen):
    """Zero gradients from the start, or lr = 0 at any time: still, through the polishing of every tenth step."""
    for shape in shapes(space):
        for what in ("gradient", "lr"):
            Y = nn.Parameter(point(space, shape, gen, F32))
            opt = cls([Y], lr=0.0 if what == "lr" else 1e-2, space=space, section=section)
            Y.grad = torch.zeros_like(Y) if what == "gradient" else randn(shape, gen, F32)
            opt.step()
            start, frame = Y.detach().clone(), frame_of(opt, Y)
            for _ in range(11):
                opt.step()
            assert torch.equal(Y, start)
            same(frame_of(opt, Y), frame)


@pytest.mark.filterwarnings("ignore:a velocity of length .* was shortened")
@pytest.mark.filterwarnings("ignore:the velocity of w1 is not finite")
@pytest.mark.parametrize("case", ["1e30", "subnormal", "overflows", "missing"])
@each_section
def test_neighbours_in_a_stack_do_not_notice(space, section, case, gen):
    """Three weights of one kind, the second with a nasty gradient: the others go as with an ordinary one."""
    shape = shapes(space)[-1]
    weights, opt = trained(space, shape, gen, section, ghor.optim.Adam, copies=3)
    twins, plain = copy.deepcopy((weights, opt))
    for _ in range(3):
        for i, (p, q) in enumerate(zip(weights, twins, strict=True)):
            q.grad = randn(shape, gen, F32)
            nasty = None if case == "missing" else GRADIENTS[case][1](space, p.detach(), gen)
            p.grad = nasty if i == 1 else q.grad.clone()
        opt.step()
        plain.step()
    for i in (0, 2):
        same(weights[i], twins[i], 1e-6)  # rounding of 3 float32 steps: a stack of another size, a polishing more
        assert on(space, weights[i])
    assert on(space, weights[1])
    if case == "missing":
        assert float(opt.state[weights[1]]["step"]) == 1
        assert not torch.equal(weights[1], twins[1])


# -- weights -----------------------------------------------------------------------------------------------------------


def declared(Y, space):
    module = nn.Module()
    module.weight = nn.Parameter(Y)
    return ghor.constrain(module, "weight", space)


def refused(error, words, call, *weights):
    """`call` raises, with the words, and leaves the weights as they were."""
    before = [w.detach().clone() for w in weights]
    with pytest.raises(error) as info:
        call()
    for word in words:
        assert re.search(word, str(info.value)), (word, str(info.value))
    for w, old in zip(weights, before, strict=True):
        same(w.detach(), old)


def low_rank(space, X):
    """Two equal columns, or where there is one column, none."""
    X = X.clone()
    M = space.matrix(X)
    M[..., -1] = M[..., 0] if M.shape[-1] > 1 else 0
    return X


# Of X = a point of the space and a little more. "scaled": c X has the projection of X where the group is compact, and
# is refused elsewhere.
WEIGHTS = {
    "rank-deficient": ("refused", low_rank),
    "zero": ("refused", lambda space, X: 0 * X),
    "1e30": ("scaled", lambda space, X: 1e30 * X),
    "1e-30": ("scaled", lambda space, X: 1e-30 * X),
    "subnormal": ("scaled", lambda space, X: 1e-40 * X),
    "non-contiguous": ("moves", lambda space, X: every_second(X)),
    "transposed": ("moves", lambda space, X: backwards(X)),
}


@pytest.mark.parametrize("case", WEIGHTS)
@each_space
def test_weights(space, case, gen):
    """What `constrain` makes of them, and the steps after it."""
    promise, make = WEIGHTS[case]
    for shape in shapes(space):
        ordinary = point(space, shape, gen, F32) + 0.05 * randn(shape, gen, F32)
        X = make(space, ordinary)
        if promise == "refused" or (promise == "scaled" and space not in ORTHOGONAL):
            module = nn.Module()
            module.weight = nn.Parameter(X)
            way_out = re.escape(f"{space!r}.random{tuple(shape)}")
            refused(ValueError, ["^weight: ", way_out], lambda m=module: ghor.constrain(m, "weight", space), X)
            assert ghor.declare.declared_space(module.weight) is None
            continue
        module, twin = declared(X, space), declared(ordinary.clone(), space)
        Y = module.weight
        assert Y.data_ptr() == X.data_ptr()
        assert Y.stride() == X.stride()
        same(Y.detach(), twin.weight.detach(), 1e-4 if case == "subnormal" else 1e-6)  # 1e-40 has 17 bits left of 24
        assert on(space, Y)
        for section in [k for s, k in SECTIONS if s == space]:
            opt = ghor.optim.Adam(module, lr=1e-2, section=section)
            for _ in range(3):
                Y.grad = randn(shape, gen, F32)
                opt.step()
            assert on(space, Y)
            assert Y.stride() == X.stride()
        if case == "non-contiguous":
            assert (X.as_strided(X.shape, X.stride(), X.storage_offset() + 1) == 7.0).all()  # what lies between


def group(p, space):
    return {"params": [("w", p)], "space": space}


def test_weights_that_share_memory(gen):
    """Entries, or whole weights: torch's own steps would add up in them."""
    for space in MANIFOLDS:
        for shape in shapes(space):
            X = point(space, shape, gen, F32)
            copies = nn.Parameter(X.expand(3, *shape))
            words = [f"^w of shape {re.escape(str(tuple(copies.shape)))} is expanded", "clone"]
            refused(ValueError, words, lambda p=copies, s=space: ghor.optim.SGD([group(p, s)]), copies)
            module = nn.Module()
            module.w = copies
            refused(ValueError, words, lambda m=module, s=space: ghor.constrain(m, "w", s), copies)
            a, b = nn.Parameter(X), nn.Parameter(X.view(shape))
            words = ["b and a are two parameters with one memory", "use one parameter for both"]
            refused(ValueError, words, lambda a=a, b=b, s=space: ghor.optim.SGD([("a", a), ("b", b)], space=s), a)
            pieces = torch.stack([X, X])  # pieces of one buffer that do not overlap are fine
            ghor.optim.SGD([nn.Parameter(pieces[0]), nn.Parameter(pieces[1])], space=space)


@each_space
def test_weights_of_other_kinds(space, gen):
    """Complex, sparse, lazy, on the meta device, an empty batch: refused by constrain and by the optimizer."""
    shape = shapes(space)[-1]
    Y = point(space, shape, gen, F32)
    cases = [
        (nn.Parameter(Y.to(torch.complex64)), TypeError, ["complex64", "real floating point"]),
        (nn.Parameter(Y.to_sparse()), TypeError, ["torch.sparse_coo", re.escape("to_dense()")]),
        (nn.Parameter(Y.new_zeros(0, *shape)), ValueError, ["empty shape|shape .0, "]),
        (nn.parameter.UninitializedParameter(), ValueError, ["no shape yet", "call the lazy module once"]),
    ]
    for p, error, words in cases:
        module = nn.Module()
        module.w = p
        for call in (lambda m=module: ghor.constrain(m, "w", space), lambda p=p: ghor.optim.SGD([group(p, space)])):
            with pytest.raises(error, match=r"^w") as info:
                call()
            assert all(re.search(word, str(info.value)) for word in words), str(info.value)


@each_section
def test_meta_device(space, section, gen):
    """An optimizer can be built there, as torch's can. Its step has nothing to go from: refused, nothing moved."""
    shape = shapes(space)[-1]
    free = nn.Parameter(torch.zeros(3))
    p = nn.Parameter(torch.empty(shape, device="meta"))
    opt = ghor.optim.Adam([group(p, space), {"params": [("free", free)]}], section=section)
    p.grad, free.grad = torch.empty(shape, device="meta"), torch.ones(3)
    with pytest.raises(ValueError, match=r"^w is on the meta device.*materialise the module, then build the optimizer"):
        opt.step()
    assert not free.any()
    assert not opt.state


@each_section
def test_tied_and_frozen_weights(space, section, gen):
    """One Parameter in two modules is one weight. Frozen later and without a gradient it is still, as in torch."""
    shape = shapes(space)[-1]
    module, other = declared(point(space, shape, gen, F32), space), nn.Module()
    other.weight = module.weight
    model = nn.ModuleList([module, other, declared(point(space, shape, gen, F32), space)])
    opt = ghor.optim.Adam(model, lr=1e-2, section=section)
    tied, single = model[0].weight, model[2].weight
    assert sum(len(g["params"]) for g in opt.param_groups) == 2
    for frozen in (False, True):
        opt.zero_grad()
        tied.requires_grad_(not frozen)
        before = snapshot(opt)
        (sum((m.weight**3).sum() for m in model)).backward()
        opt.step()
        assert torch.equal(tied, before[0][0]) == frozen
        assert not torch.equal(single, before[0][1])
        if frozen:
            same(opt.state_dict()["state"][0], before[1][0])
    assert model[1].weight is tied
    assert on(space, tied)
    assert on(space, single)


# -- options -----------------------------------------------------------------------------------------------------------

OPTIONS = [
    (ghor.optim.Adam, {"lr": -1e-3}, "Invalid learning rate: -0.001"),
    (ghor.optim.Adam, {"lr": float("nan")}, "Invalid learning rate: nan"),
    (ghor.optim.Adam, {"betas": (-0.1, 0.9)}, "Invalid beta parameter at index 0: -0.1"),
    (ghor.optim.Adam, {"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    (ghor.optim.Adam, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    (ghor.optim.Adam, {"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
    (ghor.optim.SGD, {"lr": -1e-3}, "Invalid learning rate: -0.001"),
    (ghor.optim.SGD, {"momentum": -0.9}, "Invalid momentum value: -0.9"),
    (ghor.optim.RMSprop, {"alpha": -0.9}, "Invalid alpha value: -0.9"),
    (ghor.optim.Rprop, {"etas": (1.5, 1.2)}, "Invalid eta values: 1.5, 1.2"),
    (ghor.optim.PaperAdam, {"lr": -1e-3}, "Invalid learning rate: -0.001"),
    (ghor.optim.PaperAdam, {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    (ghor.optim.PaperAdam, {"delta": -1.0}, "Invalid delta: -1.0"),
]


@pytest.mark.parametrize(("cls", "options", "words"), OPTIONS, ids=lambda v: getattr(v, "__name__", "") or str(v)[:24])
def test_options_out_of_range(cls, options, words, gen):
    """In torch's words, on every space."""
    for space in MANIFOLDS:
        Y = nn.Parameter(point(space, shapes(space)[-1], gen, F32))
        refused(ValueError, [f"^{re.escape(words)}$"], lambda Y=Y, s=space: cls([Y], space=s, **options), Y)


@each_section
@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1e-2, 1e30])
def test_learning_rates_set_live(space, section, lr, gen):
    """torch looks at a learning rate in the constructor only. Negative: uphill. Huge: on. Not finite: held."""
    shape = shapes(space)[-1]
    (Y,), opt = trained(space, shape, gen, section, ghor.optim.SGD, F64)
    (Z,), down = copy.deepcopy(((Y,), opt))
    opt.param_groups[0]["lr"] = lr
    start = Y.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    said = [re.search("not finite|shortened", str(w.message)).group() for w in caught]
    assert on(space, Y)
    if lr == -1e-2:
        assert not said
        Z.grad = -Y.grad
        down.step()
        same(Y, Z, 1e-15)
    elif lr == 1e30:
        assert said == ["shortened"]
    else:
        assert said == ["not finite"]
        assert torch.equal(Y, start)
    opt.param_groups[0]["lr"] = 1e-2  # and it goes on: SGD has no moments that could be lost
    opt.step()
    assert not torch.equal(Y, start)
    assert on(space, Y)
