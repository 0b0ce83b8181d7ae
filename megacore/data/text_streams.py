"""Files of texts that are tokenized beside training, by processes of each rank.

A corpus is dealt to N streams: piece k of file f (see :func:`megacore.data.text.cut`) is of stream (f + k) mod N. A
stream is the tokens of its documents, each with the token that ends it, over and over. Sample j of a stream is its
tokens [j L, (j + 1) L + 1), and sample n of the corpus is sample n // N of stream n mod N. So samples are a function of
the files, N and the seed, whatever the layout, and a rank reads the streams alone that it takes samples of.

An epoch of a stream has its files in an order that belongs to (seed, stream, epoch), and the documents of a part of a
piece, some MiB, in one that belongs to the part too. Both are formulas: a stream goes on from any of its documents, by
reading that part of that file.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import count, islice, repeat
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megacore.background import unnamed_main
from megacore.data import text, tokenizer
from megacore.data.batches import HELD, TokenError
from megacore.data.encode import start_worker
from megacore.data.grouping import fitting
from megacore.data.indexed import Integers
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.permutation import ROUNDS, Permutation
from megacore.data.samples import Purpose, Sample, Source, draw, shuffled
from megacore.data.text import Fault, FileRange, InputError

CHUNK = 2**15
"""Characters that are tokenized at once: whoever resumes waits for so many of each stream."""
AHEAD = 16
"""Chunks of a stream that are asked for before they are needed, once its first sample is there."""
KEPT = 8
"""States that were asked for last, which a stream can go back to."""
LOOKED_AT = 1000
"""Documents that are looked at before a run starts."""
LISTED = 3
"""Documents that could not be read, in words."""


class Place(NamedTuple):
    """A document of a stream: a file by its place in the order of an epoch, a piece of the file, a part of the piece,
    and a document by its place in the order of the part; all count from 0."""

    epoch: int
    file: int
    piece: int
    part: int
    document: int


@dataclass(frozen=True)
class Chunk:
    """Some documents: their tokens with those that end them [n], how many each has [documents], and their places
    [documents, 5]. faults: the number of those before them that were left out because they could not be read."""

    tokens: Integers
    lengths: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    faults: int


@dataclass(frozen=True)
class TextFiles:
    """The files of a corpus, and how they become streams. key: of the text in rows. seed: that of the order; None: the
    order of the files. skip: whether a document that cannot be read is left out. least: tokens, below which one is left
    out."""

    name: str
    files: tuple[Path, ...]
    streams: int
    model: ModelFiles
    key: str = "text"
    seed: int | None = 0
    skip: bool = False
    least: int = 0

    def look(self) -> None:
        """Look at the number of pieces, and at the first documents, which takes no tokenizer. Raises InputError: there
        are too few for so many streams, or one is bad."""
        if len(self.files) < self.streams:
            pieces = [len(text.cut(file)) for file in self.files]
            fitting_streams = (n for n in range(self.streams, 0, -1) if _all_have_some(pieces, n))
            if (most := next(fitting_streams, 0)) < self.streams:
                raise InputError(
                    f"{self.name} has {sum(pieces):,} pieces (a file, a row group, or {text.LINES >> 20} MiB of a "
                    f".jsonl file), too few for {self.streams} streams: set streams to {max(most, 1)}"
                )
        found = (each for file in self.files for piece in text.cut(file) for each in text.documents(piece, self.key))
        for document in islice(found, LOOKED_AT):
            if isinstance(document, Fault) and not self.skip:
                raise InputError(_bad(document))

    @cached_property
    def end(self) -> int:
        """The token that ends a document. Raises InputError: the tokenizer does not serve, or is another model's."""
        loaded = self.load()
        if loaded.vocabulary > self.model.vocabulary:
            raise InputError(
                f"{self.name}: the tokenizer has ids up to {loaded.vocabulary - 1}, and the model's vocabulary ends at "
                f"{self.model.vocabulary - 1}: set model.vocab_size to {loaded.vocabulary} or more"
            )
        return _end(loaded)

    def load(self) -> tokenizer.Tokenizer:
        """Return the tokenizer. InputError if it cannot be used."""
        with self.model.folder() as folder:
            return tokenizer.load(folder)

    def documents(self, stream: int, start: Place) -> Iterator[tuple[Place, str | Fault]]:
        """Yield the documents of a stream from a place on, without end. InputError if an epoch has none."""
        for epoch in count(start.epoch):
            found_text = False
            order: Sequence[int] | Permutation = range(len(self.files))
            if self.seed is not None:
                keys = draw(ROUNDS, self.seed, Purpose.TEXT_FILES, epoch, (stream, 0))
                order = Permutation(len(self.files), keys.tolist())
            for at in range(start.file if epoch == start.epoch else 0, len(self.files)):
                number = order[at]
                pieces = text.cut(self.files[number])
                for piece in range((stream - number) % self.streams, len(pieces), self.streams):
                    here = (epoch, at, piece)
                    if here < start[:3]:
                        continue
                    first = start.part if here == start[:3] else 0
                    for part, found in enumerate(_parts(pieces[piece], self.key, first), first):
                        within = (piece << 32 | part, number)
                        chosen: Sequence[int] = range(len(found))
                        if self.seed is not None:
                            chosen = shuffled(len(found), self.seed, Purpose.TEXTS, epoch, within).tolist()
                        begin = start.document if (*here, part) == start[:4] else 0
                        for document in range(begin, len(found)):
                            yield Place(*here, part, document), found[chosen[document]]
                            found_text |= _size(found[chosen[document]]) > 0
            if not found_text and epoch > start.epoch:
                raise InputError(self._without_text(stream))

    def chunks(self, loaded: tokenizer.Tokenizer, stream: int, start: Place) -> Iterator[Chunk]:
        """Yield the tokens of a stream from a document on, without end. InputError if a document cannot be read, or an
        epoch has none of the least length."""
        end, faults, last = np.array([_end(loaded)], np.int32), 0, start.epoch
        groups = fitting(self.documents(stream, start), lambda each: _size(each[1]), CHUNK)
        for group in groups:
            faults += sum(isinstance(document, Fault) for _, document in group)
            if faults and not self.skip:
                raise InputError(_bad(next(document for _, document in group if isinstance(document, Fault))))
            texts = [(place, document) for place, document in group if isinstance(document, str) and document]
            ids = [np.append(each, end) for each in loaded.encode([document for _, document in texts])]
            kept = [(place, each) for (place, _), each in zip(texts, ids, strict=True) if each.size >= self.least]
            if kept:
                places, tokens = zip(*kept, strict=True)
                lengths = np.array([each.size for each in tokens], np.int64)
                yield Chunk(np.concatenate(tokens), lengths, np.array(places, np.int64), faults)
                faults, last = 0, places[-1].epoch
            elif group[-1][0].epoch > last + 1:
                raise InputError(self._without_text(stream))

    @cached_property
    def identity(self) -> str:
        """The digest of the names and sizes of the files, wherever they lie, and of the tokenizer."""
        hasher = blake2b(repr([(file.name, file.stat().st_size) for file in self.files]).encode(), digest_size=8)
        for name in tokenizer.FILES:
            if name in self.model.files and name != tokenizer.TEMPLATE:
                hasher.update(self.model.files[name].read())
        return hasher.hexdigest()

    def _without_text(self, stream: int) -> str:
        least = f" of {self.least} tokens" if self.least else ""
        return (
            f"stream {stream} of {self.streams} of {self.name} has no text{least}: set fewer streams, or a lower least"
        )


