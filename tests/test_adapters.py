"""Adapters: what they start as, merge, save, several at once, half precision, shared weights, and what is
refused."""

import copy
import io
import re
import warnings

import pytest
import torch
from helpers.conv1d import Conv1D
from helpers.table import randn
from torch import nn
from torch.nn.utils import parametrize

import ghor
from ghor.adapters import (
    Adapted,
    LowRank,
    Rotation,
    activate,
    adapt,
    angle_groups,
    load,
    merge,
    remove,
    save,
    unmerge,
)

KINDS = [Rotation(4), Rotation(4, "both"), LowRank(2), LowRank(2, full=True)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=repr)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj, self.head = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 3)

    def forward(self, x):
        return self.head((self.q_proj(x) * self.v_proj(x)).tanh())


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def x(gen):
    return randn((20, 8), gen, torch.float32)


def train(model, x, steps=10, lr=0.05):
    opt = ghor.optim.AdamW(ghor.param_groups(model), lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        opt.step()
    return loss.item()


def turned(model, gen):
    """The same model, its adapters far from where they start."""
    for layer in (m for m in model.modules() if isinstance(m, Adapted)):
        for part in layer.parts.values():
            for leaf, p in part.named_parameters():
                if leaf in "LR":
                    p.data.copy_(ghor.SpecialOrthogonal().random(*p.shape, generator=gen, dtype=p.dtype))
                elif leaf in "sS":
                    p.data.normal_(generator=gen)
    return model


def state(model):
    """All that an error must leave as it is."""
    weights = {n: v.tolist() for n, v in model.state_dict().items()}
    return str(model), weights, [(n, p.requires_grad) for n, p in model.named_parameters()]


def tensors_of(model):
    """All parameters and buffers, also those that are not in the state dict."""
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def same_when_merged(model, x):
    """Merged, it computes the same; unmerged, it is what it was, to the bit, and so is a merged copy; without
    its adapters it keeps what was learned. Leaves the original layers behind."""
    y, before = model(x).detach(), tensors_of(model)
    rounding = 1e-5 * max(1, float(y.abs().max()))
    merge(model)
    torch.testing.assert_close(model(x), y, rtol=0, atol=rounding)
    for merged in (copy.deepcopy(model), model):
        unmerge(merged)
        torch.testing.assert_close(merged(x), y, rtol=0, atol=0)
        torch.testing.assert_close(tensors_of(merged), before, rtol=0, atol=0)
    merge(model)
    remove(model)
    torch.testing.assert_close(model(x), y, rtol=0, atol=rounding)
    assert not any(isinstance(m, Adapted) for m in model.modules())


def off(p):
    M = p.detach().double()
    return float((M.mT @ M - torch.eye(M.shape[-1])).norm(dim=(-2, -1)).max())


@each_kind
def test_an_adapter_starts_as_nothing_and_learns_on_its_space(kind, net, x):
    before, weights = net(x), copy.deepcopy(net.state_dict())
    assert adapt(net, ["q_proj", "*.v_proj", "v_proj"][::2], kind, train=["head.*"]) == ["q_proj", "v_proj"]
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    trained = {n for n, p in net.named_parameters() if p.requires_grad}
    leaves = {KINDS[0]: "R", KINDS[1]: "LR", KINDS[2]: "UVs", KINDS[3]: "UVS"}
    assert {n.rpartition(".")[2] for n in trained if "parts" in n} == set(leaves[kind])
    assert {n for n in trained if "parts" not in n} == {"head.weight", "head.bias"}
    first = train(net, x, 1)
    assert train(net, x, 30) < first
    assert torch.equal(net.q_proj.base.weight, weights["q_proj.weight"])
    parts = [p for n, p in net.named_parameters() if n.rpartition(".")[2] in "LRUV"]
    assert max(map(off, parts)) <= 2e-6
    assert min(float((p - p.new_zeros(()) - torch.eye(*p.shape[-2:])).detach().norm()) for p in parts) > 1e-3


@pytest.mark.parametrize("sides", ["right", "left", "both"])
@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_rotations_keep_the_singular_values(sides, steps, gen):
    """L W R with L and R 16 x 16, by Adam in float32: to 1e-6 of the largest, after any number of steps."""
    model, data = nn.Sequential(nn.Linear(16, 16)), randn((2, 64, 16), gen, torch.float32)
    before = torch.linalg.svdvals(model[0].weight.detach().double())
    adapt(model, "0", Rotation(16, sides))
    opt = ghor.optim.Adam(ghor.param_groups(model), lr=0.02)
    for _ in range(steps):
        opt.zero_grad()
        (model(data[0]) - data[1]).square().sum().backward()
        opt.step()
    W = model[0].base.weight.detach().clone()
    merge(model)
    after = torch.linalg.svdvals(model[0].weight.detach().double())
    assert float((after - before).abs().max() / before.max()) <= 1e-6
    assert torch.dist(W, model[0].weight) > 0.5


@pytest.mark.parametrize("sides", ["right", "left", "both"])
def test_rotations_act_as_block_diagonal_matrices(sides, gen):
    """y = L W R x + c; the bias does not turn."""
    model, x = nn.Sequential(nn.Linear(8, 12)).double(), randn((5, 8), gen)
    adapt(model, "0", Rotation(4, sides))
    part, W, c = turned(model, gen)[0].parts["default"], model[0].base.weight, model[0].bias
    whole = {leaf: torch.block_diag(*p) for leaf, p in part.named_parameters()}
    L, R = (whole.get(leaf, torch.eye(size).double()) for leaf, size in (("L", 12), ("R", 8)))
    torch.testing.assert_close(model(x), x @ (L @ W @ R).T + c)
    torch.testing.assert_close(model[0].weight, L @ W @ R)


def test_merge_and_unmerge_several(net, x):
    """The merged model computes the same to rounding, unmerging is exact, and `active` chooses."""
    bare = net(x)
    adapt(net, ["q_proj"], Rotation(4), "a")
    adapt(net, ["q_proj", "v_proj"], LowRank(2), "b")
    adapt(net, ["q_proj"], Rotation(2, "both"), "c")
    train(net, x)
    outputs = {}
    for names in (["a", "b", "c"], ["c", "a"], ["b"], []):
        activate(net, names)
        outputs[len(names)] = net(x)
        same_when_merged(copy.deepcopy(net), x)
    assert torch.equal(outputs[0], bare)
    assert not torch.allclose(outputs[3], outputs[2], atol=1e-3)
    merge(net)
    with pytest.raises(ValueError, match="call unmerge first"):
        activate(net, ["a"])
    remove(net)
    assert list(net.state_dict()) == list(Net().state_dict())


@each_kind
def test_save_the_adapter_alone(kind, net, x, tmp_path):
    fresh = copy.deepcopy(net)
    adapt(net, ["q_proj", "v_proj"], kind, "task")
    train(net, x)
    if isinstance(kind, LowRank):  # what is added has these singular values
        part = net.q_proj.parts["task"]
        added = (net.q_proj.weight - net.q_proj.base.weight).detach()
        values = torch.linalg.svdvals((part.S if kind.full else part.s.diag()).detach())
        torch.testing.assert_close(torch.linalg.svdvals(added)[:2], values)
    save(net, tmp_path / "task.pt", "task")
    saved = torch.load(tmp_path / "task.pt", weights_only=True)["tensors"]
    assert {n.rpartition(".")[0] for n in saved} == {"q_proj", "v_proj"}
    assert load(fresh, tmp_path / "task.pt") == "task"
    assert load(fresh, tmp_path / "task.pt", "again") == "again"
    activate(fresh, ["task"])
    assert torch.equal(fresh(x), net(x))
    with pytest.raises(ValueError, match="for q_proj, which this model does not have"):
        load(nn.Linear(8, 12), tmp_path / "task.pt")


@each_kind
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"V": torch.eye(16)[:, :2], "R": torch.eye(4).repeat(4, 1, 1)}, "this model needs"),
        ({"V": torch.eye(8)[:, :1], "R": torch.eye(4)[None]}, r"0\.[VR]: the file has .* this model needs"),
        ({"U": None, "R": None, "other": torch.ones(1)}, r"0\.(R|U|other): the file has"),
        ({"other": torch.ones(1)}, r"0\.other: the file has \(1,\), this model needs nothing"),
        (
            {"U": torch.ones(12, 2), "R": torch.ones(2, 4, 4)},
            r"0\.[UR] of the file .* off (Stiefel|SpecialOrth)",
        ),
        (
            {"V": torch.eye(8)[:, :2] * torch.nan, "R": torch.eye(4).repeat(2, 1, 1) * torch.nan},
            "of the file .* off",
        ),
    ],
    ids=["sizes", "one", "missing", "more", "off", "nan"],
)
def test_a_file_that_does_not_fit_changes_nothing(kind, change, message, tmp_path):
    model, file = nn.Sequential(nn.Linear(8, 12), nn.ReLU()), tmp_path / "a.pt"
    adapt(model, ["0"], kind)
    save(model, file)
    saved = torch.load(file, weights_only=True)
    for leaf, value in change.items():
        if leaf == "other" or f"0.{leaf}" in saved["tensors"]:
            saved["tensors"][f"0.{leaf}"] = value
    saved["tensors"] = {n: v for n, v in saved["tensors"].items() if v is not None}
    torch.save(saved, file)
    for fresh in (nn.Sequential(nn.Linear(8, 12)), model):
        before = state(fresh)
        with pytest.raises(ValueError, match=message):
            load(fresh, file, "new")
        assert state(fresh) == before


