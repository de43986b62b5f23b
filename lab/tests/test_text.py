"""The language model: its text, its network, its methods, and the sweep."""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from configs import MNIST, Stop, stop_at
from runs import facts, names, the_record, weights
from synthetic import rows
from test_cli import call

from ghor_lab import execute, plan, record, train
from ghor_lab.baselines import AdamH, MuonH, UnitRowsAdam
from ghor_lab.config import Config
from ghor_lab.networks import Decoder
from ghor_lab.networks.decoder import rotate, rotations
from ghor_lab.report import write_tables
from ghor_lab.tasks import LanguageModel, off_spaces
from ghor_lab.text import data
from ghor_lab.text.methods import METHODS
from ghor_lab.text.sweep import DECAYS, SEEDS, todo
from ghor_lab.text.trials import AROUND, books

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8}
TINY = tuple(word for name, value in SMALL.items() for word in ("--set", f"{name}={value}"))
CONFIG = Config("text", "adamw", (0,), 2, 3e-3, 2, every=3, warmup=2, network=SMALL)

pytestmark = pytest.mark.usefixtures("as_before", "one_commit")
every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    """A small library in place of the interpreter's, which takes a second or more to read."""
    folder = tmp_path_factory.mktemp("library")
    for i in range(64):
        (folder / f"m{i}.py").write_text(f"def f{i}(x):\n    return {i} * x  # {'law ' * (i % 7)}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
        data.load.cache_clear()
        yield folder
    data.load.cache_clear()


# -- the text ------------------------------------------------------------------------------------------------


def test_files_are_split_by_their_content(library, tmp_path):
    """Every byte once; names, copies, empty files and what was installed beside the library do not count."""
    text = data.load()
    assert sum(text.facts["files"]) == 64
    held_out = bytes(text.held_out)
    for path in sorted(library.glob("*.py")):
        content = path.read_bytes()
        assert (content in held_out) == data.is_held_out(data.hashlib.sha256(content).digest())
        for name in (f"a/{path.name}", f"copies/{path.name}", f"site-packages/{path.name}"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content + b"#" * name.startswith("site"))
    (tmp_path / "empty.py").touch()
    other = data.load(tmp_path)
    assert other.facts == text.facts
    assert torch.equal(other.train, text.train)
    assert torch.equal(other.held_out, text.held_out)


def test_another_library_has_another_digest(library, tmp_path):
    for path in library.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "m0.py").write_text("changed = True\n")
    assert data.load(tmp_path).facts["digest"] != data.load().facts["digest"]


def test_a_library_without_both_parts_is_refused(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="has no readable standard library"):
        data.load(tmp_path)


@pytest.mark.slow
def test_the_library_of_this_interpreter():
    """Megabytes, of which about 6 % are held out, more or less as files differ in size."""
    train, held_out = data.load(Path(json.__file__).parents[1]).facts["bytes"]
    assert train > 5e6
    assert 0.03 < held_out / (train + held_out) < 0.12


def test_windows_are_pieces_of_the_text():
    text = torch.arange(100, dtype=torch.uint8)
    assert data.windows(text, torch.tensor([0, 97]), 3).tolist() == [[0, 1, 2], [97, 98, 99]]
    assert data.evenly(text, 3, 10)[:, 0].tolist() == [0, 45, 90]


# -- the network ---------------------------------------------------------------------------------------------


def test_the_network_has_about_a_million_weights():
    model = Decoder()
    assert sum(p.numel() for p in model.parameters()) == 820_352
    assert len(model.matrices()) == 24


