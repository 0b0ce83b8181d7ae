"""`megacore upcycle`: a dense model becomes one with experts whose loss is the dense one's, to train it on.

Every expert of a layer is a copy of its feed-forward network, or with --granularity a slice of its hidden features;
routers are drawn from the seed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megacore.models.config import ModelConfigError
from megacore.models.upcycle import WITH_EXPERTS, upcycling
from megacore.progress_bar import progress_bar
from megacore.say import err, say
from megacore.store.conversions.target import make_folder
from megacore.store.conversions.upcycled import UpcycledFolder
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.audit import DamageError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.tools import folders
from megacore.tools.options import command_parser, count


def main(argv: Sequence[str]) -> int:
    parser = command_parser("upcycle", __doc__)
    parser.add_argument("source", type=Path, help=f"a dense model: {folders.HUGGING_FACE}, or a checkpoint")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--experts", type=count, required=True, metavar="N", help="experts of each layer")
    parser.add_argument("--top-k", type=count, required=True, metavar="N", help="experts that a token goes to")
    parser.add_argument(
        "--granularity", type=count, default=1, metavar="N", help="slices of the hidden features, of which an "
        "expert is one; --experts and --top-k count slices then (1)"
    )  # fmt: skip
    known = ", ".join(f"{one}: {other}" for one, other in WITH_EXPERTS.items())
    parser.add_argument("--family", help=f"of the new model ({known})")
    parser.add_argument("--seed", type=int, default=0, help="of the routers (0)")
    folders.add_target(parser, ("hf", "megacore"), "the format of the new folder")
    return folders.program(run, parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    source, asked = folders.opened(arguments.source), folders.target(arguments)
    dtype = asked.stored_dtype
    try:
        way = upcycling(
            source.config,
            source.raw,
            experts=arguments.experts,
            top_k=arguments.top_k,
            granularity=arguments.granularity,
            family_name=arguments.family,
        )
    except ModelConfigError as error:
        raise StoreError("\n- ".join([f"{source.path} cannot be upcycled:", *error.problems])) from error
    made = UpcycledFolder.of(source, way, arguments.seed, dtype)
    plan = asked.planned(made)
    if not arguments.dry_run:
        _check(source, made, arguments)
    folder = make_folder(plan, source.path, arguments.target, arguments.jobs, arguments.dry_run, progress_bar)
    folders.told(folder, arguments)
    if math.frexp(way.scale)[0] != 0.5 and not (dtype and made.widens(dtype)):
        err(
            f"what comes out of an expert is the dense model's times {way.scale:g}, which is no power of two: weights "
            "are rounded, and the loss is the dense model's but for that"
        )
    if not arguments.json:
        parameters = f"{source.schema.parameters:,} parameters became {way.config.schema.parameters:,}"
        say(f"{source.config.family} -> {way.config.family}: {parameters}")
    return 0


def _check(source: SafetensorsFolder, made: UpcycledFolder, arguments: argparse.Namespace) -> None:
    """Read a checkpoint's weights that many are made of, of which no sum is left to compare in the end."""
    if source.format == Checkpoint.format:
        damage = audit.check(source, folders.jobs(arguments), tensors={"weights": made.replaced})
        if damage:
            raise DamageError.of(source.path, damage)
