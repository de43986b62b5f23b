"""The layers against slow loops, their declarations, their initial weights."""

import math

import pytest
import torch
from torch import Tensor

import ghor
from ghor.constraints.declare import declared_spaces
from ghor_lab.networks import PSD, StiefelAttention, VisionTransformer
from ghor_lab.networks.vision_transformer import patches

SPACES = [ghor.Stiefel(), ghor.Grassmann(), None]


def slow_attention(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """One image, (tokens, dim), by the formula: token after token, head after head."""
    _, heads, _, f = weight.shape
    y = torch.zeros_like(x)
    for h in range(heads):
        Q, K, V = weight[:, h]
        for i in range(len(x)):
            scores = [float(scale * torch.dot(Q.T @ x[i], K.T @ x[j])) for j in range(len(x))]
            share = [math.exp(s) for s in scores]
            for j in range(len(x)):
                y[i, h * f : (h + 1) * f] += share[j] / sum(share) * (V.T @ x[j])
    return y


def slow_transformer(model: VisionTransformer, image: Tensor, scale: float) -> Tensor:
    x = torch.zeros(16, 49, dtype=image.dtype)
    for row in range(28):
        for column in range(28):  # column-major: the row's number runs first
            token = 4 * (column // 7) + row // 7
            feature = 7 * (column % 7) + row % 7
            x[token, feature] = image[row, column]
    for block in model.blocks:
        x = slow_attention(x, block.attention.weight, scale)
        x = torch.stack([z + torch.tanh(block.weight @ z + block.bias) for z in x])
    e = torch.exp(model.head @ x[-1])
    return e / e.sum()


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize(("scale", "value"), [("dim", 49**-0.5), (None, 1.0), (0.3, 0.3)])
def test_attention_is_the_formula(space, scale, value, gen):
    layer = StiefelAttention(49, 7, space, scale, generator=gen, dtype=torch.float64)
    x = torch.randn(2, 3, 5, 49, dtype=torch.float64, generator=gen)
    with torch.no_grad():
        y = layer(x)
        for i in range(2):
            for j in range(3):
                # 49-term sums of numbers of size 1, rounded at 1e-16 each
                torch.testing.assert_close(
                    y[i, j], slow_attention(x[i, j], layer.weight, value), rtol=0, atol=1e-13
                )


@torch.no_grad()
def test_transformer_is_the_formula(gen):
    model = VisionTransformer(blocks=3, generator=gen, dtype=torch.float64)
    for block in model.blocks:
        block.bias.normal_(generator=gen)
    images = torch.rand(2, 28, 28, dtype=torch.float64, generator=gen)
    y = model(images)
    for image, row in zip(images, y, strict=True):
        torch.testing.assert_close(row, slow_transformer(model, image, 1 / 7), rtol=1e-11, atol=0)
    torch.testing.assert_close(y, model(images[:, None]), rtol=0, atol=0)


def test_gradients(gen):
    layer = StiefelAttention(6, 2, generator=gen, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=gen, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(layer, {"weight": w}, x), (x, layer.weight)
    )


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (0, 3, 6), (2, 0, 3, 6), (0, 0, 6)])
def test_nothing_in_nothing_out(shape):
    """No tokens, or an empty batch."""
    layer = StiefelAttention(6, 2)
    y = layer(torch.zeros(shape))
    assert y.shape == shape
    y.sum().backward()
    assert not layer.weight.grad.any()


def test_patches_are_column_major():
    tokens = patches(torch.arange(16.0).reshape(1, 4, 4), 2)[:, 0].T
    assert tokens.tolist() == [[0, 4, 1, 5], [8, 12, 9, 13], [2, 6, 3, 7], [10, 14, 11, 15]]


