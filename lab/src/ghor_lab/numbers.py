"""`ghor numbers`: write the numbers in texts from records, by templates.

    <!-- numbers: first-look -->

    After 25 epochs the loss is 0.595.

    <!-- /numbers -->

The text between the comments is written from the template numbers/first-look.jinja in the folder of results,
here

    After 25 epochs the loss is {{ run("mnist", "geometric-adam").loss(25) }}.

A template can use what `environment` names. A check reports whether anything would change. Nothing is
trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError, TemplateNotFound

from . import caught, paper, trials
from .files import store
from .pools import Array, pool
from .quantities import ACCURACY, BEST, DECODER, DRIFT, ENCODER, LOSS, mean
from .record import Run, read_all
from .tables import counted, listed, number, short, spread

BLOCK = re.compile(r"(<!-- numbers: ([\w-]+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)
NAMES = {
    "geometric-adam": "geometric Adam",
    "scalar-moment-adam": "scalar-moment Adam",
    "momentum": "momentum",
    "gradient": "gradient",
    "standard-adam": "standard Adam",
}
# by the names that quantities have in records and templates
QUANTITIES = {"loss": LOSS, "best": BEST, "test_accuracy": ACCURACY, "drift": DRIFT}


class Found:
    """A run of one or more seeds, with its numbers as texts. By default numbers are from the last epoch."""

    def __init__(self, run: Run) -> None:
        ((p,), _) = pool([run])
        self.record, self.pool, self.epochs, self.asked = run, p, p.epochs, p.asked
        self.experiment, self.optimizer, self.label = p.experiment, p.optimizer, p.label
        self.seeds = listed(p.seeds)
        self.in_paper = p.optimizer in paper.REPORTED.get(p.experiment, {})

    def values(self, key: str, epoch: int | None = None) -> Array:
        """The values of all seeds at an epoch, (seeds,); nan if one was not finite."""
        epoch = self.epochs if epoch is None else epoch
        if not 0 < epoch <= self.epochs:
            raise ValueError(f"{self.record.path} has {counted(self.epochs, 'epoch')}, there is no {epoch}")
        if (found := self.pool.series(key)) is None:
            raise ValueError(f"{self.record.path} has no {key}")
        row: Array = found[epoch - 1]
        return row

    def loss(self, epoch: int | None = None) -> str:
        """Mean and, for several seeds, sample deviation."""
        return spread(*mean(self.values("loss", epoch)), LOSS.spec)

    def accuracy(self, epoch: int | None = None, digits: int = 1) -> str:
        """Test accuracy in percent."""
        return spread(*mean(self.values("test_accuracy", epoch)), f".{digits}f")

    def drift(self) -> str:
        """The largest drift over all epochs and seeds; "-" if no weight is on a manifold."""
        found = self.pool.series("drift")
        return number(None if found is None else float(found.max()), DRIFT.spec)

    def range(self, key: str, count: int, spec: str) -> str:
        """Smallest and largest value over the last epochs; for one seed."""
        values = [line[key][0] for line in self.record.epochs[-count:]]
        return f"{min(values):{spec}} to {max(values):{spec}}"

    @property
    def structure(self) -> float:
        """The worst deviation of encoder and decoder from symplectic."""
        return max(float(x.max()) for q in (ENCODER, DECODER) if (x := q.of(self.pool)) is not None)

    def off(self, key: str = "loss") -> str:
        """Distance from the paper, in its standard deviations; only for the paper's number of epochs."""
        distance = QUANTITIES[key].off(self.pool)
        return "" if distance is None else f"{distance:+z.1f}"


def of_paper(experiment: str, optimizer: str, key: str = "loss") -> str:
    """The paper's mean and standard deviation (for the drift smallest and largest), with its digits."""
    return QUANTITIES[key].paper(experiment, optimizer)


def authors(key: str, optimizer: str, epoch: int) -> str:
    """A number from the authors' published run on MNIST; "-" if there is none."""
    curve = paper.AUTHORS[key]
    values = dict(zip(curve.epochs, curve.values.get(optimizer, ()), strict=False))
    spec = {"loss": ".3f", "test_accuracy": ".1f", "drift": ".1e"}[key]
    return number(values.get(epoch), spec)


def environment(results: Path) -> Environment:
    """The templates of a folder of results, and what they can use: its records, and the paper's numbers."""
    runs = cache(lambda folder: read_all(results / folder)[0])

    def run(folder: str, optimizer: str, seed: int = 0, label: str | None = None, epochs: int = 0) -> Found:
        """The shortest record with this optimizer, seed and label that has at least so many epochs."""
        found = [
            run
            for run in runs(folder)
            if (run.header["config"]["optimizer"], run.header["config"].get("label")) == (optimizer, label)
            and seed in run.header["config"]["seeds"]
            and len(run.epochs) >= max(epochs, 1)
        ]
        if not found:
            least = f", of {counted(epochs, 'epoch')} or more" if epochs else ""
            wanted = f"{optimizer}, seed {seed}, label {label}{least}"
            raise ValueError(f"{results / folder} has no record of {wanted}")
        return Found(min(found, key=lambda run: len(run.epochs)))

    def text(folder: str) -> trials.Book:
        """The largest group of comparable runs of the language model in a folder."""
        if not (found := trials.books(runs(folder))):
            raise ValueError(f"{results / folder} has no finished run of the language model")
        return found[0]

    def counts(folder: str) -> str:
        """How many runs of a folder were caught."""
        made = caught.table(pool(runs(folder))[0])
        return made.markdown().strip() if made else ""

    made = Environment(
        loader=FileSystemLoader(results / "numbers"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.globals |= {"names": NAMES, "run": run, "text": text, "caught": counts, "paper": of_paper}
    made.globals["authors"] = authors
    made.globals["all"] = lambda folder: [Found(run) for run in runs(folder)]
    made.globals["json"] = lambda path: json.loads((results / path).read_text(encoding="utf-8"))
    made.filters["f"] = lambda value, spec: short(format(value, spec))
    return made


def write(files: Sequence[Path], results: Path, check: bool = False) -> tuple[list[str], int]:
    """Write the numbers; returns where they changed (or would, for a check), and the number of blocks.

    Raises ValueError for a block that is not closed or cannot be written.
    """
    templates = environment(results)
    changed: list[str] = []
    count = 0
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        text = path.read_text(encoding="utf-8")

        def made(block: re.Match[str], path: Path = path, text: str = text) -> str:
            where = f"{path}, line {text.count(chr(10), 0, block.start()) + 1}"
            try:
                inside = templates.get_template(f"{block[2]}.jinja").render().strip()
            except TemplateNotFound:
                raise ValueError(
                    f"{where}: there is no {results / 'numbers' / block[2]}.jinja; run it in the clone, or "
                    "name the folder of records with --results"
                ) from None
            except (TemplateError, ValueError, KeyError, TypeError, IndexError, OSError) as error:
                raise ValueError(f"{where}: {error}") from None
            if block[3] != f"\n{inside}\n\n":
                changed.append(where)
            return f"{block[1]}\n{inside}\n\n{block[4]}"

        new, blocks = BLOCK.subn(made, text)
        if not text.count("<!-- numbers:") == text.count("<!-- /numbers") == blocks:
            raise ValueError(
                f"{path}: a block does not begin with <!-- numbers: NAME --> or end with <!-- /numbers -->"
            )
        count += blocks
        if new != text and not check:
            store(new.encode(), path)
    return changed, count
