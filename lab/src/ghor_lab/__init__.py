"""The paper's experiments: data, configurations, training, records, reports, command line."""

import sys


def main() -> None:
    """Run the command `ghor`."""
    from .cli import main

    sys.exit(main())
