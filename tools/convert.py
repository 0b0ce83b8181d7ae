"""`megacore convert`: a Hugging Face folder to a checkpoint in any layout, a checkpoint to such a folder, and either to
a GGUF file of llama.cpp.

A checkpoint of adapters becomes a folder of the peft library, or with the model that it adapts a model; a checkpoint of
torch.distributed.checkpoint (FSDP2, torchtitan) what a Hugging Face folder becomes, or such a folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megacore.progress_bar import progress_bar
from megacore.store.conversions.convert import convert_opened, open_source
from megacore.tools import folders
from megacore.tools.options import command_parser


def main(argv: Sequence[str]) -> int:
    parser = command_parser("convert", __doc__)
    parser.add_argument("source", type=Path, help=f"{folders.HUGGING_FACE}, or a checkpoint with --to hf")
    parser.add_argument("target", type=Path, help="the folder to make, or with --to gguf the file")
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
    parser.add_argument(
        "--config", type=Path, metavar="FOLDER_OR_JSON", help="with a checkpoint of another trainer: the "
        "Hugging Face config.json of its model, or the folder that has it, if it does not lie beside the tensors"
    )  # fmt: skip
    folders.add_target(parser, ("megacore", "hf", "peft", "gguf"), "the format to convert to")
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    asked = folders.target(arguments)
    source, base = open_source(arguments.source, asked, arguments.base, arguments.ignore_field, arguments.config)
    folders.tell(arguments.source, source)
    if base is not None:
        folders.tell(arguments.base, base)
    made = convert_opened(source, arguments.target, asked, base, arguments.jobs, arguments.dry_run, progress_bar)
    folders.told(made, arguments)
    return 0
