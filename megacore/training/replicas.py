"""Replicas compared: ranks with the same image must have it to the bit, or memory or an arithmetic unit is at fault.

Of three or more the one that differs is known, of two it is not. Its gradients have been in the sums of all since, so
all go back to the newest checkpoint, which was written when they still agreed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from megacore.recovery.corruption import Corrupted, outvoted
from megacore.training import image
from megacore.training.check import Setup
from megacore.training.checksums import checksum
from megacore.training.recompute import recompute
from megacore.training.recover import identical_ranks
from megacore.training.trainer import Trainer
from parallel.rank_sets import RankSet


def compare_replicas(setup: Setup, trainer: Trainer) -> None:
    """Have a trainer compare its state, and what it computes, with its replicas' as often as the config says; all ranks
    call this.

    Where states are split so that none has a replica, no states are compared.
    """
    alike = identical_ranks(setup, trainer.mesh)
    if any(len(ranks) > 1 for ranks in alike.values()):
        trainer.compare = partial(compare, trainer, alike)
    trainer.recompute = partial(recompute, trainer)


def compare(trainer: Trainer, alike: Mapping[int, RankSet]) -> None:
    """Compare the images of all ranks after a step; this waits for the device.

    Args:
        trainer: This rank's.
        alike: {rank: the ranks whose image is the same}.

    Raises:
        Corrupted: on the ranks that differ from most of their replicas, and on all replicas where no most agree.
    """
    trainer.step.beat.enter("log")
    control, rank = trainer.control, trainer.mesh.rank
    named = [(name, checksum(each[...])) for name, each in image.named(trainer) if name != image.OWN]
    sums: list[int] = torch.stack([each.to(trainer.mesh.device) for _, each in named]).tolist()
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
    where = f"{_some(differ)} after step {trainer.done}"
    if wrong is None:
        raise Corrupted(f"ranks {_listed(replicas)} differ in {where}, and nobody knows which is right", None)
    most = [each for each in replicas if each not in wrong]
    raise Corrupted(f"rank {rank} differs from its replicas, ranks {_listed(most)}, in {where}", rank)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
