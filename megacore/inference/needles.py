"""Whether a model finds a fact in a long text: prompts of real text with a fact at a depth of it, and a question.

The answer is among the tokens that the model reads, and found if each of its tokens is the most likely one after those
before it: it is what greedy decoding would write, and nothing has to be generated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megacore.inference.documents import Document
from megacore.inference.evaluate import Excerpt, Integers, summed
from megacore.inference.texts import Texts
from megacore.store.strict_json import StoreError
from models.assemble import Model
from parallel.labels import IGNORE
from parallel.random import key

CITIES = ("Paris", "Tokyo", "Lima", "Cairo", "Oslo", "Delhi", "Quito", "Rome", "Seoul", "Dakar", "Sydney", "Boston")
FACT = "\n\nThe magic number of {city} is {number}.\n\n"
QUESTION = "\n\nWhat is the magic number of {city}? The magic number of {city} is"
ANSWER = " {number}"


@dataclass(frozen=True)
class Needles:
    """The prompts: some for each length and depth.

    Args:
        lengths: Tokens of a prompt, its question and answer included.
        depths: The number of depths, evenly from the beginning of the text to its end.
        each: The prompts of each length and depth, which differ in fact and text.
        seed: The seed of the facts and texts.
    """

    lengths: tuple[int, ...]
    depths: int
    each: int
    seed: int = 0

    @property
    def shares(self) -> list[float]:
        """The part of the text that lies before the fact, of each depth."""
        return [depth / max(1, self.depths - 1) for depth in range(self.depths)]

    def windows(self, texts: Texts, documents: Iterable[Document]) -> list[Excerpt]:
        """Return all prompts: lengths, in them depths, in them each. The labels are the tokens of the answers.

        Raises:
            StoreError: a length has no room for a fact and its question, or the documents are too short for it.
        """
        facts = [_Fact.of(texts, key(self.seed, number)) for number in range(self.each)]
        begin, sizes = _begin(texts), [fact.size for fact in facts]
        longest, least = max(self.lengths), len(_begin(texts)) + max(sizes)
        if min(self.lengths) < least:
            raise StoreError(
                f"--needle {min(self.lengths)}: a fact and its question take {least} tokens, choose as many or more"
            )
        text, needed = _text(documents, begin, longest * self.each), longest - len(begin) - min(sizes)
        if len(text) < needed:
            raise StoreError(
                f"--needle {longest}: its text takes {needed:,} tokens, and the documents have {len(text):,}: "
                f"give more --data, or choose up to {longest - needed + len(text)}"
            )
        made = (
            fact.prompt(begin, text, length, share, key(self.seed, number, length))
            for length in self.lengths
            for share in self.shares
            for number, fact in enumerate(facts)
        )
        return [_window(tokens, answer, place) for place, (tokens, answer) in enumerate(made)]


def found(model: Model, needles: Needles, windows: list[Excerpt]) -> list[list[float]]:
    """Return the share of needles that the model finds, by length and depth; every rank of its mesh calls this.

    Args:
        model: The model, in evaluation mode. Data-parallel ranks share out the prompts, one in a microbatch.
        needles: The question.
        windows: Its prompts, the same on all ranks.
    """
    right = np.array(summed(model, ([window] for window in windows), "most_likely"))
    answers = np.array([np.count_nonzero(window.labels != IGNORE) for window in windows])
    cells = (right == answers).reshape(len(needles.lengths), needles.depths, needles.each)
    shares: list[list[float]] = cells.mean(2).tolist()
    return shares


@dataclass(frozen=True)
class _Fact:
    """The tokens of one, of its question, and of its answer."""

    fact: list[int]
    question: list[int]
    answer: list[int]

    @classmethod
    def of(cls, texts: Texts, drawn: int) -> _Fact:
        words = {"city": CITIES[drawn % len(CITIES)], "number": 10_000 + drawn // len(CITIES) % 90_000}
        fact, question, both = (
            texts.encode(text.format(**words), special=False) for text in (FACT, QUESTION, QUESTION + ANSWER)
        )
        # A tokenizer may join the end of the question with the answer.
        same = next((n for n, (a, b) in enumerate(zip(question, both, strict=False)) if a != b), len(question))
        return cls(fact, both[:same], both[same:])

    @property
    def size(self) -> int:
        return len(self.fact) + len(self.question) + len(self.answer)

    def prompt(self, begin: list[int], text: Integers, length: int, share: float, drawn: int) -> tuple[Integers, int]:
        """Return a prompt of so many tokens, its answer included, and how many of them are the answer."""
        size = length - len(begin) - self.size
        start = drawn % (len(text) - size + 1)
        before, after = np.split(text[start : start + size], [round(share * size)])
        parts = begin, before, self.fact, after, self.question, self.answer
        return np.concatenate([np.array(part, np.int64) for part in parts]), len(self.answer)


def _window(tokens: Integers, answer: int, place: int) -> Excerpt:
    labels = tokens[1:].copy()
    labels[:-answer] = IGNORE
    return Excerpt(tokens[:-1], labels, np.full(len(labels), place))


def _begin(texts: Texts) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    whole, bare = texts.encode("a"), texts.encode("a", special=False)
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)]


def _text(documents: Iterable[Document], begin: list[int], most: int) -> Integers:
    """Return the tokens of the first documents one after the other, without what begins each, as many as are needed."""
    parts, size = [np.zeros(0, np.int64)], 0
    for document in documents:
        tokens = document.tokens
        parts.append(tokens[len(begin) :] if tokens[: len(begin)].tolist() == begin else tokens)
        size += len(parts[-1])
        if size >= most:
            break
    return np.concatenate(parts)
