"""`megacore config`: the keys of a recipe, each with its type, its range, its default and what it means.

docs/config.md is what it prints for all of them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from megacore import config
from megacore.config import SECTIONS, Bound, Config, CorpusConfig
from megacore.parallel.enum_errors import nearest
from megacore.say import err, say
from megacore.tools.options import command_parser

HEADING = """# The keys of a recipe

Printed by `megacore config` from [megacore/config.py](../megacore/config.py), where each key has its one place. A
recipe (YAML) has any of them, and an override on the command line is `section.key=value`.
"""
WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict[str, Any]: "a mapping",
    dict[str, str]: "a mapping of texts",
    CorpusConfig: "a mapping of `path`, `weight`, `least`, `split` and `streams`",
}


def main(argv: Sequence[str]) -> int:
    parser = command_parser("config", __doc__)
    parser.add_argument("key", nargs="?", help="a section (optimizer) or a key of one (optimizer.lr); all by default")
    wanted = parser.parse_args(argv).key
    sections = dict(_sections())
    if wanted is None:
        say("\n".join([HEADING, *("\n".join(lines) for lines in sections.values())]).rstrip())
        return 0
    section, _, name = wanted.partition(".")
    lines = sections.get(section, [])
    if name:
        lines = [line for line in lines if line.startswith(f"- `{wanted}`")]
    if not lines:
        keys = [*sections, *(f"{each}.{field.name}" for each, kind in SECTIONS.items() for field in fields(kind))]
        err(f"a recipe has no {wanted}{nearest(wanted, keys)}")
        return 2
    say("\n".join(lines).rstrip())
    return 0


def _sections() -> Iterator[tuple[str, list[str]]]:
    """Yield each section with its lines of Markdown."""
    said = _docstrings()
    for each in fields(Config):
        if (kind := SECTIONS.get(each.name)) is not None:
            null = " `null` by default." if getattr(Config(), each.name) is None else ""
            yield each.name, [f"## {each.name}", "", f"{_about(kind)}{null}", "", *_lines(each.name, kind, said), ""]
        else:
            line = _line(each.name, each.type, getattr(Config(), each.name), said["Config"][each.name])
            yield each.name, [f"## {each.name}", "", line, ""]
        if each.name == "data":
            corpus = "data.train[]"
            yield corpus, ["### A corpus", "", _about(CorpusConfig), "", *_lines(corpus, CorpusConfig, said), ""]


def _lines(section: str, kind: Any, said: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for each in fields(kind):
        yield _line(f"{section}.{each.name}", each.type, each.default, said[kind.__name__][each.name])


def _line(key: str, annotation: Any, default: Any, said: str) -> str:
    value = default if isinstance(default, str) or default is MISSING else json.dumps(default)
    shown = "" if value is MISSING else f"; `{value}` by default"
    return f"- `{key}`: {words(annotation)}{shown}. {said}"


def words(annotation: Any) -> str:
    """Return the type of a key in words: `a number above 0 or null`."""
    kinds = get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if get_origin(annotation) is Annotated:
        return ", ".join([words(kinds[0]), *(each.words for each in kinds[1:] if isinstance(each, Bound))])
    if get_origin(annotation) is Literal:
        *others, last = (f"`{each}`" for each in kinds)
        return f"{', '.join(others)} or {last}"
    if get_origin(annotation) is tuple:
        of = words(kinds[0])
        return f"a list (each {of})" if kinds[-1] is ... else f"a list of {len(kinds)} (each {of})"
    return " or ".join(map(words, kinds))


def _about(kind: Any) -> str:
    return str(kind.__doc__).partition("\n\n")[0].replace("\n    ", " ")


def _docstrings() -> dict[str, dict[str, str]]:
    """Return {class of megacore/config.py: {field: the string below it}}."""
    module = ast.parse(Path(str(config.__file__)).read_text(encoding="utf-8"))
    return {each.name: dict(_below(each.body)) for each in module.body if isinstance(each, ast.ClassDef)}


def _below(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for here, after in pairwise(body):
        match here, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, " ".join(text.split())
