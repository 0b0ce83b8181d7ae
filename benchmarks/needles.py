"""Whether a model finds a fact in a long text: prompts of real text with a fact at a depth of it, and a question.

    python -m benchmarks.needles MODEL --data FOLDER --lengths 2048,4096,8192 --needles 8 --picture needles.png

Each prompt is text of the data with a sentence such as "The magic number of Lima is 48213." at a depth of it, and a
question about it. The answer is among the tokens that the model reads, and found if each of its tokens is the most
likely one after those before it, of equals the one with the lowest id: it is what greedy decoding would write, and
nothing has to be generated. A base model is asked as well as a chat model: the answer is the end of a sentence.
MODEL, the mesh, --device and --dtype are those of `megacore evaluate`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from megacore import pictures
from megacore.inference.evaluation_data import Document, DocumentFiles, Excerpt, Integers
from megacore.inference.perplexity import summed
from megacore.inference.texts import Texts
from megacore.models.assemble import Model
from megacore.parallel.labels import IGNORE
from megacore.parallel.random import key
from megacore.say import say, say_data
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders, options, processes
from megacore.tools.tables import table

ROOT = Path(__file__).resolve().parent.parent
CITIES = ("Paris", "Tokyo", "Lima", "Cairo", "Oslo", "Delhi", "Quito", "Rome", "Seoul", "Dakar", "Sydney", "Boston")
FACT = "\n\nThe magic number of {city} is {number}.\n\n"
QUESTION = "\n\nWhat is the magic number of {city}? The magic number of {city} is"
ANSWER = " {number}"


@dataclass(frozen=True)
class Needles:
    """The prompts: so many of each length, in tokens with question and answer, and depth, which are spread evenly from
    the beginning of the text to its end. They differ in fact and text."""

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
                f"--lengths {min(self.lengths)}: a fact and its question take {least} tokens, choose as many or more"
            )
        text, needed = _text(documents, begin, longest * self.each), longest - len(begin) - min(sizes)
        if len(text) < needed:
            raise StoreError(
                f"--lengths {longest}: its text takes {needed:,} tokens, and the documents have {len(text):,}: "
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
    right = np.array(summed(model, windows, "most_likely", 1))
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


# -- the command


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    processes.add_model(parser)
    parser.add_argument("--data", action="append", type=Path, required=True, metavar="PATH", help="real text")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of the text in a row of .jsonl or .parquet")
    parser.add_argument("--lengths", type=options.counts, required=True, metavar="N,N,...", help="tokens of a prompt")
    parser.add_argument("--depths", type=options.count, default=5, metavar="N", help="places of the fact (5)")
    parser.add_argument("--needles", type=options.count, default=4, metavar="N", help="of each length and depth (4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the facts and where their texts begin (0)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG of what is found")
    parser.add_argument("--json", action="store_true", help="print data instead of words")
    processes.add_mesh(parser, data=True)
    return folders.program(lambda parsed: run(parsed, given), parser.parse_args(given))


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    needles = Needles(arguments.lengths, arguments.depths, arguments.needles, arguments.seed)
    job, windows = processes.check(arguments, partial(_windows, arguments, needles))
    if job.lacks_ranks:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return processes.start("benchmarks.needles", given, job.shape.world)
    with processes.loaded(job, arguments) as model:
        shares = found(model, needles, windows)
    if job.here.rank == 0:
        data = {"lengths": needles.lengths, "depths": needles.shares, "needles": needles.each, "found": shares}
        if arguments.picture is not None:
            draw(data, arguments.picture)
        if arguments.json:
            say_data(data, indent=1)
        else:
            say(shown(data))
    return 0


def _windows(arguments: argparse.Namespace, needles: Needles, folder: WeightFolder) -> list[Excerpt]:
    longest, most = folder.config.max_positions, max(needles.lengths)
    if longest is not None and most > longest:
        raise StoreError(
            f"--lengths {most}: the model has {longest} positions: choose up to those, or extend it first "
            "(max_position_embeddings and the rope of its config.json)"
        )
    texts = Texts.of(folder)
    files = DocumentFiles(arguments.data, folder.config.vocab_size, texts, arguments.text_key, "all")
    return needles.windows(texts, files.documents())


def shown(data: dict[str, Any]) -> str:
    head = ["depth", *(f"{length:,}" for length in data["lengths"])]
    rows = [
        [f"{depth:.0%}", *(f"{column[row]:.0%}" for column in data["found"])]
        for row, depth in enumerate(data["depths"])
    ]
    return f"found of {data['needles']} needles, by depth and tokens of the prompt\n{table(head, rows)}"


def draw(data: dict[str, Any], picture: Path) -> None:
    """Draw the share of needles that were found, depths over lengths."""
    pyplot, lengths, depths = pictures.pyplot(), data["lengths"], data["depths"]
    figure, axes = pyplot.subplots(figsize=(1.2 * len(lengths) + 2.5, 0.45 * len(depths) + 1.5), layout="constrained")
    drawn = axes.imshow(np.array(data["found"]).T, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set(xlabel="tokens of the prompt", ylabel="depth of the fact")
    figure.colorbar(drawn, label="found")
    pictures.save(figure, picture)


if __name__ == "__main__":
    sys.exit(main())
