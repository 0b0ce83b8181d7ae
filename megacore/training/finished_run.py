"""What :func:`megacore.train` returns: a run that has ended, to be looked at. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore import checkpoints
from megacore.config import Config
from megacore.store.conversions.target import MadeFolder
from megacore.training import metrics


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """A run whose ranks have ended. What is on disk is read when it is asked for, on the machine that has it.

    Args:
        config: The recipe with its overrides, as it was run.
        step: The last step that was done; below ``config.train.steps`` where the run was stopped.
        exported: The folder of ``checkpoint.export``, where this process has made it.
    """

    config: Config
    step: int
    exported: MadeFolder | None = None

    def __repr__(self) -> str:
        losses = [record["loss"] for record in self.metrics if "loss" in record]
        loss = f", loss {losses[-1]:.4f}" if losses else ""
        return f"FinishedRun({self.config.out!r}, step {self.step} of {self.config.train.steps}{loss})"

    @property
    def folder(self) -> Path:
        """The run's own folder, which stands for its newest checkpoint wherever a checkpoint is asked for."""
        return Path(self.config.out)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of its metrics.jsonl (docs/metrics.md) in the order of their steps, those before it was resumed
        included."""
        return metrics.read(self.folder / metrics.METRICS)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that it has, in the order of their steps: each is a path for :func:`megacore.load_model` and
        :func:`megacore.convert`."""
        return [*checkpoints.complete(checkpoints.folder_of(self.folder, self.config.checkpoint.folder)).values()]
