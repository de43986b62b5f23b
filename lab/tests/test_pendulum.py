"""The trajectories obey the equation and its conserved energy; the lift; the cache; the reconstruction
error."""

import math

import pytest
import torch

from ghor_lab import data, pendulum
from ghor_lab.networks import SymplecticAutoencoder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return pendulum.load(tmp_path_factory.mktemp("cache"))


def test_shapes_and_grid(loaded):
    assert (loaded.t.shape, loaded.theta.shape, loaded.velocity.shape) == ((101,), (100, 101), (100, 101))
    assert (loaded.z.shape, loaded.z.dtype) == ((100, 101, 4), torch.float64)
    torch.testing.assert_close(loaded.t, torch.arange(101).double() / 10, rtol=0, atol=1e-14)
    for i in range(10):
        for j in range(10):
            assert math.isclose(loaded.theta[10 * i + j, 0], 2 * math.pi * i / 9, abs_tol=1e-15)
            assert math.isclose(loaded.velocity[10 * i + j, 0], -2 + 4 * j / 9, abs_tol=1e-15)


def test_energy_is_conserved(loaded):
    H = loaded.velocity.square() / 2 + loaded.theta.cos()
    assert float((H - H[:, :1]).abs().max()) < 1e-10
    # both sides of the separatrix H = 1
    assert bool((H < 0.9).any())
    assert bool((H > 1.1).any())


def test_every_point_follows_from_the_one_before(loaded):
    """Against 20 steps of the classical Runge-Kutta method: 0.005^4 / 120, times 0.1, is below 1e-12."""
    y, h = torch.stack([loaded.theta, loaded.velocity])[:, :, :-1], 0.005
    f = lambda y: torch.stack([y[1], y[0].sin()])  # noqa: E731
    for _ in range(20):
        a = f(y)
        b = f(y + h / 2 * a)
        c = f(y + h / 2 * b)
        y = y + h / 6 * (a + 2 * b + 2 * c + f(y + h * c))
    error = (y - torch.stack([loaded.theta, loaded.velocity])[:, :, 1:]).abs().max()
    assert float(error) < 1e-11


def test_the_lift(loaded):
    for k, i in [(0, 0), (37, 50), (99, 100)]:
        theta, velocity = float(loaded.theta[k, i]), float(loaded.velocity[k, i])
        q1, q2, p1, p2 = loaded.z[k, i].tolist()
        assert (q1, q2) == pytest.approx((math.sin(theta), math.cos(theta)), abs=1e-15)
        assert (p1, p2) == pytest.approx((velocity * math.cos(theta), -velocity * math.sin(theta)), abs=1e-15)
    q, p = loaded.z[..., :2], loaded.z[..., 2:]
    torch.testing.assert_close(
        q.square().sum(-1), torch.ones(100, 101, dtype=torch.float64), rtol=0, atol=1e-15
    )
    # p is the derivative of q: central differences of step 0.1 are off by 0.1^2 / 6 of a third derivative
    # below 100
    torch.testing.assert_close((q[:, 2:] - q[:, :-2]) / 0.2, p[:, 1:-1], rtol=0, atol=100 * 0.1**2 / 6)


# -- the cache -----------------------------------------------------------------------------------------------


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("t", "theta", "velocity", "z"))


def test_a_second_load_reads_the_file(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(data.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert same(pendulum.load(), loaded)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")] == ["ghor/pendulum/angles.f64"]
    monkeypatch.setattr(pendulum, "integrate", None)
    assert same(pendulum.load(), loaded)


@pytest.mark.parametrize("damage", ["bit", "digest", "short", "empty"])
def test_a_damaged_file_is_named_and_made_again(damage, loaded, tmp_path, capsys):
    pendulum.load(tmp_path)
    path = tmp_path / "pendulum" / "angles.f64"
    whole = path.read_bytes()
    raw = bytearray(whole)
    if damage == "bit":
        raw[1000] ^= 1
    elif damage == "digest":
        raw[3] ^= 0xFF
    path.write_bytes({"short": raw[:-8], "empty": b""}.get(damage, raw))
    assert capsys.readouterr().err == ""
    assert same(pendulum.load(tmp_path), loaded)
    message = capsys.readouterr().err
    assert f"{path} is damaged" in message
    assert ("bytes, not 161665" if damage in ("short", "empty") else "SHA-256") in message
    assert path.read_bytes() == whole
    pendulum.load(tmp_path)
    assert capsys.readouterr().err == ""


def test_a_cache_that_cannot_be_written_is_no_obstacle(loaded, tmp_path, capsys):
    (tmp_path / "pendulum").write_text("a file where the folder should be")
    assert same(pendulum.load(tmp_path), loaded)
    assert "could not be written" in capsys.readouterr().err


# -- the loss ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_reconstruction_error_is_the_formula(loaded, gen):
    model = SymplecticAutoencoder(
        encoder_layers=2, decoder_layers=2, copies=(3,), generator=gen, dtype=torch.float64
    )
    z = loaded.z.reshape(-1, 4)[torch.randperm(10100, generator=gen)[:768]].view(3, 256, 4)
    error = pendulum.reconstruction_error(model, z.mT)
    assert error.shape == (3,)
    y = model(z)
    for i in range(3):
        slow = math.sqrt(float(((z[i] - y[i]) ** 2).sum()) / float((z[i] ** 2).sum()))
        assert math.isclose(float(error[i]), slow, rel_tol=1e-12)
    # the same points in every copy
    one = pendulum.reconstruction_error(model, z[:1].mT)
    assert math.isclose(float(one[0]), float(error[0]), rel_tol=1e-12)
    assert math.isclose(
        float(one[1]),
        float(torch.linalg.norm(z[0] - model(z[0])[1]) / torch.linalg.norm(z[0])),
        rel_tol=1e-12,
    )


def test_the_error_of_a_single_network(loaded, gen):
    model = SymplecticAutoencoder(encoder_layers=2, decoder_layers=2, generator=gen, dtype=torch.float64)
    error = pendulum.reconstruction_error(model, loaded.z.reshape(1, -1, 4).mT)
    assert error.shape == (1,)
    error.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
