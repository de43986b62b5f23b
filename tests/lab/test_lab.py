"""Configurations, records, checkpoints, and training that goes on where it stopped."""

import copy
import dataclasses
import itertools
import json
import math
import os
import pickle
import random
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import SMALL, TIMES, facts, make_mnist, small_mnist, strip, the_record, weights

from ghor.nn import VisionTransformer
from ghor_lab import checkpoint, data, execute, tasks, train
from ghor_lab.config import AUTOENCODER, OPTIMIZERS, READINGS, TRANSFORMER, Config
from ghor_lab.files import clean, store
from ghor_lab.record import Damaged, append, decode, encode, read

PENDULUM = Config("pendulum", "geometric-adam", (0, 1), 2, 1e-3, 5050, compile=False, network=SMALL)
MNIST = Config("mnist", "geometric-adam", (0,), 2, 1e-3, 16, compile=False, network={"blocks": 1})


@pytest.fixture(autouse=True, scope="module")
def as_before():
    """Training sets torch's threads and what becomes of subnormal numbers."""
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    monkeypatch.setattr(train, "commit", lambda: "0000000")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_mnist(folder)
    before = data.DATASETS["mnist"]
    small_mnist(folder)
    yield folder
    data.DATASETS["mnist"] = before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two epochs: its folder."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "commit", lambda: "0000000")
        train.train(PENDULUM, folder)
    return folder


class Stop(Exception):
    pass


def stop_at(last):
    def report(epoch, line):
        if epoch == last:
            raise Stop

    return report


# -- configurations ----------------------------------------------------------------------------------------------------


CHANGES = {
    "experiment": "fashion-mnist",
    "optimizer": "momentum",
    "seeds": (3,),
    "lr": 0.5,
    "batch_size": 7,
    "label": "other",
    "betas": (0.8, 0.99),
    "eps": 1e-7,
    "momentum": 0.4,
    "norm": "frobenius",
    "retraction": "geodesic",
    "section": "implicit",
    "dtype": "float64",
    "device": "cuda",
    "threads": 2,
    "compile": True,
    "flush_subnormals": False,
    "network": {"blocks": 3},
    "manifold_lr": 0.3,
}


def test_the_name_depends_on_everything_but_the_epochs():
    """And is a plain name of a file, whatever the label."""
    assert set(CHANGES) == {f.name for f in dataclasses.fields(Config)} - {"epochs"}
    assert dataclasses.replace(MNIST, epochs=9).name == MNIST.name
    names = {MNIST.name} | {dataclasses.replace(MNIST, **{k: v}).name for k, v in CHANGES.items()}
    assert len(names) == 1 + len(CHANGES)
    odd = dataclasses.replace(MNIST, label="../a b/*[?]\n\0")
    assert not set(odd.name) & set("/*[]?\n\0 ")


numbers = st.floats(1e-12, 1e6)


