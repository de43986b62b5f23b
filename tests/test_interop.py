"""Weights of other libraries become declared ones, at their present values, and train."""

import copy
import json
import pickle
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.conv1d import Conv1D
from helpers.table import close, randn
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import ghor
from ghor.adapters import LowRank, Rotation, adapt
from ghor.constraints.declare import declared_spaces
from ghor.interop import from_geoopt, from_parametrized, load_peft, save_peft

F64 = torch.float64


def skew(X):
    return (X - X.mT) / 2


def declared(model):
    return {name: space for name, _, space in declared_spaces(model) if space != ghor.Euclidean()}


def train(model, values, steps=10):
    """Some steps of Adam towards where the `values`, name -> tensor, of a model are not yet; the loss
    falls."""
    target = {name: value.detach() + 0.1 for name, value in values().items()}
    opt = ghor.optim.Adam(model, lr=1e-2)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = sum((value - target[name]).square().sum() for name, value in values().items())
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for _, p, space in declared_spaces(model):
        assert (space.residual(p.detach()) <= space.tolerance(p.detach())).all()


# -- geoopt ------------------------------------------------------------------------------------------------


class ManifoldParameter(nn.Parameter):
    """What is read of geoopt's: the manifold, by the name of its class and its attributes."""

    def __new__(cls, X, manifold):
        p = super().__new__(cls, X)
        p.manifold = manifold
        return p


def like_geoopt():
    """A module with the names of geoopt that the tests use."""

    def manifold(name, **attributes):
        def made(*args, c=None, learnable=False, complement=None):
            own = dict(attributes)
            if "k" in own:
                k = torch.tensor(-1.0 if c is None else -c, requires_grad=learnable)
                own |= {"k": k} | ({"c": -k} if "c" in own else {})
            if complement is not None:
                own["projector"] = complement
            if name == "ProductManifold":
                shapes = [(s,) if isinstance(s, int) else s for _, s in args]
                own = {"manifolds": [m for m, _ in args], "shapes": shapes}
            return type(name, (), own)()

        return made

    plain = ["EuclideanStiefelExact", "Sphere", "SymmetricPositiveDefinite", "Euclidean"]
    plain += ["Scaled", "BirkhoffPolytope", "ProductManifold"]
    found = {name: manifold(name) for name in plain} | {"Stiefel": manifold("CanonicalStiefel")}
    found |= {
        name: manifold(name, k=0, c=0) for name in ("PoincareBall", "PoincareBallExact", "Stereographic")
    }
    return SimpleNamespace(ManifoldParameter=ManifoldParameter, Lorentz=manifold("Lorentz", k=0), **found)


@pytest.fixture(params=["geoopt", "like it"])
def geoopt(request):
    if request.param == "geoopt":
        return pytest.importorskip("geoopt", exc_type=ImportError)
    return like_geoopt()


class Bag(nn.Module):
    """A module with these parameters."""

    def __init__(self, **params):
        super().__init__()
        for name, p in params.items():
            setattr(self, name, p)

    def values(self):
        return {name: getattr(self, name) for name in "abcdefgh" if hasattr(self, name)}


def bag(geoopt, gen):
    """One weight on each of the manifolds that have an equivalent."""

    def weight(manifold, Y):
        return geoopt.ManifoldParameter(Y, manifold=manifold)

    ball = ghor.Hyperbolic().to_ball(ghor.Hyperbolic().random(5, 4, generator=gen, dtype=F64))
    return Bag(
        a=weight(geoopt.Stiefel(), ghor.Stiefel().random(6, 2, generator=gen, dtype=F64)),
        b=weight(geoopt.EuclideanStiefelExact(), ghor.Stiefel().random(2, 6, 3, generator=gen, dtype=F64)),
        c=weight(geoopt.Sphere(), ghor.Sphere().random(4, 3, generator=gen, dtype=F64)),
        d=weight(geoopt.Lorentz(), ghor.Hyperbolic().random(5, 4, generator=gen, dtype=F64)),
        e=weight(geoopt.PoincareBallExact(), ball),
        f=weight(geoopt.SymmetricPositiveDefinite(), ghor.SPD().random(3, 3, generator=gen, dtype=F64)),
        g=weight(geoopt.Euclidean(), randn((), gen)),
        h=nn.Parameter(randn((3,), gen)),
    )


