"""Prompts to tokens and tokens to text, as transformers does it with a folder's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacore import pretrained
from megacore.data.spelling import ModelFiles
from megacore.data.text import InputError
from megacore.data.tokenizer import parts_of
from megacore.store.adapted import Whole
from megacore.store.strict_json import StoreError, parse_json, short

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Texts:
    """The tokenizer of a folder.

    Args:
        folder: The model.
        tokenizer: As transformers loads it.
    """

    folder: Whole
    tokenizer: Any

    @classmethod
    def of(cls, folder: Whole) -> Texts:
        """Load it.

        Raises:
            StoreError: there is none, or it cannot be used.
        """
        try:
            with files_of(folder).folder() as files:
                return cls(folder, pretrained.tokenizer(files))
        except InputError as error:
            raise StoreError(f"{folder.path} has no tokenizer among its files: put those of the model there") from error
        except StoreError as error:
            raise StoreError(f"{folder.path}: the tokenizer cannot be used: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the special ones that the tokenizer puts around it; a very long one in parts."""
        first, *others = parts_of(text)
        ids: list[int] = self.tokenizer(first, verbose=False)["input_ids"]
        for part in others:
            ids += self.tokenizer(part, verbose=False, add_special_tokens=False)["input_ids"]
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation up to where the answer begins.

        Raises:
            StoreError: there is no chat template, or it does not take these messages.
        """
        if not self.tokenizer.chat_template:
            raise StoreError(f"{self.folder.path} has no chat template: it is no chat model; leave out --chat")
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program
            raise StoreError(f"{self.folder.path}: the chat template does not take the messages: {error}") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special ones left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stops(self) -> frozenset[int]:
        """The tokens that end an answer: the generation config's, else the model config's, else the tokenizer's.

        Raises:
            StoreError: they are no ids of the model's tokens.
        """
        file = self.folder.companions().get(GENERATION)
        given = parse_json(file.read(), file.path) if file else {}
        raw = files_of(self.folder).config
        key, vocabulary = "eos_token_id", self.folder.config.vocab_size
        of_config = given.get(key) if isinstance(given, dict) else None
        said = {GENERATION: of_config, "config.json": raw.get(key), "the tokenizer": self.tokenizer.eos_token_id}
        where, found = next(((where, ids) for where, ids in said.items() if ids is not None), ("", []))
        ids: list[Any] = found if isinstance(found, list) else [found]
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise StoreError(
                f"{self.folder.path}: {key} of {where} is {short(found)}, and must be a token id from 0 to "
                f"{vocabulary - 1} or a list of them"
            )
        return frozenset(ids)


def files_of(folder: Whole) -> ModelFiles:
    """What a folder holds beside the weights."""
    return ModelFiles(folder.companions(), folder.raw, folder.config.vocab_size)


@dataclass
class Stream:
    """Text of tokens that come one by one, given out as soon as no further token can change it.

    Args:
        decode: The text of some tokens.
        shown: Tokens before, whose text is out; a tokenizer may drop a space where a text begins.
    """

    decode: Callable[[Sequence[int]], str]
    shown: Sequence[int]
    waiting: list[int] = field(default_factory=list)

    def add(self, token: int) -> str:
        """The text that is now certain; nothing after the first bytes of a character."""
        self.waiting.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text:
            return ""
        self.shown, self.waiting = self.waiting, []
        return text

    def end(self) -> str:
        """What is left, with a replacement character for half of one."""
        return self._text() if self.waiting else ""

    def _text(self) -> str:
        return self.decode([*self.shown, *self.waiting])[len(self.decode(self.shown)) :]
