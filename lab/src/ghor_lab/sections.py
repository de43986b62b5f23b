"""The sections of a report and their words: what is compared, and what differs from the paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import caught, figures, headline, methods, paper, sphere, tables
from .config import READINGS
from .figures import Figure
from .pool import EXPERIMENTS, FEW, Pool, name, place
from .record import Run
from .table import Table
from .text import report as language
from .text.trials import books


@dataclass(frozen=True)
class Part:
    """Words, then the table they are about, then figures."""

    text: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()
    folded: bool = False
    quiet: bool = False  # not for the terminal


@dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    title: str
    parts: Sequence[Part]

    @property
    def id(self) -> str:
        """The target of links inside the page."""
        return "section-" + re.sub(r"\W+", "-", self.title.lower()).strip("-")


def sections(runs: Sequence[Run], pools: Sequence[Pool]) -> list[Section]:
    """All sections for which there are records, in the paper's order."""
    found: list[Section] = []
    for experiment in dict.fromkeys(p.experiment for p in pools):
        same = [p for p in pools if p.experiment == experiment]
        parts = pendulum(same) if experiment == "pendulum" else transformer(experiment, same, first=not found)
        found.append(Section(name(EXPERIMENTS, experiment), parts))
    for i, book in enumerate(books(runs)):
        file = f"text-{i + 1}" if i else "text"
        drawn = [language.curves(book, file), language.rates(book, file)]
        parts = [Part(() if i else language.WORDS, language.table(book, file), drawn)]
        found.append(Section(f"{language.TITLE}, {book.steps} steps" if i else language.TITLE, parts))
    compared = Section("Methods", [Part(methods.WORDS, methods.table())])
    return [*found, *costs(pools), compared, drawing(), provenance(runs, pools)]


def present(drawn: Iterable[Figure | None]) -> list[Figure]:
    """The figures for which there was something to draw."""
    return [figure for figure in drawn if figure is not None]


# -- the vision transformer ----------------------------------------------------------------------------------

TRANSFORMER = (
    "336 attention projections are on St(7, 49), or unconstrained for standard Adam. The loss is "
    "‖prediction - one-hot‖ / ‖one-hot‖ over a batch (1.34 for the constant prediction), averaged over the "
    "epoch; drift is the largest ‖YᵀY - I‖ over the weights.",
    "Adam is chaotic here: its first step is the sign of gradients that have nearly vanished through 16 "
    "blocks, so one rounding error changes the run. Results are distributions over seeds, and a single run "
    "can lie far from their mean.",
)
ROWS = (
    "Final loss and drift are those of the last epoch, best loss is the smallest of all epochs. Up to "
    f"{FEW} runs get a row each; more runs get mean ± sample standard deviation, and for the drift smallest "
    "and largest. Off by: ours minus the paper's mean, in the paper's standard deviations, if the number "
    "of epochs is the paper's. Losses and drift have no unit.",
    "The authors count a run only if it passes a gate: all finite, drift at most 1e-2, the last epoch's "
    "loss below 0.98 of the first's, an accuracy of at least 30 % from 50 epochs on; standard Adam within "
    "0.05 of √1.8. The last column has its verdict, and Runs has the reason; if there are many runs, a "
    "second row has the mean of those it accepts.",
)
OTHER_EPOCHS = (
    "The paper's rows are after {} epochs, over 10 seeds. Rows with another number of epochs do not compare "
    "like with like: they show how far these runs have come, not which is better."
)
EQUAL_EPOCHS = (
    "At equal epochs: the paper has no numbers before epoch 500, but its authors published one run per "
    "configuration (none for scalar-moment Adam). Both rows are at the same epoch, the last one that their "
    "table and our runs have; if a quantity is missing there, a second pair of rows has it. One run is "
    "compared with a distribution."
)


CAUGHT = (
    "The first steps of Adam have full length in every coordinate, and can carry a run into the constant "
    "prediction, where hardly any gradient is left. Intervals are Wilson's; runs with another start, frame "
    "or warm-up are from the command ghor caught."
)