@pytest.mark.filterwarnings("ignore")  # geoopt compiles with torch.jit.script
def test_from_geoopt(geoopt, gen):
    model = bag(geoopt, gen)
    before = {
        name: value.detach().as_subclass(torch.Tensor).clone() for name, value in model.values().items()
    }
    assert from_geoopt(model) is model
    assert declared(model) == {
        "a": ghor.Stiefel(),
        "b": ghor.Stiefel(),
        "c": ghor.Sphere(),
        "d": ghor.Hyperbolic(),
        "f": ghor.SPD(),
        "parametrizations.e.original0": ghor.Hyperbolic(),
    }
    for name, value in model.values().items():
        close(value.detach(), before[name], 1e-14)
    assert not any(isinstance(p, geoopt.ManifoldParameter) for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    twin = copy.deepcopy(model)
    train(model, model.values)
    train(twin, twin.values)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert declared(from_geoopt(model)) == declared(twin)  # once more changes nothing


@pytest.mark.filterwarnings("ignore")
def test_products_become_their_parts(geoopt, gen):
    ball, stiefel = geoopt.PoincareBall(), geoopt.Stiefel()
    manifold = geoopt.ProductManifold(
        (geoopt.Sphere(), 3), (stiefel, (4, 2)), (ball, 2), (geoopt.Euclidean(), 1)
    )
    X = torch.cat(
        [
            ghor.Sphere().random(7, 3, generator=gen, dtype=F64),
            ghor.Stiefel().random(7, 4, 2, generator=gen, dtype=F64).flatten(1),
            randn((7, 2), gen) / 10,
            randn((7, 1), gen),
        ],
        -1,
    )
    model = from_geoopt(nn.Sequential(Bag(a=geoopt.ManifoldParameter(X, manifold=manifold))))
    assert list(declared(model).values()) == [ghor.Sphere(), ghor.Stiefel(), ghor.Hyperbolic()]
    assert [tuple(p.shape) for p in model.parameters()] == [(7, 3), (7, 4, 2), (7, 3), (7, 1)]
    close(model[0].a.detach(), X, 1e-14)
    train(model, model[0].values)
    assert not hasattr(pickle.loads(pickle.dumps(model[0].parametrizations.a[0])), "manifold")


@pytest.mark.filterwarnings("ignore")
def test_tied_weights_stay_tied(geoopt):
    p = geoopt.ManifoldParameter(torch.zeros(3, 2), manifold=geoopt.PoincareBall())
    q = geoopt.ManifoldParameter(torch.eye(3, 2), manifold=geoopt.Stiefel())
    model = from_geoopt(nn.ModuleList([Bag(a=p, b=q), Bag(a=p, b=q)]))
    assert len(list(model.parameters())) == 2
    assert model[0].b is model[1].b
    assert model[0].parametrizations.a.original0 is model[1].parametrizations.a.original0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda g: (g.PoincareBall(c=0.5), torch.zeros(2)),
            "1.w is on geoopt's PoincareBall of curvature -0.5;",
        ),
        (lambda g: (g.Lorentz(learnable=True), torch.eye(2)[0]), "curvature -1, learnable"),
        (
            lambda g: (g.Scaled(g.Sphere(), 2.0), torch.eye(2)[0]),
            "1.w is on geoopt's Scaled, which has no equivalent",
        ),
        (lambda g: (g.BirkhoffPolytope(), torch.full((2, 2), 0.5)), "BirkhoffPolytope"),
        (lambda g: (g.Sphere(complement=torch.eye(3)[:, :1]), torch.eye(3)[1]), "sphere of a subspace"),
        (
            lambda g: (g.ProductManifold((g.Stereographic(), 2)), torch.zeros(2)),
            "factor 0 of 1.w is on .* Stereographic",
        ),
    ],
)
def test_what_has_no_equivalent_is_named_and_nothing_changes(geoopt, make, said):
    manifold, X = make(geoopt)
    good = geoopt.ManifoldParameter(torch.eye(3, 2), manifold=geoopt.Stiefel())
    bad = geoopt.ManifoldParameter(X, manifold=manifold)
    model = nn.ModuleList([Bag(w=good), Bag(w=bad)])
    with pytest.raises(ValueError, match=said):
        from_geoopt(model)
    assert model[0].w is good
    assert model[1].w is bad


