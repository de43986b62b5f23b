"""ghor.optim.LBFGS: torch's on Euclidean weights, its figures on manifolds, its state."""

import copy
import warnings

import pytest
import torch
from helpers.problems import STIEFEL, brockett, closure, gen, svd
from helpers.steps import through_a_file
from torch import nn

import ghor
from ghor.solve.coordinates import Coordinates
from ghor.solve.iterate import Iterate, Ray, Sample, renewed
from ghor.solve.rules import Limited
from ghor.spaces.retraction import cayley

SEARCHES = pytest.mark.parametrize("search", [None, "strong_wolfe"])
SECTIONS = pytest.mark.parametrize("section", ["transported", "implicit"])


def normed(opt, params, f):
    """A closure of f, and the gradient norms in g^hor at every evaluation."""
    norms, evaluated = [], closure(opt, f)

    def step():
        loss = evaluated()
        rgrads = [STIEFEL.rgrad(p.detach(), p.grad) for p in params]
        norms.append(
            sum(float(STIEFEL.inner(p.detach(), d, d)) for p, d in zip(params, rgrads, strict=True)) ** 0.5
        )
        return loss

    return step, norms


@SEARCHES
def test_on_euclidean_weights_it_is_torchs(search):
    """Rosenbrock's function and a quadratic in one: the same evaluations, the same point. 1e-8: forty
    iterations amplify rounding by the condition of the problem, 2500, and more."""

    def f(x, y):
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum() + (y - 1).square().sum()

    ends = []
    for cls, more in ((torch.optim.LBFGS, {}), (ghor.optim.LBFGS, {"space": ghor.Euclidean()})):
        params = [
            nn.Parameter(torch.zeros(8, dtype=torch.float64)),
            nn.Parameter(torch.ones(2, 3, dtype=torch.float64) * 3),
        ]
        opt = cls(params, lr=1 if search else 0.05, line_search_fn=search, history_size=5, **more)
        for _ in range(2):
            opt.step(closure(opt, lambda params=params: f(*params)))
        state = opt.state[params[0]]
        ends.append((state["func_evals"], state["n_iter"], torch.cat([p.detach().flatten() for p in params])))
    assert ends[0][:2] == ends[1][:2]
    assert (ends[0][2] - ends[1][2]).abs().max() <= 1e-8


@pytest.mark.parametrize("retraction", ["cayley", "geodesic"])
@pytest.mark.parametrize(
    ("seed", "section"),
    [
        *((seed, "transported") for seed in range(2)),
        (0, "implicit"),
        *(pytest.param(seed, "transported", marks=pytest.mark.slow) for seed in range(2, 8)),
        pytest.param(1, "implicit", marks=pytest.mark.slow),
    ],
)
def test_the_svd_problem_of_the_authors(seed, retraction, section):
    """Gradient norm 3.8e-7 in at most 300 evaluations (their BFGS: 2441 and 3031), 1e-10 in the end."""
    f, start, best = svd(seed)
    w = [nn.Parameter(x) for x in start]
    opt = ghor.optim.LBFGS(
        w, space=STIEFEL, retraction=retraction, section=section, history_size=30, max_iter=100,
        tolerance_grad=1e-11, tolerance_change=0, line_search_fn="strong_wolfe",
    )  # fmt: skip
    step, norms = normed(opt, w, lambda: f(w))
    while len(norms) < 1000 and min(norms, default=1) > 1e-10:
        opt.step(step)
    assert next(i for i, norm in enumerate(norms) if norm <= 3.8e-7) < 300
    assert min(norms) <= 1e-10
    assert float(f(w).detach()) <= best + 1e-13
    assert max(float(STIEFEL.residual(x.detach())) for x in w) <= 1e-13


F = brockett(30, 4)[0]


