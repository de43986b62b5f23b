"""What torch.optim promises of any optimizer, on weights on manifolds: files, copies, groups, gradients that
are missing, writes of others, interrupts."""

import copy
import itertools
import math
import pickle
import warnings
from pathlib import Path

import pytest
import pytorch_optimizer as po
import torch
from helpers.runs import (
    CASES,
    DOUBLE,
    FRAMES,
    RULES,
    Run,
    apart,
    every,
    frames,
    interrupted,
    pairs,
    same,
    through_file,
)
from torch import nn

import ghor
from ghor.lifting.state import OUR_KEYS

# -- files -------------------------------------------------------------------------------------------------


@pairs
def test_resume_to_the_bit(case, rule):
    a = Run(case, rule).run(range(7))
    b = a.resumed()
    a.run(range(7, 25)), b.run(range(7, 25))
    if rule == "NAdam":  # torch loads the float32 mu_product of a float64 weight as float64
        a.flat = b.flat = []
    assert same(a.values(), b.values())
    for i, entries in a.opt.state_dict()["state"].items():
        theirs = b.opt.state_dict()["state"][i]
        assert entries.keys() == theirs.keys()
        if i < len(a.ps):
            assert all(torch.equal(v, theirs[k]) for k, v in entries.items())
            assert all(v.is_contiguous() for v in entries.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith("complex")])
def test_resume_of_narrow_weights(case, dtype):
    """State is in float32, and what is loaded is not cast to the weight's dtype."""
    a = Run(case, dtype=dtype).run(range(7))
    a.on_space()
    saved = a.opt.state_dict()["state"]
    assert {v.dtype for i in range(3) for k, v in saved[i].items() if k not in ("moves", "step")} == {
        torch.float32
    }
    b = a.resumed()
    a.run(range(7, 25)), b.run(range(7, 25))
    assert same(a.values(), b.values())


@frames
def test_resume_where_weights_took_turns(case):
    """Each in turn without a gradient, equally often: a file brings them into one batch."""
    a = Run(case, dtype=torch.float32 if not case.startswith("complex") else DOUBLE)
    for step in range(9):
        a.run([step], on={0, 1, 2} - {step % 3})
    b = a.resumed()
    a.run(range(9, 40)), b.run(range(9, 40))
    assert same(a.values(), b.values())


def test_one_count_for_each_weight():
    """torch's Adam, which loads the state, adds to each: members of a batch share no number in a file."""
    a = Run("stored").run(range(3))
    plain = torch.optim.Adam([{"params": a.ps}, {"params": a.flat}], lr=0.1)
    plain.load_state_dict(a.opt.state_dict())
    for p in a.ps + a.flat:
        p.grad = torch.ones_like(p)
    plain.step()
    assert float(plain.state[a.ps[0]]["step"]) == 4


def test_other_groups_take_the_state():
    a = Run("stored", flat=0).run(range(7))
    saved, b = through_file(a.opt.state_dict()), a.clone()
    b.opt = b.cls([{"params": b.ps[:1]}, {"params": b.ps[1:]}], space=b.space, **b.options)
    group = saved["param_groups"][0]
    saved["param_groups"] = [{**group, "params": [0]}, {**group, "params": [1, 2]}]
    b.opt.load_state_dict(saved)
    a.run(range(7, 30)), b.run(range(7, 30))
    assert apart(a.values(), b.values()) <= 1e-11


def damaged(key, damage):
    a = Run("stored" if key == "section" else "closed form").run(range(3))
    saved = a.opt.state_dict()
    saved["state"][1][key] = damage(saved["state"][1][key])
    return a, saved


@pytest.mark.parametrize("key", ["section", "frame_anchor"])
@pytest.mark.parametrize(
    "damage",
    [lambda X: X * 1.1, lambda X: X * math.nan, lambda X: X[:-1, :-1], torch.zeros_like],
    ids=["longer", "NaN", "smaller", "0"],
)
def test_a_damaged_file_loads_nothing(key, damage):
    a, saved = damaged(key, damage)
    before, state = a.values(), copy.deepcopy(a.opt.state_dict()["state"])
    with pytest.raises(ValueError, match=f"parameter 1 of group 0: a loaded {key} .*delete the key '{key}'"):
        a.opt.load_state_dict(saved)
    assert same(a.values(), before)
    torch.testing.assert_close(a.opt.state_dict()["state"], state, rtol=0, atol=0)
    a.run(range(3, 6)).on_space()


