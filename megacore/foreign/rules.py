"""Rules that say what becomes of a key of another project's config, and the account of a whole config. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megacore.recipe import assigned
from megacore.say import brief

Given = Mapping[str, Any]
"""{key, with dots between its parts: value}."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a key. ``keys``: the keys of a recipe that it becomes, with their values; ``remark``: what is to
    be known of it: why it becomes none, or how ours differs; ``refused``: whether it would change the run, and there is
    nothing like it here."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    refused: bool = False


@dataclass(frozen=True)
class ForeignConfig:
    """What a rule sees besides its value: all keys, and the number of devices, where it is known."""

    given: Given
    gpus: int | None = None


Rule = Callable[[Any, ForeignConfig], Verdict]


def to(key: str, made: Callable[[Any], Any] | Mapping[Any, Any] | None = None, remark: str = "") -> Rule:
    """Return a rule: the value goes to a key of ours, made into another one by a function or a table."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        try:
            found = value if made is None else made[value] if isinstance(made, Mapping) else made(value)
        except (KeyError, TypeError, ValueError):
            known = f": only {', '.join(map(str, made))} are" if isinstance(made, Mapping) else ""
            return Verdict(remark=f"{brief(value)} is not known here{known}", refused=True)
        return Verdict({key: found}, remark)

    return rule


def where(values: Mapping[Any, Mapping[str, Any]], why: str) -> Rule:
    """Return a rule: each of these values becomes some keys, or none; others are refused, with the reason."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        try:
            return Verdict(values[value], "" if values[value] else "so here too")
        except (KeyError, TypeError):
            return Verdict(remark=why, refused=True)

    return rule


def only(*values: Any, why: str) -> Rule:
    """Return a rule: these values say what is so here anyway; others are refused, with the reason."""
    return where({value: {} for value in values}, why)


def off(why: str) -> Rule:
    """Return a rule: nothing like it is here, which is refused unless it is off or empty."""
    return lambda value, config: (
        Verdict(remark="so here too") if not value or value in ("no", "none") else Verdict(remark=why, refused=True)
    )


def without(why: str) -> Rule:
    """Return a rule: the key has no meaning here."""
    return lambda value, config: Verdict(remark=why)


@dataclass(frozen=True)
class Project:
    """A project whose configs are read. ``rules``: {key, or a pattern of keys: its rule}; a key itself goes before
    patterns, and these in their order; ``without``: {the reason: such keys that have no meaning here, with blanks
    between them}; ``defaults``: the values of keys that are left out, where they are others than ours, by all keys;
    ``elsewhere``: a value -> where another one stands in its place; empty if none does."""

    name: str
    rules: Mapping[str, Rule]
    without: Mapping[str, str]
    defaults: Callable[[Given], Given]
    elsewhere: Callable[[Any], str] = lambda value: ""

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a key; None where it is unknown."""
        rules = {**self.rules, **{key: without(why) for why, keys in self.without.items() for key in keys.split()}}
        named = next((rule for pattern, rule in rules.items() if fnmatchcase(key, pattern)), None)
        return rules.get(key, named)


@dataclass(frozen=True)
class AccountRow:
    """A key of theirs, its value, and what becomes of it; ``given``: it stands in the config."""

    key: str
    value: Any
    verdict: Verdict
    given: bool = True


def account(project: Project, given: Given, gpus: int | None = None) -> list[AccountRow]:
    """Return what becomes of each key of a config, and of what it leaves out."""
    config, rows, taken = ForeignConfig(given, gpus), list[AccountRow](), dict[str, tuple[str, Any]]()
    left_out = {key: value for key, value in project.defaults(given).items() if key not in given}
    for key, value in {**given, **left_out}.items():
        verdict = _verdict(project, key, value, config)
        for ours, made in verdict.keys.items():
            other, before = taken.setdefault(ours, (key, made))
            if before != made:
                why = f"{other} makes {ours} {brief(before)}, and this {brief(made)}"
                verdict = Verdict(remark=why, refused=True)
        rows.append(AccountRow(key, value, verdict, key in given))
    return rows


def _verdict(project: Project, key: str, value: Any, config: ForeignConfig) -> Verdict:
    if (rule := project.rule(key)) is None:
        return Verdict(remark="unknown here", refused=True)
    if said := project.elsewhere(value):
        return Verdict(remark=said)
    try:
        return rule(value, config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # files of strangers hold anything
        return Verdict(remark=f"{brief(value)} is not understood", refused=True)


def recipe_of(rows: list[AccountRow]) -> dict[str, Any]:
    """Return the recipe that the rows come to."""
    tree = dict[str, Any]()
    for row in rows:
        for key, value in row.verdict.keys.items():
            tree = assigned(tree, key.split("."), value)
    return tree


def batch(global_size: str | None, micro_size: str, parallel: tuple[str, ...]) -> Rule:
    """Return the rule of the number of microbatches that are added up, from the names of the keys beside it.
    ``parallel``: the keys of the ranks that share a microbatch."""

    def rule(value: Any, config: ForeignConfig) -> Verdict:
        given = config.given
        if global_size is not None and isinstance(given.get(global_size), int):
            return Verdict(remark="follows from the batch and the ranks")
        micro = given.get(micro_size, 1)
        if not isinstance(value, int) or not isinstance(micro, int):
            return Verdict(remark="set batch.global_size and batch.micro_size")
        if config.gpus is None:
            size = f"{micro} x {value} x their replicas"
            return Verdict(remark=f"batch.global_size is {size}: give their number of GPUs, --gpus N", refused=True)
        replicas = config.gpus
        for key in parallel:
            replicas //= given.get(key, 1)
        return Verdict({"batch.global_size": micro * value * replicas})

    return rule
