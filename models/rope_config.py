"""Rotary position embeddings as configured: one frozen dataclass per rope type of a Hugging Face config. No torch.

Fields carry their Hugging Face names. ``from_hugging_face`` reads both spellings of a config.json, the new
``"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}`` and the old
``"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}``; ``to_hugging_face`` writes either.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from random import Random
from typing import Any, ClassVar, Literal, TypeGuard, get_args

from parallel.choices import check_choice, nearest

HUGGING_FACE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""The top-level keys of a config.json that ``from_hugging_face`` reads, beside ``max_position_embeddings``."""
Spelling = Literal["rope_parameters", "rope_scaling"]
"""The key of a config.json that holds the type and its numbers: as transformers 5 writes it, or as 4 did."""
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""What the old spelling keeps beside the type and its numbers, not among them."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """What every type has: ``rope_theta``, the base of the geometric series of wavelengths."""

    rope_type: ClassVar[str]
    from_model: ClassVar[tuple[str, ...]] = ()  # fields that a config.json keeps outside of rope_parameters

    rope_theta: float = 10000.0

    def problems(self, head_dim: int) -> list[str]:
        """What is wrong with these values for heads of this size; empty if nothing is."""
        found = [] if head_dim % 2 == 0 else [f"head_dim {head_dim} is odd: rotary embeddings turn pairs of it"]
        found += _outside(self, "rope_theta", above=1)
        return found


@dataclass(frozen=True, kw_only=True)
class DefaultRope(Rope):
    """Su et al. 2021, arXiv 2104.09864."""

    rope_type = "default"


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all frequencies divided by ``factor``."""

    rope_type = "linear"

    factor: float

    def problems(self, head_dim: int) -> list[str]:
        return super().problems(head_dim) + _outside(self, "factor", above=0)


@dataclass(frozen=True, kw_only=True)
class DynamicRope(Rope):
    """NTK-aware scaling of the base by the actual length of a sequence beyond ``max_position_embeddings``."""

    rope_type = "dynamic"
    from_model = ("max_position_embeddings",)

    factor: float
    max_position_embeddings: int

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim) + _outside(self, "factor", above=0)
        found += _outside(self, "max_position_embeddings", above=0)
        return found + (
            [f"head_dim {head_dim} is too small for rope_type 'dynamic': choose 4 or more"] * (head_dim < 4)
        )


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolates the slow dimensions, keeps the fast ones, ramps between.

    ``beta_fast`` and ``beta_slow`` are the turns within the original length at which the ramp starts and ends;
    ``truncate`` rounds it to whole dimensions. ``attention_factor`` scales cos and sin; without it, it follows from
    ``factor``, or from ``mscale`` and ``mscale_all_dim`` where both are given.
    """

    rope_type = "yarn"

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim) + _outside(self, "original_max_position_embeddings", above=0)
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            found += _outside(self, name, above=0)
        if not isinstance(self.truncate, bool):
            found.append(f"truncate is {self.truncate!r}: it must be true or false")
        if not found and self.beta_fast < self.beta_slow:
            found.append(f"beta_fast ({self.beta_fast}) must not be below beta_slow ({self.beta_slow})")
        return found


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a searched divisor per frequency, [head_dim/2] each.

    ``long_factor`` counts for sequences longer than ``original_max_position_embeddings``, ``short_factor`` for the
    others. ``attention_factor`` scales cos and sin; without it, it follows from ``factor``.
    """

    rope_type = "longrope"

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim) + _outside(self, "original_max_position_embeddings", above=1)
        found += _outside(self, "factor", above=0) + _outside(self, "attention_factor", above=0)
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if not isinstance(factors, tuple) or not all(_is_number(number) and number > 0 for number in factors):
                found.append(f"{name} is {factors!r}: it must be a list of numbers above 0")
            elif len(factors) != head_dim // 2:
                found.append(f"{name} has {len(factors)} numbers: head_dim {head_dim} needs {head_dim // 2}")
        return found


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """LLaMA 3.1 (arXiv 2407.21783): divides by ``factor`` only wavelengths beyond the original length.

    Wavelengths above original / ``low_freq_factor`` are divided, those below original / ``high_freq_factor`` kept, and
    those between are blended.
    """

    rope_type = "llama3"

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            found += _outside(self, name, above=0)
        if not found and self.high_freq_factor <= self.low_freq_factor:
            found.append(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor ({self.low_freq_factor})"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ProportionalRope(Rope):
    """Turns the first ``partial_rotary_factor`` of the frequencies and leaves the others at frequency 0."""

    rope_type = "proportional"

    factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim) + _outside(self, "factor", above=0)
        return found + _outside(self, "partial_rotary_factor", above=0, up_to=1)


