"""Recipe (YAML) + overrides (`optimizer.lr=1e-3`) -> a frozen, typed `Config`. Nothing here imports torch."""

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megacore.config import SECTIONS, Config, CorpusConfig
from megacore.parallel import limits
from megacore.recipe_yaml import dotted, read_yaml
from megacore.say import brief
from megacore.store.io.strict_json import StoreError, read_file, read_json


class ConfigError(ValueError):
    """Everything that is wrong with a config, at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(limits.cut, problems))
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in the config:", *_numbered(self.problems)]))


def _numbered(problems: Sequence[str]) -> Iterator[str]:
    return (f"{number:3}. {problem}" for number, problem in enumerate(problems, start=1))


Recipe = str | Path | Mapping[str, Any] | Config
"""A file, the name of one that comes along, the sections that would stand in it, or what was read of it."""

# -- reading


def named_json(key: str, path: str) -> Any:
    """Return what is in a JSON file that a key of a recipe names. Raises ConfigError: it cannot be read."""
    try:
        return read_json(Path(path))
    except StoreError as error:
        raise ConfigError([f"{key} ({path}): {error}"]) from None


RECIPES = Path(__file__).parent / "launch" / "recipes"
"""Those that come along."""


def recipes() -> list[str]:
    """Return the names of the recipes that come along."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find(recipe: str | Path) -> Path:
    """Return the file of a recipe: itself, or where there is none, the one of this name that comes along. Raises
    ConfigError: there is neither."""
    if os.path.lexists(recipe):
        return Path(recipe)
    if recipe in recipes():
        return RECIPES / f"{recipe}.yaml"
    raise ConfigError([f"there is no recipe {recipe}: give a file, or one that comes along ({', '.join(recipes())})"])