# -- parametrizations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["matrix_exp", "cayley", "householder"])
@pytest.mark.parametrize("sides", [(5, 5), (3, 6), (6, 3)])
def test_from_torch_orthogonal(how, sides):
    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(*sides), orthogonal_map=how), nn.Linear(sides[1], 2)
    )
    before = model[0].weight.detach().clone()
    from_parametrized(model)
    assert declared(model) == {"0.weight": ghor.Stiefel()}
    assert type(model[0]) is nn.Linear
    assert model[0].weight.is_contiguous()
    close(model[0].weight.detach(), before, 1e-6)
    train(model, lambda: {"a": model[0].weight})


def test_a_weight_of_geoopt_without_a_nearest_point_is_named(geoopt):
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(3, 6))
    for layer in model:
        layer.weight = geoopt.ManifoldParameter(layer.weight.detach().clone(), geoopt.Stiefel())
    model[1].weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^1\.weight"):
        from_geoopt(model)
    assert all(isinstance(layer.weight, geoopt.ManifoldParameter) for layer in model)


def test_what_cannot_be_declared_leaves_all_as_it_was():
    orthogonal = parametrizations.orthogonal
    model = nn.Sequential(
        orthogonal(nn.Linear(6, 3)), orthogonal(nn.MultiheadAttention(8, 2), "in_proj_weight")
    )
    with pytest.raises(ValueError, match=r"1\.in_proj_weight .* holds queries, keys and values"):
        from_parametrized(model)
    assert all(parametrize.is_parametrized(layer) for layer in model)


def test_other_parametrizations_stay():
    model = nn.ModuleList([parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3)])
    from_parametrized(model)
    assert parametrize.is_parametrized(model[0], "weight")
    both = parametrizations.orthogonal(parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="2 parametrizations, one on top"):
        from_parametrized(both)


def test_from_geotorch():
    geotorch = pytest.importorskip("geotorch", exc_type=ImportError)
    model = nn.ModuleList(
        [nn.Linear(4, 6), nn.Linear(5, 5), nn.Linear(4, 7), nn.Linear(3, 2), nn.Linear(3, 3), nn.Linear(3, 2)]
    )
    geotorch.orthogonal(model[0], "weight")
    nn.init.eye_(model[1].weight)
    parametrize.register_parametrization(model[1], "weight", geotorch.SO((5, 5)))
    geotorch.grassmannian(model[2], "weight")
    geotorch.sphere(model[3], "weight")
    geotorch.positive_definite(model[4], "weight")
    geotorch.sphere(model[5], "weight", radius=2.0)
    before = [layer.weight.detach().clone() for layer in model]
    from_parametrized(model)
    found = [ghor.Stiefel(), ghor.SpecialOrthogonal(), ghor.Grassmann(), ghor.Sphere(), ghor.SPD()]
    assert list(declared(model).values()) == [*found, ghor.Sphere(radius=2.0)]
    for layer, old in zip(model, before, strict=True):
        close(layer.weight.detach(), old, 1e-6)
    train(model, lambda: {name: p for name, p in model.named_parameters() if "weight" in name})
    with pytest.raises(ValueError, match="weight is parametrized by geotorch's LowRank"):
        from_parametrized(geotorch.low_rank(nn.Linear(4, 4), "weight", 2))


# -- adapters of peft --------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj, self.head = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head((self.q_proj(x) * self.v_proj(x)).tanh())


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def by_peft(peft, config, folder, gen, size):
    """A model without an adapter, and what peft's model with a random one of this size computes."""
    plain, x = Small(), randn((6, 8), gen, torch.float32)
    model = peft.get_peft_model(copy.deepcopy(plain), config)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "oft_R" in n or "lora_" in n:
                p.normal_(generator=gen).mul_(size)
            elif p.requires_grad:
                p.add_(1)
        model.save_pretrained(folder)
        return plain, x, model(x)


