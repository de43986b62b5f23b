"""Declaring spaces: constrain, what a declaration survives, param_groups, check, and how optimizers find
it."""

import copy
import gc
import math
import pickle
import re
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from helpers.steps import through_a_file
from helpers.table import MANIFOLD_CASES, name, point, randn
from torch import nn
from torch.nn.utils import prune

import ghor
from ghor.constraints.declare import declarations_of, declared_spaces
from ghor.constraints.registry import declared_space

manifolds = pytest.mark.parametrize(("space", "shape"), MANIFOLD_CASES, ids=name)

# Distances of a projected float32 weight, measured in float64: rounding of each entry, eps/2, in n <= 8
# columns.
F32 = 8 * torch.finfo(torch.float32).eps


class Net(nn.Module):
    """Two projections one level down, a tall one and a wide one, a kernel and a bias."""

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"tall": nn.Linear(3, 9, bias=False), "wide": nn.Linear(9, 3)})
        self.conv = nn.Conv2d(2, 5, 3, bias=False)

    def forward(self, x):
        return self.block["wide"](self.block["tall"](x)).square().mean() + self.conv.weight.sum()


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net()
    ghor.constrain(net, "block.tall.weight", ghor.Stiefel())
    ghor.constrain(net, "block.wide.weight", ghor.Grassmann())
    return ghor.constrain(net, "conv.weight", ghor.Stiefel(flatten=3))


DECLARED = {
    "block.tall.weight": ghor.Stiefel(),
    "block.wide.weight": ghor.Grassmann(),
    "block.wide.bias": ghor.Euclidean(),
    "conv.weight": ghor.Stiefel(flatten=3),
}


def found(model):
    return {n: space for n, _, space in declared_spaces(model)}


def spaces_in(opt):
    """{parameter: its space}, from the groups of an optimizer."""
    out = {}
    for group in opt.param_groups:
        space, count = group["space"], len(group["params"])
        out |= dict(zip(group["params"], space if isinstance(space, tuple) else [space] * count, strict=True))
    return out


# -- constrain ---------------------------------------------------------------------------------------------


@manifolds
def test_constrain_moves_the_weight_to_the_projection(space, shape, gen):
    """In place: the same parameter, its memory and strides; and a point of the space is left where it is."""
    module = nn.Module()
    module.weight = p = nn.Parameter(point(space, shape, gen) + 0.05 * randn(shape, gen))
    expected, place, strides = space.project(p.detach()), p.data_ptr(), p.stride()
    assert ghor.constrain(module, "weight", space) is module
    assert module.weight is p
    assert (p.data_ptr(), p.stride()) == (place, strides)
    assert p.requires_grad
    assert p.grad_fn is None
    assert torch.equal(p, expected)
    assert space.residual(p.detach()).max() <= 1e-13  # a hundred eps and ||Y|| <= 4
    assert found(module) == {"weight": space}
    assert declared_space(p) == space
    ghor.constrain(module, "weight", space)
    # rounding of the projection of a point: 49 x 7 entries, as in the laws
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=500 * torch.finfo(p.dtype).eps)


def test_constrained_weights_tall_wide_and_flattened(net):
    W = net.block["tall"].weight, net.block["wide"].weight.mT, net.conv.weight.flatten(1).mT
    for Y in (w.detach().double() for w in W):
        assert Y.shape[0] > Y.shape[1]
        assert (Y.mT @ Y - torch.eye(Y.shape[1])).norm() <= F32
    assert net.conv.weight.is_contiguous()


def test_constrain_by_a_nested_name_is_constrain_on_the_owner(net):
    assert found(net) == DECLARED
    other = Net()
    ghor.constrain(other.block["tall"], "weight", ghor.Stiefel())
    assert found(other)["block.tall.weight"] == ghor.Stiefel()
    assert found(net.block["tall"]) == {"weight": ghor.Stiefel()}


def test_constrain_again_replaces_the_declaration(net):
    ghor.constrain(net, "conv.weight", ghor.Sphere(flatten=3))
    assert found(net)["conv.weight"] == ghor.Sphere(flatten=3)
    assert spaces_in(ghor.optim.SGD(net.parameters()))[net.conv.weight] == ghor.Sphere(flatten=3)
    ghor.constrain(net, "conv.weight", ghor.Euclidean())
    assert found(net)["conv.weight"] == ghor.Euclidean()
    assert spaces_in(ghor.optim.SGD(net.parameters()))[net.conv.weight] == ghor.Euclidean()


