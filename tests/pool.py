"""One pool of processes for all distributed tests of a pytest session: importing torch is paid for once.

A forkserver imports torch, its children are the ranks. Each job runs a module-level function in as many ranks as it
asks for, in a process group of its own, and gives back what each rank returned.
"""

import gc
import multiprocessing
import multiprocessing.context
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

LARGEST = 8
TIMEOUT_S = 120
"""Long, for cores are shared with other workers."""


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Pool:
    def __init__(self) -> None:
        self._workers: list[tuple[multiprocessing.context.ForkServerProcess, Connection]] = []
        self._jobs = 0
        # One for the session: ranks that look for each other in a file look every 10 ms.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(*arguments)`` on ranks 0..world-1 of a gloo group -> what each returned."""
        if world > LARGEST:
            raise ValueError(f"the pool has {LARGEST} processes, {world} are asked for")
        while len(self._workers) < world:
            self._workers.append(_start(self._store.port))
        self._jobs += 1
        for rank in range(world):
            self._workers[rank][1].send((rank, world, self._jobs, function, arguments))
        return self._collect(world)

    def _collect(self, world: int) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(waiting.values())} of {world} did not answer in {TIMEOUT_S} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    ok, result = connection.recv()
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} of {world} died") from None
                if not ok:
                    # The others may wait for this one for ever: start afresh.
                    self.close()
                    raise RankError(f"rank {rank} of {world}:\n{result}")
                results[rank] = result
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have imported what tests need. A session has one server: what it imports is settled here."""
    context = multiprocessing.get_context("forkserver")
    # torch's compiler is imported with the first optimizer, in more than a second.
    imported = ["torch", "torch.distributed", "torch._dynamo", "pytest"]
    imported += ["megacore.models.decoder", "megacore.training.main"]
    if "transformers" in sys.modules:  # else nobody in this session needs it
        imported.append("transformers.modeling_utils")
    imported += [name for name in sys.modules if name.startswith("megacore.models.families.")]
    context.set_forkserver_preload(imported)
    return context


def _start(port: int) -> tuple[multiprocessing.context.ForkServerProcess, Connection]:
    context = forkserver()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, port), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(connection: Connection, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=TIMEOUT_S))
    gc.freeze()
    while True:
        try:
            rank, world, job, function, arguments = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"job{job}", store),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            result = function(*arguments)
            dist.barrier()
            # Modules and hooks refer to each other: left to themselves, groups would live on, and their threads spin.
            gc.collect()
            # What is left stays, such as what the job has imported. That each of the next ones, in each rank, looks at
            # it again takes longer than most of them.
            gc.freeze()
            dist.destroy_process_group()
            connection.send((True, result))
        except Exception:
            connection.send((False, traceback.format_exc()))
            return
