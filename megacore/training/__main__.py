"""``python -m megacore.training RECIPE [section.key=value ...]`` is one rank of a run, which is protected."""

from __future__ import annotations

import sys

from megacore.training.main import main, protection

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], protection()))
