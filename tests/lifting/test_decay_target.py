"""Weight decay towards an anchor: the formula, what it leaves alone, and that it is state like any other."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from helpers.steps import STIEFEL, Net, gradients, same, sections, through_a_file, train, values
from helpers.table import COMPLEX_CASES, MANIFOLDS, name, point, randn, shapes, spoiled
from helpers.table import sections as sections_of
from torch import nn

import ghor

COMPACT = [
    ("AdamW", s, shapes(s)[0], torch.float64, k) for s in MANIFOLDS if s.compact for k in sections_of(s)
]
COMPACT += [("AdamW", s, shape, torch.complex128, "auto") for s, shape in COMPLEX_CASES if s.compact][::2]
COMPACT += [(cls, STIEFEL, (9, 3), torch.float64, "auto") for cls in ("SGD", "Muon")]


@pytest.mark.parametrize(("cls", "space", "shape", "dtype", "section"), COMPACT, ids=name)
def test_the_rate_of_decay(cls, space, shape, dtype, section, gen):
    """Without gradients -d/dt |Y - Y0|^2/2 = wd |rgrad|^2 of it: fitted over a run, within 1 %."""
    Y = nn.Parameter(space.random(*shape, generator=gen, dtype=dtype))
    Y0, lr, wd = space.random(*shape, generator=gen, dtype=dtype), 0.02, 0.5
    opt = getattr(ghor.optim, cls)([Y], space=space, section=section, lr=lr, weight_decay=wd, anchor=Y0)
    f, slope = [], []
    for _ in range(120):
        y, y0 = space.layout.points(Y.detach()), space.layout.points(Y0)
        away = space.layout.weight(y - space.geometry.representative(y, y0), shape)
        V = space.rgrad(Y.detach(), away)
        f.append(away.abs().square().sum() / 2)
        slope.append(wd * space.metric(Y.detach(), V, V).sum())
        Y.grad = torch.zeros_like(Y)
        opt.step()
    f, slope = torch.stack(f), torch.stack(slope)
    predicted, measured = lr * (slope[1:] + slope[:-1]) / 2, -f.diff()
    rate = (predicted * measured).sum() / predicted.square().sum()
    assert abs(rate - 1) <= 0.01
    assert f[-1] < 0.9 * f[0]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_rate_on_spd_does_not_depend_on_the_size(scale, gen):
    space, lr, wd = ghor.SPD(), 0.05, 0.5
    X, Y0 = (scale * space.random(3, 3, generator=gen, dtype=torch.float64) for _ in range(2))
    Y = nn.Parameter(100 * X)
    opt = ghor.optim.AdamW([Y], space=space, lr=lr, weight_decay=wd, anchor=Y0)
    before = space.dist(Y.detach(), Y0)
    for _ in range(40):
        Y.grad = torch.zeros_like(Y)
        opt.step()
    rate = (space.dist(Y.detach(), Y0) / before) ** (1 / 40)
    assert abs(rate - (1 - lr * wd)) <= 1e-3  # Cayley's third order


@pytest.mark.parametrize("section", ["implicit", "transported"])
@pytest.mark.parametrize("r", [0.5, 3.0, 8.0])
def test_the_rate_on_hyperbolic_space_does_not_depend_on_the_distance(r, section):
    space, lr, wd = ghor.Hyperbolic(), 0.05, 0.5
    origin = space.E((4, 3), dtype=torch.float64)
    angles = torch.arange(4, dtype=torch.float64)[:, None]
    V = torch.cat([torch.zeros(4, 1), r * angles.cos(), r * angles.sin()], 1).double()
    Y, Y0 = nn.Parameter(space.exp(origin, V)), space.exp(origin, V.roll(1, 0) / 2)
    opt = ghor.optim.AdamW([Y], space=space, section=section, lr=lr, weight_decay=wd, anchor=Y0)
    before = space.dist(Y.detach(), Y0)
    for _ in range(40):
        Y.grad = torch.zeros_like(Y)
        opt.step()
    rate = (space.dist(Y.detach(), Y0) / before) ** (1 / 40)
    assert (rate - (1 - lr * wd)).abs().max() <= 2e-3


@pytest.mark.parametrize(
    "options", [{"weight_decay": 0.0, "anchor": "start"}, {"weight_decay": 0.1}], ids=["wd=0", "none"]
)
@pytest.mark.parametrize("cls", ["AdamW", "SGD", "Muon"])
def test_no_decay_or_no_anchor_is_a_no_op(cls, options):
    nets = [Net(), Net()]
    opts = [
        getattr(ghor.optim, cls)(net, lr=0.02, **o)
        for net, o in zip(nets, (options, {"weight_decay": 0.0}), strict=True)
    ]
    steps = gradients(nets[0], 5)
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, steps)
    same(values(nets[0])[:-1], values(nets[1])[:-1])  # the last is Euclidean


@sections
def test_through_a_file_and_a_copy(section):
    """ "start" is where the first step found the weight, also after a file, a copy, and a gradient that was
    missing."""
    nets = [Net(), Net()]
    opts = [ghor.optim.AdamW(net, lr=0.02, weight_decay=0.5, anchor="start", section=section) for net in nets]
    steps = gradients(nets[0], 6)
    steps[1][0] = None
    train(nets[0], opts[0], steps)
    train(nets[1], opts[1], steps[:3])
    start = values(Net())
    assert torch.equal(opts[1].state[nets[1].a]["decay_target"], start[0])
    net = copy.deepcopy(nets[1])
    fresh = ghor.optim.AdamW(net, lr=0.02, section=section)
    fresh.load_state_dict(through_a_file(opts[1].state_dict()))
    train(net, fresh, steps[3:])
    same(values(net), values(nets[0]))
    again = copy.deepcopy((nets[1], opts[1]))
    train(*again, steps[3:])
    same(values(again[0]), values(nets[0]))


def test_declared_and_changed(gen):
    """`constrain` can say it; a group's entry that is written later counts from the next step on."""
    torch.manual_seed(0)  # some starts are so far from the target that 60 steps do not reach it
    layer, target = nn.Linear(3, 7, bias=False).double(), point(STIEFEL, (7, 3), gen)
    ghor.constrain(layer, "weight", STIEFEL, anchor=target)
    layer = copy.deepcopy(layer)
    opt = ghor.optim.AdamW(layer, lr=0.1, weight_decay=0.5)
    still = [[torch.zeros(7, 3, dtype=torch.float64)]] * 60
    train(layer, opt, still)
    assert (layer.weight - target).norm() < 0.3
    opt.param_groups[0]["anchor"] = other = point(STIEFEL, (7, 3), gen)
    train(layer, opt, still)
    assert (layer.weight - other).norm() < 0.3
    opt.param_groups[0]["anchor"] = None
    ghor.constrain(layer, "weight", STIEFEL)
    before = layer.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(layer, opt, still[:2])
    same(layer.weight.detach(), before, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_half_precision_stays_at_its_anchor(dtype, gen):
    """At the anchor nothing pulls: no bit changes."""
    Y = nn.Parameter(STIEFEL.random(7, 3, generator=gen).to(dtype))
    before = Y.detach().clone()
    opt = ghor.optim.AdamW([Y], space=STIEFEL, lr=0.1, weight_decay=0.5, anchor="start")
    for _ in range(3):
        Y.grad = torch.zeros_like(Y)
        opt.step()
    assert torch.equal(Y, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name)
def test_padding_has_no_anchor(dtype, gen):
    tables = [nn.Embedding(6, 3, padding_idx=0, dtype=dtype) for _ in range(2)]
    for table in tables:
        ghor.constrain(table, "weight", ghor.Sphere(), anchor="start")
    opt = ghor.optim.AdamW([t.weight for t in tables], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        for table in tables:
            table.weight.grad = randn((6, 3), gen, dtype)
        opt.step()
    assert all(torch.equal(t.weight[0], torch.zeros(3, dtype=dtype)) for t in tables)


@pytest.mark.parametrize(
    "plain",
    [ghor.Sphere(), ghor.Sphere(radius=2.5), ghor.Sphere(radius="start"), ghor.Hyperbolic()],
    ids=name,
)
@pytest.mark.parametrize("section", ["auto", "transported"])
def test_other_rows_of_a_padded_weight_are_those_of_one_without(plain, section, gen):
    """With a given anchor, and through a state dict, which holds points of length one."""
    padded = replace(plain, padding_idx=2)
    Y, Y0 = (plain.random(6, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    rows, runs = torch.arange(6) != 2, []
    for space in (padded, plain):
        p, anchor = nn.Parameter(Y.clone()), Y0.clone()
        if space is padded:
            p.data[2] = anchor[2] = 0
        make = lambda p=p, anchor=anchor, space=space: ghor.optim.AdamW(  # noqa: E731
            [p], space=space, section=section, lr=0.1, weight_decay=0.5, anchor=anchor
        )
        opt = make()
        for k in range(14):
            if k == 4:
                saved, opt = opt.state_dict(), make()
                opt.load_state_dict(saved)
            p.grad = randn((6, 4), torch.Generator().manual_seed(k))
            opt.step()
        runs.append(p.detach())
    assert (runs[0][rows] - runs[1][rows]).abs().max() <= 1e-13
    assert not runs[0][2].any()


def test_some_of_a_group_have_one(gen):
    """Through a file, into an optimizer that was built without; and a declared anchor is a copy."""
    starts, grads = [point(STIEFEL, (7, 3), gen) for _ in range(3)], [randn((7, 3), gen) for _ in range(8)]
    pairs = [[nn.Parameter(Y.clone()) for Y in starts[:2]] for _ in range(2)]
    options = {"space": STIEFEL, "lr": 0.1, "weight_decay": 0.5}
    one = ghor.optim.AdamW(pairs[0], anchor=[starts[2], None], **options)
    with pytest.warns(UserWarning, match="no effect"):
        other = ghor.optim.AdamW(pairs[1], **options)

    def step(opt, params, G):
        for p in params:
            p.grad = G.clone()
        opt.step()

    step(one, pairs[0], grads[0])
    for p, q in zip(*pairs, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(through_a_file(one.state_dict()))
    for G in grads[1:]:
        step(one, pairs[0], G)
        step(other, pairs[1], G)
    assert all(map(torch.equal, *pairs))
    layer = nn.Linear(3, 7, bias=False)
    ghor.constrain(layer, "weight", STIEFEL)
    start = layer.weight.detach().clone()
    ghor.constrain(layer, "weight", STIEFEL, anchor=layer.weight.detach())
    opt = ghor.optim.AdamW(layer, lr=0.1, weight_decay=0.5)
    for G in grads[:2]:
        step(opt, [layer.weight], G.float())
    same(opt.state[layer.weight]["decay_target"], start)
    same(ghor.optim.AdamW(layer, weight_decay=0.5).param_groups[0]["anchor"][0], start)
    with pytest.warns(UserWarning, match="weight has an anchor, but this optimizer has no weight_decay"):
        ghor.optim.Rprop(layer)
    opt = ghor.optim.Rprop([nn.Parameter(start.clone())], space=STIEFEL)
    with pytest.warns(UserWarning, match="parameter 0 of group 1 has an anchor"):  # not with the next step
        opt.add_param_group({"params": [layer.weight]})


def test_what_is_refused(gen):
    p, flat = nn.Parameter(point(STIEFEL, (7, 3), gen)), nn.Parameter(randn((4,), gen))
    Y0, AdamW = point(STIEFEL, (7, 3), gen), ghor.optim.AdamW

    def group(**keys):
        return [{"params": [p], "space": STIEFEL, **keys}]

    with pytest.raises(ValueError, match=r"the anchor of parameter 0 of group 0 .* off Stiefel"):
        AdamW(group(anchor=spoiled(STIEFEL, Y0, 1e-3)))
    with pytest.raises(ValueError, match=r"float64 of shape \(3, 7\), the weight float64 of shape \(7, 3\)"):
        AdamW(group(anchor=Y0.mT))
    with pytest.raises(TypeError, match=r"None, 'start' or a point of Stiefel.*, got 'begin'"):
        AdamW(group(anchor="begin"))
    with pytest.raises(ValueError, match="1 parameters and 2 anchors"):
        AdamW(group(anchor=[Y0, Y0]))
    with pytest.raises(ValueError, match="an anchor, but no weight_decay"):
        ghor.optim.Rprop(group(anchor="start"))
    with pytest.raises(ValueError, match="is Euclidean and decays towards 0"):
        AdamW([{"params": [flat], "anchor": flat.detach()}], space=ghor.Euclidean())
    AdamW([{"params": [flat], "anchor": torch.zeros(4)}], space=ghor.Euclidean())
    with pytest.raises(ValueError, match=r"the anchor of weight .* off Stiefel"):
        ghor.constrain(nn.Linear(3, 7), "weight", STIEFEL, anchor=torch.ones(7, 3))


def test_a_weight_decays_though_another_has_no_gradient(gen):
    """The step in which a stack splits is like every other."""
    Y0, Z0, A = (point(STIEFEL, (7, 3), gen) for _ in range(3))
    grads = [randn((7, 3), gen) for _ in range(3)]

    def run(others):
        Y, Z = nn.Parameter(Y0.clone()), nn.Parameter(Z0.clone())
        params = [Y, Z] if others else [Y]
        opt = ghor.optim.AdamW(params, space=STIEFEL, anchor=[A] * len(params), lr=1e-2, weight_decay=5.0)
        for G in grads:
            Y.grad = G.clone()
            opt.step()
        return Y.detach()

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:weight_decay=0.5 has no effect")
@pytest.mark.parametrize("steps", [0, 1])
def test_an_anchor_point_is_saved_before_the_first_step(steps, gen):
    Y, Z, A = (point(STIEFEL, (7, 3), gen) for _ in range(3))
    pair = [nn.Parameter(Y.clone()), nn.Parameter(Z.clone())]
    opt = ghor.optim.AdamW(pair, space=STIEFEL, anchor=[A, "start"], lr=1e-2, weight_decay=0.5)
    for _ in range(steps):
        pair[1].grad = randn((7, 3), gen)
        opt.step()
    twins = [nn.Parameter(p.detach().clone()) for p in pair]
    other = ghor.optim.AdamW(twins, space=STIEFEL, lr=1e-2, weight_decay=0.5)
    other.load_state_dict(through_a_file(opt.state_dict()))
    for p, q in zip(pair, twins, strict=True):
        p.grad = torch.zeros_like(p)
        q.grad = torch.zeros_like(q)
    for _ in range(3):
        opt.step()
        other.step()
    same([p.detach() for p in twins], [p.detach() for p in pair])
    same(other.state[twins[0]]["decay_target"], A)


@pytest.mark.filterwarnings("ignore:weight_decay=0.5 has no effect")
def test_an_anchor_that_is_declared_too_late(gen):
    layer = nn.Linear(3, 7, bias=False)
    ghor.constrain(layer, "weight", STIEFEL)
    opt, plain = ghor.optim.AdamW(layer, weight_decay=0.5), ghor.optim.Rprop(layer)
    given = ghor.optim.AdamW([layer.weight], anchor="start", weight_decay=0.5)
    layer.weight.grad = randn((7, 3), gen, torch.float32)
    opt.step()
    ghor.constrain(layer, "weight", STIEFEL, anchor=point(STIEFEL, (7, 3), gen, torch.float32))
    with pytest.raises(ValueError, match=r"weight is declared with an anchor, and this optimizer has none"):
        opt.step()
    plain.step()  # has no decay
    given.step()  # has an anchor of its own


@pytest.mark.filterwarnings("ignore:AdamW. no parameter is on a manifold", "ignore:weight changed outside")
def test_anchors_that_are_not_late(gen):
    """Of a Euclidean weight, of one that does not decay, and where a group has lost what is declared."""
    layer, other = nn.Linear(3, 7, bias=False), nn.Linear(3, 7, bias=False)
    ghor.constrain(other, "weight", ghor.Euclidean(), anchor="start")
    opt = ghor.optim.AdamW(other, weight_decay=0.5)
    other.weight.grad = randn((7, 3), gen, torch.float32)
    opt.step()
    ghor.constrain(layer, "weight", STIEFEL)
    still = ghor.optim.SGD(layer, lr=0.1)
    layer.weight.grad = randn((7, 3), gen, torch.float32)
    still.step()
    ghor.constrain(layer, "weight", STIEFEL, anchor="start")
    still.step()
    opt = ghor.optim.AdamW(layer, weight_decay=0.5)
    opt.step()
    opt.param_groups[0]["anchor"] = None
    opt.step()
    assert opt.param_groups[0]["anchor"] == "start"


def test_a_state_dict_has_a_copy_of_the_anchor(gen):
    Y, A = (point(STIEFEL, (7, 3), gen) for _ in range(2))
    opt = ghor.optim.AdamW([nn.Parameter(Y)], space=STIEFEL, anchor=A, weight_decay=0.5)
    opt.state_dict()["param_groups"][0]["anchor"][0].zero_()
    same(opt.param_groups[0]["anchor"][0], A)
