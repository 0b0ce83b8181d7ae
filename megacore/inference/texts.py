"""Prompts to tokens and tokens to text, as transformers does it with a folder's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megacore.data import pretrained
from megacore.data.guard import Guard, GuardError
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.text import InputError
from megacore.data.tokenizer import import_transformers, parts_of
from megacore.store.io.strict_json import StoreError, parse_json, short
from megacore.store.weight_folders.folder import WeightFolder

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Texts:
    """The tokenizer among a model's files, which another process holds (`megacore.data.guard`); path: where they are;
    begin, end: the tokens that begin and end a text, as the tokenizer says it."""

    path: Path
    files: ModelFiles
    guard: Guard
    begin: Any
    end: Any

    @classmethod
    def of(cls, folder: WeightFolder) -> Texts:
        """Load that of a folder. Raises StoreError: there is none, or it cannot be used."""
        try:
            files = ModelFiles(folder.companions(), folder.raw, folder.config.vocab_size)
            return cls.among(files, folder.path)
        except InputError as error:
            raise StoreError(f"{folder.path} has no tokenizer among its files: put those of the model there") from error

    @classmethod
    def among(cls, files: ModelFiles, path: Path) -> Texts:
        """Load it. Raises InputError: there is none; StoreError: it cannot be used."""
        import_transformers()
        try:
            with files.folder() as folder:
                guard = Guard(lambda: _TransformersTokenizer(folder))
                return cls(path, files, guard, *guard.call("ends"))
        except GuardError as error:
            raise StoreError(f"{path}: the tokenizer cannot be used: {error}") from error

    def _ask(self, method: str, *arguments: object, fails: str = "the tokenizer fails") -> Any:
        try:
            return self.guard.call(method, *arguments)
        except GuardError as error:
            raise StoreError(f"{self.path}: {fails}: {error}") from error

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the special ones that the tokenizer adds if there are to be some; a very
        long one in parts."""
        first, *others = parts_of(text)
        ids: list[int] = self._ask("encode", first, special)
        for part in others:
            ids += self._ask("encode", part, False)
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins. Raises StoreError: there is no chat
        template, or it does not take these messages."""
        ids: list[int] | None = self._ask("chat", messages, fails="the chat template does not take the messages")
        if ids is None:
            without = "it is no chat model, and megacore generate goes on with a text without --chat"
            raise StoreError(f"{self.path} has no chat template: {without}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones left out."""
        return self._ask("decode", list(ids))

    def stops(self) -> frozenset[int]:
        """Return the tokens that end an answer: the generation config's, else the model config's, else the tokenizer's.
        Raises StoreError: they are no ids of the model's tokens."""
        file = self.files.files.get(GENERATION)
        given = parse_json(file.read(), file.path) if file else {}
        key, vocabulary = "eos_token_id", self.files.vocabulary
        of_config = given.get(key) if isinstance(given, dict) else None
        said = {GENERATION: of_config, "config.json": self.files.config.get(key), "the tokenizer": self.end}
        where, found = next(((where, ids) for where, ids in said.items() if ids is not None), ("", []))
        ids: list[Any] = found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise StoreError(
                f"{self.path}: {key} of {where} is {short(found)}, and must be a token id from 0 to "
                f"{vocabulary - 1} or a list of them"
            )
        return frozenset(ids)


class _TransformersTokenizer:
    """The tokenizer in a folder, as transformers loads it."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = pretrained.tokenizer(folder)

    def ends(self) -> list[Any]:
        return [self._tokenizer.bos_token_id, self._tokenizer.eos_token_id]

    def encode(self, text: str, special: bool) -> list[int]:
        return self._tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        if not self._tokenizer.chat_template:
            return None
        given, written = list(messages), self._tokenizer.apply_chat_template
        if pretrained.wants_parts(partial(written, tokenize=False)):
            given = pretrained.in_parts(given)
        return written(given, add_generation_prompt=True, tokenize=True, return_dict=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class Stream:
    """Text of tokens that come one by one, given out as soon as no further token can change it; shown: tokens before,
    whose text is out (a tokenizer may drop a space where a text begins)."""

    decode: Callable[[Sequence[int]], str]
    shown: Sequence[int]
    waiting: list[int] = field(default_factory=list)

    def add(self, token: int) -> str:
        """Return the text that is now certain; nothing after the first bytes of a character."""
        self.waiting.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text:
            return ""
        self.shown, self.waiting = self.waiting, []
        return text

    def end(self) -> str:
        """Return the rest, with a replacement character for half of one."""
        return self._text() if self.waiting else ""

    def _text(self) -> str:
        return self.decode([*self.shown, *self.waiting])[len(self.decode(self.shown)) :]
