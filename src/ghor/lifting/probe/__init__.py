"""Which optimizers lift: a rule is tried where it is to run before it is trusted with a manifold.

`verdict` says whether, `laws` what is asked, `trial` how a rule is run, `turning` which state turns with a
frame.
"""

from ghor.lifting.probe.laws import not_in_ghor
from ghor.lifting.probe.turning import parity
from ghor.lifting.probe.verdict import given_options, left_ghor, options_of, refuse_unless_it_lifts, verify

__all__ = [
    "given_options",
    "left_ghor",
    "not_in_ghor",
    "options_of",
    "parity",
    "refuse_unless_it_lifts",
    "verify",
]
