"""The example with learned rotations: folding changes nothing, and a run of all methods on a tiny model."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import ghor

pytest.importorskip("transformers")
pytest.importorskip("ghor_lab")

pytestmark = pytest.mark.filterwarnings("ignore")  # geoopt compiles with torch.jit.script

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
TINY = {"hidden": 16, "heads": 2, "layers": 2, "intermediate": 32, "context": 12, "pretrain": 1, "steps": 4}


@pytest.fixture
def example():
    return importlib.import_module("learned_rotations")


@pytest.fixture
def o(example):
    return example.Options(**TINY, held_out=16, calibration=2, large=32)


def test_rotations_and_scales_fold_into_the_model(example, o, tmp_path, gen):
    """The merged model is a plain Llama that computes the same, whatever R1, R2 and s are."""
    model = example.pretrained(o, tmp_path)
    again = example.pretrained(o, tmp_path)  # from the file
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)
    r = example.Rotated(model, seed=3)
    space = ghor.SpecialOrthogonal()
    for p in (r.R1, r.R2):
        assert space.residual(p.detach()).max() <= 1e-6  # random Hadamard matrices of determinant 1
        p.data.copy_(space.random(*p.shape, generator=gen))
    r.log_s.data.normal_(generator=gen)
    assert example.changed(r, model, o) <= 1e-5
    assert type(r.merged(model)) is type(model)
    assert r(torch.arange(24).view(2, 12)).isfinite()


def test_quantized_numbers_have_16_levels_and_straight_gradients(example, gen):
    x = torch.randn(5, 40, generator=gen).requires_grad_()
    for rounded in (example.quantized_weight, example.quantized_input):
        y = rounded(x)
        levels = [len(row.mul(1e4).round().unique()) for row in y]
        assert 8 < max(levels) <= 16
        width = x.detach().amax(1) - x.detach().amin(1)
        assert ((y - x).abs().amax(1) <= width / 10).all()
        (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(g, torch.ones_like(x))


@pytest.mark.parametrize("only", ["ghor Adam", pytest.param("", marks=pytest.mark.slow)])
def test_every_method_learns(only, example, tmp_path, capsys, monkeypatch):
    """A tiny model has nothing to gain; but all of it runs, stays on its space, and can be broken off."""
    monkeypatch.setattr(example, "replicas_equal", lambda names, o, folder: dict.fromkeys(names, True))
    command = ["--small", "--seeds", "1", "--out", str(tmp_path), "--record", str(tmp_path / "a.json")]
    command += ["--only", only]
    record = example.main(command)
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(json.dumps(record))
    assert [row["name"] for row in record["rows"]] == [n for n in example.NAMES if only in n]
    for row in record["rows"]:
        if row["name"].startswith("ghor"):
            assert row["drift"] <= 2e-6
            assert row["changed"] <= 1e-4
    monkeypatch.setattr(example, "run", None)  # what was computed is not computed again
    assert example.main(command)["rows"] == record["rows"]
    assert "ghor Adam" in capsys.readouterr().out


@pytest.mark.slow
def test_replicas_are_equal(example, o, tmp_path):
    example.pretrained(o, tmp_path)
    names = [n for n in example.METHODS if n.startswith("ghor")]
    assert example.replicas_equal(names, o, tmp_path) == dict.fromkeys(names, True)