def test_constrain_frozen_weights(net):
    """They are moved and declared, and stay out of the groups."""
    net.block["tall"].weight.requires_grad_(False)
    ghor.constrain(net, "block.tall.weight", ghor.Stiefel())
    assert not net.block["tall"].weight.requires_grad
    names = [n for g in ghor.param_groups(net) for n, _ in g["params"]]
    assert names == ["block.wide.bias", "block.wide.weight", "conv.weight"]
    for source in (net, list(net.parameters())):
        spaces = spaces_in(ghor.optim.SGD(source))
        assert spaces[net.block["tall"].weight] == ghor.Stiefel()  # it waits until it thaws


def test_tied_weights_are_one_weight(gen):
    a, b = nn.Linear(9, 3, bias=False), nn.Linear(9, 3, bias=False)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    ghor.constrain(model, "1.weight", ghor.Stiefel())  # declared by its second name, found by the first
    assert found(model) == {"0.weight": ghor.Stiefel()}
    opt = ghor.optim.SGD(model, lr=0.1)
    assert spaces_in(opt) == {a.weight: ghor.Stiefel()}
    before = a.weight.detach().clone()
    a.weight.grad = randn((3, 9), gen, torch.float32)
    opt.step()
    assert not torch.equal(b.weight, before)
    assert ghor.Stiefel().residual(b.weight.detach().double()) <= F32


def test_a_weight_that_another_model_declares_is_on_its_space_here_too():
    a, b = nn.Linear(9, 3, bias=False), nn.Linear(9, 3, bias=False)
    b.weight = a.weight
    ghor.constrain(a, "weight", ghor.Stiefel())
    assert [group["space"] for group in ghor.param_groups(b)] == [ghor.Stiefel()]
    assert list(ghor.check(b).weights) == ["weight"]
    for source in (b, ghor.param_groups(b), b.parameters()):
        assert spaces_in(ghor.optim.SGD(source)) == {b.weight: ghor.Stiefel()}
    with torch.no_grad():
        b.weight.mul_(2)
    assert list(ghor.project(b)) == ["weight"]
    assert ghor.Stiefel().residual(a.weight.detach().double()) <= F32


def test_meta_device():
    """There is nothing to move: refused with the way out, which works; a declaration made before is kept on
    meta."""
    meta = nn.Linear(9, 3, bias=False, device="meta")
    with pytest.raises(
        ValueError, match=r"weight is on the meta device.*materialise the module, then constrain"
    ):
        ghor.constrain(meta, "weight", ghor.Stiefel())
    assert found(meta) == {"weight": ghor.Euclidean()}
    module = meta.to_empty(device="cpu")
    with torch.random.fork_rng():
        module.reset_parameters()
    ghor.constrain(module, "weight", ghor.Stiefel())
    module.to_empty(device="meta")
    assert found(module) == {"weight": ghor.Stiefel()}
    opt = ghor.optim.SGD(module)
    assert opt.param_groups[0]["space"] == ghor.Stiefel()
    assert "Stiefel()" in ghor.check(module)


def test_a_weight_of_too_low_rank_is_refused_with_the_way_out(gen):
    module = nn.Linear(9, 3, bias=False)
    with torch.no_grad():
        module.weight[1] = 2 * module.weight[0]
    before = module.weight.detach().clone()
    with pytest.raises(ValueError, match=r"weight: a matrix of rank 2 < 3 .*Stiefel\(\)\.random\(3, 9\)"):
        ghor.constrain(module, "weight", ghor.Stiefel())
    assert torch.equal(module.weight, before)
    assert found(module) == {"weight": ghor.Euclidean()}


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_constrain_does_not_depend_on_the_size(size, gen):
    """The polar factor of c X is that of X; squares of 1e30 are not float32."""
    X = randn((9, 3), gen, torch.float32)
    modules = [nn.Module(), nn.Module()]
    for module, scale in zip(modules, (1.0, size), strict=True):
        module.weight = nn.Parameter(X * scale)
        ghor.constrain(module, "weight", ghor.Stiefel())
    # scaling rounds X once, and the polar factor's condition number is 2/(s_1 + s_n), about one here
    assert (modules[0].weight - modules[1].weight).detach().abs().max() <= 20 * torch.finfo(torch.float32).eps


# -- what a declaration survives ---------------------------------------------------------------------------


def by_state_dict(assign):
    def load(model):
        other = copy.deepcopy(model)
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
        return other

    return load


