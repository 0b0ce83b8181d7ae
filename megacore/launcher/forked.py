"""Is what a forkserver imports first: from here on it ends with the launcher, also while it imports the rest."""

from __future__ import annotations

import os

from megacore.rank import LAUNCHER, die_with

# The launcher, which may have ended before this was imported: a config that is refused is refused at once.
die_with(int(os.environ.get(LAUNCHER) or os.getppid()))
