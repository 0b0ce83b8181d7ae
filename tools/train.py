"""`megacore train`: pretrain what a recipe describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megacore.launcher.command import run


def main(argv: Sequence[str] | None = None) -> int:
    return run("train", sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
