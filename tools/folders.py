"""The arguments, progress and errors that the commands about checkpoint folders share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from megacore import checkpoints
from megacore.models.config import ModelConfig
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import Layout, MeshShape, mesh_problems
from megacore.parallel.weights.schema import split_of
from megacore.say import err, harmless, say, say_data
from megacore.store.conversions.conversion import FolderPlan, to_checkpoint, to_hugging_face
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.audit import DamageError
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder
from megacore.store.weight_folders.hugging_face_files import SHARD_SIZE, parse_size

Item = TypeVar("Item")
HUGGING_FACE = "a Hugging Face folder or a name of its hub (OWNER/NAME, OWNER/NAME@REVISION)"
MOST_JOBS = 64
"""Threads that a disk may still thank for."""


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    add_parts(group, experts="expert parallel ranks")
    group.add_argument("--chunks", type=count, default=1, metavar="N", help="chunks of each stage (interleaved)")
    group.add_argument(
        "--layers-per-stage",
        type=counts,
        metavar="N,N,...",
        help="layers of each of the pp x chunks virtual stages; balanced by default",
    )


def add_parts(group: argparse._ActionsContainer, experts: str) -> None:
    """Add the numbers of parts that a model is split into; ``experts``: what those of --ep are."""
    for name, what in (
        ("tp", "tensor parallel ranks"),
        ("pp", "pipeline stages"),
        ("ep", experts),
        ("etp", "parts of each expert, 1 or as many as --tp"),
    ):
        group.add_argument(f"--{name}", type=count, default=1, metavar="N", help=what)


def has_layout(arguments: argparse.Namespace) -> bool:
    """Return whether any argument of :func:`add_layout` was given another value than its default."""
    numbers = ("tp", "pp", "ep", "etp", "chunks")
    return any(getattr(arguments, name) != 1 for name in numbers) or bool(arguments.layers_per_stage)


def layout(arguments: argparse.Namespace, config: ModelConfig) -> Layout:
    """Return the layout that the arguments ask for.

    Raises:
        StoreError: all reasons why the model cannot be split so.
    """
    mesh = MeshShape(pp=arguments.pp, ep=arguments.ep, tp=arguments.tp)
    problems = mesh_problems(config.sizes, mesh, arguments.etp)
    stages, layers, given = mesh.pp * arguments.chunks, config.sizes["layer"], arguments.layers_per_stage
    product = f"--pp x --chunks = {mesh.pp} x {arguments.chunks} = {stages}"
    if stages > layers:
        problems.append(f"cannot give each of {product} virtual stages one of the {layers} layers")
    if given is not None and len(given) != stages:
        problems.append(f"--layers-per-stage has {len(given)} numbers: give {product}")
    if given is not None and sum(given) != layers:
        problems.append(f"--layers-per-stage adds up to {sum(given)}, and the model has {layers} layers")
    if problems:
        raise StoreError("\n".join(problems))
    return layout_of(config, mesh, arguments.chunks, given, split=split_of(arguments.etp))


def opened(
    path: Path, adapters: bool = False, told: bool = True, ignored_fields: Sequence[str] = ()
) -> SafetensorsFolder:
    """Open a folder as :func:`~megacore.store.conversions.formats.open_folder` does, and say what of it is taken.

    Raises:
        StoreError: likewise.
    """
    folder = open_folder(path, adapters, ignored_fields=ignored_fields)
    if told:
        tell(path, folder)
    return folder


def tell(given: Path, found: WeightFolder) -> None:
    """Say which checkpoint of a run is taken, where its folder was given, or which commit, and which part of a model
    is."""
    if found.hub is not None:
        err(f"{given}: taking {found.hub}, {found.path}")
    elif found.path != given:
        err(f"{given}: taking its newest checkpoint, {found.path}")
    if found.left_out is not None:
        err(found.left_out)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    # Half of the time a thread waits for the disk.
    jobs = 2 * (os.cpu_count() or 1)
    parser.add_argument("--jobs", type=count, default=jobs, metavar="N", help="threads (two per core)")


def jobs(arguments: argparse.Namespace) -> int:
    return min(arguments.jobs, MOST_JOBS)


def add_writing(parser: argparse.ArgumentParser) -> None:
    add_jobs(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the files, written or not, as JSON")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=FLOATS.values(), help="of the weights; by default each keeps its own, bit for bit"
    )


def add_target(parser: argparse.ArgumentParser, formats: Sequence[str], about: str) -> None:
    """Add the arguments of :func:`planned`, whose first format is the default one, and those of :func:`carry_out`."""
    parser.add_argument("--to", choices=formats, default=formats[0], help=about)
    parser.add_argument("--max-shard-size", metavar="SIZE", help=f"of a Hugging Face file ({SHARD_SIZE})")
    add_layout(parser)
    add_dtype(parser)
    add_writing(parser)


def planned(
    source: WeightFolder, arguments: argparse.Namespace, of_hugging_face: Callable[[int], FolderPlan] | None = None
) -> FolderPlan:
    """Return the plan of what a source becomes.

    Args:
        of_hugging_face: Plans what is asked for with ``--to`` beside a checkpoint, given the most bytes of a file.

    Raises:
        StoreError: it cannot be planned, or arguments are of another format.
    """
    if arguments.to == "megacore":
        if arguments.max_shard_size is not None:
            raise StoreError("--max-shard-size is for --to hf: a checkpoint has one file per coordinate of its layout")
        return to_checkpoint(source, layout(arguments, source.config), dtype(arguments))
    if has_layout(arguments):
        raise StoreError(
            "a Hugging Face folder has no layout: leave out --tp, --pp, --ep, --etp, --chunks and the like, or make a "
            "checkpoint by --to megacore"
        )
    size = parse_size(arguments.max_shard_size or SHARD_SIZE)
    return to_hugging_face(source, size, dtype(arguments)) if of_hugging_face is None else of_hugging_face(size)


def dtype(arguments: argparse.Namespace) -> str | None:
    """Return the name in safetensors files of the dtype that is asked for."""
    return next((name for name, kind in FLOATS.items() if kind == arguments.dtype), None)


def carry_out(plan: FolderPlan, source: Path, target: Path, arguments: argparse.Namespace) -> None:
    """Write the plan of a source with a progress bar and say what was made, or with ``--dry-run`` only show it.

    Raises:
        StoreError: as :meth:`FolderPlan.write`, or the target lies in the source.
    """
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise StoreError(f"{target} lies in {source}, which is only read: choose a folder beside it")
    if not arguments.dry_run:
        with bar(plan.size, target.name) as progress:
            plan.write(target, jobs(arguments), progress)
    if arguments.json:
        files = [{"path": file.path, "bytes": file.size, "tensors": len(file.tensors)} for file in plan.files]
        told = {"target": str(target), "written": not arguments.dry_run, "bytes": plan.size, "files": files}
        say_data(told, indent=2)
    elif arguments.dry_run:
        for file in plan.files:
            say(f"{file.path}  {file.size:,} bytes, {len(file.tensors)} tensors")
        say(f"{plan.size:,} bytes would be written to {target}")
    else:
        number = len([*plan.files])
        say(
            f"{target}: {plan.kind}, {plan.schema.parameters:,} parameters and {plan.size:,} bytes in "
            f"{number} file{'s' * (number > 1)} of weights"
        )


@contextmanager
def bar(size: int, name: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar of ``size`` bytes, if somebody watches -> a function that is told of bytes that are done."""
    if not sys.stderr.isatty():  # do not even import what draws
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc=harmless(name)) as drawn:
        yield drawn.update


def watched(items: Iterable[Item], name: str, unit: str) -> Iterable[Item]:
    """Return the same items, and show their progress if somebody watches."""
    if not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    counted: Iterable[Item] = tqdm(items, desc=harmless(name), unit=unit)
    return counted


class ReportedElsewhere(Exception):
    """Something is wrong, and another process says what."""


def program(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command; what is wrong with files is said in words."""
    try:
        return run(arguments)
    except ReportedElsewhere:
        return 1
    except BrokenPipeError:  # of the output: see tools.main
        raise
    except (StoreError, OSError) as error:
        err(error)
        if isinstance(error, DamageError) and (other := checkpoints.instead_of(error.path)):
            err(other)
        return 1
    except KeyboardInterrupt:
        err("interrupted; nothing was left behind")
        return 130


def lines(path: Path) -> list[str]:
    """Return the prompts in a file, one on each line.

    Raises:
        StoreError: there are none.
    """
    try:
        found = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    if not found:
        raise StoreError(f"{path} has no prompts: write one on each line")
    return found


def count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    return tuple(count(part) for part in text.split(","))
