"""Gradients and weights of odd sizes, ranks and layouts in memory: what is promised for each, on every space.

Two tables. A row is a case, how to make it, and the promise:

    moves     as any step; the weight is on its space
    same      the step of the ordinary tensor with these values
    on        no more than that the weight is finite and on its space
    near      on, and gradient descent does not go further than rounding
    scaled    the point of the ordinary weight where the group is compact, refused elsewhere
    refused   an error that names the weight and the way out; the weight is as it was
"""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from refusals import raises
from steps import same, take_steps
from table import (
    MANIFOLDS,
    each_section,
    each_shape_and_section,
    has_frame,
    is_compact,
    kinds,
    name,
    on,
    point,
    randn,
    sections,
)
from torch import nn

import ghor
from ghor._torch.values import as_on_an_accelerator
from ghor.lifting import partition
from ghor.lifting.stack import ColumnStack

F32, F64 = torch.float32, torch.float64


def trained(space, shapes, gen, section, cls, dtype=F32):
    """Weights of these shapes in one optimizer, after one ordinary step."""
    weights = [nn.Parameter(point(space, shape, gen, dtype)) for shape in shapes]
    opt = cls([(f"w{i}", p) for i, p in enumerate(weights)], lr=1e-2, space=space, section=section)
    take_steps(opt, gen)
    return weights, opt


# -- gradients ---------------------------------------------------------------------------------------------


def rank_one(space, Y, gen):
    G = torch.zeros_like(Y)
    space.matrix(G)[..., 0] = 1.0
    return G


def normal_to_the_space(space, Y, gen):
    """(Y*)^T S, S = S*: its coordinates [Y^T G - (Y^T G)*; Q^T G] are rounding, and Adam makes steps of
    it."""
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


@pytest.mark.filterwarnings("ignore:a velocity of length .* was clipped")
@pytest.mark.filterwarnings("ignore:the velocity of w[0-9] is not finite")
@pytest.mark.parametrize("case", GRADIENTS)
@each_section
def test_gradients(space, section, case, gen):
    """Three steps with it, after one ordinary step, and an ordinary step after them."""
    promise, make = GRADIENTS[case]
    if make in (rank_one, normal_to_the_space) and not has_frame(space):
        pytest.skip(f"{space} is no space of tall matrices")
    dtype = F64 if promise == "same" else F32
    for cls in (ghor.optim.SGD, ghor.optim.Adam):
        weights, opt = trained(space, kinds(space), gen, section, cls, dtype)
        twins, plain = copy.deepcopy((weights, opt)) if promise == "same" else (weights, None)
        starts = [Y.detach().clone() for Y in weights]
        for _ in range(3):
            for Y in weights:
                Y.grad = make(space, Y.detach(), gen)
            opt.step()
            if plain is not None:
                for Y, Z in zip(weights, twins, strict=True):
                    Z.grad = Y.grad.to_dense().clone(memory_format=torch.contiguous_format)
                plain.step()
        for Y, Z, start in zip(weights, twins, starts, strict=True):
            assert on(space, Y)
            if promise == "moves":
                assert (Y - start).abs().max() > 1e-3  # an lr of 1e-2 and entries of order one
            if promise == "near" and cls is ghor.optim.SGD:
                same(Y.detach(), start, 1e-6)
            if promise == "same":
                same(Y, Z, 1e-13)  # sums in another order: rounding of a few float64 steps
        take_steps(opt, gen)
        assert all(on(space, Y) for Y in weights)


@pytest.mark.filterwarnings("ignore:a velocity of length .* was clipped")
@pytest.mark.filterwarnings("ignore:the velocity of w1 is not finite")
@pytest.mark.parametrize("case", ["1e30", "subnormal", "overflows", "missing"])
@each_section
def test_neighbours_in_a_stack_do_not_notice(space, section, case, gen):
    """Three weights of one kind, the second with a nasty gradient: the others go as with an ordinary one."""
    shape = kinds(space)[-1]
    weights, opt = trained(space, [shape] * 3, gen, section, ghor.optim.Adam)
    twins, plain = copy.deepcopy((weights, opt))
    for _ in range(3):
        for i, (p, q) in enumerate(zip(weights, twins, strict=True)):
            q.grad = randn(shape, gen, F32)
            nasty = None if case == "missing" else GRADIENTS[case][1](space, p.detach(), gen)
            p.grad = nasty if i == 1 else q.grad.clone()
        opt.step()
        plain.step()
    for i in (0, 2):
        same(
            weights[i], twins[i], 1e-6
        )  # rounding of 3 float32 steps: a stack of another size, a polishing more
        assert on(space, weights[i])
    assert on(space, weights[1])
    if case == "missing":
        assert float(opt.state[weights[1]]["step"]) == 1
        assert not torch.equal(weights[1], twins[1])


# -- weights -----------------------------------------------------------------------------------------------


def declared(Y, space):
    module = nn.Module()
    module.weight = nn.Parameter(Y)
    return ghor.constrain(module, "weight", space)


