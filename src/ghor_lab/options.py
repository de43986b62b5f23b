"""Options of the command line: how the help shows them, and what it says of those that several commands
have."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from .config import AUTOENCODER, TRANSFORMER

FLAG = ""  # what stands beside an option that takes no value
WHAT, HOW, WHERE = "What to train", "How", "Where, and how many at a time"
DATA = (
    "Folder in which data files are looked for first, and kept if they have to be fetched; it is made then."
)
DATA_ELSE = "the variable GHOR_DATA, else the cache, on Linux ~/.cache/ghor"
RATE = "Learning rate of all weights."
THREADS = (
    "Threads of each run. They decide the rounding: another number is another run, which starts from "
    "scratch. To go "
    "on with a run on another machine or with other --jobs, give the number it has."
)
JOBS = "Runs at a time. The default of --threads depends on it."
OF_TRANSFORMER, OF_PENDULUM = (
    ", ".join(f"{name}={value}" for name, value in known.items()) for known in (TRANSFORMER, AUTOENCODER)
)
NETWORK = f"Change the transformer, by default {OF_TRANSFORMER}. May be repeated."
NETWORKS = (
    f"Change the network. By default the transformer has {OF_TRANSFORMER}, and that of the pendulum "
    f"{OF_PENDULUM}. "
    "May be repeated."
)


def option(
    text: str,
    metavar: str | None,
    panel: str | None = None,
    default: str | None = None,
    names: tuple[str, ...] = (),
) -> Any:
    """An option and what the help says of it; `default` is in words, where the value does not speak for
    itself."""
    return typer.Option(
        *names,
        help=text,
        metavar=metavar,
        show_default=True if default is None else default,
        rich_help_panel=panel,
    )


class Plain(TyperCommand):
    """A command whose help has no types of Python."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, and --help."""
        return untyped(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for the commands together."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, and --help."""
        return untyped(super().get_params(ctx))


def untyped(params: Any) -> list[Any]:
    """Parameters that show their metavar and no type: flags and arguments nothing."""
    for param in params:
        if isinstance(param, TyperArgument):
            param.display_type = lambda ctx: ""  # type: ignore[method-assign]
        elif param.metavar is None:
            param.metavar = FLAG
    return list(params)
