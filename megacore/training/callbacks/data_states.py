"""The states of data sets that are iterated, in checkpoints: who resumes need not read them from their beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.data.own_rows import streams
from megacore.training.trainer import Callback, Trainer

_KEY = "data_states"


class DataStates(Callback):
    """Saves and restores a state of each stream; one that a checkpoint has no state of is read from its beginning."""

    def on_save(self, run: Trainer, document: dict[str, Any]) -> None:
        next_sample = run.batches.skipped.sample(run.position.samples)
        found = {
            each.name: each.state(row) for each, row in streams(run.batches.source, next_sample) if each.has_states
        }
        if found:
            document[_KEY] = found

    def on_resume(self, run: Trainer, document: Mapping[str, Any]) -> None:
        known = document.get(_KEY, {})
        for each, _ in streams(run.batches.source, 0):
            if each.has_states and each.name in known:
                each.resume(**known[each.name])
