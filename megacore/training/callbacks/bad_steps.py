"""Steps whose loss or gradient norm is not finite: they change nothing, and end the run at once, or once there are too
many of them. They are known on the device alone until somebody looks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megacore import exits
from megacore.data.skipped import SampleRange, in_words
from megacore.incidents import Incident, counted
from megacore.parallel.collectives import all_reduce_
from megacore.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from megacore.training.step import Stats

WINDOW = 100
"""Steps among which ``optimizer.max_skipped`` may be left out."""


class NonFinite(RuntimeError):
    """The loss or the gradient norm is not a number any more, or too often; on every rank."""

    status = exits.FAILED


class BadSteps(Callback):
    """Counts bad steps on the device, so that nobody waits for it; from one more than ``allowed`` (None for any) of the
    last ``WINDOW`` on, the weights do not change any more. Those that overflowed for their loss scale do not count."""

    def __init__(self, allowed: int | None) -> None:
        self._allowed = allowed
        self._told = 0
        """The steps that were left out until the last record."""

    def on_start(self, run: Trainer) -> None:
        self._begin(run, run.start.skipped)
        self._told = run.start.skipped

    def _begin(self, run: Trainer, skipped: int) -> None:
        """Count from here on; so many were left out before."""
        device = run.mesh.device
        self._first, self._skipped = torch.tensor([0, skipped], device=device).unbind()
        self._here, self._halted = torch.zeros(2, dtype=torch.bool, device=device).unbind()
        self._recent = torch.zeros(WINDOW, dtype=torch.bool, device=device)

    def on_gradients(self, run: Trainer, stats: Stats) -> None:
        bad = ~stats.finite
        self._skipped = self._skipped + bad
        bad &= ~stats.overflow
        self._recent[run.step % WINDOW] = bad
        if self._allowed is None:
            return
        now = self._halts(stats) & ~self._halted
        self._halted = self._halted | now
        self._first = torch.where(now, run.step, self._first)
        self._here = self._here | (now & ~torch.isfinite(stats.own_loss))
        self._note(now, stats)
        run.halt(self._halted)

    def _halts(self, stats: Stats) -> Tensor:
        """Return whether a step is one too many, a bool scalar on the device."""
        return self._recent.sum() > (self._allowed or 0)

    def _note(self, now: Tensor, stats: Stats) -> None:
        """Take note, on the device, of the step that halts the run, where ``now`` is true."""

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if largest["look"] and (step := int(self._first)):
            self._found(run, step)

    def _found(self, run: Trainer, step: int) -> None:
        """Answer to the step that has halted the run."""
        allowed = self._allowed
        way_out = "or go on without such steps by optimizer.non_finite=skip"
        if allowed:
            way_out = (
                f"or raise optimizer.max_skipped ({allowed}): with this one {allowed + 1} of the last {WINDOW} steps "
                "were not finite, and left out"
            )
        run.report(Incident("non_finite", "end", step=step, samples=bounds(run, step), at=time.time()))
        run.fail(NonFinite(self._in_words(run, step, way_out)))

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        if "loss" not in record:
            return
        record["skipped_steps"] = skipped = int(self._skipped)
        scaling = run.train_step.scaling
        if (left_out := skipped - self._told) and scaling.minimum == scaling.maximum:  # else the scale was too large
            detail = f"{counted(left_out, 'step')} up to this one, which changed nothing"
            reason = "optimizer.non_finite=skip"
            run.report(Incident("non_finite", "skip", detail, reason, step=run.step, at=time.time()))
        self._told = skipped

    def _in_words(self, run: Trainer, step: int, way_out: str) -> str:
        return (
            f"step {step}, samples {in_words(samples(run, step))} of the training data: {self._where(run)}. The "
            f"weights are those before this step. Lower optimizer.lr, look at these samples, {way_out}"
        )

    def _where(self, run: Trainer) -> str:
        """Return which ranks' losses were not finite; all ranks ask."""
        ranks = torch.zeros(run.mesh.shape.world, dtype=torch.int64, device=run.mesh.device)
        ranks[run.mesh.rank] = self._here
        found = all_reduce_(ranks, run.mesh.world).nonzero().flatten().tolist()
        if found:
            return "the loss is not finite on " + ", ".join(map(run.control.who, found))
        scaling = run.train_step.scaling
        smallest = f" even at loss_scale.minimum ({scaling.minimum:g})" if scaling.scales else ""
        return f"the loss is finite on every rank, the gradient is not{smallest}"


def samples(run: Trainer, step: int) -> list[SampleRange]:
    """Return the ranges of the samples of a step."""
    first = run.start.at(step - 1, run.config).samples
    return run.start.skipped_samples.samples(first, run.config.batch.sizes.at(first))


def bounds(run: Trainer, step: int) -> SampleRange:
    """Return the first sample of a step and the one after its last."""
    found = samples(run, step)
    return found[0][0], found[-1][1]
