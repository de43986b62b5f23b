"""Reports from synthetic records: the numbers in the tables, the page, and records that are not whole."""

import math
import re
import statistics
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas
from rich.console import Console
from synthetic import epoch_line, loss, mixed_records, pick, rows, run, write  # noqa: F401

from ghor_lab import figures, headline, paper, record, tables
from ghor_lab.check import look_at
from ghor_lab.pendulum import lift
from ghor_lab.pool import FEW, off, pool
from ghor_lab.report import report
from ghor_lab.sections import sections
from ghor_lab.table import Column, Row, Table

# -- numbers -------------------------------------------------------------------------------------------------


def test_a_few_runs_have_a_row_each_and_many_their_mean(mixed, tmp_path):
    root, _, _ = mixed
    found = rows(root / "out", "mnist-outcomes")
    for optimizer, title in (("geometric-adam", "Geometric Adam"), ("standard-adam", "Standard Adam")):
        for seed in (0, 1):
            row = pick(found, configuration=title, source=f"ghor, seed {seed}")
            assert (row["epochs"], row["epochs_asked"], row["seeds"]) == ("7", "7", "1")
            assert float(row["final_loss_mean"]) == pytest.approx(loss(optimizer, seed, 7), rel=1e-12)
            assert (row["final_loss_sd"], row["final_difference"]) == ("", "")
    assert pick(found, configuration="Standard Adam", source="ghor, seed 0")["drift_min"] == ""
    for seed in range(FEW + 1):
        write(tmp_path, "mnist", "geometric-adam", [seed], 7)
    run([tmp_path], tmp_path / "out")
    row = pick(rows(tmp_path / "out", "mnist-outcomes"), source="ghor")
    final = [loss("geometric-adam", seed, 7) for seed in range(FEW + 1)]
    assert row["seeds"] == f"{FEW + 1}"
    assert float(row["final_loss_mean"]) == pytest.approx(statistics.mean(final), rel=1e-12)
    assert float(row["final_loss_sd"]) == pytest.approx(statistics.stdev(final), rel=1e-12)
    assert (float(row["drift_min"]), float(row["drift_max"])) == (7e-7, 7e-7 + FEW * 1e-7)


def test_what_the_gate_excludes_is_told_and_left_out_of_a_second_row(tmp_path):
    for seed in range(FEW + 1):
        caught = {"loss": [1.33]} if seed == 1 else {}
        write(tmp_path, "mnist", "geometric-adam", [seed], 3, changes=lambda seeds, e, caught=caught: caught)
    write(tmp_path, "mnist", "momentum", [0], 3, changes=lambda seeds, e: {"loss": [1.33]})
    page, _ = run([tmp_path], tmp_path / "out")
    found = rows(tmp_path / "out", "mnist-outcomes")
    everything = pick(found, configuration="Geometric Adam", source="ghor")
    accepted = pick(found, configuration="Geometric Adam", source="ghor, by the gate")
    losses = [loss("geometric-adam", seed, 3) for seed in range(FEW + 1) if seed != 1]
    assert (everything["seeds"], everything["gate"]) == (f"{FEW + 1}", f"{FEW} of {FEW + 1} accepted")
    assert (accepted["seeds"], accepted["gate"]) == (f"{FEW}", f"{FEW} of {FEW} accepted")
    assert float(accepted["final_loss_mean"]) == pytest.approx(statistics.mean(losses), rel=1e-12)
    assert float(everything["final_loss_mean"]) == pytest.approx(statistics.mean([*losses, 1.33]), rel=1e-12)
    one = pick(found, configuration="Riemannian momentum", source="ghor, seed 0")
    assert (one["gate"], float(one["final_loss_mean"])) == ("excluded", 1.33)
    assert (
        f"1 of {FEW + 1} runs of Geometric Adam would not pass the authors' gate."
        in page.read_text().replace("&#39;", "'")
    )
    gates = [row["gate"] for row in rows(tmp_path / "out", "runs")]
    excluded = "excluded: loss 1.330 after 1.330 in the first epoch"
    assert gates == ["accepted so far", excluded, *["accepted so far"] * (FEW - 1), excluded]