ROPE_TYPES: dict[str, type[Rope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "llama3": Llama3Rope,
    "proportional": ProportionalRope,
}


def from_hugging_face(config: Mapping[str, Any]) -> Rope:
    """The rope of a config.json, from either spelling; whether its values make sense, ``problems`` says.

    A null is as good as a missing key. ``original_max_position_embeddings``, where a type has it, falls back to
    ``max_position_embeddings``; a ``factor`` of yarn that is null, or of longrope that is not there, is the ratio of
    the two. Raises ValueError with all problems at once: unknown types and fields (with the nearest known spelling),
    missing fields, and two spellings of a thing that disagree.
    """
    given, problems = _flatten(config)
    rope_type = given.pop("rope_type", None) or "default"
    check_choice("rope_type", rope_type, ROPE_TYPES)
    kind = ROPE_TYPES[rope_type]

    length = config.get("max_position_embeddings")
    original = given.get("original_max_position_embeddings") or length
    derived: dict[str, Any] = {"max_position_embeddings": length, "original_max_position_embeddings": original}
    ratio_wanted = rope_type == "longrope" or (rope_type == "yarn" and "factor" in given)
    if ratio_wanted and _is_number(length) and _is_number(original):
        derived["factor"] = length / original
    if given.get("partial_rotary_factor") == 1:
        del given["partial_rotary_factor"]  # whole heads are what every type means without it

    optional = {field.name: field.default is not MISSING for field in fields(kind)}
    stored = [name for name in optional if name not in kind.from_model]
    present = {name: value for name, value in given.items() if value is not None}
    values = {name: value for name, value in (derived | present).items() if name in optional and value is not None}
    problems += [
        f"rope_type {rope_type!r} has no field {name!r}{nearest(name, stored)} (choose from {', '.join(stored)})"
        for name in present
        if name not in stored
    ]
    missing = [name for name in optional if not optional[name] and name not in values]
    problems += [f"rope_type {rope_type!r} needs the field {name!r}, which is missing" for name in missing]
    if problems:
        raise ValueError("rope_parameters: " + "; ".join(problems))
    arguments: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    return kind(**arguments)


def to_hugging_face(rope: Rope, spelling: Spelling = "rope_parameters") -> dict[str, Any]:
    """The part of a config.json that says this rope: ``{"rope_parameters": ...}``, or as transformers 4 wrote it
    ``{"rope_theta": ..., "rope_scaling": ...}``. ``max_position_embeddings`` is the model's to write."""
    check_choice("spelling", spelling, get_args(Spelling))
    values = {field.name: getattr(rope, field.name) for field in fields(rope) if field.name not in rope.from_model}
    stored = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_type": rope.rope_type} | stored}
    theta = stored.pop("rope_theta")
    scaling = None if rope.rope_type == "default" else {"rope_type": rope.rope_type} | stored
    return {"rope_theta": theta, "rope_scaling": scaling}


def draw(rng: Random, head_dim: int, positions: int) -> dict[str, Any]:
    """A config.json's ``rope_parameters`` at random: any type, for heads of this size."""
    rope_type = rng.choice(tuple(ROPE_TYPES))
    original = rng.choice((8, positions))
    own: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 3.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": original, "truncate": rng.random() < 0.5},
        "longrope": {
            "short_factor": [rng.uniform(1, 3) for _ in range(head_dim // 2)],
            "long_factor": [rng.uniform(1, 30) for _ in range(head_dim // 2)],
            "original_max_position_embeddings": original,
            "factor": 2.0,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
        "proportional": {"partial_rotary_factor": 0.5},
    }
    return {"rope_type": rope_type, "rope_theta": rng.choice((10.0, 1e4)), **own.get(rope_type, {})}


def override(base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of which some fields are replaced; what they do not name of its rope stays, in the base's spelling.

    ``rope_parameters`` and ``rope_scaling`` mean the same here: with a rope_type they replace the type and its numbers,
    without one they replace the numbers that they name, and null takes the scaling away. ``rope_theta`` and
    ``partial_rotary_factor`` stay until they are named themselves. What contradicts itself is left as it stands, for
    :func:`from_hugging_face` to tell.
    """
    changed = {**base, **fields}
    (held, wrong), (given, also_wrong) = _flatten(base), _flatten(fields)
    if fields.keys().isdisjoint(HUGGING_FACE_KEYS) or wrong or also_wrong:
        return changed
    beside = [name for name in HUGGING_FACE_KEYS if name in _BESIDE or base.get(name) is not None]
    scalings = [fields[key] for key in get_args(Spelling) if key in fields]
    if "rope_type" in given or (scalings and not any(scalings)):
        held = {name: value for name, value in held.items() if name in beside}
    rope = {name: value for name, value in held.items() if name not in fields} | given
    others = {name: value for name, value in changed.items() if name not in HUGGING_FACE_KEYS}
    if base.get("rope_parameters") or base.keys().isdisjoint(HUGGING_FACE_KEYS):
        return others | {"rope_parameters": rope}
    if rope.get("rope_type") == "default":
        del rope["rope_type"]
    return others | {name: rope.pop(name) for name in beside if name in rope} | {"rope_scaling": rope or None}


def _flatten(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """One dictionary in the new spelling, and what is no mapping or disagrees between the places it may stand in."""
    problems: list[str] = []
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping):
            return {}, [f"{name} is {value!r}: it must be a mapping with a rope_type, or null"]
    if new and old and new != old:
        problems.append(f"rope_parameters {dict(new)} and rope_scaling {dict(old)} disagree: remove one")
    given = dict(new or old)

    elsewhere = {
        name: config.get(name) for name in HUGGING_FACE_KEYS if name not in ("rope_parameters", "rope_scaling")
    }
    elsewhere["rope_type"] = given.pop("type", None)
    for name, value in elsewhere.items():
        if value is None:
            continue
        if given.get(name) is None:
            given[name] = value
        elif given[name] != value:
            problems.append(f"{name} is given twice, as {given[name]!r} and {value!r}: remove one")
    return given, problems


def _outside(rope: Rope, name: str, above: float, up_to: float = math.inf) -> list[str]:
    """The problem of a field that is not a number in (above, up_to]; an optional field may be None."""
    value = getattr(rope, name)
    optional = next(field.default is None for field in fields(rope) if field.name == name)
    if (value is None and optional) or (_is_number(value) and above < value <= up_to):
        return []
    limit = "" if up_to == math.inf else f" and at most {up_to}"
    return [f"{name} is {value!r}: it must be a number above {above}{limit}"]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