@given(
    pick=st.sampled_from(["mnist", "fashion-mnist"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    seed=st.integers(0, 2**40 - 1),
    rates=st.tuples(numbers, numbers),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    label=st.none() | st.text(max_size=20),
)
def test_a_configuration_comes_back_from_its_record_as_it_was(pick, optimizer, seed, rates, betas, label):
    config = Config(pick, optimizer, (seed,), 3, rates[0], 10, label, betas, rates[1])
    line = decode(encode({"kind": "run", "config": config.to_dict()}))
    back = Config.from_dict(line["config"])
    assert back == config
    assert back.name == config.name
    assert set(line["config"]) | {"manifold_lr"} == {f.name for f in dataclasses.fields(Config)}


def test_manifold_lr_is_the_rate_of_the_weights_on_manifolds():
    config = dataclasses.replace(MNIST, optimizer="scalar-moment-adam", manifold_lr=0.018)
    opt = train.optimizer_of(config, VisionTransformer(blocks=1))
    assert {str(g["space"]): g["lr"] for g in opt.param_groups} == {"Euclidean()": MNIST.lr, "Stiefel()": 0.018}
    assert Config.from_dict(config.to_dict()) == config


def test_one_and_one_point_nought_are_one_configuration():
    assert dataclasses.replace(MNIST, lr=1).name == dataclasses.replace(MNIST, lr=1.0).name
    assert dataclasses.replace(MNIST, seeds=[0], betas=[0, 0]).name == dataclasses.replace(MNIST, betas=(0.0, 0)).name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experiment": "cifar"}, "unknown experiment 'cifar'; there are pendulum, mnist"),
        ({"optimizer": "adam"}, "there are geometric-adam"),
        ({"manifold_lr": 0.0}, "manifold_lr must be a positive number, got 0.0"),
        ({"manifold_lr": 1.0, "optimizer": "standard-adam"}, "standard-adam has no weights on manifolds"),
        ({"retraction": "polar"}, "there are cayley, geodesic"),
        ({"section": "none"}, "there are auto, transported, implicit"),
        ({"norm": "max"}, "there are canonical, frobenius"),
        ({"dtype": "float16"}, "there are float32, float64"),
        ({"device": "tpux"}, "unknown device 'tpux'"),
        ({"seeds": ()}, "seeds must be"),
        ({"seeds": (0, 0)}, "seeds must be"),
        ({"seeds": (-1,)}, "seeds must be"),
        ({"seeds": (2**40,)}, "seeds must be"),
        ({"seeds": (0, 1)}, "one seed a run"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"threads": 0}, "threads"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
        ({"lr": -1e-3}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": float("inf")}, "lr must be"),
        ({"eps": 0}, "eps must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": (-0.1, 0.9)}, "betas must be"),
        ({"betas": (0.9,)}, "betas must be two"),
        ({"momentum": 1}, "momentum must be"),
        ({"network": {"layers": 3}}, "unknown network option 'layers'; there are patch_size"),
        ({"network": {"blocks": "many"}}, "blocks must be a whole number"),
        ({"network": {"blocks": 1.5}}, "blocks must be a whole number"),
        ({"network": {"blocks": 0}}, "blocks must be a whole number from 1 on, got 0"),
    ],
)
def test_bad_values_are_refused_with_the_good_ones(change, words):
    with pytest.raises(ValueError, match="^(?s:.*)" + words.replace("(", r"\(")):
        dataclasses.replace(MNIST, **change)


def test_fields_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="unknown field 'learning_rate'; there are experiment, "):
        Config.from_dict({**MNIST.to_dict(), "learning_rate": 1})
    with pytest.raises(ValueError, match="standard-adam is for mnist"):
        dataclasses.replace(PENDULUM, optimizer="standard-adam")


def test_defaults_are_the_papers():
    assert Config("mnist", "geometric-adam", (0,), 1, 1e-3, 1).network == TRANSFORMER
    assert dataclasses.replace(PENDULUM, network={}).network == AUTOENCODER
    assert READINGS["as run"]["geometric-adam"] == 1e-3
    assert set(READINGS["as stated"].values()) == {1e-4}


# -- lines -------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(width=32) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=9,
)


