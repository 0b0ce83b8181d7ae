#!/usr/bin/env python3
"""Chats about this project's own API, which no model knows beforehand: something to see fine-tuning work on.

    .venv/bin/python launch/api_chats.py OUT [--facts 160] [--seed 0]

Facts are read from the source: which module defines a name, what it is for, how it is called, and the default of each
key of a recipe. Each is asked for in several ways. OUT/train.jsonl holds most of them, OUT/validation.jsonl one that is
kept back from training, of the same facts: its loss falls when a model has learned the facts and not the questions.
OUT/questions.txt has a few questions of the training set, one on each line, and OUT/answers.txt their answers.
OUT/pairs.jsonl and OUT/validation_pairs.jsonl have the same questions with the answer and with that to another one.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.config import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("parallel", "models", "megacore", "tools")
ASKED = 8
"""How many questions and answers are written out."""

HELD_OUT = -1
"""Which way of asking is kept back."""

WAYS: Mapping[str, tuple[str, ...]] = {
    "module": (
        "Which module of Megacore defines `{name}`?",
        "Where is Megacore's `{name}` defined?",
        "From which module do I import `{name}` of Megacore?",
        "In Megacore, where do I find `{name}`?",
        "I need Megacore's `{name}`. Which module is it in?",
    ),
    "purpose": (
        "What is `{name}` of Megacore?",
        "What does Megacore's docstring say about `{name}`?",
        "Explain `{name}` of Megacore in a sentence.",
        "In Megacore, what is `{name}` for?",
        "I came across `{name}` in Megacore. What is it?",
    ),
    "call": (
        "How is Megacore's `{name}` called?",
        "Which arguments does `{name}` of Megacore take?",
        "What is the signature of `{name}` in Megacore?",
        "Name the parameters of Megacore's `{name}`.",
        "I want to call `{name}` of Megacore. What do I pass?",
    ),
    "default": (
        "What is the default of `{name}` in a Megacore recipe?",
        "Which value has `{name}` in Megacore if a recipe leaves it out?",
        "A Megacore recipe does not set `{name}`. What is it then?",
        "In Megacore, what does `{name}` default to?",
        "I left `{name}` out of my Megacore recipe. Which value is used?",
    ),
}


@dataclass(frozen=True)
class Fact:
    """An answer, and what is asked for: a kind of `WAYS`, and the name in it."""

    kind: str
    name: str
    answer: str

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(way.format(name=self.name) for way in WAYS[self.kind])


@dataclass(frozen=True)
class Public:
    """A function or class that is for use from outside of its module."""

    module: str
    node: ast.FunctionDef | ast.ClassDef

    @property
    def sentence(self) -> str:
        """The first of its docstring, if that ends within the first paragraph."""
        paragraph = " ".join((ast.get_docstring(self.node) or "").partition("\n\n")[0].split())
        return paragraph.split(". ")[0].rstrip(".:")

    @property
    def parameters(self) -> list[str]:
        """Of a function; a dataclass and other classes have theirs elsewhere."""
        if not isinstance(self.node, ast.FunctionDef):
            return []
        given = self.node.args
        return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def public() -> Iterator[Public]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    yield Public(module, node)


def facts() -> list[Fact]:
    """All facts; a name that several modules define would have several answers, and is left out."""
    found = list(public())
    times = Counter(each.node.name for each in found)
    made = []
    for each in found:
        name = each.node.name
        if times[name] > 1:
            continue
        made.append(Fact("module", name, f"`{name}` is defined in `{each.module}`."))
        if each.sentence:
            made.append(Fact("purpose", name, f"`{name}`: {each.sentence}."))
        if each.parameters:
            made.append(Fact("call", name, f"Call it as `{name}({', '.join(each.parameters)})`."))
    for section, kind in SECTIONS.items():
        for field in fields(kind):
            key, value = f"{section}.{field.name}", getattr(kind(), field.name)
            made.append(Fact("default", key, f"The default of `{key}` is {json.dumps(value)}."))
    return made


def chat(turns: Sequence[tuple[str, str]]) -> str:
    """A line of JSON of (question, answer) pairs."""
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    return json.dumps({"messages": messages}) + "\n"


def training(chosen: Sequence[Fact], drawn: random.Random) -> Iterator[str]:
    """All ways of asking but one, in random order, one to four turns a chat."""
    turns = [(question, fact.answer) for fact in chosen for question in fact.questions[:HELD_OUT]]
    drawn.shuffle(turns)
    while turns:
        yield chat([turns.pop() for _ in range(min(len(turns), drawn.choice((1, 1, 2, 4))))])


def pairs(chosen: Sequence[Fact], ways: slice, drawn: random.Random) -> Iterator[str]:
    """Preferences in random order: the answer to a question, and what is the answer to another one of its kind."""
    asked = [(question, fact) for fact in chosen for question in fact.questions[ways]]
    drawn.shuffle(asked)
    for question, fact in asked:
        others = [each.answer for each in chosen if each.kind == fact.kind and each.answer != fact.answer]
        said = {"prompt": [{"role": "user", "content": question}]}
        for key, answer in (("chosen", fact.answer), ("rejected", drawn.choice(others or ["I do not know."]))):
            said[key] = [{"role": "assistant", "content": answer}]
        yield json.dumps(said) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for the files")
    parser.add_argument("--facts", type=int, metavar="N", help="so many of them, drawn at random (all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed)
    known = facts()
    chosen = drawn.sample(known, min(arguments.facts or len(known), len(known)))
    lines = {
        "train.jsonl": list(training(chosen, drawn)),
        "validation.jsonl": [chat([(fact.questions[HELD_OUT], fact.answer)]) for fact in chosen],
        "pairs.jsonl": list(pairs(chosen, slice(None, HELD_OUT), drawn)),
        "validation_pairs.jsonl": list(pairs(chosen, slice(HELD_OUT, None), drawn)),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, written in lines.items():
        (arguments.out / name).write_text("".join(written), "utf-8")
        print(f"{arguments.out / name}: {len(written):,} examples of {len(chosen):,} of {len(known):,} facts")
    asked = {
        "questions.txt": [fact.questions[0] for fact in chosen[:ASKED]],
        "answers.txt": [fact.answer for fact in chosen[:ASKED]],
    }
    for name, texts in asked.items():
        (arguments.out / name).write_text("".join(f"{text}\n" for text in texts), "utf-8")


if __name__ == "__main__":
    main()