def _all_have_some(pieces: Sequence[int], streams: int) -> bool:
    """Return whether each stream has a piece; pieces: of each file."""
    return len({(file + piece) % streams for file, count in enumerate(pieces) for piece in range(count)}) == streams


def _parts(piece: FileRange, key: str, first: int) -> Iterator[list[str | Fault]]:
    """Yield the documents of a piece, some MiB at a time, from part `first` on."""
    if piece.path.suffix in text.STREAMED:
        for block in islice(text.blocks(piece), first, None):
            yield list(text.documents(block, key))
    else:
        yield from islice(fitting(text.documents(piece, key), _size, text.LINES), first, None)


def _size(document: str | Fault) -> int:
    return len(document) if isinstance(document, str) else 0


def _bad(fault: Fault) -> str:
    return f"{fault} (leave out what cannot be read by chat.bad_lines=skip)"


def _end(loaded: tokenizer.Tokenizer) -> int:
    if loaded.end is None:
        raise InputError("the tokenizer has no end-of-document token: name it as eos_token in tokenizer_config.json")
    return loaded.end


# -- in a process that tokenizes


def _serve(connection: Connection, texts: TextFiles) -> None:
    """Answer (stream, place) with the next chunk of the stream, or what is wrong with it; a place says from where on,
    None: from where the last chunk ended."""
    start_worker()
    loaded: tokenizer.Tokenizer | None = None
    reading = dict[int, Iterator[Chunk | str]]()
    while True:
        try:
            stream, place = connection.recv()
        except EOFError:
            return
        try:
            loaded = loaded or texts.load()
            if place is not None:
                reading[stream] = texts.chunks(loaded, stream, place)
            found: Chunk | str = next(reading[stream])
        except InputError as error:
            found = str(error)
            reading[stream] = repeat(found)
        try:
            connection.send(found)
        except OSError:  # the rank has ended
            return


# -- in a rank

_OF_RANKS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