class Net(nn.Module):
    """A weight on a manifold and a Euclidean one."""

    def __init__(self, seed=0):
        super().__init__()
        self.Y = nn.Parameter(STIEFEL.random(30, 4, generator=gen(seed), dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        ghor.constrain(self, "Y", STIEFEL)

    def loss(self):
        return F(self.Y) + (self.b - self.Y[0]).square().sum()


def closure_of(net, opt):
    return closure(opt, net.loss)


@pytest.mark.parametrize("memory", [100, 7])
@SECTIONS
@SEARCHES
def test_a_checkpoint_resumes_to_the_bit(search, section, memory):
    def build(net):
        return ghor.optim.LBFGS(
            net,
            lr=1 if search else 0.01,
            max_iter=5,
            line_search_fn=search,
            section=section,
            history_size=memory,
        )

    net = Net()
    opt = build(net)
    for _ in range(3):
        opt.step(closure_of(net, opt))
    twin = copy.deepcopy(net)
    again = build(twin)
    again.load_state_dict(through_a_file(opt.state_dict()))
    for _ in range(3):
        opt.step(closure_of(net, opt))
        again.step(closure_of(twin, again))
    assert torch.equal(net.Y, twin.Y)
    assert torch.equal(net.b, twin.b)


@pytest.mark.filterwarnings("ignore:Converting a tensor:UserWarning")
@pytest.mark.parametrize("change", ["model.to", "load_state_dict"])
@pytest.mark.parametrize("section", ["transported", "implicit", None])
@SEARCHES
@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.bfloat16)],
    ids=str,
)
def test_the_dtype_changes_between_steps(before, after, search, section, change):
    """The memory is converted. (Only a weight that float64 finds off its space goes on without it.)"""

    def build(net):
        options = {"max_iter": 4, "line_search_fn": search, "lr": 1 if search else 0.01}
        if section is None:
            return ghor.optim.LBFGS(net.parameters(), space=ghor.Euclidean(), **options)
        return ghor.optim.LBFGS(net, section=section, **options)

    net = (Net() if section else nn.Linear(3, 1)).to(before)
    if section is None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.arange(4, dtype=before), net.parameters())
    opt = build(net)

    def step(dtype):
        def loss():
            if section:
                stretched = torch.linspace(0, 3, 30, dtype=dtype) @ net.Y.square()
                return stretched.sum() + (net.b - net.Y[0]).square().sum()
            x = torch.arange(21.0).sin().view(7, 3).to(dtype)
            return (net(x) - x.square().sum(1, True)).square().sum()

        return float(opt.step(closure(opt, loss)))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        start = step(before)
        pairs = len(opt.state[next(net.parameters())]["old_stps"])
        state = opt.state_dict()
        net.to(after)
        if change == "load_state_dict":
            opt = build(net)
            opt.load_state_dict(state)
        first = step(after)
        kept = len(opt.state[next(net.parameters())]["old_stps"]) > pairs
        last = step(after)
    said = " ".join(str(w.message) for w in found)
    assert last <= first < start
    assert kept or ("the memory is empty" in said and after == torch.float64)
    memory = opt.state[next(net.parameters())]["prev_flat_grad"].dtype
    assert memory == (torch.float32 if after == torch.bfloat16 else after)


def test_the_dtype_of_one_of_two_alike_changes():
    """Flat vectors are laid out by kinds of weights, so the memory means nothing any more."""
    net = nn.ParameterList([STIEFEL.random(5, 2, generator=gen(k), dtype=torch.float64) for k in range(2)])
    opt = ghor.optim.LBFGS([net[0], net[1]], space=STIEFEL, max_iter=3)

    def loss():
        return sum((torch.arange(1.0, 6, dtype=p.dtype) @ p.square()).sum().double() for p in net)

    opt.step(closure(opt, loss))
    net[1].data = net[1].data.float()
    with pytest.warns(UserWarning, match="another dtype: the memory is empty"):
        opt.step(closure(opt, loss))
    assert net[1].dtype == torch.float32


@SECTIONS
@pytest.mark.parametrize("curved_first", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64), (torch.float64, torch.float32)],
    ids=str,
)
def test_a_checkpoint_resumes_in_every_dtype(dtypes, curved_first, section):
    """The memory of all weights is in the state of the first, in a wider dtype than it may have."""
    spaces = [STIEFEL, ghor.Euclidean()][:: 1 if curved_first else -1]

    def build(params, state=None):
        opt = ghor.optim.LBFGS([{"params": params, "space": spaces}], lr=0.05, max_iter=4, section=section)
        if state is not None:
            opt.load_state_dict(state)
        return opt

    def step(opt, params):
        Y, b = params[:: 1 if curved_first else -1]
        opt.step(closure(opt, lambda: F(Y.double()) + (b.double() - Y.double()[0]).square().sum()))

    shapes = [(30, 4), (4,)][:: 1 if curved_first else -1]
    params = [
        nn.Parameter(s.project(s.random(*shape, generator=gen(0))).to(dtype))
        for s, shape, dtype in zip(spaces, shapes, dtypes, strict=True)
    ]
    with torch.no_grad():
        for p, s in zip(params, spaces, strict=True):
            p.copy_(s.project(p))
    opt = build(params)
    step(opt, params)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    again = build(twins, through_a_file(opt.state_dict()))
    for _ in range(2):
        step(opt, params)
        step(again, twins)
    assert opt.state[params[0]]["n_iter"] == 12
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)


