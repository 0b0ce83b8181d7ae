"""`megacore train`: pretrain what a recipe describes."""

from __future__ import annotations

from functools import partial

from megacore.launcher.command import run

main = partial(run, "train")
