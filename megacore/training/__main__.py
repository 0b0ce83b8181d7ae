"""``python -m megacore.training RECIPE [section.key=value ...]`` is one rank of a run."""

from __future__ import annotations

import sys

from megacore.training.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
