"""Options of the command line: how the help shows them, and texts that several commands share."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from .config import AUTOENCODER, TRANSFORMER

FLAG = ""  # shown beside an option that takes no value
WHAT, HOW, WHERE = "What to train", "How", "Where, and how many at a time"
DATA = "Folder that is searched for data files first, and that receives downloads; it is created if needed."
DATA_ELSE = "the variable GHOR_DATA, else the cache, on Linux ~/.cache/ghor"
RATE = "Learning rate of all weights."
THREADS = (
    "Threads of each run. They affect rounding, so another number means another run, which starts from "
    "scratch. To continue a run on another machine or with other --jobs, give its number of threads."
)
JOBS = "Number of runs at a time. The default of --threads depends on it."
OF_TRANSFORMER, OF_PENDULUM = (
    ", ".join(f"{name}={value}" for name, value in known.items()) for known in (TRANSFORMER, AUTOENCODER)
)
NETWORK = f"Change the transformer, by default {OF_TRANSFORMER}. May be repeated."
NETWORKS = (
    f"Change the network. By default the transformer has {OF_TRANSFORMER}, the pendulum's {OF_PENDULUM}. "
    "May be repeated."
)


def option(
    text: str,
    metavar: str | None,
    panel: str | None = None,
    default: str | None = None,
    names: tuple[str, ...] = (),
) -> Any:
    """An option and its help text; `default` says in words what the value alone does not."""
    return typer.Option(
        *names,
        help=text,
        metavar=metavar,
        show_default=True if default is None else default,
        rich_help_panel=panel,
    )


class Plain(TyperCommand):
    """A command whose help shows no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, and --help."""
        return untyped(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, and --help."""
        return untyped(super().get_params(ctx))


def untyped(params: Any) -> list[Any]:
    """Parameters that show their metavar instead of a type; flags and arguments show nothing."""
    for param in params:
        if isinstance(param, TyperArgument):
            param.display_type = lambda ctx: ""  # type: ignore[method-assign]
        elif param.metavar is None:
            param.metavar = FLAG
    return list(params)
