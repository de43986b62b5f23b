"""The paper's experiments: data, configurations, training, records, reports, command line.

A project of its own beside the library: `pip install . ./lab` in a clone.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command `ghor`."""
    try:
        from .cli import app

        app()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"", "ghor", "ghor_lab", *sys.stdlib_module_names}:
            raise
        sys.exit(f"the command line needs {error.name}: in a clone of ghor, pip install . ./lab")
