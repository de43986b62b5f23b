"""A run: what its record says, what its numbers depend on, and what cannot be trained."""

import copy
import dataclasses
import pickle

import pytest
import torch
from configs import MNIST, PENDULUM
from runs import SMALL, the_record

import ghor
from ghor_lab import execute, tasks, train
from ghor_lab.config import Config
from ghor_lab.record import Damaged, read

pytestmark = pytest.mark.usefixtures("as_before", "one_commit")


def test_what_a_record_says(finished):
    run = read(the_record(finished))
    assert run.finished
    assert run.epochs_asked == 2
    header = run.header
    assert header["name"] == PENDULUM.name == run.path.stem
    assert Config.from_dict(header["config"]) == PENDULUM
    assert {"commit", "ghor", "torch", "python", "machine", "processes", "started", "steps_per_epoch"} <= set(
        header
    )
    assert {"system", "processor", "cores", "memory_gib"} == set(header["machine"])
    assert header["steps_per_epoch"] == 10100 // 5050
    assert (
        header["parameters"]["manifold_weights"] == 2 * 2
    )  # one PSD layer down, one up, for each of two seeds
    for i, line in enumerate(run.epochs, 1):
        assert line["epoch"] == i
        assert len(line["loss"]) == len(line["drift"]) == len(line["symplecticity"]["encoder"]) == 2
        assert max(line["drift"]) < 2e-6
        assert set(line["ms"]) == {"ad", "direction", "retraction", "other"}
        assert sum(line["ms"].values()) * header["steps_per_epoch"] <= 1000 * line["seconds"] + 1
    sample = run.last("sample")
    assert sample["epoch"] == 2
    assert (
        torch.tensor(sample["original"]).shape == torch.tensor(sample["reconstruction"]).shape == (5, 101, 4)
    )
    assert torch.tensor(sample["latent"]).shape == (5, 101, 2)
    assert run.last("end")["epochs"] == 2


def test_the_state_of_the_papers_transformer():
    """336 weights on St(7, 49), and N^2 + 2 N n numbers for each of them: section, first and second
    moment."""
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
    """St(7, 49): a section of 49^2 and two moments of 49 x 7; one number instead of a moment; one moment;
    none."""
    expected = {"geometric-adam": 686, "scalar-moment-adam": 344, "momentum": 343, "gradient": 0}
    model = tasks.Classification.network(MNIST)
    for name, entries in expected.items():
        state = train.count_state(dataclasses.replace(MNIST, optimizer=name), model)
        assert state["entries_per_manifold_weight"] == 2401 + entries


@pytest.mark.parametrize("space", [ghor.Stiefel(), ghor.Euclidean()], ids=str)
def test_a_step_tells_its_phases_to_the_stopwatch(space):
    p = torch.nn.Parameter(torch.eye(5, 2))
    opt = ghor.optim.Adam([p], space=space)
    watch, seen = train.Stopwatch(opt), []
    opt.phase_hook = lambda phase: seen.append(phase) or watch(phase)
    for _ in range(2):
        p.grad = torch.ones(5, 2)
        opt.step()
    assert seen == ["direction", "retraction", "done"] * 2
    assert watch.retraction > 0


def test_an_optimizer_of_torch_has_no_retraction(images, tmp_path):
    config = dataclasses.replace(MNIST, epochs=1)
    for name, positive in (("geometric-adam", True), ("standard-adam", False)):
        path = train.train(dataclasses.replace(config, optimizer=name), tmp_path, data=images)
        assert (read(path).epochs[0]["ms"]["retraction"] > 0) == positive


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


def test_seeds_decide_the_numbers(finished, tmp_path):
    """The same seeds give the same losses, alone or together; others give others."""
    for seed in (0, 1):
        train.train(dataclasses.replace(PENDULUM, seeds=(seed,)), tmp_path / str(seed))
    both = [line["loss"] for line in read(the_record(finished)).epochs]
    alone = [[line["loss"][0] for line in read(the_record(tmp_path / s)).epochs] for s in "01"]
    assert torch.allclose(
        torch.tensor(both), torch.tensor(alone).T, rtol=1e-5
    )  # batched products round differently
    assert alone[0] != alone[1]


# -- what goes wrong -----------------------------------------------------------------------------------------


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
    monkeypatch.setattr(
        train, "optimizer_of", lambda config, model: torch.optim.SGD(model.parameters(), lr=0.0)
    )
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    monkeypatch.setattr(train, "count_state", lambda config, model: None)
    train.train(PENDULUM, tmp_path)
    assert [line["loss"] for line in read(the_record(tmp_path)).epochs] == [[None, 1.0]] * 2


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
