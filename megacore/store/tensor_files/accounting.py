"""Accounting for the tensors of a Hugging Face folder: each is used once as a weight, or explained, or an error."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np

from megacore.models.config import ModelConfig
from megacore.models.wrappers import Naming, Wrapper
from megacore.parallel.rank_sets import runs
from megacore.parallel.weights.schema import NAMED, Schema
from megacore.parallel.weights.transfer import Stored, hugging_face
from megacore.store.tensor_files.dtypes import kinds_of
from megacore.store.tensor_files.tensors import Bits, Entry, TensorFile

_NUMBER = re.compile(r"(?<=\.)(0|[1-9]\d{0,8})(?=\.)")
_COMPARED_AT_ONCE = 4 << 20
_SUGGESTED_FROM = 10_000


@dataclass(frozen=True)
class TensorInFile:
    """A tensor where it lies."""

    file: TensorFile
    name: str

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.name]

    @property
    def bits(self) -> Bits:
        return self.file.array(self.name)

    def __str__(self) -> str:
        return f"{printable(self.name)} ({self.file.path.name})"


def tensors_of(files: Iterable[TensorFile]) -> dict[str, TensorInFile]:
    """Return the tensors of some files by their names."""
    return {name: TensorInFile(file, name) for file in files for name in file.entries}


@dataclass(frozen=True)
class Account:
    """The account of the tensors of a folder. ``ignored``: names on the family's list of tensors that hold no weights;
    ``others``: names of tensors that the model leaves out; ``carried``: names of tensors of other parts of what it is
    wrapped in; ``naming``: how the model's tensors are named there."""

    weights: Mapping[str, TensorInFile]
    ignored: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    naming: Naming | None = None
    problems: list[str] = field(default_factory=list)


def account(config: ModelConfig, files: Mapping[str, TensorFile], wrapper: Wrapper | None = None) -> Account:
    """Account for all tensors that lie in ``files`` (by tensor) for a model of this configuration. The tensors of what
    the model leaves out, and of other parts of what it is wrapped in, are listed, and any that is of no part is a
    problem."""
    too_few = _absurd(config, len(files))
    if too_few:
        return Account({}, problems=[too_few])
    expected = {stored.name: stored for stored in hugging_face(config.schema)}
    ignorable = ignorable_by(type(config))
    carried = dict.fromkeys(name for name in files if wrapper and wrapper.carries(name))
    others = dict.fromkeys(name for name in files if name.startswith(config.left_out) and name not in carried)
    part = {name: TensorInFile(file, name) for name, file in files.items() if name not in others | carried}
    outside: list[str] = []
    naming = wrapper.naming(part) if wrapper else None
    if naming:
        inside = {name: naming.inside(name) for name in part}
        outside = [name for name, found in inside.items() if found is None]
        part = {found: part[name] for name, found in inside.items() if found is not None}
        others |= dict.fromkeys(part.pop(name).name for name in [*part] if name.startswith(config.left_out))
    held, problems = _with_prefix(config, part, lambda name: name in expected or ignorable(name))
    problems += _spares(config, held)
    ignored = tuple(held[name].name for name in held if name not in expected and ignorable(name))
    weights = {name: held[name] for name in expected if name in held}
    missing = [name for name in expected if name not in held]
    unexpected = [held[name].name for name in held if name not in expected and not ignorable(name)] + outside
    problems += _absent(config, missing, unexpected) + alike(_unfit(config.schema, expected, weights))
    return Account(weights, ignored, tuple(others), tuple(carried), naming, problems)


def ignorable_by(kind: type[ModelConfig]) -> Callable[[str], bool]:
    """Return a function: whether a tensor is on the family's list of those without weights, with its prefix or not."""
    dotted = f"{kind.base_model_prefix}."
    templates = [re.escape(template.removeprefix(dotted)) for template in kind.ignored]
    pattern = "|".join(re.sub(r"\\\{\w+\\\}", r"\\d+", template) for template in templates)
    match = re.compile(f"(?:{re.escape(dotted)})?(?:{pattern})")
    return lambda name: bool(templates) and match.fullmatch(name) is not None


def summary(names: Iterable[str]) -> list[str]:
    """Return all the names, each once, those that differ in numbers drawn together: ``h.{0..3,7}.ln_1.weight``,
    ``h.{0,1}.experts.{0..7}.weight``."""
    groups: dict[tuple[str, ...], dict[tuple[int, ...], list[int]]] = {}
    for name in names:
        words = _NUMBER.split(name)
        first, *others = [*map(int, words[1::2])] or [0]
        groups.setdefault(tuple(words[::2]), {}).setdefault(tuple(others), []).append(first)
    return [printable(spelled) for words, found in groups.items() for spelled in _drawn_together(words, found)]


def _drawn_together(words: Sequence[str], found: Mapping[tuple[int, ...], list[int]]) -> Iterator[str]:
    """Yield the names with numbers between these words, {all numbers but the first: each first one}."""
    if len(words) == 1:
        yield words[0]
        return
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for others, firsts in found.items():
        alike.setdefault(tuple(sorted(firsts)), []).append(others)
    for shared, listed in alike.items():
        columns = [sorted({*column}) for column in zip(*listed, strict=True)]
        every = math.prod(map(len, columns)) == len(listed)
        for numbers in [columns] if every else [[[n] for n in each] for each in listed]:
            spelled = map(ranges, (shared, *numbers))
            yield "".join(itertools.chain(*zip(words, spelled, strict=False), words[-1:]))


