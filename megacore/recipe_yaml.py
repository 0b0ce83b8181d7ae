"""The YAML of recipes: what may stand in a file of strangers, read and written. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megacore.parallel import limits
from megacore.say import brief

Where = tuple[str | int, ...]


class RecipeProblem(ValueError):
    """YAML that no recipe may have."""


# YAML 1.1 takes 1e-3 for a text and 2020-01-01 for a date; a recipe means the number and the text.
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers = _RESOLVERS


class _YamlDumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_YamlLoader, _YamlDumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dotted(where: Sequence[str | int]) -> str:
    """Return the spelling of a place of a recipe: ``data.train[0].path``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{brief(part)}" for part in where).removeprefix(".")


def read_yaml(text: str, depth: int = 0) -> Any:
    """Return the mappings, lists and plain values of a text of YAML, in which aliases are what they stand for.
    ``depth``: the levels that it will stand below. Raises RecipeProblem: it is nested too deeply, its aliases stand for
    too much, or it has what no recipe may have; yaml.YAMLError: it is no YAML, or asks for Python's objects."""
    for event in yaml.parse(text, _YamlLoader):  # what composes them recurses
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > limits.DEEPEST:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise RecipeProblem(
                f"line {line} is nested more than {limits.DEEPEST} levels deep, and no recipe needs to be"
            )
    loader = _YamlLoader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _Values(loader).of(node, ())
    finally:
        loader.dispose()


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return {key with dots between its parts: value} of nested mappings."""
    found = dict[str, Any]()
    for key, value in tree.items():
        inside = isinstance(value, Mapping) and value
        found |= flat(value, f"{before}{key}.") if inside else {f"{before}{key}": value}
    return found


def write_yaml(tree: Any) -> str:
    """Return the text of a tree of mappings, lists and plain values, which :func:`read_yaml` reads back as it is."""
    return yaml.dump(tree, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)


class _Values:
    """The values of the nodes of a text, and how many there have been: a line each, aliases can double them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._count = 0

    def of(self, node: yaml.Node, where: Where) -> Any:
        self._count += 1
        if self._count > limits.VALUES:
            raise RecipeProblem(f"{dotted(where[:1])}: its aliases stand for more than {limits.VALUES:,} values")
        if len(where) > limits.DEEPEST:
            raise RecipeProblem(f"{dotted(where[:1])}: its aliases are nested more than {limits.DEEPEST} levels deep")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.of(each, (*where, index)) for index, each in enumerate(node.value)]
        value = self._loader.construct_object(node, deep=True)
        if isinstance(value, str) and "${" in value:
            raise RecipeProblem(
                f"{dotted(where)}: {brief(value)} is not resolved: write the value itself, or name it once with an "
                "anchor of YAML (&name) and use it elsewhere (*name)"
            )
        if value is None or isinstance(value, str | int | float):
            return value
        raise RecipeProblem(f"{dotted(where)}: a recipe has no {type(value).__name__}")

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
        merged, own = dict[str, Any](), dict[str, Any]()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                value = self.of(value_node, where)
                if not isinstance(value, dict):
                    raise RecipeProblem(f"{dotted(where)}: << takes one mapping")
                merged |= value
                continue
            key = self._loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise RecipeProblem(f"{dotted(where)}: the key {brief(key)} is no text: put it in quotes")
            if key in own:
                line = key_node.start_mark.line + 1
                raise RecipeProblem(f"{dotted(where) or 'a recipe'}: duplicate key {brief(key)} in line {line}")
            own[key] = self.of(value_node, (*where, key))
        return merged | own
