"""Partitions of a corpus, which several nodes tokenize; how a token file is finished of what was written in order."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megacore.data.corpus import CORPUS
from megacore.data.encode import grouped
from megacore.data.indexed import GrowingPair, IndexedDataset, Integers
from megacore.data.permutation import ROUNDS, Permutation
from megacore.data.samples import Purpose, draw
from megacore.data.stage import Stage, StageProgress
from megacore.data.tokenizer import FILES

PART = "part.json"
"""Beside the token file of a partition: its :class:`StageProgress`."""
BLOCK = 2**16
"""Documents whose places in the order are computed at once."""


@dataclass(frozen=True)
class Partition:
    """The `number`-th, from 1, of `count` successive partitions of the input."""

    number: int
    count: int

    @classmethod
    def parse(cls, value: str) -> Partition:
        match = re.fullmatch(r"(\d+)/(\d+)", value)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise ArgumentTypeError(f"{value} is not I/N with I from 1 to N, such as 2/8")
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, name: str) -> str:
        return f"{name}.part-{self.number}-of-{self.count}"

    def share(self, total: int) -> tuple[int, int | None]:
        """Return the bytes [start, stop) in which its pieces begin; those at the end, which are empty, are the
        last's."""
        stop = None if self.number == self.count else total * self.number // self.count
        return total * (self.number - 1) // self.count, stop


def in_order(stage: Stage, name: str, shuffle: int | None) -> Path:
    """Return the prefix that documents are written to in the order of the input."""
    return stage.folder / (name if shuffle is None else f".{name}.in_order")


def finish(stage: Stage, progress: StageProgress, name: str, shuffle: int | None, part: bool = False) -> None:
    """Make the outputs from the pair `in_order`, in the stage, and keep that they are finished."""
    if shuffle is not None and progress.extent.documents:
        source = IndexedDataset(in_order(stage, name, shuffle), checked=True)
        with GrowingPair(stage.folder / name, progress.tally.counts.size) as pair:
            _shuffle(source, pair, shuffle)
            pair.sync()
            pair.write_index(stage.folder / f"{name}.idx")
    if part:
        progress.write(stage.folder / PART)
    else:
        progress.tally.corpus(name, progress.end).write(stage.folder)
    tokenizer = [file for file in FILES if (stage.folder / file).exists()]
    stage.finish(progress, (f"{name}.bin", *tokenizer, PART if part else CORPUS, f"{name}.idx"))


def _shuffle(source: IndexedDataset, pair: GrowingPair, seed: int) -> None:
    order = Permutation(source.documents, draw(ROUNDS, seed, Purpose.FILE).tolist())
    starts = range(0, source.documents, BLOCK)
    blocks = (order.block(start, min(start + BLOCK, source.documents)) for start in starts)
    documents = (source.document(document) for block in blocks for document in block.tolist())
    for group in grouped(documents, _bytes):
        pair.extend(np.concatenate(group), np.array([tokens.size for tokens in group]))


def _bytes(tokens: Integers) -> int:
    return tokens.nbytes
