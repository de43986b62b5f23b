"""Rules are verified where they run: at the size and dimension of the weights, with the options of their
group."""

import math

import pytest
import pytorch_optimizer as po
import torch
from liftable import NO, ST, Rule, points, refusal
from table import randn
from torch import nn

import ghor
from ghor.lifting import probe
from ghor.lifting.probe import Case

SP = ghor.Sphere()


# -- what changes with size ----------------------------------------------------------------------------------


class FactoredFrom16(Rule):
    """Divides by row and column norms of its two largest dimensions, where both are 16 or more: as Adafactor
    does."""

    def velocity(self, g, group):
        big = sorted(range(g.dim()), key=lambda i: g.shape[i])[-2:]
        if min(g.shape[i] for i in big) < 16:
            return g / g.abs()
        r, c = (g.square().mean(i, keepdim=True) for i in big)
        return g / (r * c).sqrt()


class QuantisedFrom4096(Rule):
    """Rounds to 256 steps of the largest in a block, where there are 4096 entries or more: as 8 bit states
    do."""

    def velocity(self, g, group):
        if g.numel() < 4096:
            return g
        blocks = g.flatten()[: g.numel() // 64 * 64].view(-1, 64)
        size = blocks.amax(1, keepdim=True)  # not of its absolute value: a common slip
        out = g.clone()
        out.flatten()[: blocks.numel()] = ((blocks / size * 127).round() / 127 * size).flatten()
        return out


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(
    ("Base", "small", "large"),
    [
        (FactoredFrom16, (12, 4), (90, 50)),
        (QuantisedFrom4096, (12, 4), (90, 50)),
        (QuantisedFrom4096, (12, 4), (4000, 2)),
    ],
)
def test_a_rule_is_tried_at_the_size_of_the_weight(Base, small, large, stack):
    assert refusal(Base, shape=small, stack=stack) is None
    assert "not odd and elementwise" in refusal(Base, shape=large, stack=stack)


class FactoredFrom40x9(Rule):
    def velocity(self, g, group):
        return g.cumsum(0) if g.dim() == 3 and len(g) >= 40 else g


def test_a_rule_is_tried_at_the_number_of_weights():
    assert refusal(FactoredFrom40x9, count=20) is None
    assert refusal(FactoredFrom40x9, count=40) is not None
    assert refusal(FactoredFrom40x9, count=40, stack=False) is None


@pytest.mark.parametrize("stack", [True, False])
def test_flash_adamw_quantises(stack):
    assert refusal(po.FlashAdamW, shape=(90, 50), stack=stack, dtype=torch.float32) is not None


def test_huge_weights_are_tried_in_a_smaller_copy():
    for space, shape in [
        (ST, (30000, 50)),
        (ST, (50, 30000)),
        (ghor.Stiefel(flatten=3), (64, 512, 3, 3)),
        (SP, (10**6,)),
    ]:
        case = Case(Rule, {}, space, shape, count=1000)
        small = case.within(128, 2**16)
        (N, n), (M, m) = space.size(shape), space.size(small.shape)
        assert len(small.shape) == len(shape)
        assert (N > n) == (M > m)
        assert M <= 128
        assert m == min(n, 120) or space.flatten > 1
        assert small.count * math.prod(small.shape) <= 2**17
        rows = [s[-1 - space.flatten] if len(s) > space.flatten else 1 for s in (shape, small.shape)]
        assert (rows[0] > n) == (rows[1] > m)


# -- what changes with dimension -----------------------------------------------------------------------------


class Orthogonalising(Rule):
    """A matrix sign of matrices, the gradient of all else: as Muon with its AdamW."""

    def velocity(self, g, group):
        if g.dim() != 2:
            return g
        U, _, V = torch.linalg.svd(g, full_matrices=False)
        return U @ V


@pytest.mark.parametrize(
    ("space", "shape", "stack", "reason"),
    [
        (ST, (9, 3), True, "another rule than on each"),  # a stack has 3 dimensions
        (ST, (9, 3), False, "not odd and elementwise"),
        (SP, (9,), True, "not odd and elementwise"),  # a stack has 2
        (SP, (9,), False, None),  # a vector: what the rule says of vectors
        (ST, (2, 9, 3), True, None),  # a batch of matrices is none of its matrices
    ],
)
def test_a_rule_is_what_it_is_on_one_weight(space, shape, stack, reason):
    got = refusal_at_construction(Orthogonalising, space, shape, stack)
    assert (got is None) if reason is None else reason in got


def refusal_at_construction(Base, space, shape, stack):
    try:
        probe.verify(Base, {}, {"params": points(space, shape)}, [space] * 2, stack)
    except ValueError as error:
        return str(error)
    return None


# not vectors one by one: they have no rows and columns to mix
@pytest.mark.parametrize(("space", "stack"), [(ST, True), (ST, False), (SP, True)], ids=str)
@pytest.mark.parametrize("Base", [po.Conda, po.SPlus, po.SCION, po.RACS, po.Alice], ids=lambda v: v.__name__)
def test_matrix_rules_are_refused(Base, space, stack):
    assert refusal(Base, space, (24, 6) if space == ST else (24,), stack, dtype=torch.float32) is not None


@pytest.mark.parametrize("Base", [po.GaLore, po.Fira, po.APOLLO], ids=lambda v: v.__name__)
@pytest.mark.parametrize("stack", [True, False])
def test_keys_of_the_group_count(Base, stack):
    """Without a rank they are AdamW, which lifts; with one they project the gradient as a matrix."""
    assert refusal(Base, stack=stack, dtype=torch.float32) is None
    group = {"rank": 2, "update_proj_gap": 10, "scale": 1.0, "projection_type": "std"}
    group |= {"scale_type": "channel"} if Base is po.APOLLO else {}
    assert refusal(Base, stack=stack, dtype=torch.float32, shape=(24, 6), group=group) is not None


# -- weight decay --------------------------------------------------------------------------------------------


class TrustRatioWithDecay(Rule):
    """SGD without weight decay; with it, as long a step as the weight is: as timm's LARS."""

    def move(self, group, p, g):
        ratio = 1.0
        if group["weight_decay"] != 0:
            w = p.norm()
            ratio = torch.where(w > 0, w / g.norm(), 1.0)
            g = g + group["weight_decay"] * p
        p.sub_(ratio * group["lr"] * g)


@pytest.mark.parametrize("stack", [True, False])
def test_decay_that_makes_another_rule_is_refused(stack):
    assert refusal(TrustRatioWithDecay, stack=stack) is None
    assert "depends on the value of the weight" in refusal(
        TrustRatioWithDecay, stack=stack, weight_decay=1e-4
    )


@pytest.mark.parametrize("Base", [po.LARS, po.Lamb], ids=lambda v: v.__name__)
@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("decay", [0.0, 1e-4])
def test_trust_ratios_are_refused_with_and_without_decay(Base, stack, decay):
    with pytest.raises(ValueError, match=NO):
        ghor.lift(Base, stack=stack)(points(ST, (9, 3)), space=ST, lr=0.1, weight_decay=decay)


@pytest.mark.filterwarnings("ignore:weight_decay")
@pytest.mark.parametrize("Base", [Rule, po.Lion, po.AdaBelief], ids=lambda v: v.__name__)
def test_decay_as_such_lifts_and_does_nothing(Base, gen):
    a, b = (points(ST, (9, 3)) for _ in range(2))
    opts = [ghor.lift(Base)(p, space=ST, lr=0.1, weight_decay=decay) for p, decay in ((a, 0.0), (b, 0.1))]
    for _ in range(5):
        for p, q in zip(a, b, strict=True):
            p.grad = randn((9, 3), gen)
            q.grad = p.grad.clone()
        for opt in opts:
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


class DecayingLast(Rule):
    """Decays after it has moved, the velocity included: as LaProp in pytorch_optimizer."""

    def move(self, group, p, g):
        p.sub_(group["lr"] * g).mul_(1 - group["lr"] * group["weight_decay"])


@pytest.mark.parametrize("Base", [DecayingLast, po.LaProp], ids=lambda v: v.__name__)
def test_decay_of_the_velocity_is_refused_with_the_way_out(Base):
    assert refusal(Base) is None
    assert "weight_decay=0" in refusal(Base, weight_decay=0.1)


# -- lists of its own ----------------------------------------------------------------------------------------


class OwnList(Rule):
    def __init__(self, params, lr=0.1):
        self.mine = list(params)
        super().__init__(self.mine, lr)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            if p.grad is not None:
                p.sub_(self.param_groups[0]["lr"] * p.grad)


@pytest.mark.parametrize("stack", [True, False])
def test_a_rule_with_a_list_of_its_own_is_refused(stack):
    with pytest.raises(ValueError, match="list of its own"):
        ghor.lift(OwnList, stack=stack)


class Coupled(Rule):
    """A step size from all weights of the group."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.param_groups[0]["d"] = 1e-3

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        moving = [p for p in group["params"] if p.grad is not None]
        group["d"] += 1e-9 * float(
            sum(p.grad.square().sum() for p in moving)
        )  # too little to be seen in 40 steps
        for p in moving:
            p.sub_(group["lr"] * group["d"] * p.grad)


@pytest.mark.parametrize("stack", [True, False])
def test_numbers_learned_from_all_weights_are_refused(stack):
    with pytest.raises(ValueError, match=NO):
        ghor.lift(Coupled, stack=stack)


@pytest.mark.parametrize("Base", [po.DAdaptAdam, po.DAdaptAdan, po.DAdaptLion], ids=lambda v: v.__name__)
@pytest.mark.parametrize("stack", [True, False])
def test_d_adaptation_is_refused(Base, stack):
    with pytest.raises(ValueError, match=NO):
        ghor.lift(Base, stack=stack)


class Late(Rule):
    """Another rule every 1000 steps."""

    def move(self, group, p, g):
        group["step"] = group.get("step", 0) + 1
        p.sub_(group["lr"] * (g.cumsum(-1) if group["step"] % 1000 == 0 else g))


def test_what_a_rule_does_late_is_seen():
    with pytest.raises(ValueError, match=NO):
        ghor.lift(Late)


class Nested(Rule):
    """State in a dict of its own: it cannot be told apart by weights."""

    def move(self, group, p, g):
        own = self.state[p].setdefault("own", {"m": torch.zeros_like(p)})
        p.sub_(group["lr"] * own["m"].mul_(0.9).add_(g))


def test_state_that_cannot_be_told_apart_needs_a_shadow_for_each_weight(gen):
    with pytest.raises(ValueError, match=r"told apart by weights.*stack=False"):
        ghor.lift(Nested)
    params = points(ST, (9, 3))
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    opts = [
        ghor.lift(Nested, stack=False)(params, space=ST),
        ghor.optim.SGD(twins, lr=0.1, momentum=0.9, space=ST),
    ]
    for t in range(4):
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            p.grad = randn((9, 3), gen) if (t + i) % 3 else None  # a stack would split
            q.grad = None if p.grad is None else p.grad.clone()
        for opt in opts:
            opt.step()
    # one by one and as a batch: the order of sums in products of 9 x 3 matrices, 4 steps
    assert max((p - q).detach().abs().max() for p, q in zip(params, twins, strict=True)) <= 1e-14


class Shaped(Rule):
    """Notes the shapes that it is given."""

    seen: tuple = ()

    def move(self, group, p, g):
        Shaped.seen = (*Shaped.seen, tuple(p.shape))
        p.sub_(group["lr"] * g)


def test_a_shadow_alone_has_the_very_shape_of_the_weight(gen):
    Lifted, (Y,) = ghor.lift(Shaped, stack=False), points(ST, (9, 3), 1)
    opt = Lifted([Y], space=ST)
    Y.grad, Shaped.seen = randn((9, 3), gen), ()
    opt.step()
    assert Shaped.seen == ((9, 3),)


# -- rules that turn with their block ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("Base", "reason"),
    [(torch.optim.Muon, None), (torch.optim.SGD, None), (torch.optim.Adam, "does not turn")],
)
@pytest.mark.parametrize("shape", [(24, 6), (6, 24), (8, 8), (12, 6)])
def test_equivariant_rules(Base, reason, shape):
    """Muon and SGD turn with A and with B; Adam does not."""
    got = probe._turns(Case(Base, {"lr": 0.1}, ST, shape))
    assert (got is None) if reason is None else reason in got