# -- copies ------------------------------------------------------------------------------------------------


@pairs
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["copy", "pickle"]
)
def test_copies_go_on_to_the_bit(case, rule, how):
    a = Run(case, rule).run(range(6))
    b = copy.copy(a)
    b.opt = how(a.opt)
    b.ps, b.flat = (group["params"] for group in (b.opt.param_groups[0], b.opt.param_groups[-1]))
    a.run(range(6, 25)), b.run(range(6, 25))
    assert type(b.opt) is type(a.opt)
    assert same(a.values(), b.values())


# -- groups and gradients ----------------------------------------------------------------------------------


@pairs
def test_each_weight_as_if_it_were_alone(case, rule):
    """Late groups, options that change, and gradients that are missing at random: its own step count."""
    a, b = (Run(case, rule, count=5, flat=0) for _ in range(2))
    a.opt = a.cls(a.ps[:3], space=a.space, **a.options)
    alone = [b.cls([p], space=b.space, **b.options) for p in b.ps]
    gen, counts = torch.Generator().manual_seed(3), [0] * 5
    for step in range(20):
        if step == 6:
            a.opt.add_param_group({"params": a.ps[3:]})
        on = [i for i in range(5 if step >= 6 else 3) if torch.rand(1, generator=gen) < 0.7]
        a.gradients(step, on), b.gradients(step, on)
        for opt in [a.opt, *(alone[i] for i in on)]:
            for group in opt.param_groups:
                group["lr"] = 0.1 / (step + 2)
            opt.step()
        for i in on:
            counts[i] += 1
    assert apart(a.values(), b.values()) <= 1e-11
    assert [int(a.opt.state[p]["moves"]) for p in a.ps] == counts


def test_weights_that_never_have_gradients_cost_nothing():
    a = Run("stored").run(range(3), on=[0])
    assert not a.opt.state.get(a.ps[1])


def test_a_group_may_lose_weights_and_get_them_back():
    a, b = Run("stored").run(range(3)), Run("stored").run(range(3))
    a.opt.param_groups[0]["params"] = a.ps[:2]
    a.run(range(3, 6))
    assert torch.equal(a.ps[2], b.ps[2])
    a.opt.param_groups[0]["params"].append(a.ps[2])
    a.run(range(6, 9)).on_space()
    assert int(a.opt.state[a.ps[2]]["moves"]) == 6


@pytest.mark.parametrize("apart_by", ["groups", "one group"])
@pytest.mark.parametrize("flat", [False, True])
def test_two_parameters_with_one_memory_are_refused(apart_by, flat):
    Y = ghor.Stiefel().random(6, 3)
    p, q = nn.Parameter(Y), nn.Parameter(Y)
    spaces = [ghor.Stiefel(), ghor.Euclidean() if flat else ghor.Stiefel()]
    groups = [{"params": [x], "space": s} for x, s in zip((p, q), spaces, strict=True)]
    groups = groups if apart_by == "groups" else [{"params": [p, q], "space": spaces}]
    with pytest.raises(ValueError, match="are two parameters that share memory"):
        ghor.optim.SGD(groups, lr=0.1)


# -- nothing moves -----------------------------------------------------------------------------------------


@pairs
def test_no_velocity_changes_no_bit(case, rule):
    for dtype in (DOUBLE,) if case.startswith("complex") else (DOUBLE, torch.bfloat16):
        a = Run(case, rule, dtype=dtype, flat=0, **({"lr": 1e-9} if rule == "Rprop" else {}))
        before = a.values()
        for _ in range(12):
            for p in a.ps:
                p.grad = torch.zeros_like(p)
            a.opt.step()
        assert same(a.values(), before)


@pytest.mark.parametrize("case", ["stored", "sphere", "SPD"])
def test_euclidean_weights_are_torchs_to_the_bit(case):
    a = Run(case, "AdamW")
    q = nn.Parameter(a.flat[0].detach().clone())
    plain = torch.optim.AdamW([q], lr=0.05, amsgrad=True)
    for step in range(12):
        a.gradients(step)
        q.grad = a.flat[0].grad.clone()
        a.opt.step(), plain.step()
    assert torch.equal(a.flat[0], q)
    assert all(torch.equal(v, a.opt.state[a.flat[0]][k]) for k, v in plain.state[q].items())


