"""Samples of data sets of the user's own, by import path: rows by their number, or one after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from megacore.config import Config, CorpusConfig
from megacore.data.batches import TokenError
from megacore.data.samples import Runs, Sample, Source, epoch_order, split_runs
from megacore.parallel.import_path import imported
from megacore.parallel.labels import IGNORE

KEPT = 8
"""States of a stream that are kept for going back, a global batch apart, besides that of its start."""


def opened(config: Config, corpus: CorpusConfig) -> IndexedRows | StreamedRows:
    """Return the data set at an import path: what is there, or what a class or function there makes of the config.
    Raises ValueError: it is none, or its first row is none."""
    name, found = corpus.path, imported(corpus.path)
    if isinstance(found, type) or (not hasattr(found, "__getitem__") and not hasattr(found, "__iter__")):
        if not callable(found):
            raise ValueError(f"{name} is {type(found).__name__}, neither a data set nor a function that makes one")
        try:
            found = found(config)
        except Exception as error:  # of code that is not ours
            raise ValueError(f"{name}, called with the config: {type(error).__name__}: {error}") from error
    if corpus.least:
        raise ValueError(f"{name} is a data set of your own, which leaves out rows itself: leave out least")
    length = config.data.sequence_length
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        return IndexedRows(found, length, config.data.seed, name)
    if hasattr(found, "__iter__"):
        return StreamedRows(found, length, config.batch.global_size, name)
    raise ValueError(f"{name} gives {type(found).__name__}: it needs __len__ and __getitem__, or __iter__")


def sample_of(row: Any, length: int, where: str) -> Sample:
    """row: up to length + 1 token ids, or a mapping with them as ``input_ids`` and, optional, ``labels`` (IGNORE where
    a token is not to be predicted) and ``documents`` (0, 1, ... of each token) -> the sample, padded at its end. Raises
    TokenError: it is no such row."""
    given = row if isinstance(row, Mapping) else {"input_ids": row}
    if unknown := given.keys() - {"input_ids", "labels", "documents"}:
        raise TokenError(f"{where} has {', '.join(sorted(map(str, unknown)))}: a row has input_ids, labels, documents")
    if "input_ids" not in given:
        raise TokenError(f"{where} has no input_ids")
    arrays = {key: np.asarray(value) for key, value in given.items()}
    ids = arrays["input_ids"]
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 2 <= ids.size <= length + 1:
        raise TokenError(
            f"{where} has {ids.dtype} of shape {list(ids.shape)}: give 2 to {length + 1} token ids, "
            "data.sequence_length and one more to predict"
        )
    if any(each.shape != ids.shape for each in arrays.values()):
        shapes = ", ".join(f"{key} {list(each.shape)}" for key, each in arrays.items())
        raise TokenError(f"{where} has {shapes}: give each token one")
    labels = arrays.get("labels", ids)
    if ((labels != ids) & (labels != IGNORE)).any():
        raise TokenError(f"{where}: labels must be input_ids, or {IGNORE} where a token is not to be predicted")
    tokens, counted = np.zeros(length + 1, np.int64), np.zeros(length + 1, np.bool_)
    documents = np.zeros(length + 1, np.int32)
    tokens[: ids.size], counted[: ids.size] = ids, labels != IGNORE
    if "documents" in arrays:
        documents[: ids.size] = arrays["documents"]
    documents[ids.size :] = documents[ids.size - 1] + 1
    return Sample(tokens, documents, counted, None if ids.size == tokens.size else ids.size)


def _digest(*samples: Sample) -> str:
    return hashlib.sha256(b"".join(x.tobytes() for each in samples for x in (each.tokens, each.counted))).hexdigest()


class IndexedRows:
    """A data set with ``len(rows)`` and ``rows[i]``, in epochs of all rows of a part, each in an order that belongs to
    (seed, epoch). ValueError if there are no rows."""

    def __init__(self, rows: Any, length: int, seed: int, name: str, runs: Runs | None = None) -> None:
        self._rows, self.length, self._seed, self._name = rows, length, seed, name
        self._runs = (runs or Runs.all_of(len(rows))).bounds
        self._ends = np.cumsum(self._runs[:, 1] - self._runs[:, 0])
        self.per_epoch = int(self._ends[-1])
        if not self.per_epoch:
            raise ValueError(f"{name} has no rows")
        self._row(0)

    def _row(self, number: int) -> Sample:
        return sample_of(self._rows[number], self.length, f"row {number} of {self._name}")

    @cached_property
    def identity(self) -> str:
        rows = len(self._rows)
        return f"{rows}-{_digest(self._row(0), self._row(rows - 1))}"

    def split(self, fraction: float, name: str) -> tuple[Source, Source | None]:
        """Hold rows out as :func:`~megacore.data.samples.split_runs` does documents."""
        train, held_out = split_runs(len(self._rows), fraction, self._seed)
        return self._part(train), self._part(held_out) if fraction else None

    def _part(self, runs: Runs) -> IndexedRows:
        return IndexedRows(self._rows, self.length, self._seed, self._name, runs)

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0 of the endless sequence of epochs."""
        epoch, within = divmod(index, self.per_epoch)
        at = epoch_order(self.per_epoch, self._seed, epoch)[within]
        run = int(np.searchsorted(self._ends, at, side="right"))
        return self._row(int(self._runs[run, 1] - self._ends[run] + at))


