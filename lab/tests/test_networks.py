"""The networks against slow loops: formulas, symplecticity, copies, seeds, declarations, training."""

import copy
import math

import pytest
import torch

import ghor
from ghor_lab.networks import (
    PSD,
    Decoder,
    GradientP,
    GradientQ,
    StiefelAttention,
    SymplecticAutoencoder,
    VisionTransformer,
    symplecticity,
)
from ghor_lab.networks.decoder import rotate, rotations
from ghor_lab.networks.phase_space import canonical, jacobian
from ghor_lab.tasks.task import on_spaces

F64 = torch.float64
SMALL = {"encoder_layers": 3, "decoder_layers": 4, "decoder_output_layers": 2, "upscale": 3}


def seeds(*numbers):
    return [torch.Generator().manual_seed(s) for s in numbers]


@torch.no_grad()
def stir(model, gen):
    """Biases away from zero, where they start."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.normal_(generator=gen)
    return model


# -- the vision transformer ----------------------------------------------------------------------------------


def slow_attention(x, weight, scale):
    """One image, (tokens, dim), by the formula: token after token, head after head."""
    _, heads, _, f = weight.shape
    y = torch.zeros_like(x)
    for h in range(heads):
        Q, K, V = weight[:, h]
        for i in range(len(x)):
            share = [math.exp(float(scale * torch.dot(Q.T @ x[i], K.T @ x[j]))) for j in range(len(x))]
            for j in range(len(x)):
                y[i, h * f : (h + 1) * f] += share[j] / sum(share) * (V.T @ x[j])
    return y


@pytest.mark.parametrize("space", [ghor.Stiefel(), ghor.Grassmann(), None], ids=str)
@pytest.mark.parametrize(("scale", "value"), [("dim", 49**-0.5), (None, 1.0), (0.3, 0.3)])
@torch.no_grad()
def test_attention_is_the_formula(space, scale, value, gen):
    layer = StiefelAttention(49, 7, space, scale, generator=gen, dtype=F64)
    x = torch.randn(2, 5, 49, dtype=F64, generator=gen)
    for image, y in zip(x, layer(x), strict=True):
        # sums of 49 numbers of size 1, rounded at 1e-16 each
        torch.testing.assert_close(y, slow_attention(image, layer.weight, value), rtol=0, atol=1e-13)


@torch.no_grad()
def test_the_transformer_is_the_formula(gen):
    model = stir(VisionTransformer(blocks=3, generator=gen, dtype=F64), gen)
    images = torch.rand(2, 28, 28, dtype=F64, generator=gen)
    for image, found in zip(images, model(images), strict=True):
        x = torch.zeros(16, 49, dtype=F64)
        for row in range(28):
            for column in range(28):  # column-major: the row's number runs first
                x[4 * (column // 7) + row // 7, 7 * (column % 7) + row % 7] = image[row, column]
        for block in model.blocks:
            x = slow_attention(x, block.attention.weight, 1 / 7)
            x = torch.stack([z + torch.tanh(block.weight @ z + block.bias) for z in x])
        e = torch.exp(model.head @ x[-1])
        torch.testing.assert_close(found, e / e.sum(), rtol=1e-11, atol=0)


def test_336_weights_on_the_stiefel_manifold(gen):
    found = on_spaces(VisionTransformer(generator=gen))
    assert [name for name, _, _ in found] == [f"blocks.{i}.attention.weight" for i in range(16)]
    assert all(p.shape == (3, 7, 49, 7) and space == ghor.Stiefel() for _, p, space in found)
    assert on_spaces(VisionTransformer(blocks=1, space=None)) == []


def test_initial_weights_of_the_transformer():
    """One seed, one network; Euclidean weights outside the attention do not depend on the space."""
    a, b = (VisionTransformer(blocks=2, generator=g) for g in seeds(3, 3))
    c = VisionTransformer(blocks=2, space=None, generator=seeds(3)[0])
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, dict(c.named_parameters())[name]) is ("attention" not in name)
    bound = math.sqrt(6 / (49 + 7))
    assert 0.95 * bound < float(c.blocks[0].attention.weight.detach().abs().max()) <= bound


# -- the symplectic autoencoder ------------------------------------------------------------------------------


def slow_layer(layer, z):
    """One point by the formula, in a network of one copy."""
    d = len(z) // 2
    q, p = z[:d].clone(), z[d:].clone()
    weight = layer.weight[0]
    if isinstance(layer, PSD):
        Phi = weight.mT if layer.out_dim < layer.in_dim else weight
        return torch.cat([Phi @ q, Phi @ p])
    source, target = (p, q) if isinstance(layer, GradientQ) else (q, p)
    for K, a, b in zip(weight, layer.scale[0], layer.bias[0], strict=True):
        target += K * a * math.tanh(float(K @ source + b))
    return torch.cat([q, p])


@torch.no_grad()
def test_the_autoencoder_is_the_formula(gen):
    model = stir(SymplecticAutoencoder(8, 4, **SMALL, generators=[gen], dtype=F64), gen)
    z = torch.randn(5, 8, dtype=F64, generator=gen)
    code, y = model.encoder(z), model(z)
    for i in range(5):
        x = z[i]
        for layer in model.encoder.layers:
            x = slow_layer(layer, x)
        torch.testing.assert_close(code[0, i], x, rtol=0, atol=1e-13)  # some roundings of numbers of size 1
        for layer in model.decoder.layers:
            x = slow_layer(layer, x)
        torch.testing.assert_close(y[0, i], x, rtol=0, atol=1e-13)


def test_the_settings_of_the_paper():
    model = SymplecticAutoencoder()
    Q, P = "GradientQ", "GradientP"
    kinds = [(type(layer).__name__, tuple(layer.weight.shape[1:])) for layer in model.encoder.layers]
    assert kinds == [(Q, (40, 2)), (P, (40, 2))] * 5 + [("PSD", (2, 1))]
    kinds = [(type(layer).__name__, tuple(layer.weight.shape[1:])) for layer in model.decoder.layers]
    assert kinds == [(Q, (20, 1)), (P, (20, 1))] * 10 + [("PSD", (2, 1))] + [(Q, (40, 2)), (P, (40, 2))] * 5
    layer = GradientQ(200, 300, generators=seeds(1))
    for p, bound in [(layer.weight, math.sqrt(6 / 400)), (layer.scale, math.sqrt(6 / 300))]:
        assert 0.98 * bound < float(p.detach().abs().max()) <= bound
    assert not layer.bias.any()


@pytest.mark.parametrize(("full", "reduced"), [(4, 2), (8, 4), (10, 2)])
def test_encoder_and_decoder_are_symplectic(full, reduced, gen):
    model = SymplecticAutoencoder(full, reduced, upscale=5, copies=3, dtype=F64)
    stir(model, gen)
    for layer in (model.encoder, model.decoder, *model.encoder.layers[-2:]):
        z = torch.randn(4, layer.in_dim, dtype=F64, generator=gen)
        M = jacobian(layer, z)
        assert M.shape == (3, 4, layer.out_dim, layer.in_dim)
        # rounding at 1e-16, times the Jacobians along the way
        assert float(symplecticity(layer, z).max()) <= 1e-12 * max(1.0, float(M.abs().max()) ** 2)
    # the same by hand, once: M J M^T = J for the wide matrix
    E = jacobian(model.encoder, torch.ones(1, full, dtype=F64))
    J, j = canonical(full, E), canonical(reduced, E)
    assert torch.equal(j @ j, -torch.eye(reduced, dtype=F64))
    torch.testing.assert_close(E @ J @ E.mT, j.expand(3, 1, reduced, reduced), rtol=0, atol=1e-12)


def test_what_is_not_symplectic_is_seen(gen):
    model = SymplecticAutoencoder(**SMALL, generators=[gen], dtype=F64)
    z = torch.randn(4, 4, dtype=F64, generator=gen)
    assert float(symplecticity(model, z)) > 0.1  # of rank 2 in R^4
    with torch.no_grad():
        model.encoder.layers[-1].weight *= 1.001
    assert math.isclose(float(symplecticity(model.encoder, z)), 0.002001, rel_tol=1e-6)


def test_jacobians_are_derivatives(gen):
    model = stir(SymplecticAutoencoder(6, 2, **SMALL, copies=2, dtype=F64), gen)
    z = torch.randn(3, 6, dtype=F64, generator=gen)
    for i in range(3):
        one = torch.autograd.functional.jacobian(lambda x: model(x[None])[:, 0], z[i])
        torch.testing.assert_close(jacobian(model, z)[:, i], one, rtol=0, atol=1e-13)


@torch.no_grad()
def test_a_copy_is_the_network_of_its_generator():
    many = SymplecticAutoencoder(8, 4, **SMALL, copies=3, generators=seeds(5, 6, 7))
    z = torch.randn(3, 11, 8, generator=seeds(0)[0])
    for i, generator in enumerate(seeds(5, 6, 7)):
        one = SymplecticAutoencoder(8, 4, **SMALL, generators=[generator])
        for (name, p), q in zip(many.named_parameters(), one.parameters(), strict=True):
            assert torch.equal(p[i], q[0]), name
        # float32, summed in another order
        torch.testing.assert_close(many(z)[i], one(z[i])[0], rtol=0, atol=1e-5)


def train(model, z, steps=20):
    opt = ghor.optim.Adam(model, lr=1e-3)
    errors = []
    for _ in range(steps):
        opt.zero_grad()
        error = (model(z) - z).square().sum((-2, -1))
        error.sum().backward()
        opt.step()
        errors.append(error.detach())
    return torch.stack(errors)


def test_copies_train_apart(gen):
    """Adam is elementwise and each copy has its own section: training together is training one by one."""
    many = SymplecticAutoencoder(6, 2, **SMALL, copies=2, generators=seeds(1, 2), dtype=F64)
    z = torch.randn(2, 16, 6, dtype=F64, generator=gen)
    train(many, z)
    for i, generator in enumerate(seeds(1, 2)):
        one = SymplecticAutoencoder(6, 2, **SMALL, generators=[generator], dtype=F64)
        train(one, z[i])
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p[i], q[0], rtol=0, atol=1e-9)  # rounding through 20 steps of Adam


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_training_keeps_encoder_and_decoder_symplectic(dtype, gen):
    model = SymplecticAutoencoder(8, 4, **SMALL, copies=2, generators=seeds(1, 2), dtype=dtype)
    z = torch.randn(32, 8, dtype=dtype, generator=gen)
    start = copy.deepcopy(model)
    errors = train(model, z)
    assert bool((errors[-1] < errors[0]).all())
    for (name, p), before in zip(model.named_parameters(), start.parameters(), strict=True):
        assert bool((p != before).flatten(1).any(1).all()), name
    eps = torch.finfo(dtype).eps
    assert [tuple(p.shape) for _, p, _ in on_spaces(model)] == [(2, 4, 2)] * 2
    for _, p, space in on_spaces(model):
        assert float(space.residual(p.detach().double()).max()) <= 20 * eps
    for layer in (model.encoder, model.decoder):  # Jacobians of some size
        assert float(symplecticity(layer, z[:4, : layer.in_dim]).max()) <= 1000 * eps


# -- the decoder ---------------------------------------------------------------------------------------------


def test_no_byte_sees_what_follows_it(gen):
    model = Decoder(layers=1, width=16, heads=2, context=8, generator=gen, dtype=F64)
    text = torch.randint(256, (1, 8), generator=gen)
    changed = text.clone()
    changed[0, 5] = (text[0, 5] + 1) % 256
    same = (model(text) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_attention_depends_on_distances_only(gen):
    """Rotary positions: the same bytes later in the window, seen from the same distance, score the same."""
    cos, sin = rotations(12, 8)
    q, k = (torch.randn(8, generator=gen, dtype=F64) for _ in range(2))
    Q, K = (rotate(x.expand(12, 8), cos, sin) for x in (q, k))
    for d in range(-5, 6):
        along = (Q @ K.T).diagonal(d)
        assert float((along - along[0]).abs().max()) < 1e-13  # rounding of numbers up to 8


def test_the_decoder_has_about_a_million_weights():
    model = Decoder()
    assert sum(p.numel() for p in model.parameters()) == 820_352
    assert len(model.matrices()) == 24


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StiefelAttention(49, 6), "multiple of heads"),
        (lambda: StiefelAttention(49, 7, scale="head"), "'dim' or None"),
        (lambda: VisionTransformer(patch_size=5), "multiple of patch_size"),
        (lambda: GradientP(5, 10), "even number of dimensions, not 5"),
        (lambda: SymplecticAutoencoder(4, 4), "reduced_dim must be less than full_dim=4, got 4"),
        (lambda: SymplecticAutoencoder(4, 1), "even number of dimensions, not 1"),
        (lambda: Decoder(width=10, heads=4), "multiple of 2"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