@pytest.mark.parametrize(
    "options", [{}, {"block_share": True}, {"r": 4, "oft_block_size": 0}, {"bias": "oft_only"}], ids=str
)
def test_oft_of_peft_is_read_exactly(options, peft, gen, tmp_path):
    """Trained with use_cayley_neumann=False, it turns by any angle below pi."""
    given = {"oft_block_size": 4, "target_modules": ["q_proj", "v_proj"], "use_cayley_neumann": False}
    plain, x, y = by_peft(peft, peft.OFTConfig(**given | options), tmp_path, gen, 1.0)
    assert load_peft(plain, tmp_path) == ["q_proj", "v_proj"]
    torch.testing.assert_close(plain(x), y, rtol=0, atol=1e-5)
    R = plain.q_proj.parts["default"].R.detach()
    assert ghor.SpecialOrthogonal().residual(R.double()).max() <= 1e-6
    assert (R - torch.eye(R.shape[-1])).norm() > 1


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 9])
def test_oft_of_peft_by_a_series(terms, peft, gen, tmp_path):
    """For small Q the truncated series is a rotation up to rounding; otherwise the nearest one is taken, and
    the warning has the distance of what peft multiplies with."""
    config = peft.OFTConfig(
        oft_block_size=4,
        target_modules=["q_proj", "v_proj"],
        use_cayley_neumann=True,
        num_cayley_neumann_terms=terms,
    )
    small = {1: 1.0, 2: 1e-4, 3: 1e-3, 4: 1e-3, 5: 5e-3, 9: 0.05}[terms]
    plain, x, y = by_peft(peft, config, tmp_path / "small", gen, small)
    load_peft(plain, tmp_path / "small")
    torch.testing.assert_close(plain(x), y, rtol=0, atol=1e-5)
    if terms > 1:
        plain, x, y = by_peft(peft, config, tmp_path / "large", gen, 0.2)
        model = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "large")
        P = [m.get_delta_weight("default").detach().double() for m in (model.q_proj, model.v_proj)]
        off = max(
            float((X.mT @ X - torch.eye(4)).norm(dim=(-2, -1)).max())
            for X in (torch.stack([M[:4, :4], M[4:, 4:]]) for M in P)
        )
        with pytest.warns(UserWarning, match=re.escape(f"matrices that are {off:.1e} off rotations")):
            load_peft(plain, tmp_path / "large")
        R = torch.block_diag(*plain.q_proj.parts["default"].R.detach().double())
        U, _, Vh = torch.linalg.svd(P[0].mT)
        close(R, U @ Vh, 1e-5)  # peft computes P in float32


@pytest.mark.parametrize("neumann", [False, True])
def test_rotations_are_written_for_peft(neumann, peft, gen, tmp_path):
    """peft's model with the file computes what ours does; read again, they are the same rotations."""
    model, x = Small(), randn((6, 8), gen, torch.float32)
    plain = copy.deepcopy(model)
    adapt(model, ["q_proj", "v_proj"], Rotation(4))
    for p in (m.parts["default"].R for m in (model.q_proj, model.v_proj)):
        W = skew(randn((2, 4, 4), gen, torch.float32)) * (0.2 if neumann else 0.6)
        p.data.copy_(torch.linalg.matrix_exp(W))
    save_peft(model, tmp_path, neumann=neumann)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path)
    assert theirs.peft_config["default"].use_cayley_neumann is neumann
    torch.testing.assert_close(theirs(x), model(x), rtol=0, atol=1e-5)
    load_peft(plain, tmp_path)
    close(plain.q_proj.parts["default"].R, model.q_proj.parts["default"].R, 2e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_lora_of_peft_becomes_low_rank(rslora, peft, gen, tmp_path):
    """s are the singular values of scaling B A; the head that was trained beside it is copied; and back."""
    config = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=rslora, target_modules=["q_proj", "v_proj"], modules_to_save=["head"]
    )
    plain, x, y = by_peft(peft, config, tmp_path / "a", gen, 0.3)
    bare = copy.deepcopy(plain)
    load_peft(plain, tmp_path / "a", "low")
    torch.testing.assert_close(plain(x), y, rtol=0, atol=1e-5)
    part = plain.q_proj.parts["low"]
    assert (part.s.diff() <= 0).all()
    assert ghor.Stiefel().residual(part.U.detach().double()) <= 1e-6
    save_peft(plain, tmp_path / "b", "low")
    bare.head.load_state_dict(plain.head.state_dict())
    theirs = peft.PeftModel.from_pretrained(bare, tmp_path / "b")
    torch.testing.assert_close(theirs(x), y, rtol=0, atol=1e-5)


