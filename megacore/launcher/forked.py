"""Is what a forkserver imports first: from here on it ends with the launcher, also while it imports the rest."""

from __future__ import annotations

import os

from megacore.rank import die_with

die_with(os.getppid())
