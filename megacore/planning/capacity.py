"""Whether a node has room for what its ranks will keep, in memory and on disk, before any of them starts. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megacore.config import Config
from megacore.devices import SMALL_CPU, Device
from megacore.models.config import ModelConfig
from megacore.parallel.virtual_stages import of_stage
from megacore.planning.recipe_setting import setting_of
from megacore.planning.setting import Setting
from megacore.planning.state_bytes import Shares, StateBytes, state
from megacore.resources import host_memory


def cpu_of(ranks: int) -> Device:
    """Return a CPU of this machine on paper: so many ranks share the memory that it, or this container, has."""
    memory = host_memory()
    return SMALL_CPU if memory is None else replace(SMALL_CPU, memory=memory / ranks)


def capacity_problems(
    config: Config,
    model: ModelConfig,
    world_size: int,
    local_ranks: int,
    device_memory: int | None = None,
    tower: int = 0,
) -> Iterator[str]:
    """Yield where the state of training alone has no room, for a config in which `megacore.checks.rules` finds
    nothing. Of activations only inputs of blocks that wait in host memory are counted, so that no run that works is
    refused. ``local_ranks`` are those on this node, ``device_memory`` bytes of a GPU here; None where the CPU computes;
    ``tower``: that of :class:`~megacore.planning.setting.Setting`.
    """
    setting = replace(setting_of(config, model, world_size, "cuda" if device_memory else "cpu"), tower=tower)
    states = [state(shares, setting) for shares in Shares.of(setting).stages]
    yield from _memory_problems(setting, states, local_ranks, device_memory)
    if config.memory.offload_folder is None:
        return
    folder = Path(config.memory.offload_folder)
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    needed = local_ranks * max(each.masters + each.moments for each in states)
    free = shutil.disk_usage(there).free
    if needed > free:
        yield (
            f"memory.offload_folder ({folder}) has {free / 1e9:,.2f} GB free, and the optimizer's states of "
            f"{local_ranks} ranks take {needed / 1e9:,.2f} GB: free some, name another folder, share them out over "
            "more ranks (zero.shard), or set optimizer.moments=bf16"
        )


def _memory_problems(
    setting: Setting, states: Sequence[StateBytes], local_ranks: int, device_memory: int | None
) -> Iterator[str]:
    """Yield the problems of memory. On several nodes it is not known which ranks are here: the least count."""
    disk = setting.offload_optimizer == "file"
    towers = [setting.tower_bytes(stage) for stage in range(len(states))]
    on_device = [
        each.device(setting).total + tower if device_memory else 0 for each, tower in zip(states, towers, strict=True)
    ]
    on_host = [
        each.total + tower - device - (each.masters + each.moments) * disk + inputs
        for each, tower, device, inputs in zip(states, towers, on_device, _inputs_on_host(setting), strict=True)
    ]
    per_stage = setting.layout.mesh.world // setting.layout.mesh.pp
    here, device = (
        sorted(size for size in sizes for _ in range(per_stage))[:local_ranks] for sizes in (on_host, on_device)
    )
    host, needed = host_memory(), sum(here)
    way_out = (
        "`megacore plan` shows what it is: take a smaller model (model.vocab_size, layers), more ranks that share it "
        "out (mesh.tp, mesh.pp, zero.shard), or memory.offload_optimizer"
    )
    if device_memory and max(device) > device_memory:
        yield (
            f"a GPU here has {device_memory / 1e9:,.2f} GB, and weights, gradients and optimizer state of one rank "
            f"take {max(device) / 1e9:,.2f} GB: {way_out}"
        )
    if host is not None and needed > host:
        ranks = "1 process" if local_ranks == 1 else f"{local_ranks} processes"
        yield (
            f"this machine, or this container, has {host / 1e9:,.2f} GB of memory, and weights, gradients and "
            f"optimizer state of the {ranks} here take {needed / 1e9:,.2f} GB: {way_out}"
            + ", or fewer tokens on each (mesh.cp, mesh.tp, batch.micro_size)"
            * any(of_stage(setting.offload_activations, stage) for stage in range(setting.layout.mesh.pp))
        )


def _inputs_on_host(setting: Setting) -> Iterator[int]:
    """Yield the bytes of the inputs of each stage's blocks, of one microbatch: whatever is recomputed, offloading keeps
    them at least."""
    layout, mesh = setting.layout, setting.layout.mesh
    tokens, width = setting.tokens // mesh.tp, setting.model.width
    for stage in range(mesh.pp):
        blocks = sum(len(layout.chunk_layers(stage, chunk)) for chunk in range(layout.chunks))
        yield blocks * tokens * width * setting.widths.parameter * of_stage(setting.offload_activations, stage)