def test_the_papers_rows_stand_beside(mixed):
    row = pick(rows(mixed[0] / "out", "mnist-outcomes"), configuration="Geometric Adam", source="paper")
    assert ",".join(list(row.values())[2:]) == "500,,10,0.24,0.014,,0.226,0.009,86.02,0.57,,0.0085,0.009,"


def test_best_is_the_smallest_of_each_seed_over_the_epochs(tmp_path):
    losses = {1: [0.5, 0.9], 2: [0.3, 0.8], 3: [0.4, 0.2]}
    write(tmp_path / "r", "mnist", "momentum", [0], 3, changes=lambda s, e: {"loss": losses[e][:1]})
    write(tmp_path / "r", "mnist", "momentum", [1], 3, changes=lambda s, e: {"loss": losses[e][1:]})
    (p,), _ = pool([record.read(path) for path in (tmp_path / "r").iterdir()])
    _, first, second = tables.outcomes("mnist", [p]).rows
    assert [row.cells[4][0] for row in (first, second)] == [0.4, 0.2]
    assert [row.cells[6][0] for row in (first, second)] == [0.3, 0.2]


def test_equal_epochs_are_the_last_that_both_have(mixed):
    """Of 7 epochs the authors' table has the fifth, for the loss only; of 2 the second."""
    found = [
        row for row in rows(mixed[0] / "out", "mnist-equal-epochs") if "18 x lr" not in row["configuration"]
    ]
    assert {row["configuration"] for row in found} == {
        "Geometric Adam", "Riemannian momentum", "Riemannian gradient", "Standard Adam"
    }  # fmt: skip
    authors = pick(found, configuration="Geometric Adam", source="authors, one run")
    ours = pick(found, configuration="Geometric Adam", source="ghor, seed 0")
    assert (authors["epoch"], authors["loss_mean"], authors["test_accuracy_mean"]) == ("5", "0.7962", "")
    assert (ours["epoch"], ours["test_accuracy_mean"]) == ("5", "")
    assert float(ours["loss_mean"]) == pytest.approx(loss("geometric-adam", 0, 5), rel=1e-5)
    assert pick(found, configuration="Riemannian gradient", source="ghor, seed 2")["epoch"] == "2"


def test_pendulum_difference_is_in_the_papers_deviations(tmp_path, monkeypatch):
    """(ours - paper) / s, where the paper's number of epochs was run."""
    monkeypatch.setitem(paper.EPOCHS, "pendulum", 3)
    for epochs in (3, 2):
        write(tmp_path, "pendulum", "geometric-adam", [0, 1, 2], epochs, label="as run", name=f"{epochs}")
    pools, _ = pool([record.read(path) for path in tmp_path.glob("*.jsonl")])
    reported, same, fewer = tables.pendulum_outcomes(pools).rows
    assert reported.paper
    final = [loss("geometric-adam", seed, 3) for seed in range(3)]
    difference = (statistics.mean(final) - 0.292) / 0.055
    assert same.cells[1] == "ghor, as run"
    assert same.cells[7] == pytest.approx(difference, rel=1e-12)
    assert fewer.cells[7:] == (None, None)
    assert off(1.0, (2.0, 0.0)) is None  # as the paper's 10.00 +- 0.00


def test_pendulum_time_is_set_against_as_many_seeds_and_epochs(mixed):
    found = rows(mixed[0] / "out", "pendulum-time")
    one = pick(found, reading="as run", configuration="Geometric Adam")
    assert float(one["minutes"]) == pytest.approx((11 + 12 + 13) / 60)
    assert float(one["paper_minutes"]) == pytest.approx(17.84 * 3 * 3 / 1000)
    total = pick(found, reading="as run", configuration="all four")
    assert float(total["minutes"]) == pytest.approx(4 * 36 / 60)
    assert float(total["paper_minutes"]) == pytest.approx(61.80 * 3 * 3 / 1000)
    assert float(total["ratio"]) == pytest.approx(float(total["paper_minutes"]) / float(total["minutes"]))