def transformer(experiment: str, pools: Sequence[Pool], first: bool) -> list[Part]:
    """Outcomes, and for MNIST the comparison at equal epochs; what holds for both data sets is said once."""
    title, asked = name(EXPERIMENTS, experiment), paper.EPOCHS.get(experiment)
    trained = [
        p for p in pools if p.epochs > 1
    ] or pools  # runs of one epoch belong to the count of caught runs
    usual = headline.plain(trained)
    quantities = {"loss": figures.LOSS, "accuracy": figures.ACCURACY, "drift": figures.DRIFT}
    drawn = [
        figures.curves(f"{experiment}-{key}", f"{title}: {q.words}", q, usual)
        for key, q in quantities.items()
    ]
    paths = {run.path for p in usual for run in p.runs}
    others = [p for p in trained if not paths & {run.path for run in p.runs}]
    drawn.append(
        figures.variants(f"{experiment}-variants", f"{title}, other settings: loss", figures.LOSS, others)
    )
    begin = [
        f"The paper's vision transformer on {title}{'.' if first else ', as above.'}",
        *(TRANSFORMER if first else ()),
    ]
    text = list(
        ROWS if first else ["The same columns: losses and drift have no unit, accuracy is in percent."]
    )
    if asked and any(p.epochs != asked for p in pools):
        text.append(OTHER_EPOCHS.format(asked))
    parts = [Part(begin, figures=present(drawn)), Part(text, tables.outcomes(experiment, trained))]
    if experiment == "mnist" and (table := tables.equal_epochs(trained)):
        parts.append(Part([EQUAL_EPOCHS], table))
    several = any(len(p.seeds) > 1 for p in pools)
    if several and (table := caught.table(f"{experiment}-caught", pools)):
        parts.append(Part([CAUGHT], table))
    return parts


# -- the pendulum --------------------------------------------------------------------------------------------

PENDULUM = (
    "A symplectic autoencoder reduces the lifted pendulum, R⁴ to R² and back. The error is ‖z - "
    "decoder(encoder(z))‖ / ‖z‖ over a batch, averaged over the epoch, and is also the training loss; the "
    "paper calls its loss a sum of squares, and its numbers are of the size of this relative error.",
    "Learning rates: the paper states 1e-4 for all four (reading “as stated”). A public version of the "
    "authors' trainer does not pass that number to the optimizer, so the defaults of its library apply: "
    "1e-3 for geometric Adam, 1e-2 for the other three (“as run”). “equal 1e-3” and “equal 1e-2” give both "
    "Adams the same rate.",
    "On St(1, 2) an element of g^hor has one entry, so scalar-moment Adam and geometric Adam are the same "
    "algorithm there up to a constant factor. A difference between these two rows cannot come from the "
    "second moment.",
)
PENDULUM_ROWS = (
    "Mean ± sample standard deviation over seeds. Off by: ours minus the paper's mean, in the paper's "
    "standard deviations, if the number of epochs is the paper's. Errors have no unit."
)
TIME = (
    "Wall-clock time of training. The paper trains one seed at a time on an NVIDIA GeForce RTX 4090; here "
    "all seeds of a run are trained at once. The paper's column is its minutes for one run, times our "
    f"seeds, times our epochs / {paper.EPOCHS['pendulum']}: with 10 seeds and 1000 epochs 618 minutes for "
    "its four configurations."
)
STRUCTURE = (
    "Encoder and decoder are symplectic by construction as long as the PSD weights are on St(1, 2). The "
    "table has the largest distances over all epochs and seeds; the Jacobian M is taken at sample points "
    "and evaluated in float64 with the weights as they are. What remains is the rounding of the weights."
)
SAMPLE = "What the autoencoder does with a few trajectories of the data, as recorded at the end of a run."


