"""Documents to tokens, by several processes, in the order of the documents."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megacore.data import text, tokenizer
from megacore.data.corpus import LISTED, Tally
from megacore.data.grouping import grouped
from megacore.data.indexed import Integers, token_dtype
from megacore.data.text import Fault, FileRange
from megacore.progress_bar import progress_bar

Item = TypeVar("Item")
Result = TypeVar("Result")
Encoded = TypeVar("Encoded", bound="EncodedPieces")


@dataclass
class EncodedPieces:
    """The result of pieces of so many bytes."""

    size: int


@dataclass
class EncodedDocuments(EncodedPieces):
    """tokens [of all documents], lengths int64 [documents]; empty: documents without text; pieces: their number."""

    tokens: Integers
    lengths: npt.NDArray[np.int64]
    text_bytes: int
    empty: int
    faults: list[Fault]
    pieces: int

    def tally(self, so_far: Tally) -> Tally:
        """Return the part that it adds to a tally; the faults in words are no more than that still lists."""
        # To find a line's number the file is read: only for those that are shown.
        return Tally(
            np.bincount(self.tokens, minlength=so_far.counts.size),
            self.lengths.size,
            self.text_bytes,
            self.empty,
            len(self.faults),
            [str(fault) for fault in self.faults[: LISTED - len(so_far.faults)]],
        )


_load = lru_cache(maxsize=1)(tokenizer.load)  # once in each process


def encode(folder: Path, text_key: str, end: int | None, pieces: list[FileRange]) -> EncodedDocuments:
    """Encode pieces in this process by the tokenizer in a folder, each document followed by the token ``end`` if it is
    given."""
    loaded = _load(folder)
    dtype = token_dtype(loaded.vocabulary)
    last = np.array([] if end is None else [end], np.int32)
    faults: list[Fault] = []
    encoded: list[Integers] = []
    text_bytes = empty = 0
    documents = (document for piece in pieces for document in text.documents(piece, text_key))
    for group in grouped(documents, lambda document: len(document) if isinstance(document, str) else 0):
        faults += [document for document in group if isinstance(document, Fault)]
        texts = [document for document in group if isinstance(document, str) and document]
        empty += group.count("")
        text_bytes += sum(len(document.encode()) for document in texts)
        encoded += [np.append(ids, last).astype(dtype) for ids in loaded.encode(texts)]
    return EncodedDocuments(
        sum(piece.size for piece in pieces),
        np.concatenate([np.empty(0, dtype), *encoded]),
        np.array([document.size for document in encoded], np.int64),
        text_bytes,
        empty,
        faults,
        len(pieces),
    )


def with_progress(
    function: Callable[[Item], Encoded], tasks: Iterator[Item], workers: int, total: int, name: str, done: int = 0
) -> Generator[Encoded, None, None]:
    """Yield the results of :func:`in_order`, and show the bytes that are done of all."""
    with progress_bar(total, name, done=done) as told, closing(in_order(function, tasks, workers)) as results:
        for result in results:
            yield result
            told(result.size)


def in_order(function: Callable[[Item], Result], items: Iterator[Item], workers: int) -> Generator[Result, None, None]:
    """Yield the result of a function for each item, in their order, by several processes; at most two per worker
    wait."""
    if workers == 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
        running = deque(pool.submit(function, item) for item in islice(items, 2 * workers))
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(function, item) for item in islice(items, 1))
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """Be a process that tokenizes for another one, and ends with it."""
    # One thread per process; and on Ctrl-C the parent ends its workers, which need not each say so.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # An executor's worker would wait for ever for a parent that was killed.
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