class _Worker:
    """A process that tokenizes, and answers in the order in which it was asked."""

    def __init__(self, texts: TextFiles) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, texts), name="tokenize", daemon=True)
        resource_tracker.ensure_running()  # it lets signals through again where it begins
        # What a scheduler sends to all is for the rank alone, which may wait for this process before it can end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_RANKS)
        try:
            with unnamed_main():
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._asked, self._name = deque[Future[Chunk]](), texts.name
        # It is always listened to: neither side waits for the other one to read what it is told.
        arguments = (self._connection, self._asked, self._process, self._name)
        thread = threading.Thread(target=_receive, args=arguments, name="tokenized", daemon=True)
        thread.start()
        weakref.finalize(self, _let_go, self._process, thread, self._connection)

    def ask(self, stream: int, place: Place | None = None) -> Future[Chunk]:
        """Ask for the next chunk of a stream. What comes raises TokenError: what is wrong with the data; RuntimeError:
        the process has ended."""
        found = Future[Chunk]()
        self._asked.append(found)
        try:
            self._connection.send((stream, place))
        except OSError:
            with suppress(InvalidStateError):  # who listens has heard of it first
                found.set_exception(_ended(self._process, self._name))
        return found


def _receive(connection: Connection, asked: deque[Future[Chunk]], process: BaseProcess, name: str) -> None:
    while True:
        try:
            found = connection.recv()
        except (EOFError, OSError):
            break
        except Exception:  # there is no memory for it, say: nothing of what comes after it is of use
            process.kill()
            break
        if isinstance(found, str):
            asked.popleft().set_exception(TokenError(found))
        else:
            asked.popleft().set_result(found)
    error = _ended(process, name)
    while asked:
        with suppress(InvalidStateError):
            asked.popleft().set_exception(error)


def _ended(process: BaseProcess, name: str) -> RuntimeError:
    process.join(5)
    code = process.exitcode
    how = f"with status {code}, and what it says stands above"
    if code is not None and code < 0:
        memory = ", likely for memory: give the node more, or take fewer data.workers" * (code == -signal.SIGKILL)
        how = f"by {signal.Signals(-code).name}{memory}"
    return RuntimeError(f"the process that tokenizes {name} has ended {how}")


def _let_go(process: BaseProcess, thread: threading.Thread, connection: Connection) -> None:
    process.kill()
    process.join()
    thread.join()
    connection.close()


State = tuple[int, ...]
"""A place, and the tokens of its document that come before."""


@dataclass
class _StreamReader:
    """A stream as this rank reads it: from the beginning of sample `number` on, which is at token `at` of those held.
    tokens [held]; starts int64 [documents], where in them documents begin; places int64 [documents, 5]. recent: states
    of the samples that were taken last. last: the sample that was."""

    worker: _Worker
    stream: int
    number: int
    place: Place
    recent: deque[tuple[int, State]]
    tokens: Integers = field(default_factory=lambda: np.empty(0, np.int32))
    starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 5), np.int64))
    at: int = 0
    coming: deque[Future[Chunk]] = field(default_factory=deque)
    faults: int = 0
    last: tuple[int, Sample | None] = (-1, None)

    def __post_init__(self) -> None:
        self.coming.append(self.worker.ask(self.stream, self.place))

    def _ask(self, count: int) -> None:
        """Ask for chunks, so that there are so many to come."""
        while len(self.coming) < count:
            self.coming.append(self.worker.ask(self.stream))

    def _fill(self, count: int) -> None:
        """Hold so many tokens from `at` on."""
        while self.tokens.size - self.at < count:
            self._ask(1)
            chunk = self.coming.popleft().result()
            first = max(int(np.searchsorted(self.starts, self.at, "right")) - 1, 0)
            begins = np.cumsum(chunk.lengths) - chunk.lengths + self.tokens.size
            self.starts = np.concatenate([self.starts[first:], begins]) - self.at
            self.places = np.concatenate([self.places[first:], chunk.places])
            self.tokens = np.concatenate([self.tokens[self.at :], chunk.tokens])
            self.at, self.faults = 0, self.faults + chunk.faults

    def advance(self, count: int) -> None:
        """Pass over tokens."""
        while count:
            self._fill(1)
            step = min(count, self.tokens.size - self.at)
            self.at, count = self.at + step, count - step

    def take(self, length: int) -> Sample:
        """Return the sample that begins here, and go to the next one."""
        self._fill(length + 1)
        stop = self.at + length + 1
        begins = np.zeros(length + 1, np.int32)
        first, last = np.searchsorted(self.starts, [self.at, stop - 1], "right")
        begins[self.starts[first:last] - self.at] = 1
        tokens = self.tokens[self.at : stop].astype(np.int64)
        sample = Sample(tokens, np.cumsum(begins, dtype=np.int32), np.ones(length + 1, np.bool_))
        if self.last[1] is not None:
            self._ask(AHEAD)
        self.last = self.number, sample
        self.number, self.at = self.number + 1, stop - 1
        self.recent.append((self.number, self._state()))
        return sample

    def _state(self) -> State:
        document = int(np.searchsorted(self.starts, self.at, "right")) - 1
        return (*self.places[document].tolist(), self.at - int(self.starts[document]))


