"""Tokenizers in Hugging Face folders: fetched, trained, and loaded without transformers where `tokenizers` will do."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore import pretrained
from megacore.data.text import InputError
from megacore.store.companions import companions, copy_companion
from megacore.store.publish import write_file
from megacore.store.strict_json import StoreError, read_json, short

END = "<|endoftext|>"
LONGEST = 2**20  # characters encoded at once: an encoding takes a hundred times the memory of its text
TEMPLATE = "chat_template.jinja"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    TEMPLATE,
)


@dataclass(frozen=True)
class Tokenizer:
    """vocabulary: 1 + the largest id. end: the id that ends a document, if there is one.

    `encode` adds no special tokens, and text that spells one is text.
    """

    vocabulary: int
    end: int | None
    encode_batch: Callable[[list[str]], list[list[int]]]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. One longer than LONGEST is encoded in parts that end with lines where they can."""
        parts = [parts_of(text) for text in texts]
        ids = iter(self.encode_batch([part for text in parts for part in text]))
        return [[token for _ in text for token in next(ids)] if len(text) > 1 else next(ids) for text in parts]


def parts_of(text: str) -> list[str]:
    """A text in parts of at most LONGEST characters, which end with lines where they can."""
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
    """The tokenizer of a folder; InputError if it is none."""
    if not (folder / "tokenizer.json").is_file():
        return _load_slow(folder)
    import tokenizers

    try:
        fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"tokenizer.json is not one that the tokenizers library reads: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]

    ids, end = fast.get_vocab(with_added_tokens=True).values(), _end_token(folder)
    if not ids:
        raise InputError("tokenizer.json has no tokens")
    return Tokenizer(
        1 + max(ids),
        None if end is None else fast.token_to_id(end),
        encode_batch,
    )


def _end_token(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            try:
                said = read_json(folder / name)
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


def _load_slow(folder: Path) -> Tokenizer:
    try:
        with _copied(folder) as files:
            slow = pretrained.tokenizer(files)
    except StoreError as error:
        raise InputError(str(error)) from error

    def encode_batch(texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = slow(
            texts, add_special_tokens=False, split_special_tokens=True, truncation=False, verbose=False
        )["input_ids"]
        return encoded

    return Tokenizer(1 + max(slow.get_vocab().values()), slow.eos_token_id, encode_batch)


@contextmanager
def _copied(folder: Path) -> Iterator[Path]:
    """A temporary folder that transformers loads the tokenizer of another one from, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="megacore-tokenizer-") as made:
        for name, companion in companions(folder, folder).items():
            copy_companion(companion, Path(made) / name, durable=False)
        config = read_json(folder / "config.json", folder) if (folder / "config.json").is_file() else None
        if isinstance(config, dict):
            kind = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
            write_file(Path(made) / "config.json", json.dumps(kind).encode(), durable=False)
        yield Path(made)


def fetch(source: str, folder: Path) -> None:
    """Copies the tokenizer of a Hugging Face folder, or of a name on its hub, to `folder`. InputError if none."""
    try:
        found = companions(Path(source), Path(source))
    except StoreError as error:
        raise InputError(str(error)) from error
    if "tokenizer.json" in found:
        for name in FILES:
            if name in found:
                copy_companion(found[name], folder / name)
        return
    beside = "/" in source and Path(source).parent.exists()
    if not Path(source).exists() and (beside or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)):
        raise InputError(
            f"there is no folder {source}: name one with a tokenizer.json, or a tokenizer by its name on the Hugging "
            "Face hub (gpt2, org/name)"
        )
    try:
        if Path(source).exists():
            with _copied(Path(source)) as files:
                pretrained.tokenizer(files).save_pretrained(folder)
        else:  # only what is no folder is a name, and asked for
            pretrained.tokenizer(source, hub=True).save_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"no tokenizer in {source}: {reason}") from error


def train(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Trains a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) and saves it as a Hugging Face tokenizer.

    The same texts give the same bytes. The vocabulary is smaller than asked for where the texts have too few pairs.
    """
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
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    write_file(folder / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())
