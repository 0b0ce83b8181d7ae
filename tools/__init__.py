"""The commands: each reads its options, asks the house, and prints."""

import sys
from itertools import pairwise

_asked = dict(pairwise(sys.orig_argv)).get("-m", "").removeprefix("megacore.tools.")
if f"megacore.tools.{_asked}" in sys.orig_argv and _asked != "main":  # which would do nothing, and end with 0
    sys.exit(f"run it as `python -m megacore {_asked.replace('_', '-')}`")