def test_no_byte_sees_what_follows_it(gen):
    model = Decoder(**SMALL, generator=gen, dtype=torch.float64)
    text = torch.randint(256, (1, 8), generator=gen)
    changed = text.clone()
    changed[0, 5] = (text[0, 5] + 1) % 256
    same = (model(text) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_attention_depends_on_distances_only(gen):
    """Rotary positions: the same bytes later in the window, seen from the same distance, score the same."""
    cos, sin = rotations(12, 8)
    q, k = (torch.randn(8, generator=gen, dtype=torch.float64) for _ in range(2))
    Q, K = (rotate(x.expand(12, 8), cos, sin) for x in (q, k))
    scores = Q @ K.T
    for d in range(-5, 6):
        along = scores.diagonal(d)
        assert float((along - along[0]).abs().max()) < 1e-13  # rounding of numbers up to 8


@every_method
def test_a_method_changes_the_network_as_little_as_its_space_asks(name):
    """The size of every head of a matrix is that of the free network: scales make up for the space."""
    free = LanguageModel.network(CONFIG).matrices()
    on = LanguageModel.network(dataclasses.replace(CONFIG, optimizer=name)).matrices()
    for key, matrix in free.items():
        x = torch.eye(matrix.weight.shape[1])
        before, after = (
            m(x).detach().unflatten(1, (m.parts, -1)).norm(dim=(0, 2)) for m in (matrix, on[key])
        )
        assert torch.allclose(before, after, rtol=1e-5)


# -- runs ----------------------------------------------------------------------------------------------------


@every_method
def test_a_run_that_was_stopped_ends_as_if_it_was_not(name, tmp_path):
    """Record and checkpoint, bit for bit; and the weights stay where the method keeps them."""
    config = dataclasses.replace(CONFIG, optimizer=name, lr=METHODS[name].rate)
    train.train(config, tmp_path / "a")
    with pytest.raises(Stop):
        train.train(config, tmp_path / "b", report=stop_at(1))
    train.train(config, tmp_path / "b")
    assert facts(the_record(tmp_path / "a")) == facts(the_record(tmp_path / "b"))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    run = record.read(the_record(tmp_path / "a"))
    assert run.header["data"] == data.load().facts
    first, last = run.epochs
    assert last["loss"][0] < first["loss"][0] < math.log(256) + 0.1
    free = METHODS[name].space is None and not METHODS[name].keeps
    assert (last["drift"] is None) == free
    assert free or last["drift"][0] < 3e-6  # float32, norms near 1
    model = LanguageModel.network(config)
    model.load_state_dict(train.checkpoint.load(the_record(tmp_path / "a").with_suffix(".ckpt"))["model"])
    assert off_spaces(model) == []


def test_only_the_matrices_differ(tmp_path):
    """The embedding moves by the same rule in all methods: after one step it is the same in all of free
    size."""
    found = []
    for name in ("adamw", "torch-muon", "adamh", "muonh"):
        task = LanguageModel(dataclasses.replace(CONFIG, optimizer=name))
        opt = train.optimizer_of(task.config, task.model)
        task.loss(next(task.batches(1)))[0].backward()
        opt.step()
        found.append(task.model.embedding.weight.detach().clone())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_record_of_another_library_is_not_continued(library, tmp_path):
    with pytest.raises(Stop):
        train.train(CONFIG, tmp_path, report=stop_at(1))
    file = library / "m0.py"
    before = file.read_text()
    try:
        file.write_text("changed = True\n")
        data.load.cache_clear()
        with pytest.raises(record.Damaged, match="was trained on other data"):
            train.train(CONFIG, tmp_path)
    finally:
        file.write_text(before)
        data.load.cache_clear()


def test_rates_rise_and_fall():
    """Linearly to 1 at the end of the warm-up, and from there to 0 after the last step."""
    config = dataclasses.replace(CONFIG, epochs=2, every=10, warmup=4)
    rates = [config.rate(step) for step in range(1, 22)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[20] == 0
    falls = [a - b for a, b in itertools.pairwise(rates[3:])]
    assert max(falls) - min(falls) < 1e-15  # rounding of numbers below 1
    assert dataclasses.replace(config, warmup=0).rate(1) == 20 / 21


def test_a_run_of_another_length_is_another_run():
    """The rate of its steps is another, so that it cannot be made longer."""
    for change in ({"epochs": 3}, {"every": 4}, {"rest_lr": 1.0}):
        assert dataclasses.replace(CONFIG, **change).name != CONFIG.name
        if "epochs" not in change:
            with pytest.raises(ValueError, match="for text only"):
                dataclasses.replace(MNIST, **change)


# -- baselines -----------------------------------------------------------------------------------------------


def quadratic(W, gen):
    target = torch.randn(W.shape, generator=gen, dtype=W.dtype)
    return lambda: (W - target).square().sum()


@pytest.mark.parametrize("cls", [AdamH, MuonH])
def test_hyperball(cls, gen):
    """||W|| stays, and a step turns W as its formula says, by the base's direction: here the first of Adam,
    the sign of the gradient, or of Muon, its orthogonal factor."""
    W = torch.nn.Parameter(torch.randn(6, 4, generator=gen, dtype=torch.float64))
    b = torch.nn.Parameter(torch.randn(4, generator=gen, dtype=torch.float64))
    opt, start, R = cls([W, b], lr=0.1, weight_decay=0.5), W.detach().clone(), float(W.detach().norm())
    loss = quadratic(W, gen)
    for t in range(20):
        opt.zero_grad()
        (loss() + b.sum()).backward()
        opt.step()
        if t == 0:
            U, _, Vh = torch.linalg.svd(W.grad, full_matrices=False)
            u = W.grad.sign() if cls is AdamH else U @ Vh
            wanted = start - 0.1 * R * u / u.norm()
            # Adam's eps; Newton-Schulz in bfloat16, whose singular values are 0.7 ... 1.2
            assert float((W.detach() - wanted * R / wanted.norm()).norm()) < (1e-6 if cls is AdamH else 0.1)
        assert abs(float(W.detach().norm()) / R - 1) < 1e-15 * 4
    resumed = cls([W, b], lr=0.1)
    resumed.load_state_dict(opt.state_dict())
    assert float(resumed.state[W]["radius"]) == R


def test_hyperball_leaves_the_weights_where_its_base_fails():
    W = torch.nn.Parameter(torch.eye(3))
    W.grad = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamH([W]).step()
    assert torch.equal(W.detach(), torch.eye(3))


def test_hyperball_without_a_direction():
    W = torch.nn.Parameter(2 * torch.eye(3))
    W.grad = torch.zeros(3, 3)
    AdamH([W], lr=0.1).step()
    assert torch.allclose(W.detach(), 2 * torch.eye(3))


def test_unit_rows(gen):
    """Rows have length 1 after every step; vectors and groups that say so are AdamW's."""
    W, V = (torch.nn.Parameter(torch.randn(6, 4, generator=gen)) for _ in range(2))
    free = torch.nn.Parameter(V.detach().clone())
    ours = UnitRowsAdam([{"params": [W]}, {"params": [V], "unit_rows": False}], lr=0.1)
    theirs = torch.optim.AdamW([free], lr=0.1)
    for _ in range(5):
        for p in (W, V, free):
            p.grad = torch.ones_like(p) * p.detach()
        ours.step()
        theirs.step()
        assert float((W.detach().norm(dim=-1) - 1).abs().max()) < 3e-7
    assert torch.equal(V, free)


# -- the sweep -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory, library):
    """The folder of a sweep of two methods, by the command, and what the command said."""
    out = tmp_path_factory.mktemp("swept")
    argv = ("run", "text", "--sweep", "--steps", 2, *TINY, "--batch-size", 2, "--threads", 1, "--out", out)
    return out, call(*argv, "-o", "adamw", "-o", "rows-adam"), argv


def test_a_sweep_answers_every_question(swept):
    """Five rates around the best, three seeds, no warm-up, decay where there is one; each run once."""
    out, said, argv = swept
    runs = [record.read(path) for path in out.glob("*.jsonl")]
    (book,) = books(runs)
    assert book.methods == ["adamw", "rows-adam"]
    for name in book.methods:
        around = [t.rate for t in book.around(name)]
        best = min(book.over_rates(name), key=lambda t: (t.final, t.rate)).rate
        # no further than 16 times the first rate
        near = [f for f in AROUND if 1 / 16.1 < best * f / METHODS[name].rate < 16.1]
        assert around == pytest.approx([best * f for f in near])
        assert [t.seed for t in book.repeated(name)] == list(SEEDS)
        assert None not in (book.cold(name), book.equal_time(name))
    assert {t.decay for t in book.full(method="adamw", rate=book.best("adamw").rate)} == set(DECAYS)
    order = [line.partition(":")[0] for line in said.splitlines() if line.endswith("to do")]
    assert order[0] == "one rate for every method"
    assert order.index("no warm-up") > order.index("other seeds at the best rate")
    assert "to do" not in call(*argv, "-o", "adamw", "-o", "rows-adam")
    first = plan.text(**OPTIONS, optimizer=["adamw", "rows-adam"])
    assert todo(first, runs) == ("", [])
    assert [c.optimizer for c in todo(first, runs[:0])[1]] == ["adamw", "rows-adam"]


OPTIONS = {
    **dict.fromkeys(("seeds", "lr", "rest_lr", "weight_decay", "warmup", "label")),
    "steps": 2,
    "batch_size": 2,
    "sweep": True,
    "threads": 1,
    "network": SMALL,
    "protocol": "ours",
    "compiled": True,
    "retraction": "cayley",
    "section": "auto",
    "dtype": "float32",
    "device": "cpu",
}


def test_a_sweep_that_starts_from_scratch_builds_on_nothing(swept, tmp_path, monkeypatch):
    """The records of all its stages go before the first run, and one that cannot be read when its turn comes;
    other seeds and labels are not the sweep's."""
    out, _, argv = swept
    folder = tmp_path / "runs"
    shutil.copytree(out, folder)
    (first,) = plan.text(**OPTIONS, optimizer=["adamw"])
    others = [dataclasses.replace(first, seeds=(7,)), dataclasses.replace(first, label="b")]
    for config in others:
        train.train(config, folder)
    damaged = next(folder.glob("adamw-*-seed1-*.jsonl"))
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    there = []

    def one_by_one(configs, folder, *_):
        """Every run ends as it did."""
        there.append({path.stem for path in folder.iterdir() if path.suffix != ".lock"})
        assert not there[-1] & {config.name for config in configs}
        for config in configs:
            shutil.copy(out / f"{config.name}.jsonl", folder)
        return []

    monkeypatch.setattr(execute, "one_by_one", one_by_one)
    call(*argv[:-1], folder, "-o", "adamw", "-o", "rows-adam", "--restart")
    kept = {config.name for config in others}
    assert there[0] == kept | {damaged.stem}
    assert {p.stem for p in folder.glob("*.jsonl")} == kept | {p.stem for p in out.glob("*.jsonl")}


def test_methods_without_a_space_are_swept_with_any_retraction(swept):
    out, _, _ = swept
    runs = [record.read(path) for path in out.glob("*.jsonl")]
    free, bound = ([r for r in runs if r.header["config"]["optimizer"] == o] for o in ("adamw", "rows-adam"))
    moved = []
    for run in bound:
        config = dataclasses.replace(Config.from_dict(run.header["config"]), retraction="geodesic")
        header = {**run.header, "name": config.name, "config": config.to_dict()}
        moved.append(dataclasses.replace(run, header=header))
    assert [book.methods for book in books([*runs, *moved])] == [["adamw", "rows-adam"]] * 2
    first = plan.text(**OPTIONS | {"retraction": "geodesic"}, optimizer=["adamw", "rows-adam"])
    assert todo(first, [*runs, *moved]) == ("", [])
    begun = [run for run in moved if run.header["name"] == first[1].name]
    for before in ([], bound):
        missing = todo(first, [*before, *free, *begun])[1]
        assert {(c.optimizer, c.retraction) for c in missing} == {("rows-adam", "geodesic")}


def test_the_report_of_a_sweep(swept, tmp_path):
    """Table, figures and words are drawn from the records, also from packed ones."""
    out, _, _ = swept
    said = call("report", out, "--out", tmp_path / "a", columns=200)
    assert "Language model, held-out loss after 2 steps" in said
    page = (tmp_path / "a" / "report.html").read_text()
    assert "Adam in g^hor, unit rows" in page
    assert "of the language model not finished" not in page
    assert {"text-curves.svg", "text-rates.svg"} <= set(names(tmp_path / "a" / "figures"))
    call("pack", out, "--out", tmp_path / "packed")
    write_tables([tmp_path / "packed"], tmp_path / "b")
    made, again = ((tmp_path / x / "tables" / "text.csv").read_text() for x in "ab")
    assert made == again
    assert len(made.splitlines()) == 1 + 2  # a row for each method


def test_the_report_leaves_out_what_is_not_finished(tmp_path):
    with pytest.raises(Stop):
        train.train(CONFIG, tmp_path, report=stop_at(1))
    assert "1 run of the language model not finished: left out" in call("report", tmp_path)


def test_the_report_of_a_few_runs(tmp_path):
    """Without the first seed, a warm-up or AdamW there is still a row, and what is not known is empty."""
    for seed in (3, 4):
        train.train(dataclasses.replace(CONFIG, optimizer="adamh", seeds=(seed,), warmup=0), tmp_path)
    train.train(dataclasses.replace(CONFIG, optimizer="adamh", seeds=(3,), label="b"), tmp_path)
    call("report", tmp_path, "--out", tmp_path / "out")
    first, second = (rows(tmp_path / "out", table)[0] for table in ("text", "text-2"))
    assert (first["seeds"], second["seeds"]) == ("2", "1")
    assert first["cold"] == first["to_adamw"] == first["equal_time"] == ""


def test_runs_with_another_warm_up_are_not_another_seed(tmp_path):
    for warmup, seed in ((1, 0), (2, 0), (2, 1), (0, 0)):
        train.train(dataclasses.replace(CONFIG, epochs=1, every=4, warmup=warmup, seeds=(seed,)), tmp_path)
    (book,) = books([record.read(path) for path in tmp_path.glob("*.jsonl")])
    assert [(t.warmup, t.seed) for t in book.repeated("adamw")] == [(2, 0), (2, 1)]
    assert len(book.around("adamw")) == 1
    assert book.cold("adamw").warmup == 0


def test_numbers_of_a_sweep(swept, tmp_path):
    out, _, _ = swept
    call("pack", out, "--out", tmp_path / "results" / "text")
    (tmp_path / "results" / "numbers").mkdir()
    (tmp_path / "results" / "numbers" / "t.jinja").write_text(
        '{% set b = text("text") %}{{ b.mean("adamw") | f(".3f") }}\n{{ b.methods | join(" ") }}'
    )
    page = tmp_path / "page.md"
    page.write_text("<!-- numbers: t -->\n\n<!-- /numbers -->\n")
    call("numbers", page, "--results", tmp_path / "results")
    (book,) = books([record.read(path) for path in out.glob("*.jsonl")])
    assert f"{book.mean('adamw'):.3f}\nadamw rows-adam" in page.read_text()
    call("numbers", page, "--results", tmp_path / "results", "--check")


def test_only_runs_on_one_text_are_compared(swept, library):
    out, _, _ = swept
    runs = [record.read(path) for path in out.glob("*.jsonl")]
    runs[0].header["data"] = {**runs[0].header["data"], "digest": "another"}
    assert [len(book.trials) for book in books(runs)] == [len(runs) - 1, 1]


def test_check_looks_at_the_weights(swept):
    out, _, _ = swept
    assert "all as they were written" in call("check", out, columns=200)