class StreamedTexts:
    """The samples of files of texts, see the module. What is tokenized is read in order: it can go back to where a
    state was asked for lately, or to its beginning. InputError as of :attr:`TextFiles.end`. ``every``: samples of a
    global batch; ``workers``: the number of processes."""

    def __init__(self, texts: TextFiles, length: int, every: int, workers: int) -> None:
        self.length, self.name, self.end, self._texts = length, texts.name, texts.end, texts
        self._recent = (HELD + 1) * -(-every // texts.streams) + 1
        self._lock = Lock()  # a batch is made ahead by a thread
        self._workers: list[_Worker | None] = [None] * workers
        self._readers = dict[int, _StreamReader]()
        self._known: dict[int, dict[int, State]] = {}
        """{stream: {sample: state}}: those that were resumed or asked for, beside that of the beginning."""

    @property
    def identity(self) -> str:
        return self._texts.identity

    @property
    def skipped(self) -> int:
        """The number of documents that were left out here because they could not be read."""
        return sum(reader.faults for reader in list(self._readers.values()))

    def split(self, fraction: float, name: str) -> tuple[Source, Source | None]:
        """Hold nothing out."""
        return self, None

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0. TokenError: a document cannot be read; RuntimeError: a process has ended."""
        number, stream = divmod(index, self._texts.streams)
        with self._lock:
            reader = self._readers.get(stream)
            if reader is not None and reader.last[0] == number:
                assert reader.last[1] is not None
                return reader.last[1]
            if reader is None or number < reader.number:
                reader = self._readers[stream] = self._reader(stream, number)
            reader.advance((number - reader.number) * self.length)
            reader.number = number
            return reader.take(self.length)

    def _reader(self, stream: int, number: int) -> _StreamReader:
        """Return a stream from its newest known state on from which a sample can be reached."""
        before = self._readers.get(stream)
        begin, state = self._newest(stream, number)
        turn = len(self._readers) % len(self._workers)
        worker = before.worker if before is not None else self._workers[turn]
        if worker is None:
            worker = self._workers[turn] = _Worker(self._texts)
        recent = deque(before.recent if before is not None else (), self._recent)
        made = _StreamReader(worker, stream, begin, Place(*state[:5]), recent)
        made.advance(state[5])
        return made

    def _newest(self, stream: int, number: int) -> tuple[int, State]:
        known = {0: (0,) * 6, **self._known.get(stream, {})}
        if (reader := self._readers.get(stream)) is not None:
            known.update(reader.recent)
        newest = max(each for each in known if each <= number)
        return newest, known[newest]

    def state(self, index: int, whole: bool = True) -> dict[str, Any]:
        """Return {stream: [sample, its state]} of the streams that this rank reads, or of all that are known to it."""
        with self._lock:
            found = dict[str, Any]()
            for stream in sorted({*self._readers, *(self._known if whole else ())}):
                number, state = self._newest(stream, -(-(index - stream) // self._texts.streams))
                found[str(stream)] = [number, *state]
                known = self._known.setdefault(stream, {})
                known[number] = state
                for old in sorted(known)[:-KEPT]:
                    del known[old]
            return {"streams": self._texts.streams, "places": found}

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the newest of each stream: no rank tells of one behind the sample that was asked for."""
        places = dict[str, list[int]]()
        for state in states:
            for stream, place in state["places"].items():
                places[stream] = max(place, places.get(stream, place))
        return {"streams": self._texts.streams, "places": places}

    def resume(self, **state: Any) -> None:
        """Know a state. ValueError: it is none, or of another number of streams."""
        count, places = state.get("streams"), state.get("places")
        if count != self._texts.streams:
            raise ValueError(
                f"{self.name} has been read as {count!r:.20} streams, and the recipe has {self._texts.streams}: set "
                "streams as it was, or begin another run by checkpoint.init"
            )
        found = dict[int, list[int]]()
        for stream, place in places.items() if isinstance(places, dict) else [("", places)]:
            numbers = [x for x in place if type(x) is int and x >= 0] if isinstance(place, list) else []
            known = stream.isdecimal() and int(stream) < self._texts.streams
            if not known or numbers != place or len(numbers) != 7:
                raise ValueError(f"the state of stream {stream!r:.20} of {self.name} is none: {place!r:.80}")
            found[int(stream)] = numbers
        with self._lock:
            for number, (sample, *at) in found.items():
                self._known.setdefault(number, {})[sample] = tuple(at)