class StreamedRows:
    """A data set that is iterated, over and over, as every rank does: of what it gives each takes its own rows.

    To go back it begins again, or at a state: where there are ``state_dict`` and ``load_state_dict``, ``iter()`` after
    the latter goes on with the row behind that state. States are JSON. ValueError if it cannot go back. ``rows``: the
    data set; ``every``: rows between states.
    """

    skipped = 0

    def __init__(self, rows: Any, length: int, every: int, name: str) -> None:
        self._rows, self.length, self._every, self.name = rows, length, every, name
        self.has_states = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")
        if not self.has_states and iter(rows) is rows:
            raise ValueError(
                f"{name} is an iterator, which cannot begin again: give what iter() begins anew, or state_dict and "
                "load_state_dict"
            )
        self._lock = Lock()  # a batch is made ahead by a thread
        self._states: dict[int, Any] = {0: self._state()}
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._last: tuple[int, Sample | None] = (-1, None)

    def _state(self) -> Any:
        if not self.has_states:
            return None
        try:
            return json.loads(json.dumps(self._rows.state_dict()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: what state_dict gives cannot be written as JSON: {error}") from error

    @cached_property
    def identity(self) -> str:
        return _digest(self.sample(0))

    def split(self, fraction: float, name: str) -> tuple[Source, Source | None]:
        """Hold nothing out."""
        return self, None

    def sample(self, index: int) -> Sample:
        """Return the sample of row `index` >= 0."""
        with self._lock:
            number, sample = self._last
            if number != index or sample is None:
                if self._iterator is None or index < self._next:
                    row, self._iterator = self._newest(index), None  # also where what follows fails
                    if self.has_states:
                        self._rows.load_state_dict(deepcopy(self._states[row]))
                    self._iterator, self._next = iter(self._rows), row
                while self._next < index:
                    self._pull()
                sample = sample_of(self._pull(), self.length, f"row {index} of {self.name}")
                self._last = index, sample
            return sample

    def state(self, index: int, whole: bool = True) -> dict[str, Any] | None:
        """Return the newest state that is known from which row ``index`` can be reached, and the row behind it; None
        where the data set has none. All ranks have the same."""
        if not self.has_states:
            return None
        with self._lock:
            row = self._newest(index)
            return {"row": row, "state": self._states[row]}

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state that all ranks have."""
        return states[0]

    def resume(self, row: int, state: Any) -> None:
        """Know a state."""
        if not self.has_states:
            return
        with self._lock:
            self._states[row], self._iterator, self._last = state, None, (-1, None)

    def _newest(self, index: int) -> int:
        return max(row for row in self._states if row <= index)

    def _pull(self) -> Any:
        if self.has_states and self._next % self._every == 0 and self._next not in self._states:
            self._states[self._next] = self._state()
            for old in sorted(self._states)[1:-KEPT]:
                del self._states[old]
        assert self._iterator is not None
        for _ in range(2):
            for row in self._iterator:
                self._next += 1
                return row
            self._iterator = iter(self._rows)
        raise TokenError(f"{self.name} gives no row when it begins again after {self._next:,} rows")
