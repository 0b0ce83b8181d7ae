"""Where a model is computed with: its mesh, the kind of device of each process, the group that they talk in. No torch
is imported before there is something to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megacore.models.config import ModelConfig
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.weights.layout import MeshShape, heads_problem, mesh_problems
from megacore.parallel.weights.schema import split_of
from megacore.rank import RankPlace, join, leave
from megacore.resources import gpus
from megacore.store.io.strict_json import StoreError

if TYPE_CHECKING:  # what is wrong is said without waiting for torch
    from megacore.parallel.mesh import Mesh


def check_mesh(
    config: ModelConfig,
    mesh: MeshShape,
    here: RankPlace,
    etp: int = 1,
    exchange: ContextExchange = "auto",
    tuning: Tuning = EVERYTHING,
) -> None:
    """Check that a model can be split over a mesh, and that torchrun has started as many processes as that takes.
    ``etp``: parts of each expert; ``exchange``: the way in which queries meet the keys of other ranks of cp;
    ``tuning``: what was trained of it. Raises StoreError: all reasons why not."""
    problems, layers = mesh_problems(config.sizes, mesh, etp), config.sizes["layer"]
    if not problems:
        problems += tuning.block_problems(config.schema, mesh, split_of(etp))
    problems += context_problems(config, mesh, exchange)
    if mesh.pp > layers:
        problems.append(f"cannot give each of `pp={mesh.pp}` stages one of the {layers} layers")
    if here.launched and here.world != mesh.world:
        problems.append(
            f"{here.world} processes were started, and {sizes(mesh)} takes {mesh.world}: start {mesh.world}"
        )
    if problems:
        raise StoreError("\n".join(problems))


def sizes(mesh: MeshShape) -> str:
    """Return the sizes of a mesh, in words."""
    return " x ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS)


def context_problems(config: ModelConfig, mesh: MeshShape, exchange: ContextExchange) -> list[str]:
    """Return why ranks of cp cannot compute attention in a way of exchanging."""
    if mesh.cp == 1:
        return [] if exchange == "auto" else [f"`exchange={exchange}`: `cp` is 1, and no text is split: leave it out"]
    problem = heads_problem(config.sizes, mesh.tp, ContextParallel.of(mesh.cp, exchange).heads)
    return [] if problem is None else [f"`exchange={exchange}`: {problem}, or `exchange=ring`"]


def device_kind(wanted: str, here: RankPlace, processes: int) -> str:
    """Return the kind of device, cpu or cuda, that each of the processes is to use. ``wanted``: either of them, or
    "auto" for GPUs if there are enough. Raises StoreError: there are too few GPUs, or there is no such kind."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise StoreError(f"`device={wanted}`: choose auto, cpu or cuda")
    there = gpus()
    needed = here.local_world if here.launched else processes
    if wanted == "cuda" and there < needed:
        raise StoreError(f"{needed} processes need {needed} GPUs here, and there are {there}: choose `device=cpu`")
    return "cuda" if wanted != "cpu" and there >= needed else "cpu"


@contextmanager
def live(shape: MeshShape, here: RankPlace, kind: str) -> Iterator[Mesh]:
    """Make the mesh, on one kind of device, while it is needed; over the process group that there is, if there is one.

    A StoreError of its processes ends it in order: every one of them has found the same.
    """
    import torch.distributed as dist

    from megacore.hardware import claim
    from megacore.parallel.mesh import TIMEOUT, Mesh

    found = claim(kind, here.local_rank)
    if shape.world == 1:
        yield Mesh.single(found)
        return
    joins, problem = not dist.is_initialized(), None
    if joins:
        join(here, kind, TIMEOUT)
    try:
        yield Mesh.create(shape, found)
    except StoreError as error:
        problem = error
    if joins:
        leave(here)
    if problem is not None:
        raise problem