def test_the_section_can_change_its_kind_and_back():
    """Inner products of the memory with each other, and with the gradient, stay what they were."""
    net = Net()
    opt = ghor.optim.LBFGS(net, max_iter=6, line_search_fn="strong_wolfe", section="transported")
    group, grams = opt.param_groups[0], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for section in ("transported", "implicit", "transported", "implicit"):
            opt.step(closure_of(net, opt))
            asked = "frame_anchor" if group["section"] == "implicit" else "section"
            assert set(opt.state[net.Y]) & {"section", "frame_anchor"} == {asked}
            closure_of(net, opt)()
            before, group["section"] = len(opt.state[net.Y]["old_dirs"]), section
            for _ in range(2):  # as it was, and as the other kind from a file
                grams.append(products(opt._located(), net))
                opt.load_state_dict(through_a_file(opt.state_dict()))
                group = opt.param_groups[0]
                group["section"] = "implicit" if section == "transported" else "transported"
            assert before == len(opt.state[net.Y]["old_dirs"]) > 0
            assert (grams[-1] - grams[-2]).abs().max() <= 1e-12 * grams[-1].abs().max()
            group["section"] = section


def products(memory, net):
    """Inner products of all vectors of a memory and of the gradient."""
    space, w = memory.space, memory.rule.window
    g = space.pull(memory.frames, space.gradients([net.Y.grad, net.b.grad]))
    X = torch.stack([g, memory.last.d, memory.last.before, *memory.rule.S[w], *memory.rule.Y[w]])
    return X @ X.mT


def test_the_state_of_torchs_own_is_not_taken_for_vectors_of_g_hor():
    b, Y = nn.Parameter(torch.zeros(4).double()), nn.Parameter(Net().Y.detach().clone())
    plain = torch.optim.LBFGS([b, Y], lr=1e-3, max_iter=3)
    opt = ghor.optim.LBFGS([{"params": [b, Y], "space": [ghor.Euclidean(), STIEFEL]}])
    plain.step(closure(plain, lambda: (Y**4).sum() + (b - Y[0]).square().sum()))
    assert "old_dirs" in plain.state_dict()["state"][0]
    opt.load_state_dict(plain.state_dict())
    assert "old_dirs" not in opt.state[b]


def test_memory_turns_where_a_reference_is_renewed():
    """Tangent vectors stay what they are, and with them all inner products."""
    x = STIEFEL.random(5, 2, generator=gen(0), dtype=torch.float64)
    space = Coordinates([x], [STIEFEL], cayley, "implicit")
    frames, count = space.frames, 0
    for i in range(60):
        G = [torch.randn(1, 5, 2, generator=gen(i), dtype=torch.float64)]
        it = Iterate(frames, Sample([frame.point() for frame in frames], 0.0, G), space.pull(frames, G), 1)
        ray = Ray(space, it, it.gradient)
        trials = ray.at(1.5 / it.norm)
        new = ray.arrive(trials, it.sample)
        there, turn = renewed(space, new)
        if turn is not None:
            count += 1
            for u, turned in ((new.gradient, there.gradient), (it.gradient, turn(it.gradient))):
                ((old,), (now,)) = ([f.push(w) for f, w in zip(at.frames, space.elements(v), strict=True)]
                                    for at, v in ((new, u), (there, turned)))  # fmt: skip
                assert (old - now).norm() <= 1e-12 * old.norm()
        frames = there.frames
    assert count >= 3