def pendulum(pools: Sequence[Pool]) -> list[Part]:
    """Outcomes by reading, time, structure, and the autoencoder's reconstruction of the sample."""
    labels = sorted({p.label for p in pools}, key=lambda label: place(READINGS, label))
    by_label = {label: [p for p in pools if p.label == label] for label in labels}
    errors = []
    for i, (label, same) in enumerate(by_label.items()):
        title = f"Pendulum{f', “{label}”' if label else ''}: reconstruction error"
        errors.append(figures.panels(f"pendulum-error-{slug(label, i)}", title, figures.ERROR, same))
    parts = [
        Part(PENDULUM, figures=present(errors)),
        Part([PENDULUM_ROWS], tables.pendulum_outcomes(pools)),
        Part([TIME], tables.pendulum_time(pools)),
    ]
    if table := tables.pendulum_structure(pools):
        distances = {"encoder": figures.ENCODER, "decoder": figures.DECODER}
        first = by_label[labels[0]]
        kept = [
            figures.curves(f"pendulum-{key}", f"Pendulum: {q.words}", q, first)
            for key, q in distances.items()
        ]
        parts.append(Part([STRUCTURE], table, present(kept)))
    samples = next((found for same in by_label.values() if (found := _samples(same))), None)
    if samples:
        shown, sample = samples[0]
        drawn = [
            figures.phase_space(sample),
            figures.reconstruction(sample, shown.title()),
            figures.latent(samples),
        ]
        parts.append(Part([SAMPLE], figures=drawn))
    return parts


def _samples(pools: Sequence[Pool]) -> list[tuple[Pool, dict[str, Any]]]:
    """One sample for each optimizer, from the first pool that has one."""
    found: dict[str, tuple[Pool, dict[str, Any]]] = {}
    for p in pools:
        sample = p.last("sample")
        if sample is not None:
            found.setdefault(p.optimizer, (p, sample))
    return list(found.values())


def slug(label: str | None, i: int) -> str:
    """A label as part of a file name; free labels are numbered, since two may differ only in signs."""
    text = re.sub(r"[^a-z0-9]+", "-", (label or "no label").lower()).strip("-")
    return text if label is None or label in READINGS else f"{i}-{text}"


# -- what all experiments have -------------------------------------------------------------------------------

COST = (
    "A step by its parts: AD is forward and backward, direction the way from the gradient to the velocity "
    "in g^hor, retraction moves the weights, other is the rest of the training loop (in the paper's rows "
    "also the evaluation of the test accuracy). Geometric share = (direction + retraction) / (AD + "
    "direction + retraction). Times are medians over epochs, memory is the maximum.",
    "The paper's rows are from one NVIDIA GeForce RTX 4090 and its memory is that of the device; ours are "
    "from the machines under Runs and the memory is that of the whole process. They differ in the machine "
    "first of all. If seeds are trained at once, a step is a step of all of them.",
)
COST_AGAIN = "The same columns: milliseconds per step, seconds per epoch, GiB."
STATE = (
    "Numbers kept by the optimizer between steps. The paper counts an element of g^hor of St(7, 49) as 21 + "
    "294 = 315 entries and stores a section for every parameter, even in vector spaces. ghor stores the "
    "element in the shape of the weight, 343 entries, and a section only for weights on manifolds. Its "
    "entries are counted on the tensors of an optimizer after its first step."
)
DRAWN = "Drawn, not measured: how the tensors that an optimizer keeps move with the weight."
RUNS = "The records that this page was made from. “20 of 25 epochs” marks a run that is not finished."


SETTINGS = "Every field of the configurations, as recorded, and which configurations have that value."


def costs(pools: Sequence[Pool]) -> list[Section]:
    """Time and memory."""
    order = dict.fromkeys(p.experiment for p in pools)
    found = [
        tables.cost(experiment, [p for p in pools if p.experiment == experiment]) for experiment in order
    ]
    timed = [table for table in found if table]
    parts = [Part([COST_AGAIN] if i else COST, table) for i, table in enumerate(timed)]
    if table := tables.state(pools):
        parts.append(Part([STATE], table))
    return [Section("Cost", parts)] if parts else []


def drawing() -> Section:
    """The paper's figure of parallel transport on the sphere."""
    return Section("Parallel transport", [Part([DRAWN], figures=[sphere.transport()])])


def provenance(runs: Sequence[Run], pools: Sequence[Pool]) -> Section:
    """Where the numbers come from."""
    parts = [Part([RUNS], tables.provenance(runs), quiet=True)]
    if pools:
        parts.append(Part([SETTINGS], tables.settings(pools), folded=True, quiet=True))
    return Section("Runs", parts)
