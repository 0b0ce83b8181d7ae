"""A profile of two steps, by torch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megacore.training.trainer import Callback, Trainer

FOLDER = "profiles"


class Profile(Callback):
    """Records the step ``log.profile`` and the next one, on the ranks of the first data parallel replica: others do the
    same. Perfetto (ui.perfetto.dev) and chrome://tracing show what it writes."""

    _recording: profile | None = None

    def on_step_begin(self, run: Trainer) -> None:
        if run.step == run.config.log.profile and run.mesh.place.dp == 0:
            cuda = [ProfilerActivity.CUDA] if run.mesh.device.type == "cuda" else []
            self._recording = profile(activities=[ProfilerActivity.CPU, *cuda])
            self._recording.start()

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if self._recording is not None and (run.step > run.config.log.profile or run.is_last):
            if run.mesh.device.type == "cuda":
                torch.cuda.synchronize(run.mesh.device)
            self._recording.stop()
            path = Path(run.config.out) / FOLDER / f"step-{run.config.log.profile}-rank-{run.mesh.rank}.json"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._recording.export_chrome_trace(str(path))
            except OSError as error:  # on a full disk, say; the run goes on
                run.tell(f"{path}: the profile could not be written: {error}")
            self._recording = None

    def on_error(self, run: Trainer, error: BaseException) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