def test_euclidean_and_manifold_weights_together_and_copies():
    net = Net()
    opt = ghor.optim.LBFGS(
        net, max_iter=500, max_eval=1000, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    opt.step(closure_of(net, opt))
    assert (net.b - net.Y[0]).abs().max() <= 1e-7  # tolerance_grad
    assert float(STIEFEL.residual(net.Y.detach())) <= 1e-13
    copy.deepcopy(opt)


def test_a_weight_that_others_moved_starts_afresh():
    """The next step is that of a new optimizer at the new point; off its space it is refused."""
    net, fresh = Net(), Net()
    opt, new = (ghor.optim.LBFGS(n, max_iter=2, line_search_fn="strong_wolfe") for n in (net, fresh))
    opt.step(closure_of(net, opt))
    other = Net(1)
    for n in (net, fresh):
        n.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match="Y changed outside the optimizer.*the memory is empty"):
        opt.step(closure_of(net, opt))
    new.step(closure_of(fresh, new))
    for p, q in zip(net.parameters(), fresh.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-12
    with torch.no_grad():
        net.Y.mul_(2)
    with pytest.raises(ValueError, match=r"Y of shape \(30, 4\) is .* off Stiefel"):
        opt.step(closure_of(net, opt))


@SEARCHES
def test_an_error_in_the_closure_leaves_the_weights_where_they_were(search):
    """Not at the step that was being tried, which no frame of ours is above."""
    net = Net()
    opt, before = (
        ghor.optim.LBFGS(net, line_search_fn=search),
        [p.detach().clone() for p in net.parameters()],
    )
    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return net.loss()

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure(opt, fails))
    assert all(map(torch.equal, net.parameters(), before))
    opt.step(closure_of(net, opt))


def test_a_step_from_a_minimum_asks_once():
    """As torch's does: no iteration is counted, and nothing is written."""
    b, Y = nn.Parameter(torch.zeros(4).double()), nn.Parameter(Net().Y.detach().clone())
    opt = ghor.optim.LBFGS([{"params": [b, Y], "space": [ghor.Euclidean(), STIEFEL]}])
    before, version = Y.detach().clone(), Y._version
    opt.step(closure(opt, lambda: (Y.mT @ Y).trace() + b.square().sum()))
    assert (opt.state[b]["func_evals"], opt.state[b]["n_iter"]) == (1, 0)
    assert torch.equal(Y, before)
    assert Y._version == version


def test_the_memory_can_be_made_smaller_and_larger():
    net = Net()
    opt = ghor.optim.LBFGS(net, max_iter=12, line_search_fn="strong_wolfe")
    group, counts = opt.param_groups[0], []
    for size in (100, 5, 8):
        group["history_size"] = size
        opt.step(closure_of(net, opt))
        counts.append(len(opt.state[net.Y]["old_dirs"]))
    assert counts[0] > 8
    assert counts[1:] == [5, 8]


def test_a_memory_that_leads_uphill_is_emptied(monkeypatch):
    net = Net()
    opt = ghor.optim.LBFGS(net, max_iter=12, line_search_fn="strong_wolfe")
    loss = [float(opt.step(closure_of(net, opt)).detach())]
    assert len(opt.state[net.Y]["old_dirs"]) > 3
    with monkeypatch.context() as patch:
        patch.setattr(Limited, "direction", lambda rule, g: g.clone())
        opt.step(closure_of(net, opt))
    assert len(opt.state[net.Y]["old_dirs"]) <= 1
    for _ in range(2):
        loss.append(float(opt.step(closure_of(net, opt)).detach()))
    assert loss[-1] < loss[0]


def test_a_weight_that_was_written_before_the_first_step_has_its_new_radius():
    """Of spheres of any radius: the declared one holds while the weight is there."""
    lengths = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    for factor in (1.0, 4.0):
        layer = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(
                ghor.Sphere().random(3, 4, generator=gen(0), dtype=torch.float64) * lengths[:, None]
            )
        ghor.constrain(layer, "weight", ghor.Sphere(radius="start"))
        with torch.no_grad():
            layer.weight.mul_(factor)
        opt = ghor.optim.LBFGS(layer, max_iter=20, line_search_fn="strong_wolfe")
        opt.step(closure(opt, layer.weight.sum))
        torch.testing.assert_close(layer.weight.detach().norm(dim=1), factor * lengths)
        best = -2 * factor * float(lengths.sum())  # the rows are (-r/2, -r/2, -r/2, -r/2)
        assert float(layer.weight.sum()) == pytest.approx(best)


