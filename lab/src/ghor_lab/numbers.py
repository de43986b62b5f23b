"""`ghor numbers`: write the numbers in texts from records, by templates.

    <!-- numbers: first-look -->

    After 25 epochs the loss is 0.595.

    <!-- /numbers -->

The text between the comments is written from the template numbers/first-look.jinja in the folder of results,
here

    After 25 epochs the loss is {{ run("mnist", "geometric-adam").loss(25) }}.

A template can use everything in `Book`. A check reports whether anything would change. Nothing is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateNotFound

from . import paper
from .caught import table as caught_table
from .files import below, store
from .pack import SUFFIX, load
from .pool import best, counted, off, pool, spread
from .record import Run, each_once
from .table import Column, short
from .tables import numbers as seed_list
from .text.trials import Book as Trials
from .text.trials import books

BLOCK = re.compile(r"(<!-- numbers: ([\w-]+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)
NAMES = {
    "geometric-adam": "geometric Adam",
    "scalar-moment-adam": "scalar-moment Adam",
    "momentum": "momentum",
    "gradient": "gradient",
    "standard-adam": "standard Adam",
}
DIGITS = {"loss": ".3f", "test_accuracy": ".1f", "drift": ".1e"}
REPORTED = {"loss": "final", "best": "best", "test_accuracy": "accuracy"}


class Found:
    """A run of one or more seeds, with its numbers as texts. By default numbers are from the last epoch."""

    def __init__(self, run: Run) -> None:
        self.record, config = run, run.header["config"]
        self.experiment, self.optimizer = config["experiment"], config["optimizer"]
        self.seeds = seed_list(config["seeds"])
        self.rate = config.get("manifold_lr") or config["lr"]  # of the manifold weights
        self.label, self.epochs, self.asked = config.get("label"), len(run.epochs), run.epochs_asked
        self.outcome = paper.OUTCOMES.get(self.experiment, {}).get(self.optimizer)

    def values(self, key: str, epoch: int | None = None) -> Any:
        """The values of all seeds at an epoch, (seeds,); nan if one was not finite."""
        epoch = self.epochs if epoch is None else epoch
        if not 0 < epoch <= self.epochs:
            raise ValueError(f"{self.record.path} has {counted(self.epochs, 'epoch')}, there is no {epoch}")
        return np.array(self.record.epochs[epoch - 1][key], dtype=np.float64)

    def loss(self, epoch: int | None = None) -> str:
        """Mean and, for several seeds, sample deviation."""
        return Column("", "", "spread", DIGITS["loss"]).show(spread(self.values("loss", epoch)))

    def accuracy(self, epoch: int | None = None, digits: int = 1) -> str:
        """Test accuracy in percent."""
        return Column("", "", "spread", f".{digits}f").show(spread(self.values("test_accuracy", epoch)))

    def best(self) -> str:
        """The smallest loss over all epochs; for one seed."""
        losses = np.array([line["loss"][:1] for line in self.record.epochs], dtype=np.float64)
        return Column("", "", "number", DIGITS["loss"]).show(best(losses)[0])

    def drift(self) -> str:
        """The largest drift over all epochs and seeds; "-" if no weight is on a manifold."""
        found = [x for line in self.record.epochs for x in line["drift"] or ()]
        largest = np.array(found, dtype=np.float64).max() if found else None
        return Column("", "", "number", DIGITS["drift"]).show(largest)

    def range(self, key: str, count: int, spec: str) -> str:
        """Smallest and largest value over the last epochs; for one seed."""
        values = [line[key][0] for line in self.record.epochs[-count:]]
        return f"{min(values):{spec}} to {max(values):{spec}}"

    @property
    def structure(self) -> float:
        """The worst deviation of encoder and decoder from symplectic."""
        lines = [line["symplecticity"] for line in self.record.epochs]
        return max(x for line in lines for key in ("encoder", "decoder") for x in line[key])

    @property
    def minutes(self) -> float:
        """The time of all epochs."""
        return float(sum(line["seconds"] for line in self.record.epochs)) / 60

    def off(self, key: str = "loss") -> str:
        """Distance from the paper, in its standard deviations; only for the paper's number of epochs."""
        if self.outcome is None or self.epochs != paper.EPOCHS[self.experiment]:
            return ""
        distance = off(float(self.values(key).mean()), getattr(self.outcome, REPORTED[key]))
        return "" if distance is None or not np.isfinite(distance) else f"{distance:+z.1f}"