def test_what_training_keeps_is_the_worst_of_all_epochs_and_seeds(mixed):
    row = pick(rows(mixed[0] / "out", "pendulum-structure"), configuration="Geometric Adam, as run")
    assert [float(row[key]) for key in ("drift", "encoder", "decoder")] == pytest.approx([5e-7, 1e-7, 6e-7])


def test_cost_is_medians_over_epochs_and_the_largest_memory(mixed):
    row = pick(rows(mixed[0] / "out", "mnist-cost"), configuration="Geometric Adam", source="ghor")
    assert float(row["ad_ms"]) == 704
    assert float(row["geometric_share_percent"]) == pytest.approx(100 * 3 / 707)
    assert (float(row["seconds_per_epoch"]), float(row["peak_gib"])) == (14, 7)
    assert (
        pick(rows(mixed[0] / "out", "fashion-mnist-cost"), configuration="Geometric Adam", source="paper")[
            "ad_ms"
        ]
        == "117.0"
    )
    assert {row["seeds_at_once"] for row in rows(mixed[0] / "out", "pendulum-cost")} == {"3"}


def test_state_is_listed_once_a_network(mixed):
    """MNIST and Fashion-MNIST train the same network; readings differ in the learning rate only."""
    found = rows(mixed[0] / "out", "state")
    keys = [(row["network"], row["configuration"], row["source"]) for row in found]
    assert len(keys) == len(set(keys)) == 5 + 5 + 4
    assert pick(found, configuration="Geometric Adam", source="paper")["total_entries"] == "1137486"


def test_the_papers_numbers_agree_with_each_other():
    """Shares with times, totals with entries a weight, mebibytes with totals: a digit copied wrong would
    show."""
    for costs in paper.COSTS.values():
        for cost in costs.values():
            share = 100 * (cost.direction + cost.retraction) / (cost.ad + cost.direction + cost.retraction)
            assert share == pytest.approx(cost.share, abs=2)  # the paper rounds and averages in another order
            step = cost.ad + cost.direction + cost.retraction + cost.other
            assert 29 * step / 1000 == pytest.approx(cost.seconds, rel=0.1)
    vectors = {"geometric-adam": 3, "scalar-moment-adam": 3, "momentum": 2, "gradient": 1, "standard-adam": 3}
    for optimizer, state in paper.STATES.items():
        assert state.total == 336 * state.per_weight + vectors[optimizer] * 39690
        assert state.mib == pytest.approx(4 * state.total / 2**20, abs=0.005)
    assert sum(o.minutes[0] for o in paper.OUTCOMES["pendulum"].values() if o.minutes) == pytest.approx(61.80)
    for curve in paper.AUTHORS.values():
        assert all(len(values) == len(curve.epochs) for values in curve.values.values())
    for outcomes in paper.OUTCOMES.values():
        assert all(o.best[0] <= o.final[0] for o in outcomes.values())


# -- pooling -------------------------------------------------------------------------------------------------


def test_a_longer_run_counts_by_itself_and_with_the_shorter_ones(tmp_path):
    long, short = (
        write(tmp_path, "mnist", "geometric-adam", [seed], epochs, name=f"{seed}")
        for seed, epochs in ((0, 7), (1, 3))
    )
    write(tmp_path, "mnist", "geometric-adam", [2], 9, done=2, name="2")  # unfinished: by itself
    pools, _ = pool([record.read(path) for path in tmp_path.glob("*.jsonl")])
    found = {p.title(): (p.seeds, p.series("loss")) for p in pools}
    assert {title: seeds for title, (seeds, _) in found.items()} == {
        "Geometric Adam": [2],
        "Geometric Adam, 3 epochs": [0, 1],
        "Geometric Adam, 7 epochs": [0],
    }
    losses = [[epoch["loss"][0] for epoch in record.read(path).epochs] for path in (long, short)]
    assert found["Geometric Adam, 3 epochs"][1].T.tolist() == [losses[0][:3], losses[1]]
    assert found["Geometric Adam, 7 epochs"][1].T.tolist() == losses[:1]


