"""Spikes of the loss and of the gradient norm are told where they begin."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megacore.incidents import Incident
from megacore.training import metrics
from megacore.training.spikes import LEAST, Seen, Spikes
from megacore.training.trainer import Callback, Trainer

_RECALLED = 1 << 19
"""Bytes of records that are read for the spikes: more of them than are remembered."""


class TellSpikes(Callback):
    """Looks at what is recorded. A run that goes on knows what it has recorded before, as if it had never ended."""

    def __init__(self) -> None:
        self.seen = Spikes()

    @property
    def limits(self) -> Mapping[str, float]:
        """The largest values of the next step that are no spikes, by metric."""
        return self.seen.limits

    def on_start(self, run: Trainer) -> None:
        out = Path(run.config.out)

        def known() -> list[Any]:
            spikes = Spikes()
            for each in metrics.newest(out / metrics.METRICS, _RECALLED) if run.step and run.mesh.rank == 0 else ():
                if "loss" in each and each["step"] <= run.step:
                    spikes = spikes.after(each["step"], each["lr"], {name: each[name] or 0.0 for name in LEAST})
            return list(map(asdict, spikes.records))

        records = run.control.tell(run.control.attempt(known))
        self.seen = Spikes(TypeAdapter(tuple[Seen, ...]).validate_python(records))

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        if "loss" not in record:
            return
        values = {name: float(record[name] or 0) for name in LEAST}
        if (found := self.seen.found(values)) and not self.seen.spiking:
            detail = ", ".join(map(str, found))
            run.report(Incident("spike", detail=detail, step=run.step, at=time.time()))
            run.tell(f"step {run.step}: {detail} is far above those before it")
        self.seen = self.seen.after(run.step, run.lr, values)

    def on_rewind(self, run: Trainer) -> None:
        self.seen = self.seen.until(run.step)
