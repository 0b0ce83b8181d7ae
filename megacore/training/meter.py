"""The throughput of a run between two records, and the share of the device's peak that it is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megacore.config import Config
from megacore.training.metrics import Record
from models.config import ModelConfig, flops_per_token
from parallel.mesh import Mesh


class Meter:
    """Throughput between two records, evaluation left out, from the last step on that was done before.

    The peak of the device is for the utilisation; None if unknown.
    """

    def __init__(self, config: Config, model: ModelConfig, mesh: Mesh, peak_tflops: float | None, step: int) -> None:
        self._tokens_per_step = config.batch.global_size * config.data.sequence_length
        self._flops = flops_per_token(model, config.data.sequence_length, config.tuning)
        self._world, self._device = mesh.shape.world, mesh.device
        self._is_told = config.log.peak_tflops is not None
        self.peak_tflops = peak_tflops
        self.begin(step)

    def begin(self, step: int) -> None:
        """Count from here on, after this step."""
        self._last_step, self._since, self._paused = step, time.perf_counter(), 0.0

    def go_back(self, step: int) -> None:
        """Count from here on where the last record is of a step that is to be done again."""
        if step < self._last_step:
            self.begin(step)

    def record(self, step: int, tell: Callable[[str], object]) -> Record:
        """Return what is recorded of the throughput up to a step, which the device has done; ``tell`` what is wrong
        with the peak."""
        now = time.perf_counter()
        steps, seconds = step - self._last_step, now - self._since
        self._since, self._last_step = now, step
        speed = steps * self._tokens_per_step / seconds
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
