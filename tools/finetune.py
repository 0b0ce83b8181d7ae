"""`megacore finetune`: fine-tune a model, and make a Hugging Face folder of the result."""

from __future__ import annotations

from functools import partial

from megacore.launcher.command import run

main = partial(run, "finetune")
