"""The first screen of a report: its sentences and its figures."""

import pytest
from synthetic import pick, rows, run, write

from ghor_lab import headline, paper, record
from ghor_lab.pool import pool


def pools_in(folder):
    return pool([record.read(path) for path in sorted(folder.glob("*.jsonl"))])[0]


def test_distances_are_in_the_papers_deviations_where_epochs_are_equal(tmp_path, monkeypatch):
    monkeypatch.setitem(paper.EPOCHS, "mnist", 3)
    for seed, epochs in ((0, 3), (1, 2)):
        write(
            tmp_path,
            "mnist",
            "geometric-adam",
            [seed],
            epochs,
            changes=lambda s, e: {"loss": [0.254], "test_accuracy": [84.88]},
        )
    page, shown = run([tmp_path], tmp_path / "out")
    full, less = (
        pick(rows(tmp_path / "out", "mnist-outcomes"), source=f"ghor, seed {seed}", epochs=e)
        for seed, e in ((0, "3"), (1, "2"))
    )
    assert (float(full["final_difference"]), float(full["accuracy_difference"])) == pytest.approx((1, -2))
    assert (less["final_difference"], less["accuracy_difference"]) == ("", "")
    (line,) = [line.split() for line in shown.splitlines() if line.startswith("MNIST ") and "0.254" in line][
        :1
    ]
    assert line[1:5] == ["Geometric", "Adam", "3", "1"]
    assert [line[5], line[9], line[10], line[14]] == ["0.254", "+1.0", "84.9", "-2.0"]
    assert shown.startswith(
        "1 of 2 results at the paper's number of epochs are within 2 of its standard deviations."
    )
    assert (
        page.read_text().index("1 of 2 results")
        < page.read_text().index("84.9")
        < page.read_text().index("<h2")
    )


def test_of_several_settings_those_nearest_to_the_papers_count(tmp_path, monkeypatch):
    monkeypatch.setitem(paper.EPOCHS, "mnist", 3)
    other = {"lr": 0.5}, {"network": {"blocks": 2}}, {"batch_size": 9}
    for seed, change in enumerate(({}, *other)):
        write(tmp_path, "mnist", "momentum", [seed], 3, **change)
    write(tmp_path, "mnist", "momentum", [4], 3, threads=1)  # changes rounding only
    write(tmp_path, "mnist", "gradient", [0], 3, lr=0.5)  # there is no other
    pools = pools_in(tmp_path)
    assert sorted((p.optimizer, p.seeds) for p in headline.plain(pools)) == [
        ("gradient", [0]),
        ("momentum", [0]),
        ("momentum", [4]),
    ]
    assert "of 6 results" in headline.verdict(pools)[0]  # a loss and an accuracy of each


def test_a_demo_says_what_it_shows(tmp_path):
    """All at one learning rate: the two Adams agree, and how much more the others have."""
    ends = {"geometric-adam": 0.3, "scalar-moment-adam": 0.31, "momentum": 0.5, "gradient": 0.7}
    for optimizer, end in ends.items():
        write(
            tmp_path,
            "pendulum",
            optimizer,
            [0, 1],
            3,
            lr=1e-2,
            changes=lambda s, e, end=end: {"loss": [end, end]},
        )
    pools = pools_in(tmp_path)
    assert headline.verdict(pools) == [
        "Without a second moment the reconstruction error is 2.0 times as large.",
        "No weight was ever further than 4.0e-7 from its manifold.",
        "All ran at the learning rate 0.01. On St(1, 2) the two Adams are one algorithm: what they differ "
        "by, at equal rates, is chance.",
    ]
    table = headline.summary(pools).filled()
    assert [table.shown(row)[:5] for row in table.rows] == [
        ["Pendulum", "Geometric Adam", "3 of 1000 epochs", "2", "0.300 ± 0.000"],
        ["Pendulum", "Scalar-moment Adam", "3 of 1000 epochs", "2", "0.310 ± 0.000"],
        ["Pendulum", "Riemannian momentum", "3 of 1000 epochs", "2", "0.500 ± 0.000"],
        ["Pendulum", "Riemannian gradient", "3 of 1000 epochs", "2", "0.700 ± 0.000"],
    ]
    letters = headline.in_letters(pools, 80)
    assert [line.split("●")[0].strip(" ░") for line in letters[:4]] == [
        *("Geometric Adam", "Scalar-moment Adam", "Riemannian momentum", "Riemannian gradient")
    ]
    assert max(map(len, letters)) <= 80
    places = [line.rindex("●") for line in letters[:4]]
    assert places == sorted(places)


def test_runs_of_one_epoch_are_for_the_count_only(tmp_path):
    write(tmp_path, "mnist", "geometric-adam", [0], 1, name="one")
    assert [p.epochs for p in headline.plain(pools_in(tmp_path))] == [1]
    write(tmp_path, "mnist", "geometric-adam", [1], 2, name="two")
    assert [p.epochs for p in headline.plain(pools_in(tmp_path))] == [2]


def test_a_loss_that_is_not_finite_is_not_the_smallest(tmp_path):
    """And none of a comparison, and no drift that is not finite is within anything."""
    bad = {"loss": [None], "drift": [None]}
    write(tmp_path / "a", "mnist", "geometric-adam", [0], 3, changes=lambda s, e: bad)
    write(tmp_path / "a", "mnist", "gradient", [0], 3)
    claim, *more = headline.verdict(pools_in(tmp_path / "a"))
    assert claim.startswith("Riemannian gradient has the smallest training loss, 0.780, after 3 of")
    assert not any("ever further" in line for line in more)
    for optimizer in paper.OUTCOMES["pendulum"]:
        changes = {"loss": [None]} if optimizer == "momentum" else {}
        write(
            tmp_path / "b",
            "pendulum",
            optimizer,
            [0],
            3,
            changes=lambda s, e, changes=changes: changes,
        )
    assert headline.verdict(pools_in(tmp_path / "b"))[0].startswith("Riemannian gradient has the smallest")


def test_nothing_yet():
    assert headline.verdict([]) == ["There is no whole epoch yet."]
    assert headline.summary([]) is None
    assert headline.figures([]) == headline.in_letters([], 80) == []
