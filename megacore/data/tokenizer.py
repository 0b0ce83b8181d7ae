"""Tokenizers in Hugging Face folders: fetched, trained, and loaded without transformers where `tokenizers` will do."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megacore.data import pretrained
from megacore.data.grouping import fitting
from megacore.data.guard import Guard, GuardError
from megacore.data.indexed import Integers
from megacore.data.text import InputError
from megacore.parallel import limits
from megacore.store.io import hub
from megacore.store.io.hub import HubName
from megacore.store.io.strict_json import StoreError, read_json, short
from megacore.store.tensor_files.companions import TEXT, Companion, companions, copy_companion
from megacore.store.tensor_files.publish import write_file

END = "<|endoftext|>"
LONGEST = 2**20  # characters encoded at once: an encoding takes a hundred times the memory of its text
TEMPLATE = "chat_template.jinja"
_VOCABULARIES = ("tokenizer.model", "tekken", "vocab", "merges")  # beginnings of the names of files of tokens
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", TEMPLATE,
)  # fmt: skip


@dataclass(frozen=True)
class Tokenizer:
    """vocabulary: 1 + the largest id. end: the id that ends a document, if there is one. `encode` adds no special
    tokens, and text that spells one is text. It is done by another process, see `megacore.data.guard`."""

    vocabulary: int
    end: int | None
    guard: Guard

    def encode(self, texts: list[str]) -> list[Integers]:
        """Return the ids of each text, int32. One longer than LONGEST is encoded in parts that end with lines where
        they can. InputError if the tokenizer fails."""
        parts = [parts_of(text) for text in texts]
        # Many parts take time and memory too.
        batches = fitting((part for text in parts for part in text), len, LONGEST)
        ids = iter([each for batch in batches for each in self._batch(batch)])
        return [next(ids) if len(text) == 1 else np.concatenate([next(ids) for _ in text]) for text in parts]

    def _batch(self, texts: list[str]) -> list[Integers]:
        try:
            flat, lengths = self.guard.call("batch", texts)
        except GuardError as error:
            size = sum(map(len, texts))
            raise InputError(f"the tokenizer fails on {len(texts):,} texts of {size:,} characters: {error}") from error
        return np.split(flat, np.cumsum(lengths)[:-1])


def parts_of(text: str) -> list[str]:
    """Return a text in parts of at most LONGEST characters, which end with lines where they can."""
    if len(text) <= LONGEST:
        return [text]
    parts, at = [], 0
    while at < len(text):
        line = text.rfind("\n", at, at + LONGEST) + 1
        stop = line if line and at + LONGEST < len(text) else at + LONGEST
        parts.append(text[at:stop])
        at = stop
    return parts


def load(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder. InputError if it cannot be used."""
    kind: type[_Fast] | type[_Slow] = _Fast if (folder / "tokenizer.json").is_file() else _Slow
    if kind is _Slow:
        import_transformers()
    end = _end_token(folder)
    try:
        guard = Guard(lambda: kind(folder))
        vocabulary: int = guard.call("vocabulary")
        found = Tokenizer(vocabulary, guard.call("end", end), guard)
    except GuardError as error:
        name = "tokenizer.json" if kind is _Fast else "the tokenizer"
        raise InputError(f"{name} is not one that the tokenizers library reads: {error}") from error
    if vocabulary > limits.VOCABULARY:
        raise InputError(f"the tokenizer has ids up to {vocabulary - 1}, and no vocabulary has {limits.VOCABULARY}")
    return found


def import_transformers() -> None:
    """Import what is slow to import, so that no process that is forked has to."""
    from transformers import AutoTokenizer, GPT2Config, LlamaConfig  # noqa: F401


