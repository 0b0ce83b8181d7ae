"""Checksums of what one rank alone has, between the update of a step and the next one.

Nobody has the same to compare it with (ZeRO shards states, tp and pp matrices): so what lies in memory must be, when
the next update reads it, what the last one has left. Parts take turns, for a checksum reads all of its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from megacore.corruption import Corrupted
from megacore.parallel.gradients.buckets import Elements
from megacore.training.callbacks.replicas import checksum, held_tensors
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer

_SAMPLE = 1 << 24
"""Elements whose checksum is timed at the start: more than a cache holds."""
_WEIGHT = 0.1
"""The weight of a step in what a byte is known to take."""


class ShardChecksums(Callback):
    """Watches as many bytes in each step as cost ``recovery.checksums`` of its time, and leaves out the update that
    would build on a byte that has changed."""

    def on_start(self, run: Trainer) -> None:
        self._share = run.config.recovery.checksums
        alone = [(name, each) for ranks, name, each in held_tensors(run) if len(ranks) == 1] if self._share else []
        if run.config.memory.offload_optimizer != "none":  # reading it back is what a step waits for
            alone = [(name, each) for name, each in alone if isinstance(each, Tensor)]
        self._alone = alone
        self._next, self._credit, self._at = 0, 0.0, time.monotonic()
        self._watched = list[tuple[str, Elements, Tensor]]()
        self._found = list[tuple[str, Tensor]]()
        self._changed = torch.zeros((), dtype=torch.bool, device=run.mesh.device)
        # Of a GPU it is read a step later, when the copy has long arrived: nobody waits for the device.
        self._seen = torch.zeros((), dtype=torch.bool, pin_memory=run.mesh.device.type == "cuda")
        self._per_byte = _seconds_per_byte(run.mesh.device) if alone else 0.0

    def on_gradients(self, run: Trainer, stats: Stats) -> None:
        if self._watched:
            self._verify()
            run.halt(self._changed)
            self._seen.copy_(self._changed, non_blocking=True)

    def on_step(self, run: Trainer, stats: Stats) -> None:
        now, before = time.monotonic(), self._at
        self._at = now
        self._watched = []
        if not self._alone:
            return
        self._credit += self._share * (now - before) / (2 * self._per_byte)  # read twice
        read = 0
        while len(self._watched) < len(self._alone):
            name, tensor = self._alone[self._next]
            values = tensor[...]
            if values.nbytes > self._credit:
                break
            self._credit -= values.nbytes
            read += values.nbytes
            self._watched.append((name, tensor, checksum(values)))
            self._next = (self._next + 1) % len(self._alone)
        else:
            self._credit = 0.0  # all are watched: nothing is saved up
        if read and run.mesh.device.type == "cpu":  # where all ranks share what memory gives
            self._per_byte += _WEIGHT * ((time.monotonic() - now) / read - self._per_byte)

    def ask(self, run: Trainer) -> Mapping[str, float]:
        return {"shards.changed": bool(self._seen)}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        changed = bool(largest["shards.changed"])
        if largest["keep"] and not changed:
            self._verify()
            changed = bool(run.control.largest(bool(self._changed))[0])
        if changed:  # on every rank
            names = [name for name, differs in self._found if bool(differs)]
            told = run.control.exchange(names[:3] if self._changed else None)
            wrong = [rank for rank, each in enumerate(told) if each is not None]
            said = "; ".join(f"{', '.join(told[rank]) or 'a shard'} of {run.control.who(rank)}" for rank in wrong)
            text = f"{said}: changed in memory between two updates, by step {run.step}"
            raise Corrupted(text, wrong[0] if len(wrong) == 1 else None)

    def on_rewind(self, run: Trainer) -> None:
        self._watched = []

    def _verify(self) -> None:
        """Compare what is watched with what it was, on the device."""
        if bool(self._seen):  # it is known, and which
            return
        self._found = [(name, checksum(tensor[...]) != before) for name, tensor, before in self._watched]
        for _, differs in self._found:
            self._changed = self._changed | differs


def _seconds_per_byte(device: torch.device) -> float:
    """Return the time that a checksum takes for a byte of much memory."""
    sample = torch.zeros(_SAMPLE, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        checksum(sample).item()
        best = min(best, time.perf_counter() - began)
    return best / sample.nbytes
