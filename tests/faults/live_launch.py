"""`megacore train`, whose ranks are those of :mod:`live_rank`."""

from __future__ import annotations

import sys

from megacore.launcher import command

if __name__ == "__main__":
    command.MODULE = "live_rank"
    sys.exit(command.run("train", sys.argv[1:]))
