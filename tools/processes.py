"""The commands that run a model: the model that is named, its mesh, and the processes that this takes."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from megacore.launcher import Node, launch, threads
from megacore.models.config import ModelConfig
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.weights.layout import MeshShape, heads_problem, mesh_problems
from megacore.parallel.weights.schema import split_of
from megacore.rank import STORE, RankPlace, join, leave
from megacore.resources import gpus
from megacore.store.conversions.formats import open_model
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    import torch

    from megacore.models.assemble import Model
    from megacore.parallel.mesh import Mesh

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
    group.add_argument("--cp", type=folders.count, default=1, metavar="N", help="ranks that share out the tokens")
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
    """Add the arguments of :func:`mesh_shape`, :func:`device` and :func:`dtype`."""
    group = parser.add_argument_group(
        "where", "More than one process is started by the command itself, or by torchrun."
    )
    folders.add_parts(group, experts="ranks over which experts are spread")
    add_context(group, exchanges=data)
    if data:
        group.add_argument("--dp", type=folders.count, default=1, metavar="N", help="ranks that share out the windows")
    else:
        parser.set_defaults(dp=1)
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    group.add_argument("--dtype", choices=FLOATS.values(), help="to compute in; by default that of the weights")


def mesh_shape(config: ModelConfig, here: RankPlace, arguments: argparse.Namespace) -> MeshShape:
    """Return the mesh that the arguments of :func:`add_mesh` ask for.

    Raises:
        StoreError: all reasons why the model, or torchrun's processes, cannot be split so.
    """
    mesh = MeshShape(pp=arguments.pp, dp=arguments.dp, ep=arguments.ep, cp=arguments.cp, tp=arguments.tp)
    problems, layers = mesh_problems(config.sizes, mesh, arguments.etp), config.sizes["layer"]
    problems += context_problems(config, mesh, arguments.exchange)
    if mesh.pp > layers:
        problems.append(f"cannot give each of --pp {mesh.pp} stages one of the {layers} layers")
    if here.launched and here.world != mesh.world:
        sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS)
        problems.append(f"{here.world} processes were started, and {sizes} takes {mesh.world}: start {mesh.world}")
    if problems:
        raise StoreError("\n".join(problems))
    return mesh


def context_problems(config: ModelConfig, mesh: MeshShape, exchange: ContextExchange) -> list[str]:
    """Return why ranks of cp cannot compute attention as --exchange says."""
    if mesh.cp == 1:
        return [] if exchange == "auto" else [f"--exchange {exchange}: --cp is 1, and no text is split: leave it out"]
    problem = heads_problem(config.sizes, mesh.tp, ContextParallel.of(mesh.cp, exchange).heads)
    return [] if problem is None else [f"--exchange {exchange}: {problem}, or --exchange ring"]


def device(wanted: str, here: RankPlace, processes: int) -> str:
    """Return the kind of device that each of the processes is to use.

    Raises:
        StoreError: there are too few GPUs.
    """
    there = gpus()
    needed = here.local_world if here.launched else processes
    if wanted == "cuda" and there < needed:
        raise StoreError(f"{needed} processes need {needed} GPUs here, and there are {there}: choose --device cpu")
    return "cuda" if wanted != "cpu" and there >= needed else "cpu"


def dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of this name."""
    import torch

    found: torch.dtype | None = getattr(torch, name) if name else None
    return found


def start(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run a module in some processes on this machine -> their exit status."""
    # What a name of the hub stands for is in the cache, and nobody asks the hub again, which may have moved on.
    status = launch(module, arguments, Node(processes), {**threads(processes), "HF_HUB_OFFLINE": "1"})
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    return status


@contextmanager
def live(shape: MeshShape, here: RankPlace, kind: str) -> Iterator[Mesh]:
    """Make the mesh, on one kind of device, while it is needed.

    A StoreError of its processes ends it in order: every one of them has found the same.
    """
    from megacore.hardware import claim
    from megacore.parallel.mesh import TIMEOUT, Mesh

    found = claim(kind, here.local_rank)
    if shape.world == 1:
        yield Mesh.single(found)
        return
    join(here, kind, TIMEOUT)
    problem = None
    try:
        yield Mesh.create(shape, found)
    except StoreError as error:
        problem = error
    leave(here)
    if problem is not None:
        raise problem


@dataclass(frozen=True)
class ModelRun:
    """A command that computes with a model: its weights, and the ranks that share it, on one kind of device."""

    arguments: argparse.Namespace
    here: RankPlace
    folder: WeightFolder
    shape: MeshShape
    device: str

    @classmethod
    def check(
        cls, arguments: argparse.Namespace, prepare: Callable[[WeightFolder], Prepared]
    ) -> tuple[ModelRun, Prepared]:
        """Return the run that arguments of :func:`add_model` and :func:`add_mesh` ask for, and what is prepared for it.

        Raises:
            StoreError: there is no such model, it cannot be split so, or ``prepare`` refuses it (on one rank).
        """
        here = RankPlace.of_environment()
        with agreed(here):
            folder = open_model(arguments.folder, arguments.base)
            shape = mesh_shape(folder.config, here, arguments)
            prepared = prepare(folder)
            return cls(arguments, here, folder, shape, device(arguments.device, here, shape.world)), prepared

    @property
    def lacks_ranks(self) -> bool:
        """Whether its ranks are to be started yet: this process is none of them."""
        return self.shape.world > 1 and not self.here.launched

    @contextmanager
    def model(self) -> Iterator[Model]:
        """Load this rank's part of the model, for as long as it is needed; say of which checkpoints it is, where
        folders of runs were given."""
        from megacore.inference.model_loader import model_from

        given = self.arguments
        if self.here.rank == 0:
            folders.tell(given.folder, self.folder)
            if self.folder.base is not None and given.base is not None:
                folders.tell(given.base, self.folder.base)
        with agreed(self.here), live(self.shape, self.here, self.device) as mesh:
            yield model_from(self.folder, mesh, dtype(given.dtype), split=split_of(given.etp), exchange=given.exchange)