def low_rank(space, X):
    """Two equal columns, or where there is one column, none."""
    X = X.clone()
    M = space.matrix(X)
    M[..., -1] = M[..., 0] if M.shape[-1] > 1 else 0
    return X


# Of X = a point of the space and a little more.
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
@pytest.mark.parametrize("space", [s for s in MANIFOLDS if has_frame(s)], ids=name)
def test_weights(space, case, gen):
    """What `constrain` makes of them, and the steps after it."""
    promise, make = WEIGHTS[case]
    if make is low_rank and not has_frame(space):
        pytest.skip(f"{space} is no space of tall matrices")
    for shape in kinds(space):
        ordinary = point(space, shape, gen, F32) + 0.05 * randn(shape, gen, F32)
        X = make(space, ordinary)
        if promise == "refused" or (promise == "scaled" and not is_compact(space)):
            module = nn.Module()
            module.weight = nn.Parameter(X)
            way_out = re.escape(f"{space!r}.random{tuple(shape)}")
            raises(ValueError, ["^weight: ", way_out], lambda m=module: ghor.constrain(m, "weight", space), X)
            assert ghor.constraints.registry.declared_space(module.weight) is None
            continue
        module, twin = declared(X, space), declared(ordinary.clone(), space)
        Y = module.weight
        assert Y.data_ptr() == X.data_ptr()
        assert Y.stride() == X.stride()
        same(
            Y.detach(), twin.weight.detach(), 1e-4 if case == "subnormal" else 1e-6
        )  # 1e-40 has 17 bits left of 24
        assert on(space, Y)
        for section in sections(space):
            opt = ghor.optim.Adam(module, lr=1e-2, section=section)
            for _ in range(3):
                Y.grad = randn(shape, gen, F32)
                opt.step()
            assert on(space, Y)
            assert Y.stride() == X.stride()
        if case == "non-contiguous":
            assert (
                X.as_strided(X.shape, X.stride(), X.storage_offset() + 1) == 7.0
            ).all()  # what lies between


def snapshot(opt):
    weights = [p.detach().clone() for g in opt.param_groups for p in g["params"]]
    return weights, copy.deepcopy(opt.state_dict()["state"])


@each_section
def test_tied_and_frozen_weights(space, section, gen):
    """One Parameter in two modules is one weight. Frozen later and without a gradient it is still, as in
    torch."""
    shape = kinds(space)[-1]
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


@each_shape_and_section
def test_repairs_leave_a_weight_alone_that_does_not_move(space, shape, section, gen):
    """No bit of it changes in 100 steps, where its neighbour in the stack is polished, point and frame."""
    Y, Z = (nn.Parameter(point(space, shape, gen, torch.float32)) for _ in range(2))
    opt = ghor.optim.SGD([Y, Z], lr=1e-3, space=space, section=section)
    Z.grad, start = torch.zeros_like(Z), Z.detach().clone()
    for _ in range(100):
        Y.grad = randn(shape, gen, torch.float32)
        opt.step()
    assert torch.equal(Z, start)


@pytest.mark.parametrize("section", ["transported", "implicit"])
@pytest.mark.parametrize("where", [nullcontext, as_on_an_accelerator], ids=["cpu", "accelerator"])
def test_large_weights_are_computed_one_by_one_on_a_cpu(where, section, gen, monkeypatch):
    """And move as a stack of them does, whose state they can load: to 1e-12, as batches round differently."""
    space, shapes = ghor.Stiefel(), [(9, 3)] * 3
    runs, states = [], []
    for large in (27, 28):
        monkeypatch.setattr(partition, "LARGE", large)
        with where():
            weights, opt = trained(space, shapes, gen.manual_seed(0), section, ghor.optim.Adam, F64)
            count = len(opt._partition.stacks)
            assert count == (3 if large == 27 and where is nullcontext else 1)
            states.append(opt.state_dict())
            opt.load_state_dict(states[0])
            take_steps(opt, gen.manual_seed(1), 4)
        runs.append(torch.stack([p.detach() for p in weights]))
    assert (runs[0] - runs[1]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("space", "shape", "columns"),
    [
        (ghor.Stiefel(), (2, 9, 3), True),
        (ghor.SymplecticStiefel(), (8, 4), True),
        (ghor.Stiefel(), (3, 9), False),
        (ghor.Stiefel(blocks=2), (18, 3), False),
        (ghor.Stiefel(flatten=2), (12, 3, 3), False),
        (ghor.SpecialOrthogonal(), (5, 5), False),
        (ghor.Sphere(flatten=2), (7, 6), False),
    ],
    ids=str,
)
def test_which_stacks_are_stored_by_columns(space, shape, columns, gen):
    """Plain tall matrices alone: any other layout would be copied, and what is written to a copy is lost."""
    Y = nn.Parameter(space.random(*shape, generator=gen))
    opt = ghor.optim.Adam([Y], space=space, section="transported")
    Y.grad = torch.randn(shape, generator=gen)
    opt.step()
    (stack,) = opt._partition.stacks
    assert isinstance(stack, ColumnStack) == columns
    assert opt.state[Y]["exp_avg"].shape == Y.shape
