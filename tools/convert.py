"""`megacore convert`: a Hugging Face folder to a checkpoint in any layout, and a checkpoint to such a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megacore.store.checkpoint import Checkpoint
from megacore.store.convert import Source, to_checkpoint, to_hugging_face
from megacore.store.export import parse_size
from megacore.store.folder import open_folder
from megacore.store.strict_json import StoreError
from tools import folders

SHARD_SIZE = "5GB"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore convert", description=__doc__)
    parser.add_argument("source", type=Path, help="a Hugging Face folder, or a checkpoint with --to hf")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--to", choices=("megacore", "hf"), default="megacore", help="the format to convert to")
    parser.add_argument("--max-shard-size", metavar="SIZE", help=f"of a Hugging Face file ({SHARD_SIZE})")
    folders.add_layout(parser)
    folders.add_dtype(parser)
    folders.add_writing(parser)
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    source, dtype = open_folder(arguments.source), folders.dtype(arguments)
    if arguments.to == "hf":
        if not isinstance(source, Checkpoint):
            raise StoreError(f"{arguments.source} is a Hugging Face folder already")
        if folders.has_layout(arguments):
            raise StoreError("a Hugging Face folder has no layout: leave out --tp, --pp, --ep, --chunks and the like")
        plan = to_hugging_face(source, parse_size(arguments.max_shard_size or SHARD_SIZE), dtype)
    else:
        if isinstance(source, Checkpoint):
            raise StoreError(
                f"{arguments.source} is a checkpoint of ours: change its layout with `megacore reshard`, or make a "
                "Hugging Face folder of it with --to hf"
            )
        if arguments.max_shard_size is not None:
            raise StoreError("--max-shard-size is for --to hf: a checkpoint has one file per coordinate of its layout")
        plan = to_checkpoint(
            {"weights": Source.of_hugging_face(source)},
            source.raw,
            folders.layout(arguments, source.config),
            dtype=dtype,
            companions=source.companions(),
        )
    folders.carry_out(plan, arguments.target, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
