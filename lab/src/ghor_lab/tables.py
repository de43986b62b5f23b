"""The paper's tables made from records, with the paper's rows beside ours. Numbers only; words are in
sections.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import paper
from .config import READINGS
from .pool import EXPERIMENTS, FEW, OPTIMIZERS, Pool, best, name, off, place, spread
from .protocol import JUDGED, verdicts
from .record import Run
from .table import Column, Row, Table

QUANTITIES = ("loss", "test_accuracy", "drift")

CONFIGURATION = Column("configuration", "configuration")
SOURCE = Column("source", "source")
EPOCHS = Column("epochs", "epochs", "epochs")
SEEDS = Column("seeds", "seeds", "number", "d")
NO_LABEL = "own rates"  # of runs that are no reading of the paper
AT_ONCE = Column("seeds_at_once", "seeds at once")


def by_optimizer(pools: Sequence[Pool]) -> Iterator[tuple[str, list[Pool]]]:
    """The pools of one experiment, grouped by optimizer."""
    for optimizer, same in groupby(pools, lambda p: p.optimizer):
        yield optimizer, list(same)


# -- outcomes ------------------------------------------------------------------------------------------------


def outcomes(experiment: str, pools: Sequence[Pool]) -> Table:
    """Final and best loss, accuracy and drift: the paper's outcome tables of the vision transformer.

    A few runs get a row each. Many get a row for their mean, and one for the mean of those that the gate
    accepts.
    """
    rows = []
    for optimizer, same in by_optimizer(pools):
        reported = paper.OUTCOMES.get(experiment, {}).get(optimizer)
        if reported:
            numbers = (reported.final, None, reported.best, reported.accuracy, None, reported.drift, None)
            asked = (paper.EPOCHS[experiment], None)
            rows.append(Row((OPTIMIZERS[optimizer], "paper", asked, paper.SEEDS, *numbers), paper=True))
        for p in same:
            accepted = np.array([why is None for why in p.verdicts])
            for source, which in _shown(p):
                rows.append(_outcome(p, source, which, reported, _gate(accepted[which])))
            if len(p.seeds) > FEW and not accepted.all():
                only = np.flatnonzero(accepted)
                rows.append(_outcome(p, "ghor, by the gate", only, reported, _gate(accepted[only])))
    columns = (
        *(CONFIGURATION, SOURCE, EPOCHS, SEEDS),
        Column("final_loss", "final loss", "spread", ".3f"),
        Column("final_difference", "loss off by (s.d.)", "number", "+z.1f"),
        Column("best_loss", "best loss", "spread", ".3f"),
        Column("test_accuracy", "test accuracy (%)", "spread", ".2f"),
        Column("accuracy_difference", "accuracy off by (s.d.)", "number", "+z.1f"),
        Column("drift", "drift ‖YᵀY - I‖, last epoch", "range", ".1e"),
        Column("gate", "authors' gate"),
    )
    return Table(f"{experiment}-outcomes", f"{name(EXPERIMENTS, experiment)}: outcomes", columns, rows)


def _shown(p: Pool) -> list[tuple[str, NDArray[np.int64]]]:
    """The rows of a pool, and the seeds in each: one by one if they are few, otherwise all in one."""
    if len(p.seeds) > FEW:
        return [("ghor", np.arange(len(p.seeds)))]
    return [(f"ghor, seed {seed}", np.array([i])) for i, seed in enumerate(p.seeds)]


def _gate(accepted: NDArray[np.bool_]) -> str:
    if len(accepted) == 1:
        return "accepted" if accepted[0] else "excluded"
    return f"{accepted.sum()} of {len(accepted)} accepted"


def _outcome(p: Pool, source: str, which: NDArray[np.int64], reported: paper.Outcome | None, why: str) -> Row:
    """The cells for some of the seeds."""
    losses, accuracy, drift = (None if (x := p.series(key)) is None else x[:, which] for key in QUANTITIES)
    numbers: tuple[Any, ...] = (None,) * 6
    if len(which):
        theirs = reported if reported and p.epochs == paper.EPOCHS[p.experiment] else None
        final, right = (None if x is None else spread(x[-1]) for x in (losses, accuracy))
        numbers = (
            final,
            off(final[0], theirs.final) if theirs and final else None,
            None if losses is None else spread(best(losses)),
            right,
            off(right[0], theirs.accuracy) if theirs and right else None,
            None if drift is None else (float(drift[-1].min()), float(drift[-1].max())),
        )
    return Row((p.title(), source, (p.epochs, p.asked), len(which), *numbers, why))


def equal_epochs(pools: Sequence[Pool]) -> Table | None:
    """MNIST at the last epochs that the authors' tables and our runs share; the authors' run first."""
    rows = []
    for p in pools:
        ours = {key: p.series(key) for key in QUANTITIES}
        theirs = {
            key: dict(zip(curve.epochs, curve.values[p.optimizer], strict=True))
            for key, curve in paper.AUTHORS.items()
            if p.optimizer in curve.values and ours[key] is not None
        }
        last = {
            max((epoch for epoch in values if epoch <= p.epochs), default=0) for values in theirs.values()
        } - {0}
        for epoch in sorted(last, reverse=True):
            values = [theirs.get(key, {}).get(epoch) for key in QUANTITIES]
            numbers = (v if v is None else (v, None) for v in values)
            rows.append(
                Row((name(OPTIMIZERS, p.optimizer), "authors, one run", epoch, 1, *numbers), paper=True)
            )
            for source, which in _shown(p):
                means = [
                    None if x is None or v is None else spread(x[epoch - 1, which])
                    for x, v in zip(ours.values(), values, strict=True)
                ]
                rows.append(Row((p.title(), source, epoch, len(which), *means)))
    columns = (
        *(CONFIGURATION, SOURCE, Column("epoch", "at epoch", "number", "d"), SEEDS),
        Column("loss", "training loss", "spread", ".3f"),
        Column("test_accuracy", "test accuracy (%)", "spread", ".2f"),
        Column("drift", "drift ‖YᵀY - I‖", "spread", ".1e"),
    )
    return Table("mnist-equal-epochs", "MNIST: at equal epochs", columns, rows) if rows else None


def pendulum_outcomes(pools: Sequence[Pool]) -> Table:
    """Final and best error by configuration and reading, and the distance from the paper."""
    rows = []
    asked = paper.EPOCHS["pendulum"]
    for optimizer, same in by_optimizer(pools):
        reported = paper.OUTCOMES["pendulum"].get(optimizer)
        if reported:
            cells = (1e-4, (asked, None), paper.SEEDS, reported.final, reported.best, None, None)
            rows.append(Row((OPTIMIZERS[optimizer], "paper", *cells), paper=True))
        for p in same:
            errors = p.series("loss")
            if errors is None:
                continue
            final, lowest = spread(errors[-1]), spread(best(errors))
            comparable = reported is not None and p.epochs == asked
            differences = (
                off(final[0], reported.final) if reported and comparable else None,
                off(lowest[0], reported.best) if reported and comparable else None,
            )
            source = f"ghor, {p.label}" if p.label else "ghor"
            cells_of_ours = (
                p.config.get("lr"),
                (p.epochs, p.asked),
                len(p.seeds),
                final,
                lowest,
                *differences,
            )
            rows.append(Row((p.title(label=False), source, *cells_of_ours)))
    columns = (
        *(CONFIGURATION, SOURCE, Column("lr", "learning rate", "number", ".0e"), EPOCHS, SEEDS),
        Column("final_error", "final error", "spread", ".3f"),
        Column("best_error", "best error", "spread", ".3f"),
        Column("final_difference", "final off by (s.d.)", "number", "+z.1f"),
        Column("best_difference", "best off by (s.d.)", "number", "+z.1f"),
    )
    return Table("pendulum-outcomes", "Pendulum: outcomes", columns, rows)


def pendulum_time(pools: Sequence[Pool]) -> Table:
    """Wall-clock minutes for all seeds of a configuration, and the paper's for as many seeds and epochs.

    A reading that has one pool for each of the paper's configurations gets a total.
    """
    rows = []
    for label in sorted({p.label for p in pools}, key=lambda label: place(READINGS, label)):
        same = [p for p in pools if p.label == label]
        minutes = [float(p.numbers("seconds").sum()) / 60 for p in same]
        theirs = [_paper_minutes(p) for p in same]
        for p, mine, paper_minutes in zip(same, minutes, theirs, strict=True):
            ratio = paper_minutes / mine if paper_minutes and mine else None
            cells = ((p.epochs, p.asked), len(p.seeds), mine, paper_minutes, ratio)
            rows.append(Row((label or NO_LABEL, p.title(label=False), *cells)))
        total, reported = math.fsum(minutes), math.fsum(m for m in theirs if m)
        if [p.optimizer for p in same] == list(paper.OUTCOMES["pendulum"]) and total:
            rows.append(Row((label or NO_LABEL, "all four", None, None, total, reported, reported / total)))
    columns = (
        *(Column("reading", "reading"), CONFIGURATION, EPOCHS, SEEDS),
        Column("minutes", "all seeds at once (min)", "number", ".1f"),
        Column("paper_minutes", "paper, one after another (min)", "number", ".1f"),
        Column("ratio", "paper / ghor", "number", ".1f"),
    )
    return Table("pendulum-time", "Pendulum: wall-clock time", columns, rows)


def _paper_minutes(p: Pool) -> float | None:
    reported = paper.OUTCOMES["pendulum"].get(p.optimizer)
    if reported is None or reported.minutes is None:
        return None
    return reported.minutes[0] * len(p.seeds) * p.epochs / paper.EPOCHS["pendulum"]


def pendulum_structure(pools: Sequence[Pool]) -> Table | None:
    """The largest distance of weights from St(1, 2), and of encoder and decoder from symplectic."""
    rows = []
    for p in pools:
        worst = [
            p.series("drift"),
            p.series("symplecticity", "encoder"),
            p.series("symplecticity", "decoder"),
        ]
        if any(values is not None for values in worst):
            cells = [None if values is None else float(values.max()) for values in worst]
            rows.append(Row((p.title(), (p.epochs, p.asked), len(p.seeds), *cells)))
    columns = (
        *(CONFIGURATION, EPOCHS, SEEDS),
        Column("drift", "drift ‖ΦᵀΦ - I‖", "number", ".1e"),
        Column("encoder", "encoder ‖M J Mᵀ - J‖", "number", ".1e"),
        Column("decoder", "decoder ‖Mᵀ J M - J‖", "number", ".1e"),
    )
    return Table("pendulum-structure", "Pendulum: what training keeps", columns, rows) if rows else None


# -- cost ----------------------------------------------------------------------------------------------------


def cost(experiment: str, pools: Sequence[Pool]) -> Table | None:
    """Milliseconds per step by its parts, seconds per epoch, memory: medians over epochs; for memory the
    maximum.
    """
    rows = []
    for optimizer, same in by_optimizer(pools):
        theirs = paper.COSTS.get(experiment, {}).get(optimizer)
        once = {json.dumps(p.config): p for p in reversed(same)}  # the longest pool of each configuration
        timed = [
            (p, [p.numbers("ms", x) for x in ("ad", "direction", "retraction", "other")])
            for p in once.values()
        ]
        timed = [(p, parts) for p, parts in timed if all(len(part) for part in parts)]
        if theirs and timed:
            times = (theirs.ad, theirs.direction, theirs.retraction, theirs.other, theirs.share)
            head = (OPTIMIZERS[optimizer], "paper", (paper.EPOCHS[experiment], None), "1")
            rows.append(Row((*head, *times, theirs.seconds, theirs.peak), paper=True))
        for p, parts in timed:
            ad, direction, retraction, other = (float(np.median(part)) for part in parts)
            share = 100 * (direction + retraction) / (ad + direction + retraction)
            seconds, peak = p.numbers("seconds"), p.numbers("peak_mib")
            median = float(np.median(seconds)) if len(seconds) else None
            largest = float(peak.max()) / 1024 if len(peak) else None
            times = (ad, direction, retraction, other, share)
            head_of_ours = (p.title(epochs=False), "ghor", (p.epochs, p.asked), _at_once(p))
            rows.append(Row((*head_of_ours, *times, median, largest)))
    columns = (
        *(CONFIGURATION, SOURCE, EPOCHS, AT_ONCE),
        Column("ad_ms", "AD (ms)", "number", ".1f"),
        Column("direction_ms", "direction (ms)", "number", ".2f"),
        Column("retraction_ms", "retraction (ms)", "number", ".2f"),
        Column("other_ms", "other (ms)", "number", ".1f"),
        Column("geometric_share_percent", "geometric share (%)", "number", ".1f"),
        Column("seconds_per_epoch", "s / epoch", "number", ".2f"),
        Column("peak_gib", "peak memory (GiB)", "number", ".2f"),
    )
    title = f"{name(EXPERIMENTS, experiment)}: cost of a step"
    return Table(f"{experiment}-cost", title, columns, rows) if rows else None


def _at_once(p: Pool) -> str:
    return ", ".join(str(count) for count in sorted({len(run.header["config"]["seeds"]) for run in p.runs}))


def state(pools: Sequence[Pool]) -> Table | None:
    """Entries of the optimizer state as the paper counts them, counted on the tensors of a real optimizer."""
    rows: list[Row] = []
    seen = set()
    transformer = {"mnist", "fashion-mnist"}
    for p in sorted(
        pools, key=lambda p: p.experiment not in transformer
    ):  # a stable sort: otherwise the order is kept
        counted = p.runs[0].header.get("state")
        if counted is None:
            continue
        network = "vision transformer" if p.experiment in transformer else "symplectic autoencoder"
        ours = (counted.get("entries_per_manifold_weight"), counted.get("total_entries"), counted.get("mib"))
        head = (network, p.title(label=False, epochs=False), "ghor", _at_once(p))
        key = (
            *head,
            *ours[:2],
            None if ours[2] is None else f"{ours[2]:.2f}",
        )  # older records have fewer digits
        if key in seen:
            continue
        theirs = paper.STATES.get(p.optimizer) if p.experiment in transformer else None
        if theirs and (network, p.optimizer) not in seen:
            numbers = (theirs.per_weight, theirs.total, theirs.mib)
            rows.append(Row((network, OPTIMIZERS[p.optimizer], "paper", "1", *numbers), paper=True))
        seen |= {key, (network, p.optimizer)}
        rows.append(Row((*head, *ours)))
    columns = (
        *(Column("network", "network"), CONFIGURATION, SOURCE, AT_ONCE),
        Column("entries_per_manifold_weight", "entries per manifold weight", "number", ",.0f"),
        Column("total_entries", "total entries", "number", ",.0f"),
        Column("mib", "MiB", "number", ".2f"),
    )
    return Table("state", "Optimizer state", columns, rows) if rows else None


# -- where the numbers come from -----------------------------------------------------------------------------


def provenance(runs: Sequence[Run]) -> Table:
    """One row per run: what, when, where, and with which versions."""
    rows = []
    compiled = [Column("compiled", "layers")] if any(history(run, "compiled") for run in runs) else []
    versions = ("commit", "ghor", "torch", "python", *(column.key for column in compiled), "machine")
    for run in runs:
        header, config = run.header, run.header["config"]
        last = run.epochs[-1].get("time") if run.epochs else None
        cells: tuple[Any, ...] = (
            run.path.name,
            name(EXPERIMENTS, config["experiment"]),
            ", ".join(part for part in (name(OPTIMIZERS, config["optimizer"]), config.get("label")) if part),
            numbers(config["seeds"]),
            (len(run.epochs), run.epochs_asked),
            _verdict(run),
            *(", then ".join(history(run, key)) for key in versions),
            config.get("device"),
            config.get("threads"),
            *(minute(time) for time in (header.get("started"), last)),
        )
        rows.append(Row(cells))
    columns = (
        *(
            Column("file", "file"),
            Column("experiment", "experiment"),
            CONFIGURATION,
            Column("seeds", "seeds"),
            EPOCHS,
        ),
        *(
            Column("gate", "authors' gate"),
            Column("commit", "commit"),
            Column("ghor", "ghor"),
            Column("torch", "torch"),
            Column("python", "Python"),
            *compiled,
        ),
        *(
            Column("machine", "machine"),
            Column("device", "device"),
            Column("threads", "threads", "number", "d"),
        ),
        *(Column("started", "started"), Column("last", "last epoch")),
    )
    return Table("runs", "Runs", columns, rows)


def _verdict(run: Run) -> str | None:
    """The verdict of the authors' gate on the run's seeds, in words; the language model is not theirs."""
    if not run.epochs or run.header["config"]["experiment"] == "text":
        return None
    seeds = run.header["config"]["seeds"]
    found = [(seed, why) for seed, why in zip(seeds, verdicts(run), strict=True) if why is not None]
    words = [why if len(seeds) == 1 else f"seed {seed}: {why}" for seed, why in found]
    if words:
        return f"excluded: {'; '.join(words)}"
    return "accepted" if len(run.epochs) >= JUDGED else "accepted so far"


def settings(pools: Sequence[Pool]) -> Table:
    """Every field of the configurations: one row per field and value, with those that have it."""
    rows = []
    for experiment, of_one in groupby(pools, lambda p: p.experiment):
        same = list(of_one)
        for key in dict.fromkeys(
            key for p in same for key in p.config if key not in ("experiment", "optimizer", "label")
        ):
            values: dict[str, list[str]] = {}
            for p in same:
                values.setdefault(json.dumps(p.config.get(key)), []).append(p.title())
            for value, titles in values.items():
                who = "all" if len(values) == 1 else "; ".join(dict.fromkeys(titles))
                rows.append(Row((name(EXPERIMENTS, experiment), key, value, who)))
    columns = (
        *(Column("experiment", "experiment"), Column("setting", "setting")),
        *(Column("value", "value"), Column("configurations", "configurations")),
    )
    return Table("settings", "Settings", columns, rows)


def numbers(values: Sequence[int]) -> str:
    """0 1 2 3 7 -> "0-3, 7"."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def history(run: Run, key: str) -> list[str]:
    """The header's value, and each value that it had when the run was resumed, in words."""
    found = (line[key] for line in (run.header, *run.others) if line.get(key) is not None)
    words = {"machine": machine, "compiled": lambda c: "compiled C" if c else "torch's"}.get(key, str)
    return list(filter(None, dict.fromkeys(map(words, found))))


def machine(found: dict[str, Any]) -> str:
    """The machine in words."""
    words = {"processor": "{}", "cores": "{} cores", "memory_gib": "{:.0f} GiB", "system": "{}"}
    return ", ".join(text.format(found[key]) for key, text in words.items() if found.get(key))


def minute(time: str | None) -> str | None:
    """2026-11-15T23:30:00+00:00 -> 2026-11-15 23:30."""
    return time[:16].replace("T", " ") if time else None