def load(recipe: Recipe, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, and apply dotted overrides in order.

    Overrides are `optimizer.lr=1e-3` or `data.train[0].weight=2`; their values are YAML. `out` is runs/<name of the
    recipe> by default, where that has a name. Raises ConfigError: all malformed overrides, unknown keys (with the
    nearest spelling) and mistyped values."""
    if isinstance(recipe, Config):
        return changed(recipe, overrides)
    if isinstance(recipe, Mapping):
        return _config(dict(recipe), overrides, Config.out)
    path = find(recipe)
    return _config(_read(path), overrides, f"runs/{path.stem}")


def changed(config: Config, overrides: Sequence[str]) -> Config:
    """Return a config with dotted overrides applied to it. Raises as :func:`load`."""
    return _config(read_yaml(config.to_yaml()), overrides, config.out) if overrides else config


def _config(tree: dict[str, Any], overrides: Sequence[str], out: str) -> Config:
    if isinstance(overrides, str):
        raise ConfigError([f"the overrides are one text, {overrides!r}: give a list of them, [{overrides!r}]"])
    problems = [problem for override in overrides for problem in _override(tree, override)]
    try:
        config = TypeAdapter(Config).validate_python({"out": out, **tree})
    except ValidationError as error:
        raise ConfigError([*problems, *map(_explain, error.errors())]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _read(recipe: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(read_file(recipe, limit=limits.RECIPE).decode())
    except StoreError as error:
        raise ConfigError([str(error)]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{recipe}:{mark.line + 1}:{mark.column + 1}" if mark else str(recipe)
        raise ConfigError([f"{where}: {error.problem}"]) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"cannot read {recipe}: {_first_line(error)}"]) from error
    if not isinstance(tree, dict | None):
        raise ConfigError([f"{recipe}: a recipe is a mapping of sections ({', '.join(SECTIONS)})"])
    return tree or {}


def _override(tree: dict[str, Any], override: str) -> Iterator[str]:
    """Apply one override to the tree in place, and yield what is wrong with it."""
    if not re.match(r"[A-Za-z_]\w*(\.\w+|\[\d+\])*=", override):
        yield f"override {override!r} is not of the form section.key=value"
        return
    key, _, text = override.partition("=")
    parts = re.findall(r"\w+", key)
    try:
        tree |= assigned(tree, parts, read_yaml(text, len(parts) - 1))
    except (yaml.YAMLError, LookupError, ValueError) as error:
        yield f"override {override!r}: {_first_line(error)}"


def assigned(inside: Any, parts: Sequence[str], value: Any) -> Any:
    """Return a tree with a value at a place of it; a mapping goes key by key into one that is there. Raises
    LookupError: a list on the way has no such index; ValueError: a value on the way has no keys."""
    if not parts:
        return _merged(inside, value)
    key, *rest = parts
    if isinstance(inside, list):
        if int(key) >= len(inside):
            raise LookupError(f"{key} is out of range: the list has {len(inside)}")
        return [assigned(each, rest, value) if at == int(key) else each for at, each in enumerate(inside)]
    if not isinstance(inside, dict | None):
        raise ValueError(f"{brief(inside)} has no key {key}")
    inside = inside or {}
    return inside | {key: assigned(inside.get(key), rest, value)}


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# -- what is wrong, in words

EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
}

OTHER_NAMES = {
    "optimizer.name": ("optim", "optimizer_name"),
    "optimizer.lr": ("learning_rate", "max_lr", "lr"),
    "optimizer.betas": ("beta1", "beta2", "adam_beta1", "adam_beta2"),
    "optimizer.clip": ("max_grad_norm", "grad_clip", "clip_grad"),
    "schedule.name": ("lr_scheduler", "lr_scheduler_type"),
    "schedule.warmup_steps": ("warmup",),
    "schedule.min_ratio": ("min_lr",),
    "train.steps": ("max_steps", "num_steps", "train_iters"),
    "train.precision": ("dtype",),
    "batch.global_size": ("batch_size", "global_batch_size", "gradient_accumulation_steps"),
    "batch.micro_size": ("micro_batch_size", "per_device_train_batch_size"),
    "data.sequence_length": ("seq_len", "seq_length", "max_length", "max_seq_length"),
    "mesh.tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "mesh.pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "memory.recompute": ("gradient_checkpointing", "activation_checkpointing"),
    "evaluate.every": ("eval_steps", "eval_interval"),
    "checkpoint.every": ("save_steps", "save_interval"),
    "log.every": ("logging_steps", "log_interval"),
    "model.vocab_size": ("vocab_size",),
    "out": ("output_dir", "out_dir"),
}
"""{a key: what other trainers call it}."""


def _explain(error: ErrorDetails) -> str:
    where = [part for part in error["loc"] if not str(part).startswith("{")]  # the ways to write a value
    kind, value = error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        return f"{dotted(where)}: unknown key; {_nearest(where)}"
    if kind == "missing":
        return f"{dotted(where)}: is missing"
    if kind == "literal_error":
        return f"{dotted(where)}: got {value!r}, choose {error['ctx']['expected']}"
    if kind in EXPECTED:
        keys = f" of {', '.join(_keys(where))}" if kind == "dataclass_type" else ""
        return f"{dotted(where)}: expected {EXPECTED[kind]}{keys}, got {value!r}"
    return f"{dotted(where)}: {error['msg']}, got {value!r}"


def _nearest(where: Sequence[str | int]) -> str:
    """Return the keys that an unknown one may have meant: what other trainers call so, else one that is spelled
    alike beside it, and its name in other sections."""
    *parents, key = where
    beside = _keys(parents)
    elsewhere = [f"{name}.{key}" for name in SECTIONS if key in _keys([name])]
    alike = difflib.get_close_matches(str(key)[:100], beside, n=1, cutoff=0.8 if elsewhere else 0.6)
    named = [ours for ours, theirs in OTHER_NAMES.items() if key in theirs]
    meant = named or [*(dotted([*parents, name]) for name in alike), *elsewhere]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    return f"{dotted(parents) or 'a recipe'} has {', '.join(beside)}"


def _keys(parents: Sequence[str | int]) -> list[str]:
    """Return the names that may stand at a place of a recipe."""
    if not parents:
        section: type = Config
    else:
        section = SECTIONS[str(parents[0])] if len(parents) == 1 else CorpusConfig
    return [each.name for each in fields(section)]


# -- for the launcher


def processes(config: Config, nodes: int, gpus: int) -> int:
    """Return the number of processes to start on each node: what the mesh needs, or with `mesh.dp` free, one for each
    GPU."""
    if config.mesh.dp is None and config.train.device_type(gpus) == "cuda" and gpus:
        return gpus
    return max(1, math.ceil(config.mesh.model_ranks * (config.mesh.dp or 1) / nodes))