def test_untrained_lora_is_zero(peft, tmp_path):
    """B = 0 has no singular vectors: some are taken."""
    plain = Small()
    model = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    load_peft(plain, tmp_path)
    part = plain.q_proj.parts["default"]
    assert not part.s.any()
    assert max(float(ghor.Stiefel().residual(p.detach().double())) for p in (part.U, part.V)) <= 1e-6


def test_a_head_with_buffers_is_read(peft, gen, tmp_path):
    """Buffers may be integers, as the number of batches that a BatchNorm has seen."""
    plain = Small()
    plain.head = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 3))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["head"])
    model = peft.get_peft_model(copy.deepcopy(plain), config)
    for _ in range(3):
        model(randn((6, 8), gen, torch.float32))
    model.save_pretrained(tmp_path)
    load_peft(plain, tmp_path)
    theirs = model.base_model.model.head.modules_to_save["default"].state_dict()
    assert theirs["0.num_batches_tracked"] == 3
    for n, t in plain.head.state_dict().items():
        torch.testing.assert_close(t, theirs[n], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Rotation(4), LowRank(2), LowRank(2, full=True)], ids=repr)
def test_files_are_those_of_safetensors(kind, gen, tmp_path):
    """By layer and name; a file of torch.save with the same tensors is read as well."""
    model, x = Small(), randn((6, 8), gen, torch.float32)
    plain = copy.deepcopy(model)
    adapt(model, ["q_proj"], kind)
    for n, p in model.q_proj.parts["default"].named_parameters():
        if n in "sS":
            p.data.normal_(generator=gen)
    save_peft(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {n.split(".")[2] for n in tensors} == {"q_proj"}
    load_peft(plain, tmp_path)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-5)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    load_peft(plain, tmp_path, "again")
    assert torch.equal(*[next(plain.q_proj.parts[name].parameters()) for name in ("default", "again")])


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"peft_type": "IA3"}, {}, "an adapter of type IA3; OFT and LORA have equivalents"),
        ({"coft": True}, {}, "with coft=True has no equivalent"),
        ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 5}, {}, "before 0.18 had another Neumann"),
        ({}, {"q_proj.oft_R.weight": torch.zeros(2, 5)}, r"q_proj: \(2, 5\) are no skew matrices"),
        ({}, {"v_proj.oft_R.weight": torch.zeros(4, 1)}, r"blocks of several sizes, \[2, 4\]"),
        ({}, {"k_proj.oft_R.weight": torch.zeros(2, 6)}, "for k_proj, which this model does not have"),
        ({}, {"head.other": torch.zeros(2)}, r"has head.other of shape \(2,\), which has no place"),
        (
            {"peft_type": "LORA", "r": 2, "lora_alpha": 2},
            {"conv.lora_A.weight": torch.zeros(2, 3, 3, 3), "conv.lora_B.weight": torch.zeros(8, 2, 1, 1)},
            r"conv: lora_A of shape \(2, 3, 3, 3\) is not that of a linear layer",
        ),
        ({"peft_type": "LORA"}, {}, "does not have lora_A and lora_B for every layer"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_files_of_peft_without_an_equivalent_change_nothing(config, tensors, said, tmp_path):
    model = Small()
    before = str(model)
    written = {"peft_type": "OFT", "use_cayley_neumann": False} | config
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    held = tensors if "r" in config else {"q_proj.oft_R.weight": torch.zeros(2, 6)} | tensors
    torch.save({f"base_model.model.{n}": t for n, t in held.items()}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=said):
        load_peft(model, tmp_path)
    assert str(model) == before


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ({"use_dora": True}, True),
        ({"kasa_config": {"beta": 1}}, True),
        ({"layer_replication": [[0, 2]]}, True),
    ]
    + [({"init_lora_weights": how}, True) for how in ("pissa", "pissa_niter_4", "olora", "corda", "loftq")]
    + [({"init_lora_weights": how}, False) for how in (None, True, False, "gaussian", "eva", "orthogonal")],
    ids=str,
)
def test_lora_with_and_without_an_equivalent(option, refused, tmp_path):
    """peft subtracts what PiSSA and the like start with from the base weight, each time it loads them."""
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **option}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    held = {"q_proj.lora_A.weight": torch.zeros(1, 8), "q_proj.lora_B.weight": torch.zeros(12, 1)}
    torch.save(held, tmp_path / "adapter_model.bin")
    (key,) = option
    with pytest.raises(ValueError, match=f"{key}=.* has no equivalent") if refused else nullcontext():
        load_peft(Small(), tmp_path)


