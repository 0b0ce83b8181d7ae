"""`megacore finetune`: fine-tune a model, and make a Hugging Face folder of the result."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.launcher.command import run


def main(argv: Sequence[str]) -> int:
    return run("finetune", argv)
