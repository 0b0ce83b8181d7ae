"""What the commands that run a model share: their mesh, and the processes that it takes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.store.adapted import Whole, open_model
from megacore.store.dtypes import FLOATS
from megacore.store.strict_json import StoreError
from models.config import ModelConfig
from parallel.layout import MeshShape, split_problems
from tools import folders

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    import torch

    from parallel.mesh import Mesh


@dataclass(frozen=True)
class Here:
    """Which process this is, as torchrun says it in the environment; the only one without it."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    launched: bool

    @classmethod
    def now(cls) -> Here:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if names[0] not in os.environ:
            return cls(0, 1, 0, 1, False)
        rank, world, local_rank, local_world = (int(os.environ[name]) for name in names)
        return cls(rank, world, local_rank, local_world, True)


@contextmanager
def agreed(here: Here) -> Iterator[None]:
    """In this block every process finds the same: of a StoreError one says what is wrong, and all exit with 1."""
    try:
        yield
    except StoreError:
        if here.rank == 0:
            raise
        raise folders.SaidElsewhere from None


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments of :func:`model`."""
    parser.add_argument("folder", type=Path, help="a checkpoint, of a model or of adapters, or a Hugging Face folder")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="of a checkpoint of adapters: the model that they were trained on, a Hugging Face folder or a checkpoint "
        "(where it was then)",
    )


def model(arguments: argparse.Namespace) -> Whole:
    """The model that the arguments name.

    Raises:
        StoreError: as :func:`~megacore.store.adapted.open_model`.
    """
    return open_model(arguments.folder, arguments.base)


def add_mesh(parser: argparse.ArgumentParser, data: bool = False) -> None:
    """The arguments of :func:`mesh_shape`, :func:`device` and :func:`dtype`."""
    group = parser.add_argument_group(
        "where", "More than one process is started by the command itself, or by torchrun."
    )
    group.add_argument("--tp", type=folders.count, default=1, metavar="N", help="tensor parallel ranks")
    group.add_argument("--pp", type=folders.count, default=1, metavar="N", help="pipeline stages")
    if data:
        group.add_argument("--dp", type=folders.count, default=1, metavar="N", help="ranks that share out the windows")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if there are any")
    group.add_argument("--dtype", choices=FLOATS.values(), help="to compute in; by default that of the weights")


def mesh_shape(config: ModelConfig, here: Here, tp: int, pp: int, dp: int = 1) -> MeshShape:
    """The mesh that the arguments ask for.

    Raises:
        StoreError: all reasons why the model, or torchrun's processes, cannot be split so.
    """
    mesh = MeshShape(pp=pp, dp=dp, tp=tp)
    problems, layers = split_problems(config.sizes, mesh), config.sizes["layer"]
    if pp > layers:
        problems.append(f"cannot give each of --pp {pp} stages one of the {layers} layers")
    if here.launched and here.world != mesh.world:
        sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in ("pp", "dp", "tp"))
        problems.append(f"{here.world} processes were started, and {sizes} takes {mesh.world}: start {mesh.world}")
    if problems:
        raise StoreError("\n".join(problems))
    return mesh


def device(wanted: str, here: Here, processes: int) -> str:
    """The kind of device that each of the processes is to use.

    Raises:
        StoreError: there are too few GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    needed = here.local_world if here.launched else processes
    if wanted == "cuda" and gpus < needed:
        raise StoreError(f"{needed} processes need {needed} GPUs here, and there are {gpus}: choose --device cpu")
    return "cuda" if wanted != "cpu" and gpus >= needed else "cpu"


def dtype(name: str | None) -> torch.dtype | None:
    """The dtype of this name."""
    import torch

    found: torch.dtype | None = getattr(torch, name) if name else None
    return found


def start(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run a module in some processes on this machine -> their exit status."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    launcher = [sys.executable, "-m", "megacore.elastic", f"--nproc-per-node={processes}", *where]
    return subprocess.run([*launcher, "-m", module, *arguments], env=environment, check=False).returncode


@contextmanager
def live(shape: MeshShape, here: Here, kind: str) -> Iterator[Mesh]:
    """The mesh, on one kind of device, while it is needed.

    A StoreError of its processes ends it in order: every one of them has found the same.
    """
    import torch
    import torch.distributed as dist

    from parallel.mesh import Mesh

    found = torch.device(kind, here.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(found)
    if shape.world == 1:
        yield Mesh.single(found)
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    problem = None
    try:
        yield Mesh.create(shape, found)
    except StoreError as error:
        problem = error
    # A gloo process that leaves while others still talk to it may abort them.
    dist.barrier()
    dist.destroy_process_group()
    if problem is not None:
        raise problem
