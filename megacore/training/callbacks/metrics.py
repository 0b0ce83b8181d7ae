"""Records of a run: what a step came to, and how fast; to files, a progress bar, and where else the config says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.config import Config
from megacore.hardware import peak_memory_gib
from megacore.models.config import ModelConfig, flops_per_token
from megacore.parallel.balance import Coefficients, Loads
from megacore.parallel.mesh import Mesh
from megacore.rank import RankPlace
from megacore.training.metrics import Log, Record, rewards
from megacore.training.step import Phase, Stats
from megacore.training.trainer import Callback, Trainer


class Metrics(Callback):
    """Records every ``log.every`` steps. Callbacks before it add to what is written."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._log: Log | None = None
        self._stats: Stats | None = None
        self._evaluating = False
        self._mtp = 0.0
        """The factor of the loss of further tokens, where they are predicted."""

    def on_start(self, run: Trainer) -> None:
        def log() -> Log | None:
            return Log(run.config, run.step, RankPlace.of_environment().began, run.tell) if run.mesh.rank == 0 else None

        self._log = run.control.attempt(log)
        self._meter.begin(run.step, run.position.tokens)
        self._mtp = run.config.mtp_factor(run.model.config.schema)

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
        self._meter.go_back(run.step, run.position.tokens)
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
            "tokens": (tokens := run.position.tokens),
            **self._meter.record(run.step, tokens, run.tell),
            "peak_memory_gib": run.control.largest(peak_memory_gib(run.mesh.device))[0],
            "skipped_steps": 0,
            **self._told(stats.told.tolist()),
            **({"loss_scale": stats.scale.item()} if run.train_step.scaling.moves else {}),
            **self._loads(run),
            **_divergence(run),
        }

    def _told(self, told: Sequence[float]) -> Record:
        """Return the metrics of what the loss says beside itself: of pairs, or the mean of further tokens."""
        return {"mtp_loss": told[0] / self._mtp} if self._mtp else rewards(told)

    def _loads(self, run: Trainer) -> Record:
        """Return the loads of the experts of a step, if there are some, and write how many tokens each was sent."""
        balance = run.train_step.balance
        if balance is None:
            return {}
        found = balance.read(len(run.model.config.anatomy.layers))
        if self._log is not None:
            self._log.write_loads(run.step, found.layers, found.counts.tolist())
        return expert_load_metrics(found, balance.coefficients)

    def _close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


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


class Meter:
    """Throughput between two records, evaluation left out.

    The peak of the device is for the utilisation; None if unknown.
    """

    def __init__(self, config: Config, model: ModelConfig, mesh: Mesh, peak_tflops: float | None) -> None:
        self._flops = flops_per_token(model, config.data.sequence_length, config.tuning)
        self._world, self._device = mesh.shape.world, mesh.device
        self._is_told = config.log.peak_tflops is not None
        self.peak_tflops = peak_tflops
        self.begin(0, 0)

    def begin(self, step: int, tokens: int) -> None:
        """Count from here on, after this step and the tokens until there."""
        self._last_step, self._tokens, self._since, self._paused = step, tokens, time.perf_counter(), 0.0

    def go_back(self, step: int, tokens: int) -> None:
        """Count from here on where the last record is of a step that is to be done again."""
        if step < self._last_step:
            self.begin(step, tokens)

    def record(self, step: int, tokens: int, tell: Callable[[str], object]) -> Record:
        """Return what is recorded of the throughput up to a step, which the device has done, and the tokens until
        there; ``tell`` what is wrong with the peak."""
        now = time.perf_counter()
        steps, seconds = step - self._last_step, now - self._since
        speed = (tokens - self._tokens) / seconds
        self._since, self._last_step, self._tokens = now, step, tokens
        tflops = speed * self._flops / self._world / 1e12
        if self.peak_tflops is not None and tflops > self.peak_tflops:
            tell(self._exceeded(tflops, self.peak_tflops, step))
            self.peak_tflops = None  # it was none
        return {
            "seconds_per_step": seconds / steps,
            "tokens_per_second": speed,
            "tflops_per_device": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
        }

    def pause(self) -> None:
        """Leave uncounted what comes from here on."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the steps before it are done
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Count again, after :meth:`pause`."""
        self._since += time.perf_counter() - self._paused

    def _exceeded(self, tflops: float, peak: float, step: int) -> str:
        of = (
            "log.peak_tflops"
            if self._is_told
            else "measured at the start, while the machine was busy"
            if self._device.type == "cpu"
            else "of the table of devices"
        )
        return (
            f"step {step}: {tflops:.3g} TFLOP/s on each device are above its peak of {peak:.3g} ({of}): mfu is "
            "null from here on, and was too high before; log.peak_tflops sets the peak"
        )
