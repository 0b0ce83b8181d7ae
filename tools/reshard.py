"""`megacore reshard`: a checkpoint to another layout, with optimizer state and everything else that is in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacore.store.checkpoint import TRAINER, Checkpoint
from megacore.store.convert import Source, to_checkpoint
from megacore.store.files import open_file
from megacore.store.strict_json import StoreError
from megacore.store.tensors import os_errors
from tools import folders


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore reshard", description=__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint")
    parser.add_argument("target", type=Path, help="the folder to make")
    folders.add_layout(parser)
    folders.add_writing(parser)
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    source = folders.opened(arguments.source, adapters=True)
    if not isinstance(source, Checkpoint):
        raise StoreError(f"{arguments.source} is a Hugging Face folder: use `megacore convert`")
    trainer = None
    if source.trainer is not None:
        with os_errors(source.path), open_file(source.path / TRAINER, source.path) as file:
            trainer = file.read()
    plan = to_checkpoint(
        {state: Source.of_checkpoint(source, state) for state in source.index.states},
        source.index.raw,
        replace(folders.layout(arguments, source.config), schema=source.schema),
        step=source.index.step,
        trainer=trainer,
        companions=source.companions(),
        adapters=source.index.adapters,
        frozen=source.index.frozen,
    )
    folders.carry_out(plan, source.path, arguments.target, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
