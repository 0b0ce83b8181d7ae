"""References in a recipe: ``${section.key}`` stands for another key's value, and for nothing else.

Recipes come from strangers, and what they resolve to ends in config.yaml, in checkpoints and in messages. So nothing of
the environment is resolved, and a few lines do not become gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.say import brief
from parallel import limits

Where = tuple[str | int, ...]

_REFERENCE = re.compile(r"(\\*)\$\{([^}]*)(\}?)")
"""Backslashes, what is referred to, and its end. As OmegaConf has it, an odd backslash makes it text."""
_KEYS = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+|\[\d+\])*")


class ReferenceProblem(ValueError):
    """A reference that is not resolved."""


def dotted(where: Sequence[str | int]) -> str:
    """Return the spelling of a place of a recipe: ``data.train[0].path``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{brief(part)}" for part in where).removeprefix(".")


def escaped(value: Any) -> Any:
    """Return a value whose texts are read back as they are: none of them refers to anything."""
    if isinstance(value, Mapping):
        return {key: escaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(each) for each in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@dataclass
class References:
    """A recipe as it was read, and how much its references have been found to stand for.

    Args:
        tree: Mappings, lists and plain values.
        found: Values and characters.
    """

    tree: Any
    found: int = 0

    def resolved(self) -> Any:
        """Return the recipe without references.

        Raises:
            ReferenceProblem: one asks for anything else than a key that is there, or they stand for too much.
        """
        return self._resolved(self.tree, (), ())

    def _resolved(self, value: Any, where: Where, asked: tuple[str, ...], depth: int = 0) -> Any:
        """Return the value of a place; ``asked`` are the references that led to it from another."""
        if depth > limits.DEEPEST:
            raise ReferenceProblem(
                f"{dotted(where[:1])}: its references are nested more than {limits.DEEPEST} levels deep"
            )
        if asked:
            self._count(where, 1 + (len(value) if isinstance(value, str) else 0))
        if isinstance(value, dict):
            return {key: self._resolved(each, (*where, key), asked, depth + 1) for key, each in value.items()}
        if isinstance(value, list):
            return [self._resolved(each, (*where, index), asked, depth + 1) for index, each in enumerate(value)]
        return self._text(value, where, asked, depth) if isinstance(value, str) else value

    def _count(self, where: Where, more: int) -> None:
        self.found += more
        if self.found > limits.REFERENCES:
            raise ReferenceProblem(
                f"{dotted(where[:1])}: the references of the recipe stand for more than {limits.REFERENCES:,} values "
                "and characters"
            )

    def _text(self, text: str, where: Where, asked: tuple[str, ...], depth: int) -> Any:
        parts, at = list[str](), 0
        for match in _REFERENCE.finditer(text):
            backslashes, keys, closed = match.groups()
            literal = len(backslashes) % 2
            parts += [text[at : match.start()], backslashes[: len(backslashes) // 2]]
            at = match.start(2) - 2 if literal else match.end()
            if not literal:
                if not closed or not _KEYS.fullmatch(keys):
                    raise ReferenceProblem(_refused(where, text[match.start(2) :]))
                value = self._of(keys, where, asked, depth)
                if match.group() == text:
                    return value
                if isinstance(value, dict | list):
                    raise ReferenceProblem(f"{dotted(where)}: ${{{keys}}} is no value that fits into a text")
                self._count(where, len(str(value)))
                parts.append(str(value))
        return "".join([*parts, text[at:]])

    def _of(self, keys: str, where: Where, asked: tuple[str, ...], depth: int) -> Any:
        if keys in asked:
            raise ReferenceProblem(f"{dotted(where)}: ${{{keys}}} refers to itself")
        value = self.tree
        for key in re.findall(r"[\w-]+", keys):
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise ReferenceProblem(f"{dotted(where)}: ${{{keys}}} refers to no key of the recipe")
        return self._resolved(value, where, (*asked, keys), depth + 1)


def _refused(where: Where, text: str) -> str:
    name, colon, _ = text.partition(":")
    said = f"{name}:..." if colon else text.partition("}")[0]
    return f"{dotted(where)}: ${{{said}}} is not resolved: only ${{section.key}} is, another key's value"