@each_kind
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
def test_a_file_in_another_precision(kind, dtypes, gen, tmp_path):
    """What is on its space to the digits of the file is there to the digits of the model."""
    model, other = (nn.Sequential(nn.Linear(8, 12)) for _ in range(2))
    adapt(model, ["0"], kind)
    save(turned(model, gen).to(dtypes[0]), tmp_path / "a.pt")
    load(other.to(dtypes[1]), tmp_path / "a.pt")
    assert (
        max(off(p) for n, p in other.named_parameters() if n[-1] in "LRUV") <= 8 * torch.finfo(dtypes[1]).eps
    )
    pairs = zip(other[0].parts.parameters(), model[0].parts.parameters(), strict=True)
    assert all(torch.dist(p, q.to(p)) <= 20 * torch.finfo(dtypes[0]).eps for p, q in pairs)


@each_kind
def test_half_precision_layers_have_adapters_in_full(kind, x):
    layer = nn.Sequential(nn.Linear(8, 12).bfloat16())
    adapt(layer, ["0"], kind)
    assert {p.dtype for p in layer.parameters() if p.requires_grad} == {torch.float32}
    out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    ghor.optim.SGD(ghor.param_groups(layer), lr=0.1).step()
    assert isinstance(layer[0], Adapted)


@pytest.mark.parametrize("kind", [*KINDS, Rotation(4, "left")], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_start_as_their_layer_under_autocast(kind, dtype, x):
    layer = nn.Sequential(nn.Linear(8, 12, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        adapt(layer, ["0"], kind)
        torch.testing.assert_close(layer(x), before, rtol=0, atol=0)  # compares dtypes, too


def test_what_cannot_be(net):
    before = str(net)
    for targets, kind, message in (
        (["q_prj"], Rotation(4), "there is no 'q_prj'; there are: q_proj"),
        (
            ["v_proj", "head"],
            Rotation(8),
            r"head: 12 inputs do not come in blocks of 8; try one of \[4, 6, 12\]",
        ),
        (["head"], Rotation(0), r"head: 12 inputs do not come in blocks of 0; try one of \[2, 3, 4\]"),
        (["head"], LowRank(0), "head: a layer 3 x 12 has no part of rank 0"),
        (["head"], Rotation(4, "both"), r"head: 3 outputs do not come in blocks of 4; try one of \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt(net, targets, kind)
    assert str(net) == before
    with pytest.raises(TypeError, match=r"^1: R of shape .* are real"):
        adapt(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.complex64)), ["0", "1"], Rotation(4))
    lazy = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(12))
    before = str(lazy)
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet: call the lazy module once"):
        adapt(lazy, ["0", "1"], LowRank(2))
    assert str(lazy) == before
    adapt(net, ["head"], LowRank(2))
    with pytest.raises(ValueError, match="head has an adapter 'default' already"):
        adapt(net, ["head"], LowRank(2))
    with pytest.raises(ValueError, match=r"no adapter \['x'\]; there are \['default'\]"):
        activate(net, ["x"])
    with pytest.raises(TypeError, match="Rotation"):
        adapt(net, ["head"], Rotation)
    with pytest.raises(ValueError, match="sides is one of 'right', 'left', 'both', got 'two'"):
        Rotation(4, "two")


@each_kind
def test_beside_an_adapter_of_peft(kind, net, x):
    """On the layer that peft wraps, W + B A becomes (W adapted) + B A; both are trained, merged and taken
    off."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        net, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["head"])
    )
    before, trained = model(x), {n for n, p in model.named_parameters() if p.requires_grad}
    assert adapt(model, ["*.base_layer"], kind, freeze=False) == ["base_model.model.q_proj.base_layer"]
    assert trained < {n for n, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    first = train(model, x, 1)
    assert train(model, x, 30) < first
    layer = net.q_proj
    A, B = (getattr(layer, f"lora_{k}")["default"].weight for k in "AB")
    assert B.detach().norm() > 1e-2
    expected = (
        x @ layer.base_layer.weight.T + layer.base_layer.bias + layer.scaling["default"] * x @ A.T @ B.T
    )
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
    out = model(x)
    merge(model)
    remove(model)
    torch.testing.assert_close(model.merge_and_unload()(x), out, rtol=0, atol=1e-5)


# -- code that reads the weight ----------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_layers_of_torch(kind, frozen, gen):
    """Their fast path in eval, and attention always, read weights of the layers instead of calling them."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0)
    model, x = nn.TransformerEncoder(layer, 2), randn((2, 5, 16), gen, torch.float32)
    with torch.no_grad():
        bare = model.eval()(x)
    assert len(adapt(model, ["linear1", "linear2", "out_proj"], kind)) == 6
    torch.testing.assert_close(model(x), bare)
    turned(model, gen).requires_grad_(not frozen)
    y, mask = model.train()(x), torch.arange(5) >= torch.tensor([[5], [3]])
    assert (y - bare).abs().max() > 0.1
    masked = model(x, src_key_padding_mask=mask)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model.eval()(x), y, rtol=0, atol=1e-5)
            kept = model(x, src_key_padding_mask=mask)[~mask]
            torch.testing.assert_close(kept, masked[~mask], rtol=0, atol=1e-5)
    same_when_merged(copy.deepcopy(model), x)
    activate(model, [])
    torch.testing.assert_close(model(x), bare)


@each_kind
def test_attention_is_trained(kind, gen):
    model, x = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)}), randn((5, 3, 16), gen, torch.float32)
    bare = model.a(x, x, x)[0].detach()
    adapt(model, ["out_proj"], kind)
    opt = ghor.optim.AdamW(ghor.param_groups(model), lr=0.05)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        losses.append((model.a(x, x, x)[0] - bare.roll(1, 0)).square().mean())
        losses[-1].backward()
        opt.step()
    assert losses[-1] < 0.9 * losses[0]


