"""Adapters: what they start as, merge, save, several at once, half precision, and what is refused."""

import copy

import pytest
import torch
from table import randn
from torch import nn

import ghor
from ghor.adapters import Adapted, LowRank, Rotation, activate, adapt, load, merge, remove, save, unmerge

KINDS = [Rotation(4), LowRank(2)]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=repr)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj, self.head = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 3)

    def forward(self, x):
        return self.head((self.q_proj(x) * self.v_proj(x)).tanh())


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
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


def off(p):
    M = p.detach().double()
    return float((M.mT @ M - torch.eye(M.shape[-1])).norm(dim=(-2, -1)).max())


@each_kind
def test_an_adapter_starts_as_nothing_and_learns_on_its_space(kind, net, x):
    before, weights = net(x), copy.deepcopy(net.state_dict())
    assert adapt(net, ["q_proj", "*.v_proj", "v_proj"][::2], kind, train=["head.*"]) == ["q_proj", "v_proj"]
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    trained = {n for n, p in net.named_parameters() if p.requires_grad}
    assert {n.rpartition(".")[2] for n in trained if "parts" in n} == ({"R"} if kind == KINDS[0] else {"U", "V", "s"})
    assert {n for n in trained if "parts" not in n} == {"head.weight", "head.bias"}
    first = train(net, x, 1)
    assert train(net, x, 30) < first
    assert torch.equal(net.q_proj.weight, weights["q_proj.weight"])
    parts = [p for n, p in net.named_parameters() if n.rpartition(".")[2] in "RUV"]
    assert max(map(off, parts)) <= 2e-6
    assert min(float((p - p.new_zeros(()) - torch.eye(*p.shape[-2:])).detach().norm()) for p in parts) > 1e-3


@each_kind
def test_rotations_keep_the_angles_between_neurons(kind, net, x):
    """W R has the Gram matrix of W; what is added by LowRank has the singular values |s|."""
    adapt(net, ["q_proj"], kind)
    train(net, x)
    W, M = net.q_proj.weight.detach(), net.q_proj.merged_weight()
    if kind == KINDS[0]:
        torch.testing.assert_close(M @ M.T, W @ W.T, rtol=0, atol=1e-6)
    else:
        values = torch.linalg.svdvals(M - W)[:2]
        torch.testing.assert_close(values, net.q_proj.parts["default"].s.detach().abs().sort(descending=True)[0])


def test_merge_and_unmerge_several(net, x):
    """The merged model computes the same to rounding, unmerging is exact, and `active` chooses."""
    bare = net(x)
    adapt(net, ["q_proj"], Rotation(4), "a")
    adapt(net, ["q_proj", "v_proj"], LowRank(2), "b")
    adapt(net, ["q_proj"], Rotation(2), "c")
    train(net, x)
    weights = copy.deepcopy(net.state_dict())
    outputs = {}
    for names in (["a", "b", "c"], ["c", "a"], ["b"], []):
        activate(net, names)
        outputs[len(names)] = net(x)
        merge(net)
        assert torch.dist(net(x), outputs[len(names)]) <= 1e-5
        with pytest.raises(ValueError, match="call unmerge first"):
            activate(net, ["a"])
        unmerge(net)
        torch.testing.assert_close(net.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(outputs[0], bare)
    assert not torch.allclose(outputs[3], outputs[2], atol=1e-3)
    activate(net, ["a", "b", "c"])
    merge(net)
    remove(net)
    assert list(net.state_dict()) == list(Net().state_dict())
    torch.testing.assert_close(net(x), outputs[3], rtol=0, atol=1e-5)


@each_kind
def test_save_the_adapter_alone(kind, net, x, tmp_path):
    fresh = copy.deepcopy(net)
    adapt(net, ["q_proj", "v_proj"], kind, "task")
    train(net, x)
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
def test_half_precision_layers_have_adapters_in_full(kind, x):
    layer = nn.Sequential(nn.Linear(8, 12).bfloat16())
    adapt(layer, ["0"], kind)
    assert {p.dtype for p in layer.parameters() if p.requires_grad} == {torch.float32}
    out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    ghor.optim.SGD(ghor.param_groups(layer), lr=0.1).step()
    assert isinstance(layer[0], Adapted)


def test_what_cannot_be(net):
    before = str(net)
    for targets, kind, message in (
        (["q_prj"], Rotation(4), "there is no 'q_prj'; there are: q_proj"),
        (["v_proj", "head"], Rotation(8), r"head: 12 inputs do not come in blocks of 8; try one of \[4, 6, 12\]"),
        (["head"], LowRank(4), "head: a layer 3 x 12 has no part of rank 4"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt(net, targets, kind)
    assert str(net) == before
    adapt(net, ["head"], LowRank(2))
    with pytest.raises(ValueError, match="head has an adapter 'default' already"):
        adapt(net, ["head"], LowRank(2))
    with pytest.raises(ValueError, match=r"no adapter \['x'\]; there are \['default'\]"):
        activate(net, ["x"])
    with pytest.raises(TypeError, match="Rotation"):
        adapt(net, ["head"], Rotation)


@each_kind
def test_beside_an_adapter_of_peft(kind, net, x):
    """On the layer that peft wraps, W + B A becomes (W adapted) + B A; both are trained, merged and taken off."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["head"]))
    before, trained = model(x), {n for n, p in model.named_parameters() if p.requires_grad}
    assert adapt(model, ["*.base_layer"], kind, freeze=False) == ["base_model.model.q_proj.base_layer"]
    assert trained < {n for n, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    first = train(model, x, 1)
    assert train(model, x, 30) < first
    layer = net.q_proj
    A, B = (getattr(layer, f"lora_{k}")["default"].weight for k in "AB")
    assert B.detach().norm() > 1e-2
    expected = x @ layer.base_layer.merged_weight().T + layer.base_layer.bias + layer.scaling["default"] * x @ A.T @ B.T
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
    out = model(x)
    merge(model)
    remove(model)
    torch.testing.assert_close(model.merge_and_unload()(x), out, rtol=0, atol=1e-5)