def test_a_seed_of_two_longer_runs_counts_once(tmp_path):
    for name, seed, epochs in (("a", 0, 3), ("b", 1, 5), ("c", 1, 8)):
        write(tmp_path, "mnist", "momentum", [seed], epochs, name=name)
    pools, _ = pool([record.read(path) for path in tmp_path.glob("*.jsonl")])
    assert {p.epochs: p.seeds for p in pools} == {3: [0, 1], 5: [1], 8: [1]}


def test_settings_that_differ_tell_pools_apart(tmp_path):
    write(tmp_path, "mnist", "momentum", [0], 2, name="a")
    write(tmp_path, "mnist", "momentum", [0], 2, name="b", retraction="geodesic", network={"blocks": 2})
    pools, warnings = pool([record.read(path) for path in tmp_path.glob("*.jsonl")])
    assert {p.title() for p in pools} == {
        "Riemannian momentum, retraction cayley, blocks 16",
        "Riemannian momentum, retraction geodesic, blocks 2",
    }
    assert not warnings


def test_threads_tell_apart_what_epochs_do_not(tmp_path):
    for name, epochs, threads in (("a", 2, 1), ("b", 4, 2), ("c", 4, 1)):
        write(tmp_path, "mnist", "momentum", [0], epochs, name=name, threads=threads)
    pools, _ = pool([record.read(tmp_path / f"{name}.jsonl") for name in "ab"])
    assert [p.title() for p in pools] == ["Riemannian momentum, 4 epochs", "Riemannian momentum, 2 epochs"]
    pools, _ = pool([record.read(tmp_path / f"{name}.jsonl") for name in "bc"])
    assert {p.title() for p in pools} == {f"Riemannian momentum, threads {n}" for n in (1, 2)}


def test_of_a_seed_that_was_run_twice_the_newer_counts(tmp_path):
    old = write(tmp_path, "mnist", "momentum", [0], 2, name="old", changes=lambda s, e: {"loss": [9.0]})
    new = write(tmp_path, "mnist", "momentum", [0], 2, name="new", started="2026-12-01T00:00:00+00:00")
    (p,), (warning,) = pool([record.read(path) for path in (old, new)])
    assert p.seeds == [0]
    assert p.runs[0].path == new
    assert str(old) in warning
    assert str(new) in warning


def test_a_loss_that_is_not_finite_is_said(tmp_path):
    write(tmp_path, "mnist", "gradient", [0], 2)
    write(tmp_path, "mnist", "gradient", [1], 2, changes=lambda s, e: {"loss": [0.5 if e == 1 else math.nan]})
    page, shown = run([tmp_path], tmp_path / "out")
    row = pick(rows(tmp_path / "out", "mnist-outcomes"), source="ghor, seed 1")
    assert (row["final_loss_mean"], row["final_loss_sd"]) == ("nan", "")
    assert float(row["best_loss_mean"]) == 0.5
    for text in (page.read_text(), shown):
        assert "the final loss of seed 1 is not finite" in text


# -- records that are not whole ------------------------------------------------------------------------------


def test_unfinished_runs_are_marked(mixed):
    root, page, shown = mixed
    found = rows(root / "out", "mnist-outcomes")
    row = pick(found, configuration="Riemannian gradient", epochs="2")
    assert (row["epochs_asked"], row["seeds"], row["final_loss_sd"]) == ("7", "1", "")
    for text in (page.read_text(), shown, (root / "out" / "report.md").read_text()):
        assert "2 of 7 epochs" in text