def test_the_weight_as_it_acts(net, x):
    """A layer with its weight and bias computes what the layer does, and has the same gradients."""
    plain = set(net.state_dict())
    for name, kind in (("a", Rotation(4)), ("b", LowRank(2)), ("c", Rotation(2, "both"))):
        adapt(net, ["q_proj"], kind, name, freeze=False)
    turned(net, torch.Generator().manual_seed(0))
    names = {n.replace("q_proj.base.", "q_proj.") for n in net.state_dict() if ".parts." not in n}
    assert names == plain
    layer = net.q_proj
    for active in (["a", "b", "c"], ["c", "a"], ["b"], []):
        activate(net, active)
        assert layer.weight.shape == (12, 8)
        gradients = []
        for y in (layer(x), nn.functional.linear(x, layer.weight, layer.bias)):
            net.zero_grad()
            y.square().sum().backward()
            gradients.append([y.detach(), *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)
    assert layer.weight is layer.base.weight
    activate(net, ["a", "b"])
    merge(net)
    assert layer.weight is layer.base.weight


# -- Conv1D ------------------------------------------------------------------------------------------------


@each_kind
def test_conv1d_of_hugging_face(kind, gen, tmp_path):
    """A linear layer whose weight is in x out: as the same nn.Linear, and its weight stays transposed."""
    model, plain, x = (
        nn.Sequential(Conv1D(12, 8)),
        nn.Sequential(nn.Linear(8, 12)),
        randn((3, 8), gen).float(),
    )
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight.T)
        plain[0].bias.copy_(model[0].bias.normal_(generator=gen))
    fresh, bare = copy.deepcopy(model), model(x)
    assert adapt(model, "0", kind) == ["0"]
    assert torch.equal(model(x), bare)
    assert (model[0].in_features, model[0].out_features) == (8, 12)
    save(turned(model, gen), tmp_path / "a.pt")
    load(plain, tmp_path / "a.pt")
    load(fresh, tmp_path / "a.pt")
    y = plain(x)
    assert (y - bare).abs().max() > 0.1
    torch.testing.assert_close(fresh(x), y, rtol=0, atol=1e-5)
    torch.testing.assert_close(model[0].weight.T, plain[0].weight)
    assert model[0].weight.is_contiguous()
    same_when_merged(model, x)
    assert type(model[0]) is Conv1D