# -- writes of others --------------------------------------------------------------------------------------


WRITES = {
    "copy_": lambda p, Y: p.detach().copy_(Y),
    ".data": lambda p, Y: p.data.copy_(Y),
    "p.data =": lambda p, Y: setattr(p, "data", Y.clone()),
}


@pytest.mark.filterwarnings("ignore:parameter 1 of group 0 changed outside")
@pytest.mark.parametrize("write", WRITES)
@every
def test_writes_are_followed(case, write):
    """The weight goes on from where it was put, as after a counted write; others as if nothing had been."""
    a, b, untouched = (Run(case).run(range(7)) for _ in range(3))
    for run, how in ((a, write), (b, "copy_")):
        with torch.no_grad():
            WRITES[how](run.ps[1], a.targets[1])
    a.run([7]), b.run([7]), untouched.run(range(7, 20))
    assert apart([a.ps[1].detach()], [a.targets[1]]) < (2 if case == "SPD" else 0.5)
    assert apart(a.values(), b.values()) <= 1e-12
    a.run(range(8, 20)).on_space()
    assert apart(a.values()[::2], untouched.values()[::2]) <= 1e-11


@frames
def test_the_same_values_written_change_nothing(case):
    a, b = Run(case).run(range(4)), Run(case).run(range(4))
    with torch.no_grad():
        for p in a.ps:
            p.copy_(p.clone())
    a.run(range(4, 20)), b.run(range(4, 20))
    assert same(a.values(), b.values())


@pytest.mark.filterwarnings("ignore:parameter 1 of group 0 changed outside")
@frames
def test_a_weight_off_its_space_moves_nothing(case):
    a = Run(case).run(range(4))
    with torch.no_grad():
        a.ps[1].mul_(-1 if case == "SPD" else 1.1)
    before, state = a.values(), copy.deepcopy(a.opt.state_dict()["state"])
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 .*off .*; call ghor\.constrain"):
        a.run([4])
    assert same(a.values(), before)
    torch.testing.assert_close(a.opt.state_dict()["state"], state, rtol=0, atol=0)
    with torch.no_grad():
        a.ps[1].copy_(a.targets[1])
    a.run(range(4, 8)).on_space()


