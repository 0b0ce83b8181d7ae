"""`megacore train`: pretrain what a recipe describes."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.launcher.command import run


def main(argv: Sequence[str]) -> int:
    return run("train", argv)
