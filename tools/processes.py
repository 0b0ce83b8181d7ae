"""The commands that run a model: the model that is named, its mesh, and the processes that this takes."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from megacore.inference.loaded_model import ModelSetup
from megacore.launcher import Node, launch, threads
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.weights.layout import MeshShape
from megacore.rank import STORE, RankPlace
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders
from megacore.tools.options import count

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    from megacore.models.assemble import Model

Prepared = TypeVar("Prepared")
LAST_WORDS_S = 10.0
"""The time that a process under torchrun waits for the first one to say what is wrong with all of them."""


@contextmanager
def agreed(here: RankPlace) -> Iterator[None]:
    """Let one process say what is wrong, and all exit with 1, on a StoreError that all find in this block."""
    try:
        yield
    except StoreError:
        if here.rank == 0:
            raise
        if STORE not in os.environ:
            # torchrun ends the others, the one that speaks too, as soon as one has ended; our launcher gives them time.
            time.sleep(LAST_WORDS_S)
        raise folders.ReportedElsewhere from None


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the model."""
    about = f"a checkpoint, of a model or of adapters, or {folders.HUGGING_FACE}"
    parser.add_argument("folder", type=Path, help=about)
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="of a checkpoint of adapters: the model that they were trained on, a Hugging Face folder or a checkpoint "
        "(where it was then)",
    )


def add_context(group: argparse._ActionsContainer, exchanges: bool = True) -> None:
    """Add the ranks of cp, and the ways in which they compute attention, if there is a choice."""
    group.add_argument("--cp", type=count, default=1, metavar="N", help="ranks that share out the tokens")
    group.set_defaults(exchange="auto")
    if not exchanges:
        return
    group.add_argument(
        "--exchange",
        choices=get_args(ContextExchange),
        default="auto",
        help="how the queries of those ranks meet each other's keys (docs/config.md, context.exchange)",
    )


def add_mesh(parser: argparse.ArgumentParser, data: bool = False) -> None:
    """Add the arguments that say where the model is computed, and in which dtype."""
    group = parser.add_argument_group(
        "where", "More than one process is started by the command itself, or by torchrun."
    )
    folders.add_parts(group, experts="ranks over which experts are spread")
    add_context(group, exchanges=data)
    if data:
        group.add_argument("--dp", type=count, default=1, metavar="N", help="ranks that share out the windows")
    else:
        parser.set_defaults(dp=1)
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    group.add_argument("--dtype", choices=FLOATS.values(), help="to compute in; by default that of the weights")


def start(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run a module in some processes on this machine -> their exit status."""
    # What a name of the hub stands for is in the cache, and nobody asks the hub again, which may have moved on.
    status = launch(module, arguments, Node(processes), {**threads(processes), "HF_HUB_OFFLINE": "1"})
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    return status


def check(arguments: argparse.Namespace, prepare: Callable[[WeightFolder], Prepared]) -> tuple[ModelSetup, Prepared]:
    """Return the model that arguments of :func:`add_model` and :func:`add_mesh` ask for, and what is prepared for it.
    Raises StoreError: there is no such model, it cannot be split so, or ``prepare`` refuses it (on one rank)."""
    with agreed(RankPlace.of_environment()):
        setup = ModelSetup.check(
            arguments.folder,
            base=arguments.base,
            dtype=arguments.dtype,
            device=arguments.device,
            mesh=MeshShape(**{dim: getattr(arguments, dim) for dim in MeshShape.DIMS}),
            etp=arguments.etp,
            exchange=arguments.exchange,
        )
        return setup, prepare(setup.folder)


@contextmanager
def loaded(setup: ModelSetup, given: argparse.Namespace) -> Iterator[Model]:
    """Load this rank's part of the model, for as long as it is needed; say of which checkpoints it is, where folders
    of runs were given."""
    if setup.here.rank == 0:
        folders.tell(given.folder, setup.folder)
        if setup.folder.base is not None and given.base is not None:
            folders.tell(given.base, setup.folder.base)
    with agreed(setup.here), setup.load() as model:
        yield model.model
