"""Runs in the pool whose ranks change between two steps, under agents that know when: each rank has its own."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from megacore.rank import STORE
from megacore.recovery.channel import OVERRIDES, Agent, Channel, Dismissed
from megacore.training import train as pretrain
from megacore.training.step import Stats
from megacore.training.trainer import Trainer

LATE_S = 0.1
"""The time between the first process that hears of a pause and the others."""


@dataclass(frozen=True)
class World:
    """The ranks of a generation.

    Args:
        ranks: {process of the pool: its rank}.
        until: The step in which it is paused; None for the end of the run.
        overrides: Of the recipe.
        over: Whether a fault ends it after that step, rather than a pause.
    """

    ranks: Mapping[int, int]
    until: int | None = None
    overrides: Sequence[str] = ()
    over: bool = False


def take_part(recipe: str, overrides: Sequence[str], folder: Path, worlds: Sequence[World]) -> int | str:
    """Be a process of a run over some worlds -> the last step of the run, or what has become of it."""
    process = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    try:
        with _agent(process, folder, worlds) as agent, patch.dict(os.environ):
            begins = process in worlds[0].ranks
            there = next(world for world in worlds if process in world.ranks)
            os.environ |= _variables(process, there, folder, 0)
            size = len(there.ranks)
            setup = pretrain.check(recipe, [*overrides, *there.overrides], size, size, goes_on=not begins)
            try:
                agent.ready()
                return pretrain.run(setup, torch.device("cpu"), size, agent)
            except Dismissed:
                return "dismissed"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool leaves one


def _variables(process: int, world: World, folder: Path, generation: int) -> dict[str, str]:
    rank, size = str(world.ranks[process]), str(len(world.ranks))
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        OVERRIDES: json.dumps(world.overrides),
        STORE: str(folder / f"store-{generation}"),
    }


@contextmanager
def _agent(process: int, folder: Path, worlds: Sequence[World]) -> Iterator[Agent]:
    """The agent of a process: it ends each world in its step, and answers each ``ready`` by the next one."""
    ours, theirs = socket.socketpair()
    channel, update = Channel(ours), Trainer.update

    def answer() -> None:
        while (messages := channel.heard()) is not None:
            for message in messages:
                if message["what"] == "lost":
                    print(f"process {process}: {message['reason']}", file=sys.stderr)
                    os._exit(1)
                if message["what"] != "ready":
                    continue
                # The first world that the process is in, or the one after that which it has left.
                left = message["generation"]
                after = range(left, len(worlds)) if not left else range(left, left + 1)
                at = next((at for at in after if process in worlds[at].ranks), None)
                if at is None:
                    channel.say("dismiss")
                    continue
                variables = _variables(process, worlds[at], folder, at + 1)
                channel.say("go", generation=at + 1, variables=variables, begun=at > 0)

    def updated(self: Trainer, step: int, stats: Stats) -> None:
        update(self, step, stats)
        at = agent.generation - 1
        if step != worlds[at].until:
            return
        if worlds[at].over:
            channel.say("over", generation=at + 1)
            raise RuntimeError("a fault")
        leaving = [rank for other, rank in worlds[at].ranks.items() if other not in worlds[at + 1].ranks]
        late = LATE_S if self.mesh.rank else 0.0
        threading.Timer(late, lambda: channel.say("pause", generation=at + 1, leaving=leaving)).start()
        time.sleep(LATE_S / 2)  # so that the first has heard of it, and the others have not

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    agent = Agent(Channel(theirs))
    try:
        with patch.object(Trainer, "update", updated):
            yield agent
    finally:
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
        ours.close()