class Book:
    """What templates can use: the records and JSON files in a folder of results, and the paper's numbers."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.runs = cache(self._runs)

    def _runs(self, folder: str) -> list[Run]:
        paths = below(self.results / folder, SUFFIX, ".jsonl")
        return each_once(run for path in paths for run in load(path))

    def run(
        self, folder: str, optimizer: str, seed: int = 0, label: str | None = None, epochs: int = 0
    ) -> Found:
        """The shortest record with this optimizer, seed and label that has at least so many epochs."""
        found = []
        for run in self.runs(folder):
            config = run.header["config"]
            same = (config["optimizer"], config.get("label")) == (optimizer, label) and seed in config[
                "seeds"
            ]
            if same and len(run.epochs) >= epochs:
                found.append(run)
        if not found:
            least = f", of {counted(epochs, 'epoch')} or more" if epochs else ""
            raise ValueError(
                f"{self.results / folder} has no record of {optimizer}, seed {seed}, label {label}{least}"
            )
        return Found(min(found, key=lambda run: len(run.epochs)))

    def all(self, folder: str) -> list[Found]:
        """All records of a folder."""
        return [Found(run) for run in self.runs(folder)]

    @staticmethod
    def paper(experiment: str, optimizer: str, key: str = "loss") -> str:
        """The paper's mean and standard deviation (for the drift smallest and largest), with its digits."""
        outcome = paper.OUTCOMES[experiment][optimizer]
        if key == "drift":
            return Column("", "", "range", ".1e").show(outcome.drift)
        pair = getattr(outcome, REPORTED[key])
        digits = ".2f" if key == "test_accuracy" else ".3f"
        return "" if pair is None else f"{pair[0]:{digits}} ± {pair[1]:{digits}}"

    @staticmethod
    def authors(key: str, optimizer: str, epoch: int) -> str:
        """A number from the authors' published run on MNIST; "-" if there is none."""
        curve = paper.AUTHORS[key]
        values = dict(zip(curve.epochs, curve.values.get(optimizer, ()), strict=False))
        return short(f"{values[epoch]:{DIGITS[key]}}") if epoch in values else "-"

    def caught(self, folder: str) -> str:
        """The table of `ghor caught`, from the records of a folder."""
        made = caught_table("caught", pool(self.runs(folder))[0])
        return made.markdown().strip() if made else ""

    def text(self, folder: str) -> Trials:
        """The largest group of comparable runs of the language model in a folder."""
        found = books(self.runs(folder))
        if not found:
            raise ValueError(f"{self.results / folder} has no finished run of the language model")
        return found[0]

    def json(self, path: str) -> Any:
        """A JSON file from the results."""
        return json.loads((self.results / path).read_text(encoding="utf-8"))


def count(files: Sequence[Path]) -> int:
    """The number of blocks in the texts."""
    return sum(len(BLOCK.findall(path.read_text(encoding="utf-8"))) for path in files)


def write(files: Sequence[Path], results: Path, check: bool = False) -> list[str]:
    """Write the numbers; returns the places where they changed, or for a check would change.

    Raises ValueError for a block that is not closed or cannot be written.
    """
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
    book = Book(results)
    templates = results / "numbers"
    environment = Environment(
        loader=FileSystemLoader(templates), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.globals |= {
        key: getattr(book, key) for key in ("run", "all", "paper", "authors", "caught", "json", "text")
    }
    environment.globals["names"] = NAMES
    environment.filters["f"] = lambda value, spec: short(format(value, spec))
    changed = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text in UTF-8: {error}") from None
        blocks = list(BLOCK.finditer(text))
        if not text.count("<!-- numbers:") == text.count("<!-- /numbers") == len(blocks):
            raise ValueError(
                f"{path}: a block does not begin with <!-- numbers: NAME --> or end with <!-- /numbers -->"
            )
        new = text
        for block in blocks:
            line = text.count("\n", 0, block.start()) + 1
            try:
                made = environment.get_template(f"{block[2]}.jinja").render().strip()
            except TemplateNotFound:
                raise ValueError(
                    f"{path}, line {line}: there is no {templates / block[2]}.jinja; run it in the clone, "
                    "or name the folder of records with --results"
                ) from None
            except (TemplateError, ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
            if block[3] != f"\n{made}\n\n":
                changed.append(f"{path}, line {line}: the records say otherwise")
                new = new.replace(block[0], f"{block[1]}\n{made}\n\n{block[4]}", 1)
        if new != text and not check:
            store(new.encode(), path)
    return changed
