"""The arguments, progress and errors that the commands about checkpoint folders share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from megacore import checkpoints
from megacore.parallel.weights.layout import read_layers
from megacore.say import err, say, say_data
from megacore.store.conversions.formats import open_folder
from megacore.store.conversions.target import FolderTarget, MadeFolder, threads
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.audit import DamageError
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder
from megacore.store.weight_folders.hugging_face_files import SHARD_SIZE
from megacore.tools.options import count

HUGGING_FACE = "a Hugging Face folder or a name of its hub (OWNER/NAME, OWNER/NAME@REVISION)"


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    add_parts(group, experts="expert parallel ranks")
    group.add_argument("--chunks", type=count, default=1, metavar="N", help="chunks of each stage (interleaved)")
    group.add_argument(
        "--layers-per-stage",
        type=layers,
        metavar="N,NxTIMES,...",
        help="layers of each of the pp x chunks virtual stages, as 0,1x14,0; balanced by default",
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


def target(arguments: argparse.Namespace) -> FolderTarget:
    """Return what the arguments of :func:`add_target`, or those of :func:`add_layout` alone, ask for."""
    asked = {each.name: getattr(arguments, each.name) for each in fields(FolderTarget) if each.name in arguments}
    return FolderTarget(**asked)


def opened(path: Path, adapters: bool = False, told: bool = True) -> SafetensorsFolder:
    """Open a folder as :func:`~megacore.store.conversions.formats.open_folder` does, and say what of it is taken.
    Raises StoreError: likewise."""
    folder = open_folder(path, adapters)
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
    for remark in found.remarks:
        err(remark)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=count, metavar="N", help="threads (two per core)")


def jobs(arguments: argparse.Namespace) -> int:
    return threads(arguments.jobs)


def add_writing(parser: argparse.ArgumentParser) -> None:
    add_jobs(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the files, written or not, as JSON")


def add_target(parser: argparse.ArgumentParser, formats: Sequence[str], about: str) -> None:
    """Add the arguments of :func:`target`, whose first format is the default one, and those of :func:`told`."""
    parser.add_argument("--to", choices=formats, default=formats[0], help=about)
    parser.add_argument("--max-shard-size", metavar="SIZE", help=f"of a Hugging Face file ({SHARD_SIZE})")
    add_layout(parser)
    dtypes = [*FLOATS.values(), *(["fp8", "q8_0"] if "gguf" in formats else [])]
    parser.add_argument("--dtype", choices=dtypes, help="of the weights; by default each keeps its own, bit for bit")
    add_writing(parser)


def told(made: MadeFolder, arguments: argparse.Namespace) -> None:
    """Say what was made, or with ``--dry-run`` would be, as :func:`add_writing` has it."""
    if arguments.json:
        say_data(made.as_data(), indent=2)
    elif arguments.dry_run:
        for file in made.files:
            say(f"{file.path}  {file.bytes:,} bytes, {file.tensors} tensors")
        say(f"{made.bytes:,} bytes would be written to {made.path}")
    else:
        say(made)


def drawn(picture: Path) -> None:
    """Say where a picture is; on stderr, for what is shown beside it may be data."""
    err(f"{picture}: a picture, {picture.stat().st_size:,} bytes")


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
        err(_in_options(str(error), arguments))
        if isinstance(error, DamageError) and (other := checkpoints.instead_of(error.path)):
            err(other)
        return 1
    except KeyboardInterrupt:
        err("interrupted; nothing was left behind")
        return 130


def _in_options(text: str, arguments: argparse.Namespace) -> str:
    """Return a message in which what is an argument of a function, as `tp` or `to=hf`, is an option of the command."""

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in vars(arguments):
            return found[0]
        return f"--{name.replace('_', '-')}" + ("" if value is None else f" {value}")

    return re.sub(r"`(\w+)(?:=([^`]*))?`", option, text)


def prompts(arguments: argparse.Namespace) -> list[str]:
    """Return the texts of ``--prompt`` and of the file ``--prompts``, one a line. Raises StoreError: that has none."""
    path: Path | None = arguments.prompts
    if path is None:
        return arguments.prompt
    try:
        found = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    if not found:
        raise StoreError(f"{path} has no prompts: write one on each line")
    return [*arguments.prompt, *found]


def layers(text: str) -> tuple[int, ...]:
    """Return the layers of virtual stages."""
    try:
        return read_layers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
