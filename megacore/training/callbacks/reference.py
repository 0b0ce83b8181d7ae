"""The log-probabilities of pairs by the weights that a run starts from: computed once, before its first step, and kept
beside the prepared pairs. A run that goes on reads them, on any layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacore.data.batches import Batches
from megacore.data.corpora import EXAMPLES
from megacore.data.packing import Packed
from megacore.data.reference import Reference, read, write
from megacore.models.assemble import Model
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.preference import TOLD, PairFunction, are_real
from megacore.progress_bar import progress_bar
from megacore.store.io.errors import StoreError
from megacore.store.weight_folders.checkpoint import TRAINER
from megacore.store.weight_folders.loader import fingerprint
from megacore.training.trainer import Callback, Trainer

KEY = "reference"
"""What :file:`trainer.json` names the weights by that the reference is."""


class ReferenceScores(Callback):
    """Gives pairs the log-probabilities of their answers by the reference; ``batches`` makes those of this rank, of the
    rows of pairs that are trained and evaluated on."""

    def __init__(self, sources: Sequence[Packed], batches: Callable[[Packed], Batches]) -> None:
        self._sources, self._batches = sources, batches
        self._weights: str | None = None
        self._out: Path | None = None
        """The folder of the run that this one goes on from."""

    def on_save(self, run: Trainer, document: dict[str, Any]) -> None:
        document[KEY] = self._weights

    def on_resume(self, run: Trainer, document: Mapping[str, Any]) -> None:
        weights = document.get(KEY)
        if weights is not None and not re.fullmatch(r"[\w-]{1,200}", str(weights), re.ASCII):
            raise StoreError(f"{TRAINER}: {KEY} is no name of weights")
        self._weights, self._out = weights, Path(str(document["recipe"].get("out", run.config.out)))

    def on_start(self, run: Trainer) -> None:
        goes_on = self._weights is not None
        self._weights = self._weights or _weights(run)
        for source in self._sources:
            examples = source.examples
            path = examples.folder / f"reference-{self._weights}.safetensors"
            before = path if self._out is None else self._out / EXAMPLES / examples.folder.name / path.name
            found = before if run.control.largest(not path.exists())[0] else path
            known = run.control.attempt(partial(read, found, examples.count))
            if lacks := run.control.largest(bool(np.isnan(known[source.chosen]).any()))[0]:
                if goes_on:
                    raise StoreError(
                        f"{path} is not there, or is of other pairs, and the weights that the run started from have "
                        "been trained since: put it back, or begin another run by checkpoint.init"
                    )
                known[source.chosen] = self._computed(run, source)[source.chosen]
            examples.reference = known
            if lacks or found != path:
                run.control.attempt(partial(write, path, known) if run.mesh.rank == 0 else lambda: None)

    def _computed(self, run: Trainer, source: Packed) -> Reference:
        """Return the log-probabilities by the weights of now, [pairs, 2]; 0 of pairs that are not in the source."""
        count, mesh = source.examples.count, run.mesh
        found = torch.zeros(count, 2, dtype=torch.float64, device=mesh.device)

        def keep(log_probabilities: Tensor, numbers: Tensor, counted: Tensor) -> Tensor:
            real = are_real(counted)
            found[numbers[real, 0].long()] = log_probabilities[real].double()
            return log_probabilities.new_zeros(TOLD)

        # In the place of what is not known yet, a pair brings along its number.
        source.examples.reference = np.repeat(np.arange(count, dtype=np.float64)[:, None], 2, 1)
        batches, one = self._batches(source), torch.ones((), device=mesh.device)
        rows, size = source.per_epoch, batches.global_batch
        shown = progress_bar(rows, "reference", "rows") if mesh.rank == 0 else nullcontext(lambda done: None)
        run.model.train(False)
        with _saying(run.model, keep), shown as told:
            for first in range(0, rows, size):
                run.enter("evaluate")
                step = replace(batches, global_batch=min(size, rows - first))
                run.train_step.pipeline.evaluate(run.upload(step.microbatches_from(first), 0), one)
                told(step.global_batch)
        run.model.train()
        run.enter("data")
        return all_reduce_(found, mesh.world).cpu().numpy()


@contextmanager
def _saying(model: Model, function: PairFunction) -> Iterator[None]:
    """Let a function have what the head finds of pairs."""
    heads = [chunk.head for chunk in model.chunks if chunk.head is not None]
    before = [head.losses for head in heads]
    for head in heads:
        assert head.losses.of_pairs is not None
        head.losses = replace(head.losses, of_pairs=replace(head.losses.of_pairs, function=function))
    try:
        yield
    finally:
        for head, losses in zip(heads, before, strict=True):
            head.losses = losses


def _weights(run: Trainer) -> str:
    """Return what names the weights of now, the same on all ranks."""
    start, adapters = run.origin, run.contents.adapters
    precision = run.config.train.precision
    if start.source is None:
        drawn = json.dumps([dict(run.contents.raw), run.config.train.seed], sort_keys=True).encode()
        return f"{blake2b(drawn, digest_size=8).hexdigest()}-{precision}"
    found = fingerprint(start.source, run.control) if adapters is None else adapters.fingerprint
    more = "" if start.adapters is None else f"-{fingerprint(start.adapters, run.control):x}"
    return f"{found:x}{more}-{precision}"
