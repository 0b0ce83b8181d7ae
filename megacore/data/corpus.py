"""What is known of a tokenized corpus: the `corpus.json` beside its token files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.store.publish import write_file
from megacore.store.strict_json import StoreError, read_json

CORPUS = "corpus.json"


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Nats per token, from how often each token occurs, [vocabulary]."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Corpus:
    """name: of the pair NAME.bin, NAME.idx. documents and tokens: in it, tokens with their end-of-document ids.

    text_bytes: of the documents in UTF-8. vocabulary: 1 + the largest id. end_of_document: the id after each, if one
    was appended. unigram_entropy: of the tokens, nats each, the loss of a model that knows their frequencies alone.
    empty and skipped: documents without text, and those that could not be read; neither is in the pair.
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
        write_file(folder / CORPUS, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Corpus:
        """What is known of the corpus in a folder; StoreError if that is nothing that was written here."""
        path = folder / CORPUS
        found = read_json(path, folder)
        if (
            not isinstance(found, dict)
            or found.keys() != _KINDS.keys()
            or not all(map(_is_known, found, found.values()))
        ):
            raise StoreError(f"{path} is not as `megacore tokenize` writes it: remove it, or tokenize the text again")
        return cls(**found)

    @classmethod
    def beside(cls, prefix: Path) -> Corpus | None:
        """What `megacore tokenize` has written about a token file; None of those of other origin."""
        known = cls.read(prefix.parent) if (prefix.parent / CORPUS).is_file() else None
        return known if known is not None and known.name == prefix.name else None


_TYPES = {"int": int, "float": int | float, "int | None": int | None, "str": str}
_KINDS: Mapping[str, Any] = {field.name: _TYPES[str(field.type)] for field in fields(Corpus)}


def _is_known(name: str, value: Any) -> bool:
    return (
        isinstance(value, _KINDS[name])
        and not isinstance(value, bool)
        and (isinstance(value, str | None) or value >= 0)
    )