@pytest.mark.parametrize("kind", [Rotation(4), LowRank(2)], ids=str)
def test_peft_adapts_the_layers_that_were_adapted(kind, peft, gen, tmp_path):
    """Others whose names end alike are left alone, also where peft could not adapt them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    plain, x = copy.deepcopy(model), randn((6, 8), gen, torch.float32)
    assert adapt(model, "[0]", kind) == ["0"]
    part = model[0].parts["default"]
    if isinstance(kind, LowRank):
        part.s.data.fill_(0.5)
    else:
        part.R.data.copy_(torch.linalg.matrix_exp(skew(randn((2, 4, 4), gen) * 0.3)))
    save_peft(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(theirs(x), model(x), rtol=0, atol=1e-5)


def test_rotations_that_peft_does_not_have(tmp_path):
    transposed = nn.Sequential(Conv1D(12, 8))
    adapt(transposed, "0", Rotation(4))
    with pytest.raises(ValueError, match="0 is a Conv1D, which peft's OFT does not take"):
        save_peft(transposed, tmp_path)
    model = Small()
    adapt(model, "q_proj", Rotation(4, "both"))
    with pytest.raises(ValueError, match="q_proj has a rotation of its outputs"):
        save_peft(model, tmp_path)
    adapt(model, "v_proj", Rotation(4), "other")
    half = torch.diag(torch.tensor([-1.0, -1, 1, 1]))
    model.v_proj.parts["other"].R.data[0] = half
    with pytest.raises(ValueError, match="v_proj has a block that turns by pi"):
        save_peft(model, tmp_path, "other")
    quarter = torch.block_diag(torch.tensor([[0.0, -1], [1, 0]]), torch.eye(2))
    model.v_proj.parts["other"].R.data[0] = quarter
    with pytest.raises(ValueError, match=r"v_proj has a block that turns by 90 degrees.* more than 64 terms"):
        save_peft(model, tmp_path, "other", neumann=True)
    with pytest.raises(ValueError, match="the model has no adapter 'third'"):
        save_peft(model, tmp_path, "third")


def test_damaged_files_of_peft_are_named(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    adapt(model, "0", LowRank(2))
    save_peft(model, tmp_path)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    good, text = file.read_bytes(), config.read_text()
    start = 8 + int.from_bytes(good[:8], "little")
    nan = good[:start] + b"\xff" * (len(good) - start)

    def raises(match):
        with pytest.raises(ValueError, match=match):
            load_peft(nn.Sequential(nn.Linear(8, 8)), tmp_path)

    for data, message in [
        (b"\xff" * 8 + good[8:], "adapter_model.safetensors is damaged"),
        (good[:8] + b"x" + good[9:], "adapter_model.safetensors is damaged"),
        (good[:-4], "adapter_model.safetensors is damaged"),
        (nan, "adapter_model.safetensors has NaN or infinite entries in .*lora"),
    ]:
        file.write_bytes(data)
        raises(message)
    file.write_bytes(good)
    config.write_text(text[:-5])
    raises("adapter_config.json is damaged")


def test_lora_has_one_rank_also_where_a_layer_is_smaller(gen, tmp_path):
    """As peft writes it: its matrices for the small layer have no more than the rank that the layer has."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).double()
    plain, x = copy.deepcopy(model), randn((6, 8), gen)
    adapt(model, "*", LowRank(5))
    for layer in model:
        layer.parts["default"].s.data.normal_(generator=gen)
    save_peft(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {t.shape[0 if "lora_A" in n else 1] for n, t in tensors.items()} == {5}
    load_peft(plain, tmp_path)
    torch.testing.assert_close(plain(x), model(x))
    assert [len(layer.parts["default"].s) for layer in plain] == [5, 3]
