"""The symplectic layers: the formulas, symplecticity, copies against a loop, seeds, declarations,
training."""

import copy
import math

import pytest
import torch

import ghor
from ghor.constraints.declare import declared_spaces
from ghor_lab.networks import PSD, GradientP, GradientQ, SymplecticAutoencoder, symplecticity
from ghor_lab.networks.phase_space import canonical, jacobian
from ghor_lab.networks.symplectic_autoencoder import dimensions

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


def slow_layer(layer, z):
    """One point by the formula."""
    d = len(z) // 2
    q, p = z[:d].clone(), z[d:].clone()
    if isinstance(layer, PSD):
        Phi = layer.weight.mT if layer.out_dim < layer.in_dim else layer.weight
        return torch.cat([Phi @ q, Phi @ p])
    source, target = (p, q) if isinstance(layer, GradientQ) else (q, p)
    for i in range(layer.width):
        K = layer.weight[i]
        target += K * layer.scale[i] * math.tanh(float(K @ source + layer.bias[i]))
    return torch.cat([q, p])


@torch.no_grad()
def test_the_network_is_the_formula(gen):
    model = stir(SymplecticAutoencoder(8, 4, 3, 2, **SMALL, generator=gen, dtype=F64), gen)
    z = torch.randn(2, 5, 8, dtype=F64, generator=gen)
    y, code = model(z), model.encoder(z)
    assert (y.shape, code.shape) == ((2, 5, 8), (2, 5, 4))
    for i in range(2):
        for j in range(5):
            x = z[i, j]
            for layer in model.encoder.layers:
                x = slow_layer(layer, x)
            torch.testing.assert_close(
                code[i, j], x, rtol=0, atol=1e-13
            )  # some tens of roundings of numbers of size 1
            for layer in model.decoder.layers:
                x = slow_layer(layer, x)
            torch.testing.assert_close(y[i, j], x, rtol=0, atol=1e-13)
    torch.testing.assert_close(model.decoder(code), y, rtol=0, atol=1e-15)


def test_the_settings_of_the_paper():
    model = SymplecticAutoencoder()
    Q, P = "GradientQ", "GradientP"
    kinds = [(type(layer).__name__, tuple(layer.weight.shape)) for layer in model.encoder.layers]
    assert kinds == [(Q, (40, 2)), (P, (40, 2))] * 5 + [("PSD", (2, 1))]
    kinds = [(type(layer).__name__, tuple(layer.weight.shape)) for layer in model.decoder.layers]
    assert kinds == [(Q, (20, 1)), (P, (20, 1))] * 10 + [("PSD", (2, 1))] + [(Q, (40, 2)), (P, (40, 2))] * 5
    assert dimensions(4, 2, 2) == [4, 2]
    assert dimensions(8, 2, 4) == [8, 6, 4, 2]
    assert dimensions(12, 2, 4) == [12, 10, 6, 2]


def test_initial_weights():
    layer = GradientQ(200, 300, copies=(2,), generator=torch.Generator().manual_seed(1))
    for p, bound in [(layer.weight, math.sqrt(6 / 400)), (layer.scale, math.sqrt(6 / 300))]:
        assert 0.98 * bound < float(p.detach().abs().max()) <= bound
        assert abs(float(p.detach().mean())) < 0.1 * bound
    assert not layer.bias.any()
    assert not torch.equal(layer.weight[0], layer.weight[1])


# -- symplecticity -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "reduced", "blocks"), [(4, 2, 2), (6, 2, 2), (6, 2, 3), (8, 4, 2), (8, 4, 3), (10, 2, 5)]
)
def test_encoder_and_decoder_are_symplectic(full, reduced, blocks, gen):
    model = SymplecticAutoencoder(
        full, reduced, blocks, blocks, upscale=5, copies=(3,), generator=gen, dtype=F64
    )
    stir(model, gen)
    for layer in (model.encoder, model.decoder, *model.encoder.layers[-2:]):
        z = torch.randn(4, layer.in_dim, dtype=F64, generator=gen)
        M = jacobian(layer, z)
        assert M.shape == (3, 4, layer.out_dim, layer.in_dim)
        defect = symplecticity(layer, z)
        assert defect.shape == (3,)
        # rounding at 1e-16, times the Jacobians along the way
        assert float(defect.max()) <= 1e-12 * max(1.0, float(M.abs().max()) ** 2)
    # the same by hand, once: M^T J M = J for the tall matrix, M J M^T = J for the wide one
    E, D = (
        jacobian(model.encoder, torch.ones(1, full, dtype=F64)),
        jacobian(model.decoder, torch.ones(1, reduced).double()),
    )
    J, j = canonical(full, E), canonical(reduced, E)
    assert torch.equal(j @ j, -torch.eye(reduced, dtype=F64))
    torch.testing.assert_close(E @ J @ E.mT, j.expand(3, 1, reduced, reduced), rtol=0, atol=1e-12)
    torch.testing.assert_close(D.mT @ J @ D, j.expand(3, 1, reduced, reduced), rtol=0, atol=1e-12)