SURVIVES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: through_a_file(m, weights_only=False),
    "to float64": lambda m: m.double(),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "to half and back": lambda m: m.half().float(),
    "load_state_dict": by_state_dict(False),
    "load_state_dict(assign=True)": by_state_dict(True),
    "to_empty": lambda m: copy.deepcopy(m).to_empty(device="cpu"),
    "AveragedModel": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
    "a new Parameter": lambda m: (
        setattr(m.conv, "weight", nn.Parameter(m.conv.weight.detach().clone()))
        or m  # as pruning and surgery do
    ),
}


@pytest.mark.parametrize("way", SURVIVES)
def test_declarations_survive(way, net):
    """Also for an optimizer that is given the model, its parameters after the model was seen, or named
    ones."""
    other = SURVIVES[way](net)
    assert found(other) == DECLARED
    if way == "to_empty":
        other.load_state_dict(net.state_dict())
    if way.startswith("to "):  # rounded, or rounded as seen from the new precision
        for n, space in DECLARED.items():
            ghor.constrain(other, n, space)
    expected = {p: DECLARED[n] for n, p in other.named_parameters()}
    assert spaces_in(ghor.optim.SGD(other)) == expected
    assert spaces_in(ghor.optim.SGD(other.parameters())) == expected


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "load_state_dict(assign=True)"])
def test_bare_parameters_of_a_copy_never_train_in_silence(way, net):
    """A copy's parameters are new tensors, and nothing has looked at the copy yet: either the spaces are
    found, or the optimizer warns that it found none."""
    params = list(SURVIVES[way](net).parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = ghor.optim.SGD(params)
    kept = {DECLARED[n] == s for n, s in zip(DECLARED, spaces_in(opt).values(), strict=True)}
    assert kept == {True} or any("no parameter is on a manifold" in str(w.message) for w in caught)


def test_a_copy_is_declared_apart(net):
    other = copy.deepcopy(net)
    ghor.constrain(other, "conv.weight", ghor.Sphere(flatten=3))
    assert found(net) == DECLARED


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_all_that_is_declared(way):
    space, layer = ghor.Sphere(radius="start"), nn.Linear(5, 4, bias=False)
    ghor.constrain(layer, "weight", space, anchor=-layer.weight.detach())
    (one,), (other,) = ([d for *_, d in declarations_of(m)] for m in (layer, SURVIVES[way](layer)))
    assert (other.space, other.moved) == (one.space, one.moved) == (space, 0)
    assert torch.equal(one.anchor, other.anchor)
    assert torch.equal(one.radii, other.radii)
    assert one.anchor is not other.anchor


def test_a_shallow_copy_outlives_its_module():
    layer = ghor.constrain(nn.Linear(9, 3, bias=False), "weight", ghor.Stiefel())
    other = copy.copy(layer)
    del layer
    gc.collect()
    assert found(other) == {"weight": ghor.Stiefel()}
    assert spaces_in(ghor.optim.SGD(other)) == {other.weight: ghor.Stiefel()}


def test_state_dict_has_no_keys_of_ours(net):
    plain = Net().state_dict()
    assert list(net.state_dict()) == list(plain)
    assert {n for n, _ in net.named_buffers()} == set()
    net.load_state_dict(plain, strict=True)


def test_declarations_keep_no_weight_alive():
    module = ghor.constrain(nn.Linear(9, 3, bias=False), "weight", ghor.Stiefel())
    gone = weakref.ref(module.weight)
    del module
    gc.collect()
    assert gone() is None


# -- param_groups ------------------------------------------------------------------------------------------


def test_param_groups_are_euclidean_first_then_one_a_space(net):
    groups = ghor.param_groups(net, lr=0.1, weight_decay=0.0)
    assert [g["space"] for g in groups] == [
        ghor.Euclidean(),
        ghor.Stiefel(),
        ghor.Grassmann(),
        ghor.Stiefel(flatten=3),
    ]
    assert [[n for n, _ in g["params"]] for g in groups] == [
        ["block.wide.bias"],
        ["block.tall.weight"],
        ["block.wide.weight"],
        ["conv.weight"],
    ]
    assert all(g["lr"] == 0.1 and g["weight_decay"] == 0.0 for g in groups)
    parameters = dict(net.named_parameters())
    assert all(p is parameters[n] for g in groups for n, p in g["params"])


def test_param_groups_options_reach_the_optimizer_and_groups_are_apart(net):
    groups = ghor.param_groups(net, retraction="geodesic")
    groups[0]["weight_decay"] = 0.5
    groups[1]["retraction"] = "cayley"
    opt = ghor.optim.AdamW(groups, lr=0.2, weight_decay=0.0)
    assert [g["retraction"] for g in opt.param_groups] == ["geodesic", "cayley", "geodesic", "geodesic"]
    assert [g["weight_decay"] for g in opt.param_groups] == [0.5, 0.0, 0.0, 0.0]
    assert opt.param_groups[0]["param_names"] == ["block.wide.bias"]
    (group,) = ghor.param_groups(nn.Linear(3, 2))
    assert group["space"] == ghor.Euclidean()
    assert [n for n, _ in group["params"]] == ["weight", "bias"]


# -- how optimizers find the spaces ------------------------------------------------------------------------

SOURCES = {
    "module": lambda net: net,
    "parameters": lambda net: net.parameters(),
    "list": lambda net: list(net.parameters()),
    "named_parameters": lambda net: net.named_parameters(),
    "param_groups": ghor.param_groups,
    "groups": lambda net: [{"params": list(net.block.parameters())}, {"params": net.conv.parameters()}],
    "groups of names": lambda net: [{"params": net.named_parameters()}],
    "groups with a space each": lambda net: [
        {"params": [p], "space": DECLARED[n]} for n, p in net.named_parameters()
    ],
    "a list of spaces": lambda net: [
        {"params": list(net.parameters()), "space": [DECLARED[n] for n, _ in net.named_parameters()]}
    ],
    "undeclared in the list": lambda net: [{"params": list(net.parameters()), "space": [None] * 4}],
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cls", ghor.optim.__all__)
def test_optimizers_find_declared_spaces(source, cls, net, gen):
    opt = getattr(ghor.optim, cls)(SOURCES[source](net), lr=1e-2)
    assert spaces_in(opt) == {p: DECLARED[n] for n, p in net.named_parameters()}
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for _ in range(2):
        for p in net.parameters():
            p.grad = randn(tuple(p.shape), gen, torch.float32)
        opt.step()
    for n, p in net.named_parameters():
        assert not torch.equal(p, before[n])
        assert DECLARED[n].residual(p.detach().double()).max() <= F32


def test_every_source_gives_the_same_run(net, gen):
    """Groups change the order of the weights and the stacks, not the numbers."""
    gradients = [
        {n: randn(tuple(p.shape), gen, torch.float32) for n, p in net.named_parameters()} for _ in range(4)
    ]
    runs = []
    for source in SOURCES.values():
        copied = copy.deepcopy(net)
        assert found(copied) == DECLARED  # a look at the copy: its parameters are known from now on
        opt = ghor.optim.Adam(source(copied), lr=1e-2)
        for g in gradients:
            for n, p in copied.named_parameters():
                p.grad = g[n]
            opt.step()
        runs.append({n: p.detach() for n, p in copied.named_parameters()})
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=0, atol=0)


def test_warning_where_nothing_is_on_a_manifold():
    model = nn.Linear(3, 2)
    for source in (model, model.parameters(), [{"params": model.parameters()}]):
        with pytest.warns(
            UserWarning, match=r"Adam: no parameter is on a manifold.*ghor\.constrain.*Euclidean\(\)"
        ):
            ghor.optim.Adam(source)


def test_silence_where_euclidean_is_meant():
    """Warnings are errors here."""
    model = nn.Linear(3, 2)
    ghor.optim.Adam(model, space=ghor.Euclidean())
    ghor.optim.Adam(model.parameters(), space=ghor.Euclidean())
    ghor.optim.Adam([{"params": model.parameters(), "space": ghor.Euclidean()}])


def test_weight_decay_on_manifold_weights_warns_once(net):
    with pytest.warns(
        UserWarning, match=r"weight_decay=0.1 has no effect on .*group 0.*Stiefel\(\)"
    ) as caught:
        ghor.optim.AdamW([{"params": [net.block["tall"].weight], "weight_decay": 0.1}])
    assert len(caught) == 1
    with pytest.warns(
        UserWarning, match=r"weight_decay=0.1 has no effect on .*all of them are on manifolds"
    ) as caught:
        ghor.optim.SGD([net.block["tall"].weight, net.conv.weight], weight_decay=0.1)
    assert len(caught) == 1


def test_weight_decay_for_the_euclidean_weights_of_a_model_is_no_reason_to_warn(net):
    """Warnings are errors here: AdamW's default, an option for the whole model, a group of Euclidean
    weights."""
    ghor.optim.AdamW([net.conv.weight])
    ghor.optim.AdamW(net, weight_decay=0.1)
    opt = ghor.optim.AdamW(net.block["tall"])
    opt.add_param_group({"params": [("bias", net.block["wide"].bias)], "weight_decay": 0.1})


@pytest.mark.parametrize("cls", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"])
def test_weight_decay_reaches_euclidean_weights_only(cls, net, gen):
    """On manifolds the run is the one without decay, bit for bit; on the bias it is torch's with decay."""
    twin, bias = copy.deepcopy(net), nn.Parameter(net.block["wide"].bias.detach().clone())
    opts = [getattr(ghor.optim, cls)(m, lr=1e-2, weight_decay=d) for m, d in ((net, 0.5), (twin, 0.0))]
    opts.append(getattr(torch.optim, cls)([bias], lr=1e-2, weight_decay=0.5))
    for _ in range(4):
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            p.grad = randn(tuple(p.shape), gen, torch.float32)
            q.grad = p.grad.clone()
        bias.grad = net.block["wide"].bias.grad
        for opt in opts:
            opt.step()
    for (n, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) == (DECLARED[n] != ghor.Euclidean())
    assert torch.equal(net.block["wide"].bias, bias)


# -- weights that are not parameters any more --------------------------------------------------------------

COMPUTED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "hook": torch.nn.utils.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 1),
}


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_a_declared_weight_that_something_computes_is_not_lost_in_silence(how, net):
    COMPUTED[how](net.block["tall"])
    message = r"^block\.tall\.weight was constrained to Stiefel\(\) and is not a parameter any more"
    for use in (ghor.optim.Adam, ghor.param_groups, ghor.project, lambda m: list(declared_spaces(m))):
        with pytest.warns(UserWarning, match=message) as caught:
            use(net)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=message):
        table = ghor.check(net)
    assert not table.ok
    assert table.lost == {"block.tall.weight": ghor.Stiefel()}
    assert re.search(r"block\.tall\.weight +Stiefel\(\) +not a parameter any more", table)
    COMPUTED[how](net.block["wide"])
    with pytest.warns(UserWarning, match=r"any more \(1 others likewise\)"):
        ghor.check(net)
    ghor.release(net)
    ghor.check(net)  # warnings are errors here


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_bare_parameters_of_a_computed_weight_do_not_train_in_silence(how, net):
    """As trainers pass them; groups of `ghor.param_groups` and other models give no second warning."""
    other = copy.deepcopy(net)
    COMPUTED[how](net.block["tall"])
    message = r"^Linear\.weight was constrained to Stiefel\(\) and is not a parameter any more: a param"
    for params in (net.parameters(), [{"params": net.parameters()}], net.named_parameters()):
        with pytest.warns(UserWarning, match=message) as caught:
            ghor.optim.Adam(params)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"^block\.tall"):
        groups = ghor.param_groups(net)
    ghor.optim.Adam(groups)  # warnings are errors here
    ghor.optim.Adam(other.parameters())
    ghor.optim.Adam(net.block["wide"].parameters())
    ghor.release(net.block["tall"])
    ghor.optim.Adam(net.parameters())
    other.block["tall"].scale = nn.Parameter(torch.ones(()))
    del other.block["tall"].weight
    ghor.optim.Adam(other.parameters())  # nothing computes a weight that is gone