@frames
def test_a_point_off_its_space_by_data_is_never_silent(case):
    a = Run(case).run(range(4))
    a.ps[1].data.mul_(-1 if case == "SPD" else 1.1)
    if case == "sphere":  # spheres read their points; this one is projected at the next look
        with pytest.warns(UserWarning, match=r"is not on .* it was projected"):
            a.run(range(4, 20))
    elif case == "hyperbolic":  # y_1 is a function of the others
        a.run(range(4, 20))
    else:
        with pytest.raises(ValueError, match="parameter 1 of group 0"):
            a.run([4])
        a.ps[1].data.copy_(a.targets[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a.run(range(4, 20))
    a.on_space()


def test_state_written_by_others_counts():
    a = Run("stored").run(range(4))
    del a.opt.state[a.ps[0]]
    a.opt.state[a.ps[1]]["step"] = torch.tensor(0.0)
    a.run([4])
    assert [int(a.opt.state[p]["step"]) for p in a.ps] == [1, 1, 5]
    a.opt.state.clear()
    a.run([5]).on_space()
    assert [int(a.opt.state[p]["step"]) for p in a.ps] == [1, 1, 1]


@pytest.mark.parametrize("case", ["stored", "sphere", "poses"])
def test_live_state_is_what_the_next_step_uses(case):
    a, b = Run(case, "RMSprop").run(range(4)), Run(case, "RMSprop").run(range(4))
    a.opt.state[a.ps[1]]["momentum_buffer"].zero_()
    b.opt.state[b.ps[1]]["momentum_buffer"] = torch.zeros_like(b.ps[1])
    a.run([4]), b.run([4])
    assert apart(a.values(), b.values()) <= 1e-13


@pytest.mark.parametrize("case", ["stored", "closed form", "sphere"])
def test_weights_may_change_their_dtype(case):
    """From float64 to float32; and from bfloat16, whose points the state has, to float32."""
    a = Run(case, flat=0).run(range(4))
    for p in a.ps:
        p.data = p.data.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a.run(range(4, 12)).on_space()
    b = Run(case, dtype=torch.bfloat16, flat=0).run(range(4))
    for p in b.ps:
        p.data = p.data.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        b.run(range(4, 12)).on_space()


# -- numbers -----------------------------------------------------------------------------------------------


@every
def test_nan_gradients_move_nothing(case):
    a = Run(case, "Adagrad", flat=0).run(range(3))
    a.gradients(3)
    a.ps[1].grad.view(-1)[0] = math.nan
    before = a.values()
    with pytest.warns(UserWarning, match="the velocity of parameter 1 of group 0 is not finite"):
        a.opt.step()
    assert not torch.equal(a.ps[0], before[0])
    a.on_space()
    with torch.no_grad():
        a.ps[1].copy_(a.ps[1].clone())  # written again: its moments are reset
    with pytest.warns(UserWarning, match="parameter 1 of group 0 changed outside.*start from zero"):
        a.run(range(4, 8)).on_space()
    assert all(bool(torch.isfinite(v).all()) for v in a.opt.state[a.ps[1]].values())


@pytest.mark.filterwarnings("ignore:a weight on .* has no digits left", "ignore:.* it was projected")
@every
def test_huge_steps_stay(case):
    if case.startswith("complex"):
        pytest.skip("as the real ones")
    a = Run(case, dtype=torch.float32, lr=1e6, flat=0)
    with pytest.warns(UserWarning, match="a velocity of length .* was clipped to .*; is the learning rate"):
        a.run(range(30))
    a.on_space(10)


# -- interrupts --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("case", "rule", "warm", "stride"),
    [
        ("stored", "Adam", 3, 23),
        ("closed form", "SGD", 9, 23),
        ("sphere", "RMSprop", 9, 23),
        ("stored", "Muon", 3, 23),
    ]
    + [pytest.param(case, "Adam", warm, 1, marks=pytest.mark.slow) for case in FRAMES for warm in (0, 9)],
)
def test_an_interrupt_at_any_line(case, rule, warm, stride):
    """Groups and state are whole, they load elsewhere, and one more step ends on the space."""
    start = Run(case, rule).run(range(warm))
    saved = copy.deepcopy(start.opt.state_dict())
    done = start.resumed().run([warm])
    keys = [
        {k for k in d.get(i, {}) if k not in OUR_KEYS}
        for d in (saved["state"], done.opt.state_dict()["state"])
        for i in range(3)
    ]
    for at in itertools.count(1, stride):
        a = start.clone()
        a.opt.load_state_dict(copy.deepcopy(saved))
        a.gradients(warm)
        groups, params = a.opt.param_groups, [list(g["params"]) for g in a.opt.param_groups]
        if not interrupted(a, at):
            break
        assert a.opt.param_groups is groups
        assert all(
            p is q for g, ps in zip(groups, params, strict=True) for p, q in zip(g["params"], ps, strict=True)
        )
        a.on_space()
        now = a.opt.state_dict()
        for i in range(3):
            entries = now["state"].get(i, {})
            assert {k for k in entries if k not in OUR_KEYS} in (keys[i], keys[3 + i])
            assert all(bool(torch.isfinite(v).all()) for v in entries.values())
        b = a.clone()
        b.opt.load_state_dict(through_file(now))
        for run in (a, b):
            run.run([warm + 1])
            assert all(bool((run.space.residual(p.detach()) <= 1e-6).all()) for p in run.ps)
    assert at > 200


def at_each_line(start, step, before=lambda a: None):
    """Runs that were interrupted in `step`, after one step, at each line of spaces/ in turn."""
    for at in itertools.count(1):
        a = copy.copy(start)
        a.opt = copy.deepcopy(start.opt)
        a.ps, a.flat = a.opt.param_groups[0]["params"], a.opt.param_groups[1]["params"]
        a.run([9]).gradients(10)
        before(a)
        if not interrupted(a, at, str(Path(ghor.__file__).parent / "spaces"), step):
            break
        yield a
    assert at > 20


def writes(a):
    a.ps[1].data.copy_(a.targets[1])


@pytest.mark.filterwarnings("ignore:the last step was interrupted", "ignore:.*changed outside the optimizer")
@pytest.mark.parametrize("how", ["", "after a write", "then a file"])
@frames
def test_an_interrupt_while_points_move(case, how):
    """The frame may be off the group then: the next step ends on the space all the same."""
    before = writes if how == "after a write" else lambda a: None
    for a in at_each_line(Run(case).run(range(9)), "step", before):
        a = a.resumed() if how == "then a file" else a
        a.run([11])
        assert all(bool((a.space.residual(p.detach()) <= 1e-12).all()) for p in a.ps)


@pytest.mark.filterwarnings("ignore:the last step was interrupted")
def test_an_interrupt_of_a_method_that_moves_points():
    start = Run("stored", "Adam")
    start.cls, start.options = ghor.lift(po.ScheduleFreeAdamW), {"lr": 0.05}
    start.opt = start.make()
    for a in at_each_line(start.run(range(9)), "eval"):
        a.opt.train()
        a.run([11])
        assert all(bool((a.space.residual(p.detach()) <= 1e-12).all()) for p in a.ps)


def test_a_rule_that_raises_leaves_weights_on_manifolds_where_they_are():
    class Raises(torch.optim.Adam):
        bad = False

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            if self.bad:
                raise RuntimeError("the rule")

    a = Run("stored")
    a.opt = ghor.lift(Raises)([{"params": a.ps, "space": a.space}], lr=0.05)
    a.flat = []
    a.run(range(3))
    before, a.opt.inner.bad = a.values(), True
    with pytest.raises(RuntimeError, match="the rule") as error:
        a.run([3])
    assert "ghor.lift(Raises) builds" in error.value.__notes__[0]
    assert same(a.values(), before)
    a.opt.inner.bad = False
    with pytest.warns(UserWarning, match="the last step was interrupted"):
        a.run(range(4, 9)).on_space()


# -- the torch optimizer inside ----------------------------------------------------------------------------


def test_a_lifted_optimizer_holds_one():
    a = Run("stored")
    assert type(a.opt.inner) is torch.optim.Adam
    assert isinstance(a.opt, torch.optim.Optimizer)
    assert not isinstance(a.opt, torch.optim.Adam)


class Counts(torch.optim.Optimizer):
    """A rule that writes numbers everywhere."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.state["global"]["n"] = self.calls
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["n"] = state.get("n", 0) + 1
                    state["m"] = (
                        state.get("m", torch.zeros_like(p)) * 0.9 + p.grad
                    )  # a new tensor in every step
                    p.add_(state["m"], alpha=-group["lr"] / (1 + 0.01 * state["n"]))


@pytest.mark.filterwarnings("ignore:a velocity of length")
@frames
def test_rules_that_write_numbers_everywhere(case):
    a = Run(case)
    a.cls, a.options = ghor.lift(Counts), {"section": a.section}
    a.opt = a.make()
    a.run(range(5))
    assert a.opt.inner.calls == 5
    assert [group["k"] for group in a.opt.param_groups] == [5, 5]
    assert all(a.opt.state[p]["n"] == 5 and a.opt.state[p]["m"].shape == p.shape for p in a.ps)
    assert a.opt.state["global"]["n"] == 5
    b = copy.copy(a)
    b.opt = pickle.loads(pickle.dumps(a.opt))
    b.ps, b.flat = (group["params"] for group in b.opt.param_groups)
    a.run(range(5, 25)), b.run(range(5, 25))
    assert b.opt.inner.calls == 25
    assert same(a.values(), b.values())


@pytest.mark.parametrize("rule", RULES)
def test_signatures_are_torchs_and_ours(rule):
    import inspect

    cls = getattr(ghor.optim, rule)
    names = list(inspect.signature(cls).parameters)
    assert {"space", "retraction", "section", "max_angle", "error_if_nonfinite", "anchor"} <= set(names)
    assert [n for n in inspect.signature(cls.Base).parameters if n not in names] == []


@pytest.mark.parametrize("wants", ["a model", "an optimizer"])
def test_rules_that_want_more_say_what_a_lift_gives(wants):
    class Wants(torch.optim.Optimizer):
        def __init__(self, other, lr=0.1):
            other = other.parameters() if wants == "a model" else other.param_groups
            super().__init__(other, {"lr": lr})

    with pytest.raises(AttributeError) as error:
        ghor.lift(Wants)([nn.Parameter(ghor.Stiefel().random(5, 2))], space=ghor.Stiefel())
    assert "ghor.lift(Wants) builds Wants(params, ...) from parameter groups" in error.value.__notes__[0]