def test_a_half_written_last_line_does_no_harm(tmp_path):
    path = write(tmp_path, "mnist", "momentum", [0], 5, done=3)
    whole = path.read_bytes()
    path.write_bytes(whole + record.encode(epoch_line("mnist", "momentum", [0], 4))[:40])
    run([tmp_path], tmp_path / "out")
    assert pick(rows(tmp_path / "out", "mnist-outcomes"), source="ghor, seed 0")["epochs"] == "3"


def test_a_damaged_line_is_an_error_that_names_file_and_line(tmp_path):
    path = write(tmp_path, "mnist", "momentum", [0], 3)
    path.write_bytes(path.read_bytes().replace(b'"epoch":2', b'"epoch":3'))
    with pytest.raises(record.Damaged, match=rf"{re.escape(str(path))}, line 3"):
        run([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_read_is_left_out_and_named(tmp_path):
    write(tmp_path, "mnist", "momentum", [0], 2)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")  # reading it fails for every user, root too
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path, "mnist", "gradient", [0], 2, done=0, name="begun")
    page, shown = run([tmp_path], tmp_path / "out")
    for name in ("gone.jsonl", "empty.jsonl", "begun.jsonl"):
        assert name in page.read_text()
        assert name in shown
    assert not [row for row in rows(tmp_path / "out", "mnist-outcomes") if "gradient" in row["configuration"]]


def test_files_of_other_programs_are_passed_over(tmp_path):
    write(tmp_path, "mnist", "momentum", [0], 2)
    (tmp_path / "other.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    _, shown = run([tmp_path], tmp_path / "out")
    assert "other.jsonl" not in shown
    assert [row["file"] for row in rows(tmp_path / "out", "runs")] == ["mnist-momentum-0.jsonl"]


def test_folders_without_records_say_what_makes_them(tmp_path):
    write(tmp_path / "there", "mnist", "momentum", [0], 2)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"nothing has no records .* `ghor run pendulum`"):
        run([tmp_path / "there", tmp_path / "nothing"], tmp_path / "out")
    with pytest.raises(ValueError, match="missing is not a folder"):
        run([tmp_path / "missing"], tmp_path / "out")
    with pytest.raises(ValueError, match="no folder"):
        run([], tmp_path / "out")
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="out is a file"):
        run([tmp_path / "there"], tmp_path / "out")


def test_a_record_with_other_seeds_than_losses_is_refused(tmp_path):
    path = write(tmp_path, "mnist", "momentum", [0], 2, changes=lambda s, e: {"loss": [0.1, 0.2]})
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: epoch 1 has 2 losses for 1 seeds"):
        run([tmp_path], tmp_path / "out")


# -- the page ------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What the tests ask of a page: its addresses, ids, headings and text, and that its elements are
    closed."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.ids, self.headings, self.text, self.tags = [], [], [], [], [], set()
        self.scopes, self.images = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.add(tag)
        self.addresses += [
            values[key] for key in ("src", "href", "xlink:href", "data", "action") if key in values
        ]
        self.ids += [values["id"]] if "id" in values else []
        self.scopes += [values.get("scope")] if tag == "th" else []
        self.images += [values.get("aria-label")] if values.get("role") == "img" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_loads_nothing(mixed):
    text = mixed[1].read_text()
    page = Page(text)
    assert not re.search(r"https?:|//\w+\.\w+|@import|<script|<link", text)
    assert all(re.match(r"#|data:", address) for address in page.addresses)
    assert not re.search(r"url\((?!#)", text)
    inside = {address[1:] for address in page.addresses if address.startswith("#")}
    inside |= set(re.findall(r"url\(#([^)]*)\)", text))
    assert inside <= set(page.ids)


def test_the_page_is_sound_and_readable_by_ear(mixed):
    page = Page(mixed[1].read_text())
    assert len(page.ids) == len(set(page.ids))
    assert set(page.scopes) == {"col", "row"}
    figures_written = list((mixed[0] / "out" / "figures").iterdir())
    assert len(page.images) == len(figures_written) == 18
    assert all(page.images)
    assert page.headings == [
        "MNIST",
        "Fashion-MNIST",
        "Pendulum",
        "Cost",
        "Methods",
        "Parallel transport",
        "Runs",
    ]


