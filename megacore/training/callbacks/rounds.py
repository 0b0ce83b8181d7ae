"""Rounds of steps that replicas take alone: after so many steps an outer one brings them together."""

from __future__ import annotations

from megacore.training.local_steps import LocalSteps
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer


class EndRounds(Callback):
    """Ends a round after every so many steps, before anybody looks at the weights."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step(self, run: Trainer, stats: Stats) -> None:
        optimizer = run.train_step.optimizer
        if run.step % self._every == 0 and isinstance(optimizer, LocalSteps):
            optimizer.end_round(run.halted)
            run.train_step.gradients.updated()
