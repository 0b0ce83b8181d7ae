"""Replicas compared: ranks that hold the same elements must have them to the bit, or memory or a unit is at fault.

What is the same follows from the layout: replicas of dp hold the same matrices, ranks of tp and cp the same norms, the
ends of a pipeline the same tied table. Replicas that take steps alone have the outer state alike, and nothing else. Of
three or more the one that differs is known, of two it is not. Its gradients have been in the sums of all since, so all
go back to the newest checkpoint, which was written when they still agreed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from megacore.control import Control
from megacore.corruption import Corrupted, outvoted
from megacore.parallel.gradients.buckets import Elements, WholeSpan, spans_of
from megacore.parallel.rank_sets import RankSet, groups_of, parts_of_dp
from megacore.places import listed
from megacore.training.trainer import Callback, Trainer

_ROW = 1024
"""Words that a checksum sums with one weight."""


class Replicas(Callback):
    """Compares after every ``recovery.compare_every`` steps, and before what the steps have come to is kept."""

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        every = run.config.recovery.compare_every
        if every and run.mesh.shape.world > 1 and (run.step % every == 0 or largest["keep"]):
            compare(run)


def compare(run: Trainer) -> None:
    """Compare the states of all ranks after a step; this waits for the device. Raises Corrupted: some differ; on all
    ranks."""
    run.enter("log")
    control = run.control
    here = list(held_tensors(run))
    sums: list[int] = torch.stack([checksum(each[...]).to(run.mesh.device) for _, _, each in here]).tolist()
    named = dict[RankSet, list[tuple[str, int]]]()
    for (ranks, name, _), each in zip(here, sums, strict=True):
        if len(ranks) > 1:
            named.setdefault(ranks, []).append((name, each))
    told = _exchanged(control, {ranks: _digest(each) for ranks, each in named.items()})
    differing = sorted({ranks for each in told for ranks in each if len({told[other][ranks] for other in ranks}) > 1})
    if not differing:
        return
    ranks = differing[0]
    theirs = _exchanged(control, {ranks: named[ranks]} if ranks in named else {})
    values = {each: told[each][ranks] for each in ranks}
    wrong = outvoted(values)
    one = wrong[0] if wrong else ranks[0]
    other = next(each for each in ranks if values[each] != values[one] and each not in (wrong or ()))
    pairs = zip(*(theirs[each][ranks] for each in (one, other)), strict=True)
    names = [name for (name, ours), (_, right) in pairs if ours != right]
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    where = f"{', '.join(names[:3])}{more} after step {run.step}"
    if wrong is None:
        raise Corrupted(f"{listed(ranks)} differ in {where}, and nobody knows which is right", None)
    most = listed([each for each in ranks if each not in wrong])
    text = f"{listed(wrong)} differ{'s' * (len(wrong) == 1)} from {most}, which hold the same, in {where}"
    raise Corrupted(text, wrong[0] if len(wrong) == 1 else None)


def held_tensors(run: Trainer) -> Iterator[tuple[RankSet, str, Elements]]:
    """Yield (the ranks that hold the same, name for people, tensor) of all that this rank's part of a run consists of
    between two steps, of each set of ranks in one order on all of them; of split parameters a rank has its shard alone.
    The tensors share the memory of the run."""
    step, mesh = run.train_step, run.model.parameters.mesh
    store, gradients = step.optimizer.store, step.gradients
    alone = parts_of_dp(run.mesh.shape, run.mesh.shape.dp // mesh.shape.dp)  # all of it where none take steps alone

    def everywhere(ranks: RankSet) -> RankSet:
        """Return the ranks of all replicas that take steps alone which are where these are in one."""
        return tuple(sorted(part[rank] for part in alone for rank in ranks))

    trained, seen = set(gradients.parts), set[object]()
    for part, span, _, _ in gradients.owned():
        if part in seen:
            continue
        seen.add(part)
        ranks = span.replicas
        if not isinstance(part, WholeSpan):
            ranks = groups_of(mesh.shape, ranks, gradients.replicas, mesh.rank)[1]
        all_ranks, ranks = everywhere(ranks), mesh.global_ranks(ranks)
        yield ranks, span.name, part.data
        if part in trained:
            for state in store.states(part):
                yield ranks, f"{state} of {span.name}", store.of(part, state)
            for state, tensor in step.optimizer.outer_states(part).items():
                yield all_ranks, f"{state} of {span.name}", tensor
    flat = {parameter for values in gradients.frozen for parameter in values.flat.parameters}
    for span in spans_of(run.model.parameters, trained=False):
        if span.parameter not in flat:
            yield everywhere(span.replicas), span.name, span.data
    yield tuple(range(run.mesh.shape.world)), "the loss scale", _Scale(run)


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


def _digest(named: Sequence[tuple[str, int]]) -> str:
    return hashlib.blake2b(str([each for _, each in named]).encode(), digest_size=8).hexdigest()


def _exchanged(control: Control, here: Mapping[RankSet, Any]) -> list[dict[RankSet, Any]]:
    """Return what each rank has of each set of ranks."""
    return [{tuple(ranks): value for ranks, value in each} for each in control.exchange([*here.items()])]


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits of a tensor, an int64 scalar on its device, which nobody waits for.

    Each row of 64-bit words has an odd weight: one word that is changed always changes it.
    """
    flat = tensor.detach().reshape(-1)
    if flat.nbytes % 8 or flat.storage_offset() * flat.itemsize % 8:
        padded = flat.new_zeros(-(-flat.nbytes // 8) * 8 // flat.itemsize)
        padded[: len(flat)] = flat
        flat = padded
    words = flat.view(torch.int64)
    whole = len(words) - len(words) % _ROW
    rows = torch.cat([words[:whole].view(-1, _ROW).sum(1), words[whole:].sum(0, keepdim=True)])
    return (rows * (2 * torch.arange(len(rows), device=rows.device) + 1)).sum()