def printable(name: str) -> str:
    """Return a name as it stands, or quoted where it would do something to a terminal."""
    return name if name.isprintable() and name else repr(name)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as one word: ``{0..3,7}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    return "{" + ",".join(f"{a}..{b}" if a < b else str(a) for a, b in runs(numbers)) + "}"


def _absurd(config: ModelConfig, found: int) -> str | None:
    """Refuse a config of billions of tensors by arithmetic, before anything counts them one by one."""
    schema = config.schema
    templates = ((param, template) for param in schema.params for template, _ in {*param.hf_tensors.values()})
    wanted = sum(schema.count(param, template) for param, template in templates)
    if wanted <= 2 * found + 10_000:
        return None
    named = {axis for param in schema.params for axis in NAMED.findall(param.hf)}
    sizes = ", ".join(f"{axis}={schema.sizes[axis]}" for axis in sorted(named))
    return f"config.json describes {wanted} tensors ({sizes}), but there are {found}"


def _with_prefix(
    config: ModelConfig, tensors: Mapping[str, TensorInFile], known: Callable[[str], bool]
) -> tuple[dict[str, TensorInFile], list[str]]:
    """Return the tensors by the names that they have in a whole model, and problems."""
    prefix = f"{config.base_model_prefix}."
    having = [name for name in tensors if name.startswith(prefix) and known(name)]
    lacking = {name: prefix + name for name in tensors if not name.startswith(prefix) and known(prefix + name)}
    lacking |= {theirs: ours for ours, theirs in config.base_names.items() if theirs in tensors}
    held = {lacking.get(name, name): tensor for name, tensor in tensors.items()}
    if not lacking or not having:
        return held, []
    names = f"{', '.join(summary(having))}; {', '.join(summary(lacking))}"
    return held, [f"some names start with {prefix!r} and some lack it: {names}"]


def _spares(config: ModelConfig, held: dict[str, TensorInFile]) -> list[str]:
    """Leave out what is stored again: a head that is the embedding, and what layers that predict further tokens have of
    the model's own. Where the embedding is not there, the head stands for it."""
    embedding, head = config.tied
    tied = (
        "though tie_word_embeddings says that they are one: if they are two, let config.json say "
        "tie_word_embeddings=false; else remove one of them"
    )
    own = (
        "and layers that predict further tokens have the model's own: to read it without these layers, let config.json "
        "say num_nextn_predict_layers=0"
    )
    spares = [(head, embedding, tied)] if config.tie_word_embeddings else []
    spares += [(name, param.hf, own) for param in config.schema.params for name in param.hf_copies]
    problems = []
    for name, kept_as, way_out in spares:
        spare = held.pop(name, None)
        kept = held.get(kept_as)
        if spare and kept and not _equal(kept, spare):
            problems.append(f"{kept} and {spare} differ, {way_out}")
        elif spare and name == head:
            held.setdefault(embedding, spare)
    return problems


def _equal(a: TensorInFile, b: TensorInFile) -> bool:
    if (a.entry.dtype, a.entry.shape) != (b.entry.dtype, b.entry.shape):
        return False
    left, right, step = a.bits.reshape(-1), b.bits.reshape(-1), _COMPARED_AT_ONCE
    return all(np.array_equal(left[i : i + step], right[i : i + step]) for i in range(0, left.size, step))


def _absent(config: ModelConfig, missing: list[str], unexpected: list[str]) -> list[str]:
    problems = []
    embedding, head = config.tied
    if head in missing:
        missing = [name for name in missing if name != head]
        problems.append(
            f"{head} is missing: a base model without its head cannot be trained as a language model. Take the folder "
            f"of the {config.architecture}; or if {embedding} serves as head, let config.json say "
            "tie_word_embeddings=true"
        )
    strange, lost = summary(unexpected), summary(missing)
    if lost:
        problems.append(f"{len(missing)} tensors are missing: {', '.join(lost)}")
    if strange:
        problems.append(f"{len(unexpected)} tensors are not of this model: {', '.join(_nearest(strange, lost))}")
    return problems


def _nearest(names: list[str], missing: list[str]) -> list[str]:
    if len(names) * len(missing) > _SUGGESTED_FROM:
        return names
    found = [(name, get_close_matches(name, missing, n=1, cutoff=0.8)) for name in names]
    return [f"{name} (is it {near[0]}?)" if near else name for name, near in found]


def _unfit(
    schema: Schema, expected: Mapping[str, Stored], weights: Mapping[str, TensorInFile]
) -> Iterator[tuple[str, str]]:
    way_out = " (a quantised model? Take the one it was made from)"
    for name, held in weights.items():
        if held.entry.shape != expected[name].shape:
            yield f"shape {list(held.entry.shape)} instead of {list(expected[name].shape)}", held.name
        param = schema[expected[name].param]
        if held.entry.dtype not in (kinds := kinds_of(param)):
            yield f"dtype {held.entry.dtype} is not one of {', '.join(kinds)}{way_out * (not param.below)}", held.name


def alike(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return (problem, tensor) pairs as a line for each problem."""
    names: dict[str, list[str]] = {}
    for problem, name in found:
        names.setdefault(problem, []).append(name)
    return [f"{problem}: {', '.join(summary(of))}" for problem, of in names.items()]