def test_gpt2_is_adapted_and_trained(gen):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    model, ids = transformers.GPT2LMHeadModel(config), torch.arange(16).view(2, 8) % 11
    assert adapt(model, ["c_attn", "mlp.c_fc"], Rotation(8, "both")) == [
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.mlp.c_fc",
    ]
    opt, losses = ghor.optim.AdamW(ghor.param_groups(model), lr=0.02), []
    for _ in range(5):
        opt.zero_grad()
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        opt.step()
    assert losses[-1] < losses[0]


# -- one angle for all sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [2, 4, 16])
def test_one_angle_for_every_size(block, gen):
    """Adam's first step moves every coordinate by lr: each column of R, U and V turns by the same angle."""
    model, x = nn.Sequential(nn.Linear(16, 32)).double(), randn((5, 16), gen)
    adapt(model, "0", Rotation(block, "both"))
    adapt(model, "0", LowRank(2), "low")
    turned(model, gen)
    groups = angle_groups(model, 0.01, retraction="geodesic")
    opt = ghor.optim.Adam(groups, lr=0.5)
    assert [g["lr"] for g in opt.param_groups if g["space"] == ghor.Euclidean()] == [0.5]
    assert sum(len(g["params"]) for g in opt.param_groups) == sum(p.requires_grad for p in model.parameters())
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    model(x).square().sum().backward()
    opt.step()
    for n, p in model.named_parameters():
        if p.requires_grad and n[-1] in "LRUV":
            chord = (p.detach() - before[n]).norm(dim=-2)
            assert (chord - 0.01).abs().max() <= 2e-4  # second order, and eps = 1e-8 of Adam


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 2), torch.float64), *(((*k, N, 1), torch.complex128) for k in ((), (3,)) for N in (1, 2, 5))],
)
def test_one_angle_for_real_and_complex_columns(shape, dtype, gen):
    """A complex column of N entries has 2N - 1 coordinates; that of a 1 x 1 matrix is its angle."""
    model = nn.Module()
    model.weight = nn.Parameter(randn(shape, gen, dtype))
    ghor.constrain(model, "weight", ghor.Stiefel())
    before = model.weight.detach().clone()
    opt = ghor.optim.Adam(angle_groups(model, 0.01, retraction="geodesic"))
    model.weight.grad = randn(shape, gen, dtype)
    opt.step()
    chord = (model.weight.detach() - before).norm(dim=-2)
    assert (chord - 0.01).abs().max() <= 2e-4  # as above