def test_one_group():
    net = Net()
    with pytest.raises(ValueError, match=r"takes one group.*pass the model itself"):
        ghor.optim.LBFGS(ghor.param_groups(net))
    assert ghor.lift(torch.optim.LBFGS) is ghor.optim.LBFGS
    opt = ghor.optim.LBFGS(net)
    with pytest.raises(ValueError, match=r"takes one group"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def spoiled(net, opt, bad):
    """A closure whose loss is NaN in the calls `bad`, from 1 on, and where it was called, as far as it is."""
    evaluated, visited = closure_of(net, opt), []

    def spoils():
        visited.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        loss = evaluated()
        if len(visited) in bad:
            for p in net.parameters():
                p.grad.mul_(torch.nan)
            return loss * torch.nan
        return loss

    return spoils, visited


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("first", [1, 2, 4])
@SEARCHES
def test_a_loss_that_is_not_finite(search, first, strict):
    """The weights stay where loss and gradient were finite, with a warning or an error; then it goes on."""
    net = Net()
    opt = ghor.optim.LBFGS(
        net, lr=1 if search else 0.01, line_search_fn=search, max_iter=30, error_if_nonfinite=strict
    )
    evaluated, visited = spoiled(net, opt, range(first, 1000))
    refused = pytest.raises(RuntimeError, match="Y is not finite") if strict else None
    with refused or pytest.warns(UserWarning, match="not finite"):
        opt.step(evaluated)
    good = visited[: max(1, first - 1)]
    here = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert any(torch.equal(here, x) for x in good)
    assert search or torch.equal(here, good[-1])
    loss = [float(closure_of(net, opt)().detach())]
    for _ in range(20 if search else 3):
        loss.append(float(opt.step(closure_of(net, opt)).detach()))
    assert float(STIEFEL.residual(net.Y.detach())) <= 1e-12
    assert loss[1] == loss[0]
    assert loss[-1] < loss[0]
    assert search is None or float(net.b.grad.norm()) <= 1e-4


@SECTIONS
@pytest.mark.parametrize("first", [2, 5])
def test_a_step_that_was_taken_back_is_tried_again(first, section):
    """With the same memory: the points of a run without NaN, to the bit."""
    runs = []
    for bad in ([], [first]):
        net = Net()
        opt = ghor.optim.LBFGS(net, lr=0.01, max_iter=10, section=section)
        evaluated, visited = spoiled(net, opt, bad)
        with pytest.warns(UserWarning, match="not finite") if bad else warnings.catch_warnings():
            opt.step(evaluated)
        opt.step(evaluated)
        runs.append(visited)
    plain, again = runs
    assert all(map(torch.equal, again[:first], plain[:first]))
    assert len(again) == first + 10
    rest = again[first:]
    assert all(map(torch.equal, rest, plain[first - 2 : first - 2 + len(rest)]))


def test_euclidean_weights_go_to_nan_as_torchs_do():
    """But for error_if_nonfinite, which torch's has not: nothing is lost."""
    for cls, more in (
        (torch.optim.LBFGS, {}),
        (ghor.optim.LBFGS, {"space": ghor.Euclidean()}),
        (ghor.optim.LBFGS, {"space": ghor.Euclidean(), "error_if_nonfinite": True}),
    ):
        x, calls = nn.Parameter(torch.ones(3)), []
        opt = cls([x], max_iter=5, **more)

        def loss(x=x, calls=calls):
            calls.append(1)
            return (x**4).sum() * (1 if len(calls) == 1 else torch.nan)

        if "error_if_nonfinite" in more:
            with pytest.raises(RuntimeError, match="stay where they were before"):
                opt.step(closure(opt, loss))
            assert torch.equal(x, torch.ones(3))
        else:
            opt.step(closure(opt, loss))
            assert x.isnan().all()


def test_a_euclidean_weight_that_was_written_leaves_the_frames():
    """Of the others; the memory stays what it was."""
    Y, c = (
        nn.Parameter(X)
        for X in (STIEFEL.random(10, 2, generator=gen(0), dtype=torch.float64), torch.ones(2).double())
    )
    opt = ghor.optim.LBFGS([{"params": [Y, c], "space": [STIEFEL, ghor.Euclidean()]}], max_iter=3)
    opt.step(closure(opt, lambda: ((Y * c) ** 4).sum() + (c**2).sum()))
    before = opt.state[Y]["section"].clone()
    with torch.no_grad():
        c.mul_(1.5)
    located = opt._located()
    assert torch.equal(located.space.states(located.frames, 0)[0]["section"], before)


def test_a_loss_that_is_not_finite_far_away():
    """The search comes back from where the loss is NaN."""
    Y = nn.Parameter(STIEFEL.random(10, 2, generator=gen(0), dtype=torch.float64))
    Z = STIEFEL.random(10, 2, generator=gen(1), dtype=torch.float64)
    opt = ghor.optim.LBFGS(
        [Y], space=STIEFEL, lr=50, max_iter=30, max_eval=300, line_search_fn="strong_wolfe"
    )

    def f():
        off = (Y - Z).square().sum()
        return off if float(off.detach()) < 4.5 else off * torch.nan

    step, norms = normed(opt, [Y], f)
    opt.step(step)
    assert norms[-1] <= 1e-6