class _Fast:
    """A tokenizer as the tokenizers library reads it from ``tokenizer.json``."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    def vocabulary(self) -> int:
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ValueError("it has no tokens")
        return 1 + max(ids)

    def end(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def batch(self, texts: list[str]) -> tuple[Integers, list[int]]:
        """Return (the ids of all, how many each has)."""
        return _flat([each.ids for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


def _flat(ids: list[list[int]]) -> tuple[Integers, list[int]]:
    return np.concatenate([np.empty(0, np.int32), *(np.array(each, np.int32) for each in ids)]), list(map(len, ids))


def _end_token(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            try:
                said = read_json(folder / name, wide=True)
            except StoreError as error:
                raise InputError(str(error)) from error
            token: Any = said.get("eos_token") if isinstance(said, dict) else said
            if token is None:
                continue
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str) or any("\ud800" <= char <= "\udfff" for char in text):
                raise InputError(f"{name} has eos_token={short(token)}, which is no text")
            return text
    return None


class _Slow:
    """A tokenizer as transformers reads it from other files."""

    def __init__(self, folder: Path) -> None:
        with _copied(folder) as files:
            self._tokenizer = pretrained.tokenizer(files)

    def vocabulary(self) -> int:
        return 1 + max(self._tokenizer.get_vocab().values())

    def end(self, token: str | None) -> int | None:
        return self._tokenizer.eos_token_id

    def batch(self, texts: list[str]) -> tuple[Integers, list[int]]:
        """Return the same as _Fast."""
        return _flat(
            self._tokenizer(
                texts, add_special_tokens=False, split_special_tokens=True, truncation=False, verbose=False
            )["input_ids"]
        )


@contextmanager
def files_for_transformers(files: Mapping[str, Companion], config: Any) -> Iterator[Path]:
    """Make a temporary folder that transformers loads a tokenizer from, and nothing else: its files, and the config of
    its model if there is one, for the kind of model alone may say which class of tokenizer it is."""
    with tempfile.TemporaryDirectory(prefix="megacore-tokenizer-") as folder:
        for name, file in files.items():
            copy_companion(file, Path(folder) / name, durable=False)
        if isinstance(config, Mapping):
            write_file(Path(folder) / "config.json", json.dumps(dict(config)).encode(), durable=False)
        yield Path(folder)


@contextmanager
def _copied(folder: Path) -> Iterator[Path]:
    """Make such a folder of another one."""
    config = read_json(folder / "config.json", folder) if (folder / "config.json").is_file() else None
    if isinstance(config, dict):
        config = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
    with files_for_transformers(companions(folder, folder), config) as copied:
        yield copied


def fetch(source: str, folder: Path) -> None:
    """Copy the tokenizer of a Hugging Face folder, or of a name on its hub, to `folder`. InputError if none; StoreError
    as of :func:`opened`."""
    given = opened(source)
    found = companions(given, given)
    if "tokenizer.json" in found:
        for name in FILES:
            if name in found:
                copy_companion(found[name], folder / name)
        return
    if not any(name.startswith(_VOCABULARIES) or "tiktoken" in name for name in found):
        raise InputError(
            f"there is no tokenizer in {source}: name a folder with a tokenizer.json, or with the files that another "
            "kind of tokenizer has (tokenizer.model, vocab.json and merges.txt)"
        )
    import_transformers()
    try:
        Guard(lambda: _save(given, folder))
    except GuardError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"no tokenizer in {source}: {reason}") from error


def opened(source: str) -> Path:
    """Return a folder, or that in the hub's cache of a name; InputError where there is neither. StoreError as of
    :func:`~megacore.store.io.hub.fetch`."""
    if Path(source).exists():
        return Path(source)
    name = HubName.of(source) or (None if "/" in source else HubName.parse(source))  # `gpt2` has no owner
    if name is None:
        raise InputError(
            f"there is no folder {source}: name one with a tokenizer.json, or a tokenizer by its name on the Hugging "
            "Face hub (gpt2, OWNER/NAME, OWNER/NAME@REVISION)"
        )
    return hub.fetch(name, [*TEXT, "config.json"])


def _save(source: Path, folder: Path) -> None:
    """Save what transformers makes of a folder."""
    with _copied(source) as files:
        pretrained.tokenizer(files).save_pretrained(folder)


def train(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) and saves it as a Hugging Face tokenizer. The
    same texts give the same bytes. The vocabulary is smaller than asked for where the texts have too few pairs."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise InputError(
            f"a vocabulary of {vocabulary} is too small: byte-level BPE has {len(alphabet)} bytes and {END}, "
            f"choose {len(alphabet) + 1} or more"
        )
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(texts, trainer)
    # In processes that are forked from one that has used threads, the library uses none, and says so unless told.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    write_file(folder / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())
