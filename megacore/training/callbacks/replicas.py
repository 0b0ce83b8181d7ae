"""Replicas compared: ranks that hold the same state must have it to the bit, or memory or a unit is at fault.

Of three or more the one that differs is known, of two it is not. Its gradients have been in the sums of all since, so
all go back to the newest checkpoint, which was written when they still agreed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType

import torch
from torch import Tensor

from megacore.store.index import MASTER, MOMENTS
from megacore.training.checksums import checksum
from megacore.training.corruption import Corrupted, outvoted
from megacore.training.trainer import Callback, Trainer
from parallel.copies import identical
from parallel.gradients.buckets import Elements
from parallel.rank_sets import RankSet


class Replicas(Callback):
    """Compares after every ``recovery.compare_every`` steps, and before what the steps have come to is kept."""

    def __init__(self) -> None:
        self._alike: Mapping[int, RankSet] = {}

    def on_start(self, run: Trainer) -> None:
        zero = run.config.zero
        alike = identical(run.model.parameters.layout, zero.shard, zero.replicas)
        self._alike = alike if any(len(ranks) > 1 for ranks in alike.values()) else {}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        every = run.config.recovery.compare_every
        if self._alike and every and (run.step % every == 0 or largest["keep"]):
            compare(run, self._alike)


def compare(run: Trainer, alike: Mapping[int, RankSet]) -> None:
    """Compare the states of all ranks after a step; this waits for the device.

    Args:
        run: This rank's.
        alike: {rank: the ranks whose state is the same}.

    Raises:
        Corrupted: on the ranks that differ from most of their replicas, and on all replicas where no most agree.
    """
    run.enter("log")
    control, rank = run.control, run.mesh.rank
    named = [(name, checksum(each[...])) for name, each in state_of(run)]
    sums: list[int] = torch.stack([each.to(run.mesh.device) for _, each in named]).tolist()
    whole = control.exchange(hashlib.blake2b(str(sums).encode(), digest_size=8).hexdigest())
    if all(len({whole[each] for each in ranks}) == 1 for ranks in alike.values()):
        return
    replicas = alike[rank]
    values = {each: whole[each] for each in replicas}
    told: list[list[int]] = control.exchange(sums if len(set(values.values())) > 1 else None)
    wrong = outvoted(values)
    if wrong is not None and rank not in wrong:
        return
    other = next(each for each in replicas if values[each] != values[rank] and each not in (wrong or ()))
    differ = [name for (name, _), ours, theirs in zip(named, sums, told[other], strict=True) if ours != theirs]
    where = f"{_some(differ)} after step {run.step}"
    if wrong is None:
        raise Corrupted(f"ranks {_listed(replicas)} differ in {where}, and nobody knows which is right", None)
    most = [each for each in replicas if each not in wrong]
    raise Corrupted(f"rank {rank} differs from its replicas, ranks {_listed(most)}, in {where}", rank)


def state_of(run: Trainer) -> Iterator[tuple[str, Elements]]:
    """Yield (name for people, tensor) of all that this rank's part of a run consists of between two steps, in one order
    on ranks of one layout; of split parameters a rank has its shard alone. They share the memory of the run."""
    step = run.train_step
    store, gradients = step.optimizer.store, step.gradients
    names = {part: span.name for part, span, _, _ in gradients.owned()}
    trained = set(gradients.parts)
    for part in gradients.parts:
        name = names.get(part, "parameters")
        yield name, part.data
        for state in (MASTER, *MOMENTS) if store.masters else MOMENTS:
            yield f"{state} of {name}", store.of(part, state)
    for part in dict.fromkeys(names):
        if part not in trained:
            yield names[part], part.data
    split = {parameter for values in gradients.frozen for parameter in values.flat.parameters}
    for name, parameter in run.model.parameters.items():
        if not parameter.requires_grad and parameter not in split:
            yield name, parameter.detach()
    yield "the loss scale", _Scale(run)


class _Scale:
    """The loss scale and its good steps, which are other tensors after each step."""

    dtype = torch.float64

    def __init__(self, run: Trainer) -> None:
        self._scaler = run.train_step.scaler

    def __getitem__(self, where: slice | EllipsisType, /) -> Tensor:
        return torch.stack([self._scaler.scale.double(), self._scaler.good_steps.double()])

    def __setitem__(self, where: slice | EllipsisType, values: Tensor, /) -> None:
        self._scaler.scale.copy_(values[0])
        self._scaler.good_steps.copy_(values[1])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
