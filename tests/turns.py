"""Whose turn it is."""

import os

ROTATION = int(os.environ.get("MEGACORE_ROTATION", "0"))
"""Another number draws other seeds, and gives each family other cases of those that it shares with the others."""
TURN = ROTATION + int(os.environ["MEGACORE_DAY"])
"""The day of conftest's ``in_turn``."""
