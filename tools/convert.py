"""`megacore convert`: a Hugging Face folder to a checkpoint in any layout, and a checkpoint to such a folder.

A checkpoint of adapters becomes a folder of the peft library, or with the model that it adapts a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megacore.store.conversions.adapters import check_base, merged, to_peft
from megacore.store.conversions.conversion import FolderPlan
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import folders


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore convert", description=__doc__)
    parser.add_argument("source", type=Path, help=f"{folders.HUGGING_FACE}, or a checkpoint with --to hf")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="with --to hf: the Hugging Face folder, or name of the hub, to merge adapters into",
    )
    parser.add_argument(
        "--ignore-field", action="append", default=[], metavar="NAME", help="leave out a field of config.json that is "
        "unknown here, and that changes nothing of what the model computes; may be given several times"
    )  # fmt: skip
    folders.add_target(parser, ("megacore", "hf", "peft"), "the format to convert to")
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    # Adapters without their model are refused where a model is needed, in words that tell how to merge them.
    adapters = arguments.to == "peft" or arguments.base is not None
    source = folders.opened(arguments.source, adapters, ignored_fields=arguments.ignore_field)
    if arguments.base is not None and arguments.to != "hf":
        raise StoreError("--base is for --to hf: it is the model that adapters are merged into")
    if arguments.to != "megacore" and source.format == HuggingFace.format:
        raise StoreError(f"{source.path} is a Hugging Face folder already")
    if arguments.to == "megacore" and source.format == Checkpoint.format:
        raise StoreError(
            f"{source.path} is a checkpoint of ours: change its layout with `megacore reshard`, or make a Hugging Face "
            "folder of it with --to hf"
        )
    of_hugging_face: Callable[[int], FolderPlan] | None = None
    if arguments.to == "peft":
        of_hugging_face = partial(_adapters, source, arguments)
    elif arguments.base is not None:
        of_hugging_face = partial(_merged, source, arguments)
    folders.carry_out(folders.planned(source, arguments, of_hugging_face), source.path, arguments.target, arguments)
    return 0


def _adapters(source: SafetensorsFolder, arguments: argparse.Namespace, _: int) -> FolderPlan:
    return to_peft(source, folders.dtype(arguments))


def _merged(source: SafetensorsFolder, arguments: argparse.Namespace, max_shard_bytes: int) -> FolderPlan:
    base = folders.opened(arguments.base)
    if base.format != HuggingFace.format:
        raise StoreError(f"{arguments.base} is a checkpoint: make a Hugging Face folder of it first, by --to hf")
    plan = merged(source, base, max_shard_bytes, folders.dtype(arguments))
    if not arguments.dry_run:
        with folders.bar(sum(record.size for record in base.index.files.values()), base.path.name) as progress:
            check_base(source, base, folders.jobs(arguments), progress)
    return plan


if __name__ == "__main__":
    sys.exit(main())
