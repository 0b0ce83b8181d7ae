"""Records of a run: what a step came to, and how fast; to files, a progress bar, and where else the config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.hardware import peak_memory_gib
from megacore.rank import Here
from megacore.training import loads
from megacore.training.meter import Meter
from megacore.training.metrics import Log
from megacore.training.step import Phase, Stats
from megacore.training.trainer import Callback, Trainer


class Metrics(Callback):
    """Records every ``log.every`` steps. Callbacks before it add to what is written."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._log: Log | None = None
        self._stats: Stats | None = None
        self._evaluating = False

    def on_start(self, run: Trainer) -> None:
        def log() -> Log | None:
            return Log(run.config, run.step, Here.now().began, run.tell) if run.mesh.rank == 0 else None

        self._log = run.control.attempt(log)
        self._meter.begin(run.step)

    def on_step(self, run: Trainer, stats: Stats) -> None:
        self._stats = stats

    def ask(self, run: Trainer) -> Mapping[str, float]:
        return {"look": self._is_due(run)}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if self._is_due(run):
            run.enter("log")
            run.call("on_log", self._record(run))

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(run.step, record)

    def on_rewind(self, run: Trainer) -> None:
        self._meter.go_back(run.step)
        if self._log is not None:
            self._log.go_back(run.step)

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        if (phase == "evaluate") is not self._evaluating:
            self._evaluating = not self._evaluating
            self._meter.pause() if self._evaluating else self._meter.go_on()

    def on_end(self, run: Trainer) -> None:
        self._close()

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self._close()

    @staticmethod
    def _is_due(run: Trainer) -> bool:
        return run.is_last or run.step % run.config.log.every == 0

    def _record(self, run: Trainer) -> dict[str, Any]:
        stats = self._stats
        assert stats is not None
        loss, norm = stats.loss.item(), stats.grad_norm.item()  # waits for the step: only then is the clock right
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": run.lr,
            "tokens": run.position.tokens,
            **self._meter.record(run.step, run.tell),
            "peak_memory_gib": run.control.largest(peak_memory_gib(run.mesh.device))[0],
            "skipped_steps": 0,
            **({"loss_scale": stats.scale.item()} if run.train_step.scaling.moves else {}),
            **self._loads(run),
        }

    def _loads(self, run: Trainer) -> Mapping[str, float | int | None]:
        """Return the loads of the experts of a step, if there are some, and write how many tokens each was sent."""
        balance = run.train_step.balance
        if balance is None:
            return {}
        found = balance.read(run.model.config.sizes["layer"])
        if self._log is not None:
            self._log.write_loads(run.step, found.layers, found.counts.tolist())
        return loads.record(found, balance.coefficients)

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