def test_what_is_not_symplectic_is_seen(gen):
    model = SymplecticAutoencoder(**SMALL, generator=gen, dtype=F64)
    z = torch.randn(4, 4, dtype=F64, generator=gen)
    assert float(symplecticity(model, z)) > 0.1  # of rank 2 in R^4
    with torch.no_grad():
        model.encoder.layers[-1].weight *= 1.001
    assert math.isclose(float(symplecticity(model.encoder, z)), 0.002001, rel_tol=1e-6)


def test_jacobians_and_gradients_are_derivatives(gen):
    model = stir(SymplecticAutoencoder(6, 2, **SMALL, copies=(2,), generator=gen, dtype=F64), gen)
    z = torch.randn(3, 6, dtype=F64, generator=gen)
    for i in range(3):
        one = torch.autograd.functional.jacobian(lambda x: model(x[None])[:, 0], z[i])
        torch.testing.assert_close(jacobian(model, z)[:, i], one, rtol=0, atol=1e-13)
    batched = torch.func.jacrev(lambda x: model(x[None])[:, 0])(z[0])
    torch.testing.assert_close(jacobian(model, z)[:, 0], batched, rtol=0, atol=1e-13)
    parts = dict(model.named_parameters())
    call = lambda x, *values: torch.func.functional_call(model, dict(zip(parts, values, strict=True)), x)  # noqa: E731
    assert torch.autograd.gradcheck(call, (z[:1].requires_grad_(), *parts.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (z[:1].requires_grad_(), *parts.values()), fast_mode=True)


# -- copies --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_copy_is_the_network_of_its_generator():
    many = SymplecticAutoencoder(8, 4, 3, 2, **SMALL, copies=(3,), generator=seeds(5, 6, 7))
    again = SymplecticAutoencoder(8, 4, 3, 2, **SMALL, copies=(3,))
    again.reset_parameters(seeds(5, 6, 7))
    z = torch.randn(3, 11, 8, generator=torch.Generator().manual_seed(0))
    for i, generator in enumerate(seeds(5, 6, 7)):
        one = SymplecticAutoencoder(8, 4, 3, 2, **SMALL, generator=generator)
        for (name, p), q, r in zip(
            many.named_parameters(), one.parameters(), again.parameters(), strict=True
        ):
            assert torch.equal(p[i], q), name
            assert torch.equal(p, r), name
        assert not torch.equal(many(z)[0], many(z)[1])
        torch.testing.assert_close(
            many(z)[i], one(z[i]), rtol=0, atol=1e-5
        )  # float32, summed in another order
    one.reset_parameters(torch.Generator().manual_seed(5))
    assert all(torch.equal(p[0], q) for p, q in zip(many.parameters(), one.parameters(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    ("copies", "lead"),
    [
        *[((), ()), ((), (2, 3)), ((3,), ()), ((3,), (1,)), ((3,), (2, 3)), ((2, 3), (3,))],
        *[((1, 3), (2, 3)), ((3, 1), (3, 2)), ((3, 1), (2,)), ((3, 1), (4, 1, 2)), ((2, 1, 3), (2, 4, 3))],
    ],
)
def test_copies_are_a_loop(copies, lead, gen):
    model = stir(SymplecticAutoencoder(6, 4, **SMALL, copies=copies, generator=gen, dtype=F64), gen)
    z = torch.randn(*lead, 5, 6, dtype=F64, generator=gen)
    shape = torch.broadcast_shapes(lead, copies)
    y = model(z)
    assert y.shape == (*shape, 5, 6)
    one = SymplecticAutoencoder(6, 4, **SMALL, dtype=F64)
    for index in (
        torch.cartesian_prod(*(torch.arange(k) for k in shape)).view(-1, len(shape)).tolist()
        if shape
        else [[]]
    ):
        i = tuple(j % k for j, k in zip(index[len(shape) - len(copies) :], copies, strict=True))
        one.load_state_dict({name: p[i] for name, p in model.state_dict().items()})
        torch.testing.assert_close(
            y[tuple(index)], one(z.expand(*shape, 5, 6)[tuple(index)]), rtol=0, atol=1e-13
        )


@pytest.mark.parametrize("copies", [(), (3,), (2, 3)])
def test_features_first_is_forward(copies, gen):
    model = SymplecticAutoencoder(6, 2, **SMALL, copies=copies, generator=gen, dtype=F64)
    C = math.prod(copies)
    z = torch.randn(*copies, 5, 6, dtype=F64, generator=gen)
    q, p = z.view(C, 5, 6).mT.chunk(2, 1)
    with torch.no_grad():
        y = torch.cat(model.features_first(q, p), 1)
        assert torch.equal(y.mT.reshape(z.shape), model(z))


# -- training ------------------------------------------------------------------------------------------------


def test_phi_is_declared_and_nothing_else():
    model = SymplecticAutoencoder(8, 2, 3, 2, **SMALL, copies=(3,))
    on = {name: tuple(p.shape) for name, p, space in declared_spaces(model) if space == ghor.Stiefel()}
    assert on == {
        "encoder.layers.3.weight": (3, 4, 3),
        "encoder.layers.7.weight": (3, 3, 1),
        "decoder.layers.4.weight": (3, 4, 1),
    }
    assert {space for _, _, space in declared_spaces(copy.deepcopy(model))} == {
        ghor.Stiefel(),
        ghor.Euclidean(),
    }


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


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_training_keeps_encoder_and_decoder_symplectic(dtype, gen):
    model = SymplecticAutoencoder(8, 4, 3, 2, **SMALL, copies=(2,), generator=gen, dtype=dtype)
    z = torch.randn(32, 8, dtype=dtype, generator=gen)
    start = copy.deepcopy(model)
    errors = train(model, z)
    assert bool((errors[-1] < errors[0]).all())
    for (name, p), before in zip(model.named_parameters(), start.parameters(), strict=True):
        assert bool((p != before).flatten(1).any(1).all()), name
    eps = torch.finfo(dtype).eps
    for _, p, space in declared_spaces(model):
        assert float(space.residual(p.detach().double()).max()) <= 20 * eps
    for layer in (model.encoder, model.decoder):
        assert (
            float(symplecticity(layer, z[:4, : layer.in_dim]).max()) <= 1000 * eps
        )  # Jacobians of some size


def test_copies_train_apart(gen):
    """Adam is elementwise and each copy has its own section: training together is training one by one."""
    many = SymplecticAutoencoder(6, 2, **SMALL, copies=(2,), generator=seeds(1, 2), dtype=F64)
    z = torch.randn(2, 16, 6, dtype=F64, generator=gen)
    train(many, z)
    for i, generator in enumerate(seeds(1, 2)):
        one = SymplecticAutoencoder(6, 2, **SMALL, generator=generator, dtype=F64)
        train(one, z[i])
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(p[i], q, rtol=0, atol=1e-9)  # rounding through 20 steps of Adam


# -- refusals ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="even number of dimensions, got 5"):
        GradientP(5, 10)
    with pytest.raises(ValueError, match="width must be positive, got 0"):
        GradientQ(4, 0)
    with pytest.raises(ValueError, match="copies must be positive"):
        PSD(4, 2, copies=(0,))
    with pytest.raises(ValueError, match="reduced_dim must be even and less than full_dim=4, got 4"):
        SymplecticAutoencoder(4, 4)
    with pytest.raises(ValueError, match="from 4 to 2 dimensions there are 2 to 2 blocks, got 3"):
        SymplecticAutoencoder(4, 2, encoder_blocks=3)
    with pytest.raises(ValueError, match="from 8 to 2 dimensions there are 2 to 4 blocks, got 1"):
        SymplecticAutoencoder(8, 2, decoder_blocks=1)
    with pytest.raises(ValueError, match="decoder_layers=-1"):
        SymplecticAutoencoder(decoder_layers=-1)
    with pytest.raises(ValueError, match=r"2 generators for copies=\(3,\); give one, or 3"):
        GradientQ(4, 10, copies=(3,), generator=seeds(1, 2))
    model = SymplecticAutoencoder(**SMALL, copies=(3,))
    for map_, bad in [(model, (5, 6)), (model, (4,)), (model.encoder, (5, 2)), (model.decoder, (5, 4))]:
        with pytest.raises(ValueError, match=rf"expected \(..., points, {map_.in_dim}\), got"):
            map_(torch.zeros(bad))
    with pytest.raises(ValueError, match=r"broadcast with copies=\(3,\), got \(2, 5, 4\)"):
        model(torch.zeros(2, 5, 4))