def test_336_weights_on_the_stiefel_manifold(gen):
    model = VisionTransformer(generator=gen)
    on = {name: p for name, p, space in declared_spaces(model) if space == ghor.Stiefel()}
    assert set(on) == {f"blocks.{i}.attention.weight" for i in range(16)}
    assert all(p.shape == (3, 7, 49, 7) for p in on.values())
    assert sum(p.shape[0] * p.shape[1] for p in on.values()) == 336
    assert model(torch.rand(2, 28, 28, generator=gen)).shape == (2, 10)
    opt = ghor.optim.Adam(model, lr=1e-3)
    found = [p for group in opt.param_groups for p in group["params"]]
    assert len(found) == 16 * 3 + 1
    assert sum(s == ghor.Stiefel() for group in opt.param_groups for s in group["space"]) == 16


@pytest.mark.parametrize("section", ["transported", "implicit"])
def test_training_keeps_the_weights_on_the_manifold(section, gen):
    model = VisionTransformer(blocks=2, generator=gen)
    opt = ghor.optim.Adam(model, lr=1e-3, section=section)
    images, labels = torch.rand(64, 28, 28, generator=gen), torch.randint(10, (64,), generator=gen)
    onehot = torch.nn.functional.one_hot(labels, 10).float()
    start = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(30):
        opt.zero_grad()
        loss = torch.linalg.vector_norm(model(images) - onehot) / torch.linalg.vector_norm(onehot)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.01
    for p, before in zip(model.parameters(), start, strict=True):
        assert not torch.equal(p, before)
    for block in model.blocks:
        Y = block.attention.weight.detach().double()
        off = torch.linalg.matrix_norm(Y.mT @ Y - torch.eye(7, dtype=torch.float64))
        assert off.shape == (3, 7)
        assert float(off.max()) <= 2e-6  # 49 entries of float32, rounded at 6e-8


def test_initial_weights(gen):
    a, b = (VisionTransformer(blocks=2, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    c = VisionTransformer(blocks=2, space=None, generator=torch.Generator().manual_seed(3))
    d = VisionTransformer(blocks=2, generator=torch.Generator().manual_seed(4))
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
        projection = "attention" in name
        # paired: the weights outside the attention are the same with and without the manifold
        assert torch.equal(p, dict(c.named_parameters())[name]) is not projection
        assert torch.equal(p, dict(d.named_parameters())[name]) is name.endswith("bias")
    bound = math.sqrt(6 / (49 + 7))
    largest = float(c.blocks[0].attention.weight.detach().abs().max())
    assert 0.95 * bound < largest <= bound
    assert 0.9 * math.sqrt(6 / 59) < float(c.head.detach().abs().max()) <= math.sqrt(6 / 59)
    assert not c.blocks[0].bias.any()


def test_unconstrained_weights_are_euclidean():
    assert all(
        space == ghor.Euclidean() for _, _, space in declared_spaces(VisionTransformer(blocks=1, space=None))
    )


@pytest.mark.parametrize("make", [lambda: StiefelAttention(8, 2), lambda: PSD(2, 6, (3,))])
def test_layers_without_values_are_declared(make):
    """Built on the meta device, a layer gets its values from `reset_parameters` or from a state dict."""
    with torch.device("meta"):
        first, second = make(), make()
    with torch.random.fork_rng():
        first.to_empty(device="cpu").reset_parameters()
    second.load_state_dict(first.state_dict(), assign=True)
    for layer in (first, second):
        assert ghor.check(layer).ok
        assert [space for _, _, space in declared_spaces(layer)] == [ghor.Stiefel()]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="multiple of heads"):
        StiefelAttention(49, 6)
    with pytest.raises(ValueError, match="'dim' or None"):
        StiefelAttention(49, 7, scale="head")
    with pytest.raises(ValueError, match="multiple of patch_size"):
        VisionTransformer(patch_size=5)
    with pytest.raises(ValueError, match=r"expected \(..., tokens, 49\)"):
        StiefelAttention(49, 7)(torch.zeros(3, 48))
    with pytest.raises(ValueError, match="one channel"):
        VisionTransformer(blocks=1)(torch.zeros(2, 3, 28, 28))