# -- weights and layers that are shared --------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head, self.same = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.head.weight = self.same.weight = self.emb.weight

    def forward(self, i):
        x = self.emb(i)
        return self.head(x) * self.same(x)


@each_kind
@pytest.mark.parametrize("targets", [["head"], ["head", "same"]])
def test_merging_a_tied_weight(kind, targets, gen):
    model, i = Tied(), torch.arange(12)
    adapt(model, targets, kind)
    before = state(turned(model, gen))
    merge(model)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".parts." not in n)
    for merged in (copy.deepcopy(model), model):
        unmerge(merged)
        assert state(merged) == before
        layers = [m.base if isinstance(m, Adapted) else m for m in (merged.head, merged.same)]
        assert all(layer.weight is merged.emb.weight for layer in layers)
    same_when_merged(model, i)
    assert list(model.state_dict()) == list(Tied().state_dict())


@each_kind
def test_a_layer_in_two_places_has_one_adapter(kind, gen, tmp_path):
    x, shared = randn((5, 8), gen, torch.float32), nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared), nn.Linear(8, 8))
    fresh, bare = copy.deepcopy(model), model(x)
    assert adapt(model, ["2.0"], kind) == ["0"]
    assert model[0] is model[2][0]
    y = turned(model, gen)(x)
    assert not torch.allclose(y, bare, atol=0.1)
    save(model, tmp_path / "a.pt")
    load(fresh, tmp_path / "a.pt")
    assert torch.equal(fresh(x), y)
    assert len(list(fresh.parameters())) == len(list(model.parameters()))
    merge(model)
    assert model[0].base.weight is shared.weight  # no other parameter holds it
    unmerge(model)
    same_when_merged(model, x)
    assert model[0] is model[2][0] is shared
    two = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8)))
    adapt(two, ["*"], kind)
    save(two, tmp_path / "two.pt")
    before = state(model)
    with pytest.raises(ValueError, match=r"some of 0, 2\.0 are one layer in this model"):
        load(model, tmp_path / "two.pt")
    assert state(model) == before


# -- weights that are computed ----------------------------------------------------------------------


def parametrized(how, model):
    getattr(nn.utils.parametrizations, how)(model[0])
    return model