def test_labels_are_escaped_everywhere(mixed):
    root, page, shown = mixed
    label = '<b>bold</b> & "18 x lr" | $1$'
    text = Page(page.read_text())
    assert "b" not in text.tags
    assert f"Riemannian gradient, {label}" in text.text
    md = (root / "out" / "report.md").read_text()
    assert "<b>" not in md
    assert r"&lt;b&gt;bold&lt;/b&gt; &amp; \"18 x lr\" \| \$1\$".replace('\\"', '"') in md
    assert label in shown
    assert (
        pick(rows(root / "out", "mnist-outcomes"), configuration=f"Riemannian gradient, {label}")["seeds"]
        == "1"
    )


def test_notes_that_belong_to_the_numbers_are_there(mixed):
    text = " ".join(Page(mixed[1].read_text()).text)
    for note in (
        "cannot come from the second moment",
        "A public version of the authors' trainer does not pass that number to the optimizer",
        "do not compare like with like",
        "Results are distributions over seeds",
        "973580b",
        "a processor, 2 cores, 24 GiB, Linux",
        "from 2026-11-15 23:30 to 2026-11-15 23:37",
    ):
        assert note in text


def test_markdown_has_every_table_and_figure(mixed):
    out = mixed[0] / "out"
    md = (out / "report.md").read_text()
    links = re.findall(r"\]\((figures/[^)]*)\)", md)
    assert sorted(links) == sorted(f"figures/{path.name}" for path in (out / "figures").iterdir())
    assert md.count("\n| --") + md.count("\n|--") >= len(list((out / "tables").iterdir()))
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in md.splitlines() if line.startswith("|")]
    assert min(widths) > 3


def test_every_table_has_a_sentence_and_the_first_screen_its_figures(mixed):
    root, page, shown = mixed
    runs = [record.read(path) for path in sorted((root / "a").rglob("*.jsonl"))]
    pools, _ = pool(runs)
    assert all(part.text for section in sections(runs, pools) for part in section.parts if part.table)
    names = [each.name for each in headline.figures(pools)]
    assert names == ["headline-loss", "headline-accuracy", "headline-drift"]
    first, second, *_ = headline.verdict(pools)
    assert re.fullmatch(
        r".* has the smallest training loss, [\d.]+, after 7 of the paper's 500 epochs\.", first
    )
    assert second.startswith("No weight was ever further than ")
    text = page.read_text()
    assert text.index('class="verdict"') < text.index(f'id="{names[0]}-') < text.index("<h2")
    assert shown.split("\n")[0].strip() == first


def test_sections_without_runs_are_left_out(tmp_path):
    write(tmp_path, "fashion-mnist", "momentum", [0], 1)
    page, _ = run([tmp_path], tmp_path / "out")
    assert Page(page.read_text()).headings == [
        "Fashion-MNIST",
        "Cost",
        "Methods",
        "Parallel transport",
        "Runs",
    ]
    names = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert names == {
        f"{name}.csv"
        for name in ("fashion-mnist-outcomes", "fashion-mnist-cost", "state", "methods", "runs", "settings")
    }


def test_reports_are_replaced_whole_and_written_to_their_folder_only(tmp_path):
    """The default folder is inside the first run folder; the same records give the same bytes."""
    path = write(tmp_path, "mnist", "momentum", [0], 2)
    before = path.read_bytes()
    console = Console(file=(tmp_path / "shown.txt").open("w"))
    page = report([tmp_path], console=console)
    assert page == tmp_path / "report" / "report.html"
    first = {p: p.read_bytes() for p in page.parent.rglob("*") if p.is_file()}
    for old in first:
        old.write_text("out of date")
    inodes = {old: old.stat().st_ino for old in first}
    report([tmp_path], console=console)
    console.file.close()
    assert {p: p.read_bytes() for p in page.parent.rglob("*") if p.is_file()} == first
    assert all(p.stat().st_ino != inode for p, inode in inodes.items())  # another file, renamed
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "report", "shown.txt"}


