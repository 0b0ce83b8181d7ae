"""The incidents of a run are added to its ``incidents.jsonl``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megacore.incidents import Incident, IncidentWriter
from megacore.training.trainer import Callback, Trainer


class Incidents(Callback):
    """Writes on rank 0, where the agent has written what ended the ranks of an earlier launch."""

    def on_start(self, run: Trainer) -> None:
        self._writer = IncidentWriter(Path(run.config.out), run.tell) if run.mesh.rank == 0 else None
        self._went_on_after: int | None = run.step

    def on_incident(self, run: Trainer, incident: Incident) -> None:
        if self._writer is not None:
            self._writer.write(incident)
            if incident.action != "tell" and self._went_on_after is None:
                self._went_on_after = run.step

    def on_rewind(self, run: Trainer) -> None:
        self._went_on_after = run.step

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        """Say once that the run goes on, as soon as another step is done."""
        if self._writer is not None and "loss" in record:
            after = self._went_on_after
            if after is not None and run.step > after:
                self._went_on_after = None
                self._writer.went_on(after, time.time())
            self._writer.catch_up()

    def on_end(self, run: Trainer) -> None:
        if self._writer is not None:
            self._writer.catch_up()