@each_kind
@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("training", [False, True])
def test_merging_into_a_parametrized_weight(kind, how, training, gen):
    """Written through the parametrization if it can represent the merged weight, otherwise refused."""
    x, plain = randn((5, 8), gen, torch.float32), nn.Linear(8, 8)
    model = parametrized(how, nn.Sequential(nn.Linear(8, 8), nn.Sequential(plain))).train(training)
    adapt(model, ["1.0"], kind)
    adapt(model, ["0"], kind, "more")
    turned(model, gen)
    if how == "spectral_norm":  # converged, so that training mode does not change it
        for _ in range(100):
            model.train()(x)
        model.train(training)
    y, before = model(x).detach(), tensors_of(model)
    fits = how == "weight_norm" or (how == "orthogonal" and isinstance(kind, Rotation))
    if fits:
        same_when_merged(model, x)
    else:
        with pytest.raises(ValueError, match=r"^0 cannot be merged: its parametrization .* remove it first"):
            merge(model)
        after = tensors_of(model)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert model[1][0].before_merge is None  # nor is any other layer
        parametrize.remove_parametrizations(model[0].base, "weight")
        merge(model)
        torch.testing.assert_close(model(x), y, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_weights_that_cannot_be_written_are_refused(gen):
    """Computed by a hook at each call, or from tensors that another layer has as well."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))
    adapt(model, ["0"], Rotation(4))
    y = turned(model, gen)(torch.ones(1, 8))
    with pytest.raises(
        ValueError, match="0 cannot be merged: its weight is not a parameter: a hook computes"
    ):
        merge(model)
    assert torch.equal(model(torch.ones(1, 8)), y)
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2)))
    model[1].parametrizations.weight.original1 = model[0].parametrizations.weight.original1
    adapt(model, ["0"], Rotation(4))
    before = tensors_of(model)
    with pytest.raises(ValueError, match=r"0 cannot be merged: .* shares a tensor with another module"):
        merge(model)
    torch.testing.assert_close(tensors_of(model), before, rtol=0, atol=0)


class Doubled(nn.Module):
    """A parametrization without a right inverse."""

    def forward(self, W):
        return 2 * W


def test_where_one_layer_cannot_be_merged_none_is(gen):
    """The first one, which has been merged by then, is as it was."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parametrize.register_parametrization(model[1], "weight", Doubled())
    adapt(model, ["*"], Rotation(4))
    turned(model, gen)
    before = tensors_of(model)
    with pytest.raises(
        ValueError,
        match=r"^1 cannot be merged: its parametrization Doubled cannot be assigned to .* remove it",
    ):
        merge(model)
    assert model[0].before_merge is model[1].before_merge is None
    torch.testing.assert_close(tensors_of(model), before, rtol=0, atol=0)


# -- names -------------------------------------------------------------------------------------------------


def test_a_string_is_one_name(x):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(11)))
    assert adapt(model, "10", Rotation(4), "ab", train="3.bias") == ["10"]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"3.bias", "10.parts.ab.R"}
    activate(model, "ab")
    assert model[10].active == ["ab"]


@each_kind
@pytest.mark.parametrize("name", ["a.b", "keys", "", "training"])
def test_names_that_modules_cannot_have(name, kind, net, tmp_path):
    before = state(net)
    with pytest.raises(ValueError, match=f"an adapter cannot be called '{name}'"):
        adapt(net, ["q_proj"], kind, name)
    assert state(net) == before
    adapt(net, ["q_proj"], kind)
    save(net, tmp_path / "a.pt")
    before = state(net)
    with pytest.raises(ValueError, match=f"an adapter cannot be called '{name}'"):
        load(net, tmp_path / "a.pt", name)
    assert state(net) == before


@each_kind
def test_a_layer_is_not_put_into_itself(kind, tmp_path):
    layer = nn.Linear(8, 12)
    before = state(layer)
    with pytest.raises(ValueError, match=r"the model is a Linear itself: .* nn\.Sequential\(layer\)"):
        adapt(layer, ["*"], kind)
    assert state(layer) == before
    model = nn.Sequential(layer)
    adapt(model, ["*"], kind)
    assert adapt(model[0], ["*"], kind, "more") == [""]  # what is adapted has room for others
    assert model[0].active == ["default", "more"]
    assert isinstance(model[0].base, nn.Linear)
    save(model[0], tmp_path / "a.pt", "more")
    with pytest.raises(ValueError, match="the model is a Linear itself"):
        load(layer, tmp_path / "a.pt")
    assert load(model[0], tmp_path / "a.pt", "again") == "again"
    with pytest.raises(ValueError, match="adapted layer itself: take its base"):
        remove(model[0])
    assert str(model).count("Adapted(") == 1


