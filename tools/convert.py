"""`megacore convert`: a Hugging Face folder to a checkpoint in any layout, and a checkpoint to such a folder.

A checkpoint of adapters becomes a folder of the peft library, or with the model that it adapts a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megacore.store.adapters import check_base, merged, to_peft
from megacore.store.checkpoint import Checkpoint
from megacore.store.conversion import FolderPlan, to_checkpoint, to_hugging_face
from megacore.store.folder import SafetensorsFolder
from megacore.store.hugging_face import HuggingFace
from megacore.store.hugging_face_files import SHARD_SIZE, parse_size
from megacore.store.strict_json import StoreError
from tools import folders


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore convert", description=__doc__)
    parser.add_argument("source", type=Path, help="a Hugging Face folder, or a checkpoint with --to hf")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--to", choices=("megacore", "hf", "peft"), default="megacore", help="the format to convert to")
    parser.add_argument("--max-shard-size", metavar="SIZE", help=f"of a Hugging Face file ({SHARD_SIZE})")
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="with --to hf: the Hugging Face folder to merge adapters into"
    )
    parser.add_argument(
        "--ignore-field", action="append", default=[], metavar="NAME", help="leave out a field of config.json that is "
        "unknown here, and that changes nothing of what the model computes; may be given several times"
    )  # fmt: skip
    folders.add_layout(parser)
    folders.add_dtype(parser)
    folders.add_writing(parser)
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    out, dtype = arguments.to != "megacore", folders.dtype(arguments)
    # Adapters without their model are refused where a model is needed, in words that tell how to merge them.
    adapters = arguments.to == "peft" or arguments.base is not None
    source = folders.opened(arguments.source, adapters, ignored_fields=arguments.ignore_field)
    if arguments.base is not None and arguments.to != "hf":
        raise StoreError("--base is for --to hf: it is the model that adapters are merged into")
    if out:
        if source.format == HuggingFace.format:
            raise StoreError(f"{source.path} is a Hugging Face folder already")
        if folders.has_layout(arguments):
            raise StoreError(
                "a Hugging Face folder has no layout: leave out --tp, --pp, --ep, --etp, --chunks and the like"
            )
        size = parse_size(arguments.max_shard_size or SHARD_SIZE)
        if arguments.to == "peft":
            plan = to_peft(source, dtype)
        elif arguments.base is not None:
            plan = _merged(source, arguments, size, dtype)
        else:
            plan = to_hugging_face(source, size, dtype)
    else:
        if source.format == Checkpoint.format:
            raise StoreError(
                f"{source.path} is a checkpoint of ours: change its layout with `megacore reshard`, or make a "
                "Hugging Face folder of it with --to hf"
            )
        if arguments.max_shard_size is not None:
            raise StoreError("--max-shard-size is for --to hf: a checkpoint has one file per coordinate of its layout")
        plan = to_checkpoint(source, folders.layout(arguments, source.config), dtype)
    folders.carry_out(plan, source.path, arguments.target, arguments)
    return 0


def _merged(
    source: SafetensorsFolder, arguments: argparse.Namespace, max_shard_bytes: int, dtype: str | None
) -> FolderPlan:
    base = folders.opened(arguments.base)
    if base.format != HuggingFace.format:
        raise StoreError(f"{arguments.base} is a checkpoint: make a Hugging Face folder of it first, by --to hf")
    plan = merged(source, base, max_shard_bytes, dtype)
    if not arguments.dry_run:
        with folders.bar(sum(record.size for record in base.index.files.values()), base.path.name) as progress:
            check_base(source, base, folders.jobs(arguments), progress)
    return plan


if __name__ == "__main__":
    sys.exit(main())
