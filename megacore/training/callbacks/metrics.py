"""Records of a run: what a step came to, and how fast; to files, a progress bar, and where else the config says."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megacore.hardware import peak_memory_gib
from megacore.models.config import flops_per_token
from megacore.parallel.balance import Coefficients, Loads
from megacore.rank import RankPlace
from megacore.training.metrics import Log, Record, rewards
from megacore.training.step import Phase, Stats
from megacore.training.trainer import Callback, Trainer


class Metrics(Callback):
    """Records every ``log.every`` steps, with the throughput since the last record, evaluation left out. Callbacks
    before it add to what is written. The peak of a device is for the utilisation; None if unknown."""

    def __init__(self, peak_tflops: float | None) -> None:
        self.peak_tflops = peak_tflops
        self._log: Log | None = None
        self._stats: Stats | None = None
        self._since, self._paused = 0.0, False
        """The time from which on seconds are counted; while an evaluation goes on, those counted before it."""

    def on_start(self, run: Trainer) -> None:
        config, model = run.config, run.model.config
        self._log = run.control.attempt(lambda: self._opened(run) if run.mesh.rank == 0 else None)
        self._flops = flops_per_token(model, config.data.sequence_length, config.tuning) / run.mesh.shape.world
        self._mtp = config.mtp_factor(model.schema)
        self._begin(run)

    def _opened(self, run: Trainer) -> Log | None:
        return Log(run.config, run.step, RankPlace.of_environment().began, run.tell)

    def _begin(self, run: Trainer) -> None:
        """Count from here on."""
        self._last_step, self._tokens, self._since = run.step, run.position.tokens, time.perf_counter()

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
        if run.step < self._last_step:
            self._begin(run)
        if self._log is not None:
            self._log.go_back(run.step)

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        if (phase == "evaluate") is not self._paused:
            self._paused = not self._paused
            if self._paused and run.mesh.device.type == "cuda":
                torch.cuda.synchronize(run.mesh.device)  # the steps before it are done
            self._since = time.perf_counter() - self._since

    def on_end(self, run: Trainer) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self.on_end(run)

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
            **self._speed(run),
            "peak_memory_gib": run.control.largest(peak_memory_gib(run.mesh.device))[0],
            "skipped_steps": 0,
            **({"mtp_loss": stats.told[0].item() / self._mtp} if self._mtp else rewards(stats.told.tolist())),
            **({"loss_scale": stats.scale.item()} if run.train_step.scaling.scales else {}),
            **self._loads(run),
            **_divergence(run),
        }

    def _speed(self, run: Trainer) -> Record:
        """Return what is recorded of the throughput since the last record, up to a step that the device has done."""
        steps, tokens, since = run.step - self._last_step, run.position.tokens - self._tokens, self._since
        self._begin(run)
        speed = tokens / (self._since - since)
        tflops, peak = speed * self._flops / 1e12, self.peak_tflops
        if peak is not None and tflops > peak:
            busy, is_cpu = "measured at the start, while the machine was busy", run.mesh.device.type == "cpu"
            found = busy if is_cpu else "of the table of devices"
            of = found if run.config.log.peak_tflops is None else "log.peak_tflops"
            run.tell(
                f"step {run.step}: {tflops:.3g} TFLOP/s on each device are above its peak of {peak:.3g} ({of}): mfu is "
                "null from here on, and was too high before; log.peak_tflops sets the peak"
            )
            self.peak_tflops = None  # it was none
        return {
            "seconds_per_step": (self._since - since) / steps,
            "tokens_per_second": speed,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }

    def _loads(self, run: Trainer) -> Record:
        """Return the loads of the experts of a step, if there are some, and write how many tokens each was sent."""
        balance = run.train_step.balance
        if balance is None:
            return {}
        found = balance.read(len(run.model.config.anatomy.layers))
        if self._log is not None:
            self._log.write_loads(run.step, found.layers, found.counts.tolist())
        return expert_load_metrics(found, balance.coefficients)


def _divergence(run: Trainer) -> Record:
    """Return how far indexers are from their attention in a step, the mean over the layers that have some."""
    alignment = run.train_step.alignment
    if alignment is None:
        return {}
    found = alignment.read(len(run.model.config.anatomy.layers))
    return {"index_divergence": (found.sum() / (found > 0).sum().clamp(min=1)).item()}


def expert_load_metrics(loads: Loads, coefficients: Coefficients) -> Record:
    """Return the metrics of the loads of experts in a step: means over the layers, and of the worst layer; see
    docs/metrics.md."""
    counts = loads.counts.double()
    shares = counts / counts.sum(1, keepdim=True)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum(1) / math.log(max(counts.shape[1], 2))
    made = {
        "load_max": (counts.amax(1) / counts.mean(1), Tensor.max),
        "load_idle": ((counts == 0).double().mean(1), Tensor.max),
        "load_entropy": (entropy, Tensor.min),
    }
    numbers = {name: values.mean().item() for name, (values, _) in made.items()}
    numbers |= {f"{name}_worst": worst(values).item() for name, (values, worst) in made.items()}
    if coefficients.balance:
        numbers["balance"] = loads.balance.mean().item()
    if coefficients.z_loss:
        numbers["router_z_loss"] = loads.z_loss.mean().item()
    if loads.biases is not None:
        numbers |= {"bias_min": loads.biases[:, 0].min().item(), "bias_max": loads.biases[:, 1].max().item()}
    return numbers
