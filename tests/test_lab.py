"""Configurations, records, checkpoints, tasks: what a run is made of."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ghor
from ghor.lab import checkpoint, train
from ghor.lab.config import Config
from ghor.lab.record import Damaged, append, decode, encode, read
from ghor.lab.tasks import Autoencoder, generator

CONFIG = {"experiment": "pendulum", "optimizer": "geometric-adam", "seeds": (0, 1), "epochs": 2, "lr": 1e-3}
SMALL = {"encoder_layers": 2, "decoder_layers": 2, "decoder_output_layers": 2}


def config(**changes):
    return Config(**{**CONFIG, "batch_size": 2525, "network": SMALL, "compile": False, **changes})


def test_a_configuration_is_its_dict():
    c = config()
    assert Config.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    assert c.name == Config.from_dict(c.to_dict()).name


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"epochs": 9}, True),
        ({"lr": 1e-2}, False),
        ({"seeds": (0, 2)}, False),
        ({"label": "x"}, False),
        ({"retraction": "geodesic"}, False),
        ({"threads": 3}, False),
        ({"network": {}}, False),
    ],
    ids=str,
)
def test_everything_but_the_epochs_decides_the_name(change, same):
    assert (config(**change).name == config().name) is same


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "magic"},
        {"experiment": "tennis"},
        {"dtype": "float16"},
        {"retraction": "straight"},
        {"section": "none"},
        {"norm": "large"},
        {"lr": 0.0},
        {"lr": math.nan},
        {"betas": (0.9, 1.0)},
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"epochs": 0},
        {"network": {"depth": 3}},
        {"experiment": "mnist", "network": {}},  # two seeds in one run
    ],
    ids=str,
)
def test_a_bad_configuration_is_refused(change):
    with pytest.raises(ValueError, match=r".{10}"):
        config(**change)


@given(st.dictionaries(st.text(max_size=5), st.floats() | st.integers() | st.text(max_size=9), max_size=4))
def test_a_line_is_read_as_it_was_written(values):
    values.pop("crc", None)
    back = decode(encode({"kind": "epoch", **values}))
    for key, value in values.items():
        if isinstance(value, float):
            expected = float(f"{value:.9g}") if math.isfinite(value) else None
            assert back[key] == expected
        elif key != "kind":
            assert back[key] == value


def test_any_changed_byte_of_a_line_is_found():
    line = encode({"kind": "epoch", "epoch": 3, "loss": [0.25]})
    for i in range(len(line) - 1):
        with pytest.raises(ValueError, match=r"."):
            decode(line[:i] + bytes([line[i] ^ 1]) + line[i + 1 :])


def test_a_record_grows_and_a_half_line_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    size = append(path, {"kind": "run", "format": 1, "config": {"epochs": 2}}, 0)
    size = append(path, {"kind": "epoch", "epoch": 1, "loss": [1.0]}, size)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"epo')
    run = read(path)
    assert (len(run.epochs), run.size, run.finished) == (1, len(whole), False)
    append(path, {"kind": "epoch", "epoch": 2, "loss": [0.5]}, run.size)
    assert len(read(path).epochs) == 2
    path.write_bytes(whole.replace(b"1.0", b"1.5") + whole)
    with pytest.raises(Damaged, match="line 2"):
        read(path)


def test_a_checkpoint_is_what_was_saved_or_an_error(tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoint.save({"epoch": 1, "x": torch.arange(3.0)}, path)
    assert torch.equal(checkpoint.load(path)["x"], torch.arange(3.0))
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    path.write_bytes(raw)
    with pytest.raises(Damaged, match="--restart"):
        checkpoint.load(path)


def test_one_seed_of_many_is_the_run_of_that_seed(tmp_path):
    """Seeds trained at once do not see each other: equal to rounding, for batched products round in their own way."""
    both = read(train.train(config(dtype="float64"), tmp_path)).epochs
    alone = read(train.train(config(dtype="float64", seeds=(1,)), tmp_path)).epochs
    for a, b in zip(both, alone, strict=True):
        assert a["loss"][1] == pytest.approx(b["loss"][0], rel=1e-8)


def test_what_an_epoch_says(tmp_path):
    run = read(train.train(config(), tmp_path))
    assert run.finished
    assert run.header["config"]["lr"] == 1e-3
    for line in run.epochs:
        assert len(line["loss"]) == len(line["drift"]) == 2
        assert max(line["drift"]) < 1e-6
        assert max(line["symplecticity"]["encoder"] + line["symplecticity"]["decoder"]) < 1e-5
        assert min(line["ms"].values()) >= 0
    sample = run.last("sample")
    assert len(sample["reconstruction"]) == len(sample["original"]) == len(sample["latent"])


def test_the_state_is_counted_on_a_real_optimizer():
    """St(7,49): a section of 49^2 and two moments of 49 x 7; one number instead of a moment; one moment; none."""
    expected = {
        "geometric-adam": 2401 + 686,
        "scalar-moment-adam": 2401 + 344,
        "momentum": 2401 + 343,
        "gradient": 2401,
    }
    for name, entries in expected.items():
        model = ghor.nn.VisionTransformer(blocks=1)
        c = Config("mnist", name, (0,), 1, 1e-3, 16)
        assert train.count_state(c, model)["entries_per_manifold_weight"] == entries
        assert train.count(model)["manifold_weights"] == 21


def test_batches_depend_on_seed_and_epoch_alone():
    task = Autoencoder(config())
    first = [batch.clone() for batch in task.batches(3)]
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, task.batches(3), strict=True))
    assert not torch.equal(first[0], next(iter(task.batches(4))))
    assert generator(0, 1).initial_seed() != generator(1, 0).initial_seed()
