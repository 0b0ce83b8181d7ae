"""The facts about a tokenized corpus: the `corpus.json` beside its token files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.text import InputError
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.publish import replace_file

CORPUS = "corpus.json"
LISTED = 5  # skipped documents that are spelled out
_SUMS = ("documents", "text_bytes", "empty", "skipped")


@dataclass(frozen=True)
class Corpus:
    """The facts about a token file NAME.bin, NAME.idx.

    documents and tokens: their numbers, tokens with the end-of-document ids. text_bytes: the size of the documents in
    UTF-8. vocabulary: 1 + the largest id. end_of_document: the id after each, if one was appended. unigram_entropy: the
    entropy of the tokens, in nats each, the loss of a model that knows their frequencies alone. empty and skipped:
    documents without text, and those that could not be read; neither is in the pair.
    """

    name: str
    documents: int
    tokens: int
    text_bytes: int
    bytes_per_token: float
    vocabulary: int
    end_of_document: int | None
    unigram_entropy: float
    empty: int
    skipped: int

    def write(self, folder: Path) -> None:
        replace_file(folder / CORPUS, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Corpus:
        """Return the facts about the corpus in a folder; StoreError if they were not written here."""
        path = folder / CORPUS
        fields = read_json(path, folder)
        if not fits(cls, fields):
            raise StoreError(f"{path} is not as `megacore tokenize` writes it: remove it, or tokenize the text again")
        return cls(**fields)

    @classmethod
    def beside(cls, prefix: Path) -> Corpus | None:
        """Return the facts that `megacore tokenize` has written about a token file; None for those of other origin."""
        known = cls.read(prefix.parent) if (prefix.parent / CORPUS).is_file() else None
        return known if known is not None and known.name == prefix.name else None


_TYPES: Mapping[str, Any] = {"int": int, "float": int | float, "int | None": int | None, "str": str}
_LISTS = {"list[str]": "str", "tuple[str, ...]": "str", "npt.NDArray[np.int64]": "int"}


def fits(kind: type[Any], found: Any) -> bool:
    """Return whether a JSON value has the fields of a dataclass, each of its type, and numbers from 0 to 2^63. What is
    neither plain nor a list is an object."""
    types = {field.name: str(field.type) for field in fields(kind)}
    return (
        isinstance(found, dict)
        and found.keys() == types.keys()
        and all(_is(types[name], value) for name, value in found.items())
    )


def _is(kind: str, value: Any) -> bool:
    if kind in _LISTS:
        return isinstance(value, list) and all(_is(_LISTS[kind], each) for each in value)
    fitting = isinstance(value, _TYPES.get(kind, dict)) and not isinstance(value, bool)
    return fitting and (not isinstance(value, int | float) or 0 <= value < 2**63)


@dataclass
class Tally:
    """The counts that add up over the documents of a corpus, as in :class:`Corpus`. counts int64 [vocabulary]: the
    number of times that each token occurs. faults: the first few documents that were skipped, in words."""

    counts: npt.NDArray[np.int64]
    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    skipped: int = 0
    faults: list[str] = field(default_factory=list)

    @classmethod
    def zero(cls, vocabulary: int) -> Tally:
        return cls(np.zeros(vocabulary, np.int64))

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def add(self, other: Tally) -> None:
        for name in ("counts", *_SUMS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults = [*self.faults, *other.faults][:LISTED]

    @classmethod
    def of(cls, json: Any) -> Tally:
        """Return the tally that stands in a file; StoreError if it is none."""
        if not fits(cls, json):
            raise StoreError("its tally has other fields, or values of other types")
        return cls(**json | {"counts": np.array(json["counts"], np.int64)})

    def corpus(self, name: str, end: int | None) -> Corpus:
        """Return the facts about the corpus; InputError if there is no token."""
        if not self.tokens:
            raise InputError(
                f"there is no text in the input: {self.empty} documents are empty and {self.skipped} unreadable"
            )
        shares = self.counts[self.counts > 0] / self.tokens
        return Corpus(
            name,
            tokens=self.tokens,
            bytes_per_token=self.text_bytes / self.tokens,
            vocabulary=self.counts.size,
            end_of_document=end,
            unigram_entropy=float(-(shares * np.log(shares)).sum()),
            **{each: getattr(self, each) for each in _SUMS},
        )