@pytest.mark.parametrize("freeze", [True, False])
def test_a_further_adapter_leaves_the_others_as_frozen_as_they_were(freeze, net, tmp_path):
    adapt(net, ["q_proj"], Rotation(4), "old")
    adapt(net, ["v_proj"], Rotation(4), "frozen")
    net.v_proj.parts["frozen"].requires_grad_(False)
    save(net, tmp_path / "old.pt", "old")
    adapt(net, ["q_proj", "v_proj"], LowRank(2), "new", freeze=freeze)
    load(net, tmp_path / "old.pt", "again", freeze=freeze)
    trained = {n.split(".parts.")[1].split(".")[0] for n, p in net.named_parameters() if p.requires_grad}
    assert trained == {"old", "new", "again"}


@pytest.mark.parametrize("freeze", [False, True])
def test_biases_of_adapted_layers_can_be_trained(freeze, net):
    net.requires_grad_(False)
    adapt(net, ["q_proj", "v_proj"], Rotation(4), train=["bias"], freeze=freeze)
    trained = {n for n, p in net.named_parameters() if p.requires_grad and ".parts." not in n}
    assert trained == {"q_proj.base.bias", "head.bias"}


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (1, 1)])
def test_low_rank_of_one_number(shape, gen):
    """A factor of size 1 x 1 is a sign and stays."""
    model, x = nn.Sequential(nn.Linear(*shape)), randn((20, shape[0]), gen, torch.float32)
    fresh, bare = copy.deepcopy(model), model(x)
    adapt(model, ["0"], LowRank(1))
    assert torch.equal(model(x), bare)
    opt = ghor.optim.SGD(ghor.param_groups(model), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
    y, file = model(x), io.BytesIO()
    assert torch.dist(y, bare) > 1e-2
    save(model, file)
    file.seek(0)
    load(fresh, file)
    assert torch.equal(fresh(x), y)
    same_when_merged(model, x)


# -- state dicts -------------------------------------------------------------------------------------------


@each_kind
def test_the_state_of_a_merged_model_is_for_merged_models(kind, net, x, gen):
    """In another, the adapters would be applied twice."""
    other = copy.deepcopy(net)
    for model in (net, other):
        adapt(model, ["q_proj"], kind)
    y, weights = turned(net, gen)(x), copy.deepcopy(net.state_dict())
    merge(net)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"q_proj\.before_merge"'):
        other.load_state_dict(net.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"q_proj\.before_merge"'):
        copy.deepcopy(net).load_state_dict(other.state_dict())
    merge(other)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(x), y, rtol=0, atol=1e-5)
    for model in (other, net.double().float()):
        unmerge(model)
        torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_one_layer_under_two_adapted_ones_is_not_merged(x):
    net = nn.Module()
    net.one = nn.Sequential(nn.Linear(8, 8))
    net.two = nn.Sequential(net.one[0])
    for part in (net.one, net.two):
        adapt(part, "0", Rotation(4), freeze=False)
        part[0].parts["default"].R.data.copy_(ghor.SpecialOrthogonal().random(2, 4, 4))
    before, weight = (net.one(x), net.two(x)), net.one[0].base.weight.detach().clone()
    with pytest.raises(ValueError, match=r"one.0 and two.0 adapt one and the same layer"):
        merge(net)
    net.two[0].active = []
    with pytest.raises(ValueError, match="would change the other"):
        merge(net)
    net.one[0].active = []
    merge(net)  # nothing to write
    unmerge(net)
    net.one[0].active = net.two[0].active = ["default"]
    assert torch.equal(net.one[0].base.weight, weight)
    assert all(map(torch.equal, (net.one(x), net.two(x)), before))


def test_a_file_has_one_kind_of_adapter(net, tmp_path):
    adapt(net, "q_proj", LowRank(2))
    adapt(net, "v_proj", LowRank(4))
    for write in (save, ghor.interop.save_peft):
        with pytest.raises(ValueError, match=r"'default' is LowRank\(.*2.* on q_proj and LowRank\(.*4"):
            write(net, tmp_path / "adapter")
    assert not any(tmp_path.iterdir())


def test_an_interrupted_write_leaves_the_old_file(net, tmp_path, monkeypatch):
    adapt(net, "q_proj", LowRank(2))
    save(net, tmp_path / "adapter.pt")
    before = (tmp_path / "adapter.pt").read_bytes()

    def fails(self, data):
        self.write_text("the beginning")
        raise OSError("no space left")

    monkeypatch.setattr(ghor.adapters.files.Path, "write_bytes", fails)
    with pytest.raises(OSError, match="no space left"):
        save(net, tmp_path / "adapter.pt")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("adapter.pt", before)]


