"""The authors' protocol where it differs from ours: the start of runs, their frames, and which runs count.

It follows a public version of the scripts that made the paper's tables. Every part is a field of the
configuration or is recorded with every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from .record import Run

AUTHORS = {"start": "authors", "frame": "random", "loss": "after"}
JUDGED = 50  # epochs, from which on the accuracy counts
TRIVIAL = math.sqrt(1.8)  # the loss of a constant prediction for ten classes


@torch.no_grad()
def authors_start(points: Iterable[Tensor]) -> None:
    """Turn uniform points Y into the authors': the Q of LAPACK's X = Q R without correcting signs.

    Their mean is E[Y] = -0.11 [I; 0]. X is the normal matrix that Y was made from, Y = Q sign(R). X and Y
    have the same Householder reflections, and hence the same Q.
    """
    for p in points:
        p.copy_(torch.linalg.qr(p.double()).Q)


@torch.no_grad()
def random_frames(opt: Optimizer, points: Iterable[Tensor], generator: Generator) -> None:
    """First sections Lambda = [Y, Q] with random Q, from the QR decomposition of (I - Y Y^T) X, X normal.

    It is computed from that of [Y, X], where Q is as orthogonal to Y as possible. Only the signs of its
    columns can differ, which makes no difference to any lifted optimizer.
    """
    for p in points:
        Y = p.double()
        *batch, N, n = Y.shape
        X = torch.randn(*batch, N, N - n, generator=generator, dtype=Y.dtype).to(Y.device)
        Q = torch.linalg.qr(torch.cat([Y, X], -1)).Q[..., n:]
        opt.state[p]["section"] = torch.cat([p, Q.to(p.dtype)], -1)


# -- the gate ------------------------------------------------------------------------------------------------


def judge(optimizer: str, epochs: Sequence[dict[str, Any]]) -> list[str | None]:
    """For each seed, why its run would not count (None if it would), from the lines of its epochs.

    A run counts if all losses are finite, the drift is at most 1e-2 and, for standard Adam, the last loss is
    within 0.05 of sqrt(1.8); for the others, the last loss is below 0.98 of the first and, from 50 epochs on,
    the accuracy is at least 30 %.
    """
    last = epochs[-1]
    losses = list(zip(*(line["loss"] for line in epochs), strict=True))
    drifts, accuracies = (last.get(key) or [None] * len(losses) for key in ("drift", "test_accuracy"))
    found: list[str | None] = []
    for loss, drift, accuracy in zip(losses, drifts, accuracies, strict=True):
        why = None
        if any(x is None or not math.isfinite(x) for x in (*loss, drift if last.get("drift") else 0)):
            why = "not finite"
        elif drift is not None and drift > 1e-2:
            why = f"drift {drift:.1e}"
        elif optimizer == "standard-adam":
            if not abs(loss[-1] - TRIVIAL) <= 0.05:
                why = f"loss {loss[-1]:.3f}, not within 0.05 of {TRIVIAL:.3f}"
        elif len(loss) > 1 and not loss[-1] < 0.98 * loss[0]:
            why = f"loss {loss[-1]:.3f} after {loss[0]:.3f} in the first epoch"
        elif len(loss) >= JUDGED and accuracy is not None and not accuracy >= 30:
            why = f"accuracy {accuracy:.1f} %"
        found.append(why)
    return found


def gate(optimizer: str, epochs: Sequence[dict[str, Any]], model: nn.Module) -> list[str | None]:
    """The same at the end of training, when the weights can be examined too."""
    found = judge(optimizer, epochs)
    finite = [torch.isfinite(p).reshape(len(found), -1).all(1) for p in model.parameters()]  # copies first
    whole = torch.stack(finite).all(0).tolist()
    return [why if ok else why or "not finite" for why, ok in zip(found, whole, strict=True)]


def verdicts(run: Run) -> list[str | None]:
    """The verdicts recorded at the end of a run, or judged from its epochs so far."""
    end = run.last("end")
    if end is not None and "gate" in end and end["epochs"] == len(run.epochs):
        return list(end["gate"])
    return judge(run.header["config"]["optimizer"], run.epochs)