def test_runs_taken_up_elsewhere_name_both_places(tmp_path):
    path = write(tmp_path, "mnist", "momentum", [0], 2)
    there = {"commit": "1234567", "torch": "2.14.0", "machine": {"processor": "another", "cores": 64}}
    line = {"kind": "resumed", "epoch": 2, "epochs": 4, "time": "2026-11-16T00:00:00+00:00", **there}
    path.write_bytes(path.read_bytes() + record.encode(line))
    (row,) = tables.provenance([record.read(path)]).rows
    assert (2, 4) in row.cells
    assert "973580b, then 1234567" in row.cells
    assert "a processor, 2 cores, 24 GiB, Linux, then another, 64 cores" in row.cells


# -- tables and figures by themselves ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_tables_fit_the_terminal(width):
    columns = (Column("a", "configuration"), *(Column(k, f"the {k} of it", "spread", ".3f") for k in "bcde"))
    table = Table("t", "A table", columns, [Row(("Scalar-moment Adam, 18 x lr", *[(0.123, 0.4)] * 4))])
    with Console(width=width, record=True, file=None, quiet=False) as console, console.capture() as shown:
        console.print(table.rich(width))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= width
    if width >= 60:  # room for every word
        assert {"Scalar-moment", "0.123", "configuration"} <= set(shown.get().split())


def test_cells():
    assert Column("a", "", "spread", ".2f").show((1.0, 0.5)) == "1.00 ± 0.50"
    assert Column("a", "", "spread", ".2f").show((1.0, None)) == "1.00"
    assert Column("a", "", "range", ".0e").show((1e-7, 2e-7)) == "1e-7 to 2e-7"
    assert Column("a", "", "range", ".0e").show((1e-7, 1e-7)) == "1e-7"
    assert Column("a", "", "epochs").show((20, 25)) == "20 of 25 epochs"
    assert Column("a", "", "epochs").show((25, 25)) == "25"
    assert Column("a", "").show("a\x1b[31mb\n") == "a [31mb "
    assert Column("a", "").show(None) == "-"
    assert tables.numbers([3, 0, 1, 2, 7]) == "0-3, 7"


def test_angles_are_those_that_were_lifted():
    theta = torch.linspace(-9, 9, 50, dtype=torch.float64)
    velocity = torch.linspace(-2, 2, 50, dtype=torch.float64)
    found, speed = figures.angles(lift(theta, velocity).numpy())
    assert np.allclose(np.exp(1j * found), np.exp(1j * theta.numpy()), atol=1e-14)
    assert np.allclose(speed, velocity.numpy(), atol=1e-14)
    assert found.min() >= 0
    assert found.max() < 2 * np.pi


def test_a_seed_without_drift_leaves_the_largest_of_the_others(tmp_path):
    """A drift of exactly 0 has no place on a logarithmic axis."""
    seeds = list(range(FEW + 1))
    path = write(tmp_path, "pendulum", "momentum", seeds, 2)
    (p,) = pool([record.read(path)])[0]
    axes = Canvas().subplots()
    values = np.full((2, len(seeds)), 1e-7)
    values[:, 0] = 0
    figures._lines(axes, p, values, figures.DRIFT)
    assert [line.get_ydata().ravel().tolist() for line in axes.lines] == [[1e-7, 1e-7]]


def test_drifts_that_are_not_finite_are_said(tmp_path):
    path = write(tmp_path, "mnist", "momentum", [0], 2, changes=lambda seeds, epoch: {"drift": [None]})
    assert look_at(path)[path].off == "not finite"


@pytest.mark.parametrize("count", [1, 2, 250, 251, 1000])
def test_long_curves_are_thinned_out_and_keep_their_ends(count):
    epochs = figures.drawn_epochs(count)
    assert len(epochs) <= figures.POINTS + 1
    assert (epochs[0], epochs[-1]) == (1, count)
    assert len(set(epochs.tolist())) == len(epochs)
