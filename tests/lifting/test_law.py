"""What a rule is, asked of the rule: whether it reads its weight, shares tensors; what turns with a frame."""

import gc
import weakref

import pytest
import pytorch_optimizer as po
import torch
from helpers.rules import Rule
from helpers.table import randn
from torch import nn

import ghor
from ghor.lifting import law
from ghor.lifting.law import Traits, asked_with, traits, with_many

ST = ghor.Stiefel()


def answers(Base, shape=(9, 3), complex=False, **options):
    rule = Base([nn.Parameter(torch.zeros(shape))], **options)
    group = {k: v for k, v in rule.param_groups[0].items() if k != "params"}
    return traits(rule, group, shape, complex)


def turning(odd=(), even=(), stacks=True, entrywise=True):
    odd, even = frozenset(odd), frozenset(even)
    return Traits(reads=False, stacks=stacks, odd=odd, even=even, turns=True, entrywise=entrywise)


@pytest.mark.parametrize(
    ("Base", "options", "expected"),
    [
        (torch.optim.SGD, {}, turning()),
        (torch.optim.SGD, {"momentum": 0.9}, turning({"momentum_buffer"})),
        (torch.optim.Adam, {}, turning({"exp_avg"}, {"exp_avg_sq"})),
        (torch.optim.Adam, {"amsgrad": True}, turning({"exp_avg"}, {"exp_avg_sq", "max_exp_avg_sq"})),
        (
            torch.optim.Adamax,
            {},
            turning({"exp_avg"}),
        ),  # the largest of absolute values is even, and no square
        (torch.optim.Rprop, {}, turning({"prev"})),
        (torch.optim.RMSprop, {"momentum": 0.9}, turning({"momentum_buffer"}, {"square_avg"})),
        (
            torch.optim.RMSprop,
            {"centered": True},
            Traits(reads=False, stacks=True),
        ),  # a square less a vector's
        (po.Lion, {}, turning({"exp_avg"})),
        (po.NovoGrad, {}, turning({"moments"}, stacks=False)),  # one norm a tensor
        (po.Lamb, {}, Traits()),  # the norm of the weight
        (po.MADGRAD, {}, Traits(stacks=True)),  # a copy of the weight
        (po.ScheduleFreeAdamW, {}, Traits(stacks=True)),  # an average of weights
        (torch.optim.ASGD, {}, Traits(stacks=True)),
        (po.Prodigy, {}, Traits()),  # how far the weight has come
        (po.SOAP, {}, Traits(reads=False)),
        (po.CAME, {}, Traits(reads=False)),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_answers(Base, options, expected):
    assert answers(Base, **options) == expected


def test_decays_are_no_reading():
    """On a manifold they do nothing, so they are off while asking."""
    assert answers(torch.optim.AdamW, weight_decay=0.1) == answers(torch.optim.AdamW, weight_decay=0.0)


class AlmostFree(Rule):
    def velocity(self, p, g):
        return g + 1e-3 * p


class Float32Inside(Rule):
    """A float32 copy of the weight is moved and copied back: as RAdam in torch_optimizer and timm."""

    def move(self, group, p, g):
        copy = p.float()
        copy.sub_(group["lr"] * g.float())
        p.copy_(copy)


class Hidden(Rule):
    """A moment on the optimizer, not in the state: a frame that turns could not take it along."""

    def velocity(self, p, g):
        self.m = 0.9 * getattr(self, "m", 0) + g
        return self.m


class Nested(Rule):
    """State in a dict of its own: it cannot be told apart by weights."""

    def velocity(self, p, g):
        own = self.state[p].setdefault("own", {"m": torch.zeros_like(p)})
        return own["m"].mul_(0.9).add_(g)


class Orthogonalising(Rule):
    """A matrix sign of matrices, the gradient of all else: a stack of matrices is no matrix."""

    def velocity(self, p, g):
        if g.dim() != 2:
            return g
        U, _, V = torch.linalg.svd(g, full_matrices=False)
        return U @ V


class Gram(Rule):
    """State that has a square weight's shape, and is no mean square of coordinates."""

    def velocity(self, p, g):
        self.state[p]["gram"] = self.state[p].get("gram", 0) + g @ g.mT
        return g


@pytest.mark.parametrize(
    ("Base", "shape", "expected"),
    [
        (AlmostFree, (9, 3), Traits(stacks=True)),
        (Float32Inside, (9, 3), turning()),
        (Hidden, (9, 3), Traits(reads=False)),
        (Nested, (9, 3), Traits(reads=False)),
        (Orthogonalising, (9, 3), turning(stacks=False, entrywise=False)),
        (Orthogonalising, (2, 9, 3), turning()),
        (Orthogonalising, (9,), turning(stacks=False)),
        (Gram, (200, 100), Traits(reads=False)),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_rules_of_users(Base, shape, expected):
    assert answers(Base, shape) == expected


class QuantisedFrom4096(Rule):
    """Rounds to 256 steps of the largest, where there are 4,096 entries or more: as 8 bit states do."""

    def velocity(self, p, g):
        size = g.abs().amax()
        return g if g.numel() < 4096 else (g / size * 127).round() / 127 * size


@pytest.mark.parametrize(("shape", "stacks"), [((40, 40), True), ((90, 50), False), ((4000, 2), False)])
def test_a_rule_is_asked_at_sizes_that_matter(shape, stacks):
    assert answers(QuantisedFrom4096, shape).stacks == stacks


def test_shapes_asked_with():
    assert asked_with((12, 49, 7)) == (2, 49, 7)
    assert asked_with((3072, 768)) == (64, 48)
    assert asked_with((768, 768)) == (64, 64)
    assert asked_with((5, 10**6)) == (5, 64)
    assert asked_with((10**6,)) == (64,)
    assert with_many((2, 49, 7), (12, 49, 7)) == (12, 49, 7)
    assert with_many((64, 3), (10000, 3)) == (1366, 3)
    assert with_many((9, 3), (9, 3)) == (9, 3)


def test_a_rule_without_eps_divides_0_by_0_and_turns_all_the_same():
    found = answers(torch.optim.Adam, eps=0.0)
    assert found == turning({"exp_avg"}, {"exp_avg_sq"})._replace(entrywise=False)


@pytest.mark.parametrize("lr", [0.0, 1e30, 1e-30, torch.tensor(0.0), torch.tensor([0.1])])
def test_any_rate_can_be_asked(lr):
    assert answers(torch.optim.SGD, lr=lr) == turning()


def test_answers_belong_to_class_objects_and_keep_none_alive():
    def define(reads):
        class Cell(Rule):
            def velocity(self, p, g):
                return g + p if reads else g

        return Cell

    assert [answers(define(reads)).reads for reads in (False, True, False)] == [False, True, False]
    Base = define(reads=False)
    answers(Base)
    gone = weakref.ref(Base)
    assert Base in law._known
    del Base
    gc.collect()
    assert gone() is None


def test_objects_of_one_class_may_differ():
    class Chosen(Rule):
        def __init__(self, params, reads):
            super().__init__(params)
            self.reads = reads

        def velocity(self, p, g):
            return g + p if self.reads else g

    assert [answers(Chosen, reads=reads).reads for reads in (False, True)] == [False, True]


def test_asking_draws_no_random_numbers_and_changes_nothing():
    rule = Hidden([nn.Parameter(torch.zeros(9, 3))])
    before, seed = dict(vars(rule)), torch.get_rng_state()
    traits(rule, {"lr": 0.1, "weight_decay": 0.0}, (9, 3))
    assert vars(rule) == before
    assert torch.equal(torch.get_rng_state(), seed)


def test_what_cannot_be_asked_is_run_the_careful_way_and_shows_its_own_error(gen):
    class Picky(Rule):
        def step(self, closure=None):
            raise KeyError("a model, please")

    p = nn.Parameter(ST.random(6, 2, generator=gen))
    p.grad = randn((6, 2), gen, torch.float32)
    opt = ghor.lift(Picky)([p], space=ST)
    assert answers(Picky) == Traits()
    with pytest.raises(KeyError, match="a model, please") as info:
        opt.step()
    assert "ghor.lift(Picky)" in info.value.__notes__[0]


class Centred(Rule):
    def velocity(self, p, g):
        return g - g.mean()


@pytest.mark.parametrize(("Base", "expected"), [(torch.optim.Adam, True), (Centred, False)])
def test_what_exchanges_entries_stays_in_g_hor(Base, expected):
    """Or it is projected."""
    assert answers(Base).entrywise is expected
    assert answers(Base, complex=True).entrywise is expected