def finite(value):
    """What a line makes of numbers that are not finite."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(values)
def test_a_line_gives_its_values_back(value):
    """Numbers of float32 exactly, to the last bit."""
    line = encode({"kind": "epoch", "value": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    back = decode(line)["value"]

    def single(x):
        return torch.tensor(x).item() if isinstance(x, float) else x

    assert json.dumps(rounded(back, single)) == json.dumps(rounded(finite(value), single))


def rounded(value, how):
    if isinstance(value, dict):
        return {k: rounded(v, how) for k, v in value.items()}
    return [rounded(v, how) for v in value] if isinstance(value, list) else how(value)


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data):
    line = encode({"kind": "epoch", "epoch": 3, "loss": [0.123456789, None], "text": "a\u00e4"})
    at = data.draw(st.integers(0, 8 * len(line) - 1))
    changed = bytearray(line)
    changed[at // 8] ^= 1 << at % 8
    if changed[:-1] == line[:-1]:  # the end of the line: it is half written then
        assert not changed.endswith(b"\n")
    with pytest.raises(ValueError, match="check sum"):
        decode(bytes(changed))


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_record_can_be_read_at_every_moment(finished, tmp_path):
    """Every prefix of it gives the lines that are whole."""
    raw, path = the_record(finished).read_bytes(), tmp_path / "r.jsonl"
    cuts = {i + d for i, c in enumerate(raw) if c == ord("\n") for d in (-1, 0, 1, 2)} | {0, 1, 500, len(raw)}
    for cut in sorted(c for c in cuts if c <= len(raw)):
        path.write_bytes(raw[:cut])
        run, whole = read(path), raw[:cut].count(b"\n")
        assert (run is None) == (whole == 0)
        if run is not None:
            assert 1 + len(run.epochs) + len(run.others) == whole
            assert run.size == raw[:cut].rfind(b"\n") + 1
            assert run.finished == (cut == len(raw))


def test_a_flipped_bit_in_a_record_is_found_or_cuts_the_last_line(finished, tmp_path):
    """Never other values than those that were written."""
    raw, path, rng = the_record(finished).read_bytes(), tmp_path / "r.jsonl", random.Random(0)
    lines = facts(the_record(finished))
    for at in [*(rng.randrange(len(raw)) for _ in range(100)), len(raw) - 1]:
        changed = bytearray(raw)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        if at < len(raw) - 1:
            number = raw[:at].count(b"\n") + 1
            with pytest.raises(Damaged, match=rf"r.jsonl, line {number}: its check sum is wrong.*--restart"):
                read(path)
        else:
            assert [strip(line, TIMES) for line in read(path).epochs] == lines[1:3]


def test_lines_out_of_order_are_damage(finished, tmp_path):
    lines, path = the_record(finished).read_bytes().splitlines(keepends=True), tmp_path / "r.jsonl"
    path.write_bytes(b"".join([lines[0], lines[2]]))
    with pytest.raises(Damaged, match="line 2: epoch 2 after epoch 0"):
        read(path)
    path.write_bytes(lines[1])
    with pytest.raises(Damaged, match="not the header of a run of format 1"):
        read(path)


def test_appending_cuts_a_half_written_line(tmp_path):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    with path.open("ab") as stream:
        stream.write(b'{"kind":"epo')
    assert read(path).size == size
    end = append(path, {"kind": "epoch", "epoch": 1}, size)
    assert path.stat().st_size == end
    assert len(read(path).epochs) == 1


def test_a_line_that_cannot_be_written_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    before = path.read_bytes()

    def fsync(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space") as caught:
        append(path, {"kind": "epoch", "epoch": 1}, size)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="No space") as caught:
        store(b"x", tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_record_that_became_shorter_is_not_filled_with_zeros(tmp_path):
    path = tmp_path / "r.jsonl"
    size = append(path, {"kind": "run", "format": 1}, 0)
    path.write_bytes(b"")
    with pytest.raises(Damaged, match=f"shorter than the {size} bytes"):
        append(path, {"kind": "epoch", "epoch": 1}, size)


def test_unfinished_files_of_one_name_are_removed(tmp_path):
    for name in (".a.ckpt.x1.part", ".a.ckpt.x2.part", ".b.ckpt.x1.part", "a.ckpt"):
        (tmp_path / name).touch()
    clean(tmp_path / "a.ckpt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.ckpt.x1.part", "a.ckpt"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_its_values_back(tmp_path):
    values = {"name": "x", "epoch": 3, "model": {"w": torch.randn(5, 3)}, "line": {"loss": [0.1, None]}}
    checkpoint.save(values, tmp_path / "a.ckpt")
    back = checkpoint.load(tmp_path / "a.ckpt")
    assert torch.equal(back.pop("model")["w"], values.pop("model")["w"])
    assert back == values
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_change_of_a_checkpoint_goes_unnoticed(tmp_path, data):
    """A flipped bit anywhere, or an end that is missing or too much."""
    path = tmp_path / "a.ckpt"
    checkpoint.save({"w": torch.arange(9.0)}, path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1) | st.integers(0, 90))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        raw = data.draw(st.sampled_from([raw + b"x", raw[: data.draw(st.integers(0, len(raw) - 1))]]))
    path.write_bytes(raw)
    with pytest.raises(Damaged, match=rf"a.ckpt is damaged \({len(raw)} bytes.*--restart"):
        checkpoint.load(path)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_what_a_record_says(finished):
    run = read(the_record(finished))
    assert run.finished
    assert run.epochs_asked == 2
    header = run.header
    assert header["name"] == PENDULUM.name == run.path.stem
    assert Config.from_dict(header["config"]) == PENDULUM
    assert {"commit", "ghor", "torch", "python", "machine", "processes", "started", "steps_per_epoch"} <= set(header)
    assert {"system", "processor", "cores", "memory_gib"} == set(header["machine"])
    assert header["steps_per_epoch"] == 10100 // 5050
    assert header["parameters"]["manifold_weights"] == 2 * 2  # one PSD layer down, one up, for each of two seeds
    for i, line in enumerate(run.epochs, 1):
        assert line["epoch"] == i
        assert len(line["loss"]) == len(line["drift"]) == len(line["symplecticity"]["encoder"]) == 2
        assert max(line["drift"]) < 2e-6
        assert set(line["ms"]) == {"ad", "direction", "retraction", "other"}
        assert sum(line["ms"].values()) * header["steps_per_epoch"] <= 1000 * line["seconds"] + 1
    sample = run.last("sample")
    assert sample["epoch"] == 2
    assert torch.tensor(sample["original"]).shape == torch.tensor(sample["reconstruction"]).shape == (5, 101, 4)
    assert torch.tensor(sample["latent"]).shape == (5, 101, 2)
    assert run.last("end")["epochs"] == 2


def test_the_state_of_the_papers_transformer():
    """336 weights on St(7, 49), and N^2 + 2 N n numbers for each of them: section, first and second moment."""
    config = Config("mnist", "geometric-adam", (0,), 1, 1e-3, 2048, compile=False)
    model = tasks.Classification.network(config)
    assert train.count(model) == {
        "manifold_weights": 336,
        "manifold_entries": 336 * 343,
        "euclidean_entries": 16 * (49 * 49 + 49) + 490,
    }
    before = copy.deepcopy(model.state_dict())
    state = train.count_state(config, model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert state["entries_per_manifold_weight"] == 49 * 49 + 2 * 343
    assert state["by_key"]["section"] == 336 * 49 * 49
    assert state["total_entries"] == 336 * 3087 + 2 * (16 * 2450 + 490)
    assert state["mib"] == state["total_entries"] * 4 / 2**20
    plain = train.count_state(dataclasses.replace(config, optimizer="standard-adam"), model)
    assert plain["total_entries"] == 2 * sum(p.numel() for p in model.parameters())


def test_the_state_is_counted_on_a_real_optimizer():
    """St(7, 49): a section of 49^2 and two moments of 49 x 7; one number instead of a moment; one moment; none."""
    expected = {"geometric-adam": 686, "scalar-moment-adam": 344, "momentum": 343, "gradient": 0}
    model = tasks.Classification.network(MNIST)
    for name, entries in expected.items():
        state = train.count_state(dataclasses.replace(MNIST, optimizer=name), model)
        assert state["entries_per_manifold_weight"] == 2401 + entries


def test_batches_depend_on_seed_and_epoch_alone(images):
    for task in (tasks.Autoencoder(PENDULUM), tasks.Classification(MNIST, images)):
        first = [copy.deepcopy(batch) for batch in task.batches(3)]
        assert len(first) == task.steps
        torch.manual_seed(5)
        for a, b in zip(first, task.batches(3), strict=True):
            assert all(map(torch.equal, *((x,) if torch.is_tensor(x) else x for x in (a, b))))
        other = next(iter(task.batches(4)))
        assert not torch.equal(*(x if torch.is_tensor(x) else x[0] for x in (first[0], other)))
    assert tasks.generator(0, 1).initial_seed() != tasks.generator(1, 0).initial_seed()


def cases(experiments=("pendulum", "mnist")):
    for experiment, optimizer in itertools.product(experiments, OPTIMIZERS):
        if (experiment, optimizer) != ("pendulum", "standard-adam"):
            yield dataclasses.replace(PENDULUM if experiment == "pendulum" else MNIST, optimizer=optimizer)


@pytest.mark.parametrize("config", list(cases()), ids=lambda c: f"{c.experiment}-{c.optimizer}")
def test_a_run_that_was_stopped_ends_as_if_it_was_not(config, images, tmp_path):
    """Record and checkpoint, bit for bit; with every optimizer, in another order of runs."""
    for folder, stops in (("a", []), ("b", [1])):
        for epoch in stops:
            with pytest.raises(Stop):
                train.train(config, tmp_path / folder, data=images, report=stop_at(epoch))
        train.train(config, tmp_path / folder, data=images)
    assert facts(the_record(tmp_path / "a")) == facts(the_record(tmp_path / "b"))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    loss = [line["loss"] for line in read(the_record(tmp_path / "a")).epochs]
    assert loss[1] != loss[0]


@pytest.mark.parametrize("options", [{"section": "implicit"}, {"compile": True}, {"retraction": "geodesic"}], ids=str)
def test_stopped_between_two_polishings(options, tmp_path):
    """39 steps an epoch: sections are polished at steps that are no multiple of it, and the count is kept."""
    config = dataclasses.replace(PENDULUM, epochs=4, batch_size=256, **options)
    train.train(config, tmp_path / "a")
    for epoch in (1, 2, 3):
        with pytest.raises(Stop):
            train.train(config, tmp_path / "b", report=stop_at(epoch))
    train.train(config, tmp_path / "b")
    assert facts(the_record(tmp_path / "a")) == facts(the_record(tmp_path / "b"))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_seeds_decide_the_numbers(finished, tmp_path):
    """The same seeds give the same losses, alone or together; others give others."""
    for seed in (0, 1):
        train.train(dataclasses.replace(PENDULUM, seeds=(seed,)), tmp_path / str(seed))
    both = [line["loss"] for line in read(the_record(finished)).epochs]
    alone = [[line["loss"][0] for line in read(the_record(tmp_path / s)).epochs] for s in "01"]
    assert torch.allclose(torch.tensor(both), torch.tensor(alone).T, rtol=1e-5)  # batched products round differently
    assert alone[0] != alone[1]


def test_a_longer_run_is_a_run_made_longer(finished, tmp_path):
    """2 epochs, then 4: the epochs, the last sample and the weights of 4 at once; both ends stay in the record."""
    four = dataclasses.replace(PENDULUM, epochs=4)
    train.train(four, tmp_path / "a")
    for config in (PENDULUM, four):
        train.train(config, tmp_path / "b")
    at_once, longer = read(the_record(tmp_path / "a")), read(the_record(tmp_path / "b"))
    kinds = [line["kind"] for line in facts(the_record(tmp_path / "b"))]
    assert kinds == ["run", "epoch", "epoch", "sample", "end", "resumed", "epoch", "epoch", "sample", "end"]
    assert longer.last("resumed")["epochs"] == longer.epochs_asked == 4
    for line, other in zip(at_once.epochs, longer.epochs, strict=True):
        assert strip(line, TIMES) == strip(other, TIMES)
    assert at_once.last("sample") == longer.last("sample")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert longer.finished


def test_asking_for_what_is_there_changes_nothing(finished, tmp_path):
    """Also for less than is there, also of a run that is on its way to more."""
    before = the_record(finished).read_bytes()
    seen = []
    for epochs in (2, 1):
        config = dataclasses.replace(PENDULUM, epochs=epochs)
        train.train(config, finished, report=lambda *args: seen.append(args))
    assert the_record(finished).read_bytes() == before
    assert [epoch for epoch, _ in seen] == [2, 1]
    with pytest.raises(Stop):
        train.train(dataclasses.replace(PENDULUM, epochs=4), tmp_path, report=stop_at(2))
    before = the_record(tmp_path).read_bytes()
    for epochs in (1, 2):
        train.train(dataclasses.replace(PENDULUM, epochs=epochs), tmp_path)
        assert the_record(tmp_path).read_bytes() == before
    assert not read(the_record(tmp_path)).finished


def test_what_changed_when_a_run_was_taken_up_again_is_written_down(tmp_path, monkeypatch):
    """Once for each change, and only if something changed."""
    config = dataclasses.replace(PENDULUM, epochs=4)
    for last, commit in enumerate(["0000000", "0000000", "1111111"], 1):
        monkeypatch.setattr(train, "commit", lambda commit=commit: commit)
        with pytest.raises(Stop):
            train.train(config, tmp_path, report=stop_at(last))
    monkeypatch.setattr(train, "machine", lambda: {"system": "other"})
    train.train(config, tmp_path)
    lines = [line for line in facts(the_record(tmp_path)) if line["kind"] == "resumed"]
    assert [(line["epoch"], line["commit"], len(line["machine"])) for line in lines] == [
        (2, "1111111", 4),
        (3, "1111111", 1),
    ]


def test_a_run_begins_anew_when_it_is_forgotten(tmp_path):
    train.train(PENDULUM, tmp_path)
    before = facts(the_record(tmp_path))
    train.forget(PENDULUM, tmp_path)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]
    train.train(PENDULUM, tmp_path)
    assert facts(the_record(tmp_path)) == before


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dataclasses.replace(PENDULUM, batch_size=10101), "more than the 10100 points"),
        (dataclasses.replace(PENDULUM, network={**SMALL, "full_dim": 6}), "full_dim must be 4"),
        (dataclasses.replace(MNIST, batch_size=51), "more than the 50 images"),
        (dataclasses.replace(MNIST, network={"heads": 5}), "dim must be a multiple of heads"),
        (dataclasses.replace(MNIST, network={"scale": "big"}), "scale is a number"),
        (dataclasses.replace(PENDULUM, device="meta:3"), "device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_leaves_no_record(config, words, images, tmp_path):
    with pytest.raises(ValueError, match=words):
        train.train(config, tmp_path, data=images)
    assert not list(tmp_path.glob("*.jsonl"))
    assert not list(tmp_path.glob("*.ckpt"))


def test_losses_that_are_no_numbers_are_null_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.Autoencoder, "loss", lambda self, batch: (batch.sum() * 0, [float("nan"), 1.0]))
    monkeypatch.setattr(train, "optimizer_of", lambda config, model: torch.optim.SGD(model.parameters(), lr=0.0))
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    monkeypatch.setattr(train, "count_state", lambda config, model: None)
    train.train(PENDULUM, tmp_path)
    assert [line["loss"] for line in read(the_record(tmp_path)).epochs] == [[None, 1.0]] * 2


def test_the_lock_is_held_while_a_run_is_in_hand(finished):
    path = the_record(finished)
    with train.in_hand(path), pytest.raises(train.Busy, match=f"{path} is in the hands of another process"):
        train.train(PENDULUM, finished)
    train.train(PENDULUM, finished)


def test_runs_that_are_left_are_told(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    path, seen = the_record(tmp_path), []
    other = dataclasses.replace(PENDULUM, label="other")
    with train.in_hand(path):
        left = execute.one_by_one([PENDULUM, other], tmp_path, None, lambda *args: seen.append(args[0]))
    assert len(left) == 1
    assert str(path) in left[0]
    assert seen == [other, other]


def test_weights_off_their_space_are_found():
    model = tasks.Autoencoder.network(PENDULUM)
    assert tasks.off_spaces(model) == []
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "encoder" in n and p.shape[-2:] == (2, 1)).mul_(1.01)
    (line,) = tasks.off_spaces(model)
    assert "off Stiefel()" in line


def test_errors_come_back_whole_from_other_processes():
    for error in (Damaged("a"), train.Busy("b"), OSError(28, "c", "d")):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back)) == (type(error), str(error))


def test_an_error_of_our_own_is_not_taken_for_a_lost_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2$"), execute.ranks():
        raise RuntimeError("mat1 and mat2")