def test_a_file_is_written_where_a_link_points_and_stays_private(net, tmp_path):
    adapt(net, "q_proj", LowRank(2))
    file, link = tmp_path / "adapter.pt", tmp_path / "latest.pt"
    file.write_bytes(b"old")
    file.chmod(0o600)
    link.symlink_to(file)
    save(net, link)
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert load(Net(), file) == "default"
    save(net, tmp_path / ("long" * 60 + ".pt"))
    with pytest.raises(IsADirectoryError):
        save(net, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_what_containers_hold_is_not_released(net):
    net.extra = {"more": [1, (ghor.Stiefel(), 2)]}
    net.extra["self"] = net.extra
    with pytest.raises(ValueError, match=r"extra is a ghor\.spaces\.stiefel\.Stiefel, which needs ghor"):
        ghor.release(net)
    net.extra["more"] = [1, 2]
    ghor.release(net)


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("adapter", [Rotation(2), Rotation(2, sides="left"), LowRank(2)], ids=str)
def test_merging_names_hooks_that_an_adapter_was_behind(adapter, where):
    """The hook takes absolute values. Merging warns if the outputs change, and only then."""
    model = nn.Sequential(nn.Linear(4, 6))

    def of_input(module, x, *_):
        return (x[0].abs(),)

    def of_output(module, x, y):
        return y.abs()

    (layer,) = model
    handle = (
        layer.register_forward_pre_hook(of_input)
        if where == "input"
        else layer.register_forward_hook(of_output)
    )
    adapt(model, ["0"], adapter)
    with torch.no_grad():
        for p in model[0].parts.parameters():
            p.copy_(torch.linalg.qr(torch.randn(p.shape))[0] if p.dim() > 1 else torch.ones(p.shape))
    x = torch.randn(5, 4)
    before = model(x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        merge(model)
    after = model(x)
    changed = not torch.allclose(before, after, atol=1e-5)
    assert changed == bool(said)
    if said:
        hook = "of_input, a forward_pre_hook" if where == "input" else "of_output, a forward_hook"
        assert re.search(rf"^0 was merged, and .*{hook} of its base.*register it on 0", str(said[0].message))
        unmerge(model)
        assert torch.equal(model(x), before)
        handle.remove()
        merge(model)  # without a warning


def test_removing_names_hooks_that_go_with_an_adapted_layer():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    adapt(model, ["0", "1"], Rotation(2))
    model[0].register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.warns(UserWarning, match=r"^0 had hooks of its own.*lambda.*register them there") as said:
        remove(model)
    assert len(said) == 1


def test_damaged_and_foreign_files_are_named(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    adapt(model, "0", Rotation(4))
    good = tmp_path / "good.pt"
    save(model, good)
    content = torch.load(good, weights_only=True)
    for name, change in [("kind", {"kind": "Rotatoin"}), ("empty", {"tensors": {}})]:
        torch.save({**content, **change}, tmp_path / f"{name}.pt")
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-200])
    (tmp_path / "nothing.pt").write_bytes(b"")
    torch.save({"q_proj.weight": torch.ones(1)}, tmp_path / "state.pt")
    torch.save([1], tmp_path / "list.pt")
    for name, message in [
        ("kind", "kind.pt has an adapter of kind 'Rotatoin', which this version does not have"),
        ("empty", "empty.pt has an adapter without tensors"),
        ("cut", "cut.pt is damaged, or no file of ghor.adapters.save"),
        ("state", "state.pt is not a file of ghor.adapters.save"),
        ("list", "list.pt is not a file of ghor.adapters.save"),
        ("nothing", "nothing.pt is damaged, or no file of ghor.adapters.save"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(nn.Sequential(nn.Linear(8, 8)), tmp_path / f"{name}.pt")
    with pytest.raises(ValueError, match=r"is a folder, .*interop.load_peft"):
        load(nn.Sequential(nn.Linear(8, 8)), tmp_path)


def test_a_rank_above_a_side_is_that_of_the_side(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    adapt(model, "*", LowRank(5))
    assert [m.parts["default"].s.numel() for m in model] == [5, 3]
    save(model, tmp_path / "a.pt")
    fresh = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    load(fresh, tmp_path / "a.pt")
    for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
        if a.requires_grad:
            assert torch.equal(a, b)
