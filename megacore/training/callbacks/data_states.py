"""The states of data that is read in order, in checkpoints: who resumes need not read it from its beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.data.corpora import streams
from megacore.store.io.errors import StoreError
from megacore.store.weight_folders.checkpoint import TRAINER
from megacore.training.trainer import Callback, Trainer

_KEY = "data_states"


class DataStates(Callback):
    """Saves and restores a state of each stream; one that a checkpoint has no state of is read from its beginning."""

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        if skipped := sum(each.skipped for each, _ in streams(run.batches.source, 0)):
            record["skipped_documents"] = skipped

    def on_save(self, run: Trainer, document: dict[str, Any]) -> None:
        next_sample = run.batches.skipped.sample(run.position.samples)
        known = list(streams(run.batches.source, next_sample))
        if not known:
            return
        states = run.control.exchange([each.state(row, run.mesh.rank == 0) for each, row in known])
        found = {
            each.name: each.merged(of_ranks)
            for (each, _), of_ranks in zip(known, zip(*states, strict=True), strict=True)
            if None not in of_ranks
        }
        if found:
            document[_KEY] = found

    def on_resume(self, run: Trainer, document: Mapping[str, Any]) -> None:
        resume_streams(run, document)


def resume_streams(run: Trainer, document: Mapping[str, Any]) -> None:
    """Let the streams of a run know their states in a ``trainer.json``. Raises StoreError: a state is none of its
    stream."""
    known = document.get(_KEY, {})
    for each, _ in streams(run.batches.source, 0):
        if each.name in known:
            try:
                each.resume(**known[each.name])
            except (TypeError, ValueError) as error:
                raise StoreError(f"{TRAINER}: {_KEY}: {error}") from None
