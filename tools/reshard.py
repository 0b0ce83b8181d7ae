"""`megacore reshard`: a checkpoint to another layout, with optimizer state and everything else that is in it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacore.progress_bar import progress_bar
from megacore.store.conversions.conversion import to_checkpoint
from megacore.store.conversions.target import make_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import folders
from megacore.tools.options import command_parser


def main(argv: Sequence[str]) -> int:
    parser = command_parser("reshard", __doc__)
    parser.add_argument("source", type=Path, help="a checkpoint")
    parser.add_argument("target", type=Path, help="the folder to make")
    folders.add_layout(parser)
    folders.add_writing(parser)
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    source = folders.opened(arguments.source, adapters=True)
    if source.format != Checkpoint.format:
        raise StoreError(f"{arguments.source} is {source.kind}: use `megacore convert`")
    layout = folders.target(arguments).layout(source.config)
    plan = to_checkpoint(source, replace(layout, schema=source.schema))
    made = make_folder(plan, source.path, arguments.target, arguments.jobs, arguments.dry_run, progress_bar)
    folders.told(made, arguments)
    return 0
