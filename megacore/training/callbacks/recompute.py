"""Computation compared: replicas compute the same microbatch, and must come to the same loss and gradients to the bit.

A unit that multiplies wrong now and then damages the sums of all replicas alike, which their states do not show. So
all replicas compute a microbatch of one of them, of each in its turn, before the step that it belongs to, with the
weights and the masks of that step. Where they differ they do it once more: who does not repeat itself is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megacore.corruption import Corrupted, at_fault
from megacore.models.decoder import Microbatch
from megacore.places import listed
from megacore.training.callbacks.replicas import checksum
from megacore.training.trainer import Callback, Trainer


class Recompute(Callback):
    """Compares before every so many steps (``recovery.recompute_every``; 0: never)."""

    _on = True

    def on_step_begin(self, run: Trainer) -> None:
        every = run.config.recovery.recompute_every
        if every and self._on and run.step % every == 0:
            self._compare(run)

    def _compare(self, run: Trainer) -> None:
        """Have all replicas compute a microbatch of one of them; this waits for the device, and changes nothing. Raises
        Corrupted: on the ranks that are at fault, or may be."""
        mesh, control, step = run.mesh, run.control, run.step
        turn, replica = divmod(step // run.config.recovery.recompute_every, mesh.shape.dp)
        microbatch = microbatch_of(run, replica, turn)
        alike = {rank: mesh.shape.along(rank, "dp") for rank in range(mesh.shape.world)}
        tries: dict[int, list[Sequence[object]]] = {rank: [] for rank in alike}

        def agree() -> bool:
            """Compute once more -> whether all replicas have come to the same."""
            loss, gradients = computed(run, microbatch)
            here = float(loss).hex(), int(gradients)
            run.enter("log")
            for rank, told in enumerate(control.exchange(here)):
                tries[rank].append(tuple(told))
            return not any(_differ({rank: tries[rank] for rank in ranks}) for ranks in alike.values())

        if agree() and (mesh.shape.dp > 1 or agree()):
            return
        agree()
        if all(len({*each}) == len(each) for each in tries.values()):
            self._on = False
            why = f"step {step}: no rank comes to the same bits twice, for which kernels must repeat bitwise"
            run.tell(f"{why}: recovery.recompute_every compares nothing from here on")
            return
        groups = [{rank: tries[rank] for rank in ranks} for ranks in set(alike.values())]
        wrong = sorted(rank for group in groups if _differ(group) for rank in at_fault(group))
        if mesh.rank not in wrong:
            return
        right = [rank for rank in alike[mesh.rank] if rank not in wrong]
        what = "loss" if len({own for rank in alike[mesh.rank] for own, _ in tries[rank]}) > 1 else "gradients"
        text = f"other bits of the {what} of a microbatch of step {step} (of dp={replica})"
        if right:
            text = f"{listed(wrong)} computed {text} than its replicas, {listed(right)}"
        elif mesh.shape.dp == 1:
            text = f"{listed(wrong)} computed {text} when it was computed again"
        else:
            text = f"{listed(alike[mesh.rank])} each computed {text}, and nobody knows which is right"
        raise Corrupted(text, mesh.rank if len(wrong) == 1 else None)


def microbatch_of(run: Trainer, replica: int, number: int) -> Microbatch:
    """Return a microbatch of this step as the rank of this place, but of another number along dp, has it; ``number``
    goes around."""
    shape = run.mesh.shape
    batches = replace(run.batches, data_rank=replica * shape.ep + run.mesh.place.ep)
    made = batches.microbatches_from(run.start.at(run.step - 1, run.config).samples)
    at = number % len(made)
    (found,) = run.upload(made[at : at + 1], run.step, at)
    return replace(found, replica=replica)


def _differ(tries: Mapping[int, Sequence[object]]) -> bool:
    return len({each for some in tries.values() for each in some}) > 1


def computed(run: Trainer, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Return what a microbatch comes to alone, scalars: this rank's part of its loss, and a checksum of the gradients
    that its backward gives here."""
    step = run.train_step
    total = torch.zeros((), dtype=torch.int64, device=step.mesh.device)
    numbers: Mapping[Tensor, int] = {
        parameter: number for number, parameter in enumerate(step.gradients.parameters.values())
    }

    def add(parameter: Tensor, gradient: Tensor) -> None:
        total.add_(checksum(gradient) * (2 * numbers[parameter] + 1))

    with step.gradients.handed_to(add):
        loss, _ = step.loss([microbatch], run.enter)
    return loss.flatten()[0], total