# -- release -----------------------------------------------------------------------------------------------


def test_a_released_model_does_without_ghor(tmp_path, gen):
    """It computes the same in a process in which ghor cannot be imported."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
        ghor.constrain(model, "0.weight", ghor.Stiefel(), anchor="start")
        ghor.adapters.adapt(model, ["2"], ghor.adapters.Rotation(3))
        ghor.adapters.adapt(model, ["3"], ghor.adapters.LowRank(2))
        model[2].parts["default"].R.data.copy_(ghor.SpecialOrthogonal().random(2, 3, 3))
        model[3].parts["default"].s.data.fill_(2.0)
    x = randn((5, 8), gen, torch.float32)
    y = model(x).detach()
    assert ghor.release(model) is model
    assert found(model) == {n: ghor.Euclidean() for n, _ in model.named_parameters()}
    assert declared_space(model[0].weight) is None
    torch.save([model, x, y], tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['ghor'] = None\n"
        f"model, x, y = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(float((model(x) - y).abs().max()), [type(m).__name__ for m in model])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    off, kinds = done.stdout.split(" ", 1)
    assert float(off) <= 2e-6  # merging rounds in float32
    assert kinds.strip() == "['Linear', 'Tanh', 'Linear', 'Linear']"


def product():
    module = ghor.interop.libraries.Product([])
    module.w = nn.Parameter(ghor.Stiefel().random(3, 2))
    ghor.constrain(module, "w", ghor.Stiefel())
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (product, r"the model is a ghor\.interop\.libraries\.Product"),
        (lambda: nn.Sequential(product()), r"0 is a ghor\.interop\.libraries\.Product"),
        (
            lambda: setattr(m := nn.Linear(3, 2), "space", ghor.Stiefel()) or m,
            r"space is a ghor\.spaces\.stiefel",
        ),
    ],
)
def test_what_needs_ghor_is_not_released(make, message):
    model = (
        nn.ModuleDict({"first": nn.Linear(3, 2), "rest": make()}) if "the model" not in message else make()
    )
    if isinstance(model, nn.ModuleDict):
        ghor.constrain(model, "first.weight", ghor.Stiefel())
    before = found(model)
    with pytest.raises(ValueError, match=message):
        ghor.release(model)
    assert found(model) == before
    assert ghor.Stiefel() in before.values()


# -- check -------------------------------------------------------------------------------------------------


def test_check_prints_and_returns_the_table(net, capsys):
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    assert ghor.check(net).ok
    capsys.readouterr()
    before = net.conv.weight.detach().clone()
    with torch.no_grad():
        net.conv.weight.mul_(2)  # Y^T Y = 4 I: 3 sqrt(5) off
    table = ghor.check(net)
    assert capsys.readouterr().out == table + "\n"
    head, rule, *rows = table.splitlines()
    assert head.split() == ["parameter", "shape", "space", "distance", "moved"]
    assert set(rule) == {"-"}
    cells = [row.split() for row in rows]
    assert [c[:3] for c in cells[:-1]] == [
        ["block.tall.weight", "9x3", "Stiefel()"],
        ["block.wide.weight", "3x9", "Grassmann()"],
        ["conv.weight", "5x2x3x3", "Stiefel(flatten=3)"],
    ]
    assert rows[-1] == "and 2 ordinary parameters"
    assert float(cells[0][3]) <= F32
    assert cells[2][3] == f"{3 * 5**0.5:.1e}"
    assert all(float(cells[i][4]) > 0.1 for i in range(3))  # how far `constrain` moved each
    assert "off: moved by another optimizer?" in rows[2]
    assert "off" not in "".join(rows[:2])
    # the same as numbers
    assert not table.ok
    assert table.worst == pytest.approx(3 * 5**0.5)
    assert table.ordinary == 2
    assert [name for name, w in table.weights.items() if not w.on_space] == ["conv.weight"]
    w = table.weights["block.wide.weight"]
    assert (w.space, w.shape, w.norm) == (ghor.Grassmann(), (3, 9), pytest.approx(3**0.5))
    assert f"{w.moved:.1e} ({100 * w.moved / w.norm:.0f} % of its norm now)" in rows[1]
    assert repr(table) == "<3 constrained weights, at most 6.7e+00 off: not ok>"
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert (copied, copied.weights) == (table, table.weights)
    with torch.no_grad():
        net.conv.weight.copy_(before)
    assert ghor.check(net).ok
    net.conv.weight.data.view(-1)[0] = math.nan  # is off as far as can be
    assert (ghor.check(net).ok, ghor.check(net).worst) == (False, math.inf)
    table = ghor.check(nn.Linear(3, 2))
    assert str(table) == "no weight is constrained; 2 ordinary parameters"
    assert (table.ok, table.worst, table.weights) == (True, 0, {})


def test_check_knows_the_lengths_of_vectors_of_any_radius():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    ghor.constrain(net, "0.weight", ghor.Sphere(radius="start"))
    ghor.constrain(net, "1.weight", ghor.Sphere())
    assert ghor.check(net).ok
    with torch.no_grad():
        net[0].weight.mul_(1.5)
    table = ghor.check(net)
    assert not table.ok
    assert 0.5 < table.worst == table.weights["0.weight"].distance
    nn.init.zeros_(net[0].weight)
    table = ghor.check(net)
    assert not table.ok
    assert table.worst >= 1
