"""Rotary position embeddings as configured: one frozen dataclass per rope type of a Hugging Face config. No torch.

Fields carry their Hugging Face names. ``from_hugging_face`` reads both spellings of a config.json, the new
``"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, ...}`` and the old
``"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}``; ``to_hugging_face`` writes either.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeGuard, get_args

from megacore.parallel.enum_errors import check_choice, nearest

Spelling = Literal["rope_parameters", "rope_scaling"]
"""The key of a config.json that holds the type and its numbers: as transformers 5 writes it, or as 4 did."""
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""The old spelling keeps these beside the type and its numbers, not among them."""
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Every type has ``rope_theta``, the base of the geometric series of wavelengths, and
    ``partial_rotary_factor``, the part of a head that turns."""

    rope_type: ClassVar[str]
    from_model: ClassVar[tuple[str, ...]] = ()  # fields that a config.json keeps outside of rope_parameters

    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0

    def part(self, head_dim: int) -> int:
        """Return the dimensions that the factor asks for, over which the wavelengths are spread; their number may be
        odd."""
        return int(head_dim * self.partial_rotary_factor)

    def turning(self, head_dim: int) -> int:
        """Return how many dimensions of a head turn, the first ones; the others pass. They turn in pairs, so of an odd
        part one more does."""
        part = self.part(head_dim)
        return part + part % 2

    def problems(self, head_dim: int) -> list[str]:
        """Return what is wrong with these values for heads of this size; empty if nothing is."""
        found = _outside(self, "partial_rotary_factor", above=0, up_to=1) + _outside(self, "rope_theta", above=1)
        part = head_dim if found else self.part(head_dim)
        if part == head_dim and head_dim % 2:
            found.append(f"head_dim {head_dim} is odd: rotary embeddings turn pairs of it")
        elif head_dim and not part:
            found.append(self._of_pairs(head_dim))
        return found

    def odd_part(self, head_dim: int) -> list[str]:
        """Return the problem of a part that is odd, where something takes pairs alone."""
        return [self._of_pairs(head_dim)] if self.part(head_dim) % 2 else []

    def _of_pairs(self, head_dim: int) -> str:
        part = self.part(head_dim)
        return (
            f"partial_rotary_factor {self.partial_rotary_factor} turns {part} of the head_dim {head_dim}: "
            f"choose {(part // 2 + 1) * 2 / head_dim} to turn pairs"
        )


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
        if not found and self.turning(head_dim) < 4:
            turning = f"{self.turning(head_dim)} turning dimensions of head_dim {head_dim}"
            found.append(f"{turning} are too few for rope_type 'dynamic': choose 4 or more")
        return found


@dataclass(frozen=True, kw_only=True)
class AlphaRope(Rope):
    """NTK-aware scaling of the base by a number, ``alpha``, which Hunyuan's files say as "dynamic". Its other numbers
    are of the files, and of no meaning."""

    rope_type = "dynamic"

    alpha: float
    factor: float
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim) + _outside(self, "alpha", above=0)
        if not found and self.turning(head_dim) < 4:
            found.append(f"head_dim {head_dim} is too small for alpha: choose 4 or more")
        return found


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
        # Its ramp has an end for each pair: transformers has one less than frequencies where the part is odd.
        return found or self.odd_part(head_dim)


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a searched divisor per frequency, [turning/2] each.

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
        turning = None if found else self.turning(head_dim)
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if not isinstance(factors, tuple) or not all(_is_number(number) and number > 0 for number in factors):
                found.append(f"{name} is {factors!r}: it must be a list of numbers above 0")
            elif turning and len(factors) != turning // 2:
                dimensions = f"{turning} turning dimensions of head_dim {head_dim}"
                found.append(f"{name} has {len(factors)} numbers: {dimensions} need {turning // 2}")
        return found


@dataclass(frozen=True, kw_only=True)
class ScaledLongRope(LongRope):
    """LongRoPE whose files say what scales cos and sin, of sequences that are longer and of others (Phi-3.5-MoE)."""

    short_mscale: float
    long_mscale: float

    def problems(self, head_dim: int) -> list[str]:
        found = super().problems(head_dim) + _outside(self, "short_mscale", above=0)
        return found + _outside(self, "long_mscale", above=0)


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
        if not found and self.high_freq_factor < self.low_freq_factor:  # Llama 4's are equal: nothing is blended
            found.append(
                f"high_freq_factor ({self.high_freq_factor}) must not be below low_freq_factor ({self.low_freq_factor})"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ProportionalRope(Rope):
    """Turns the first ``partial_rotary_factor`` of the frequencies and leaves the others at frequency 0."""

    rope_type = "proportional"

    factor: float = 1.0

    def part(self, head_dim: int) -> int:
        """Return all dimensions: those beyond the factor turn with frequency 0."""
        return head_dim

    def problems(self, head_dim: int) -> list[str]:
        return super().problems(head_dim) + _outside(self, "factor", above=0)


ROPE_TYPES: dict[str, type[Rope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "llama3": Llama3Rope,
    "proportional": ProportionalRope,
}
_FIELDS = {"rope_type", "type"}.union(*({field.name for field in fields(kind)} for kind in ROPE_TYPES.values()))


@dataclass(frozen=True, kw_only=True)
class Convention:
    """The way a family's config.json says a rope, and what it means by saying nothing: the defaults of its class.

    Args:
        rope_theta: The base of a file that has none.
        partial_rotary_factor: The factor of a file that has none. None for a family of which whole heads turn: then a
            part is an error, but for the type proportional.
        original_max_position_embeddings: The length of a file that has none, of a family that keeps it at the top
            level (Phi-3). None for one that falls back to ``max_position_embeddings``.
        parameters: The ``rope_parameters`` where the file has none (gpt-oss).
        theta_key: The top-level key of ``rope_theta`` ("rotary_emb_base" of GPT-NeoX).
        partial_key: That of ``partial_rotary_factor`` ("rotary_pct" of GPT-NeoX).
        scaled: Whether the old ``rope_scaling`` is about this rope (not about the local one of Gemma-3).
        pairs: Whether the family's class takes a part of a head as it stands, which then must be even; the others take
            one dimension more where it is odd.
        rope_types: Types by other names, {"su": "longrope"} (Phi-3).
        own_types: Types that mean something else in this family (Hunyuan).
        ignored: Numbers that mean nothing where there are tokens of text alone (sections of a rope of images).
    """

    rope_theta: float = 10000.0
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"
    scaled: bool = True
    pairs: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict)
    own_types: Mapping[str, type[Rope]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    @property
    def beside(self) -> dict[str, str]:
        """{what may stand beside the type and its numbers: its top-level key}."""
        return {"rope_theta": self.theta_key, "partial_rotary_factor": self.partial_key, _ORIGINAL: _ORIGINAL}

    @property
    def keys(self) -> frozenset[str]:
        """The top-level keys of a config.json that are read, beside ``max_position_embeddings``."""
        return frozenset({"rope_parameters", *self.beside.values(), *(["rope_scaling"] if self.scaled else [])})

    def stored(self, kind: type[Rope]) -> list[str]:
        """Return the fields of a type that ``rope_parameters`` may have in this family."""
        whole = self.partial_rotary_factor is None and kind is not ProportionalRope
        others = {*kind.from_model, *(["partial_rotary_factor"] if whole else [])}
        return [each.name for each in fields(kind) if each.name not in others]


PLAIN = Convention()
Kinds = Mapping[str, Convention]
"""{kind of layer: how its rope is said}, of families whose ``rope_parameters`` are nested by kind."""


def from_hugging_face(config: Mapping[str, Any], convention: Convention = PLAIN) -> Rope:
    """Return the rope of a config.json, from either spelling; whether its values make sense, ``problems`` says.

    A null is as good as a missing key. ``original_max_position_embeddings``, where a type has it, falls back to
    ``max_position_embeddings``; a ``factor`` of yarn that is null, or of longrope that is not there, is the ratio of
    the two. Raises ValueError with all problems at once: unknown types and fields (with the nearest known spelling),
    missing fields, and two spellings of a thing that disagree.
    """
    given, problems = _said(config, convention)
    rope_type = given.pop("rope_type", None) or "default"
    if isinstance(rope_type, str):
        rope_type = convention.rope_types.get(rope_type, rope_type)
    check_choice("rope_type", rope_type, ROPE_TYPES)
    kind = convention.own_types.get(rope_type, ROPE_TYPES[rope_type])
    stored = convention.stored(kind)

    length = config.get("max_position_embeddings")
    original = given.get(_ORIGINAL) or convention.original_max_position_embeddings or length
    derived: dict[str, Any] = {"max_position_embeddings": length, _ORIGINAL: original}
    derived |= {name: getattr(convention, name) for name in _BESIDE}
    ratio_wanted = rope_type == "longrope" or (rope_type == "yarn" and "factor" in given)
    if ratio_wanted and _is_number(length) and _is_number(original) and original > 0:
        derived["factor"] = length / original
    if "partial_rotary_factor" not in stored and given.get("partial_rotary_factor") == 1:
        del given["partial_rotary_factor"]  # whole heads are what every type means without it
    nested = config.get("rope_parameters") or config.get("rope_scaling")
    if _ORIGINAL not in stored and not (isinstance(nested, Mapping) and _ORIGINAL in nested):
        given.pop(_ORIGINAL, None)  # at the top level it is of the model, whatever its rope

    optional = {field.name: field.default is not MISSING for field in fields(kind)}
    present = {name: value for name, value in given.items() if value is not None and name not in convention.ignored}
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


def to_hugging_face(
    rope: Rope, spelling: Spelling = "rope_parameters", convention: Convention = PLAIN
) -> dict[str, Any]:
    """Return the part of a config.json that says this rope: ``{"rope_parameters": ...}``, or as transformers 4 wrote it
    ``{"rope_theta": ..., "rope_scaling": ...}``. ``max_position_embeddings`` is the model's to write."""
    check_choice("spelling", spelling, get_args(Spelling))
    values = {name: getattr(rope, name) for name in convention.stored(type(rope))}
    stored = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}
    if isinstance(rope, ProportionalRope) and rope.factor == 1:
        del stored["factor"]  # of which files say nothing
    top: dict[str, Any] = {}
    if convention.original_max_position_embeddings is not None and _ORIGINAL in stored:
        top = {_ORIGINAL: stored[_ORIGINAL]}  # there transformers would take the class's default for it
    if convention.partial_rotary_factor == rope.partial_rotary_factor == 1:
        stored.pop("partial_rotary_factor")  # as their class says whole heads
    if spelling == "rope_parameters":
        return top | {"rope_parameters": {"rope_type": rope.rope_type} | stored}
    beside = _BESIDE[:1] if isinstance(rope, ProportionalRope) else _BESIDE
    top |= {convention.beside[name]: stored.pop(name) for name in beside if name in stored}
    return top | {"rope_scaling": None if rope.rope_type == "default" else {"rope_type": rope.rope_type} | stored}


def by_kind(config: Mapping[str, Any], kinds: Kinds) -> dict[str, Rope]:
    """Return the rope of each kind of layer: from ``rope_parameters`` that are nested by kind, as transformers 5 writes
    them, or from what stood at the top level before (Gemma-3: ``rope_theta`` and ``rope_scaling`` of the global layers,
    ``rope_local_base_freq`` of the local ones), or from flat ones (:func:`is_flat`), which say no more than these. As
    :func:`from_hugging_face` for each; raises all problems together."""
    config = _without_flat(config, kinds)
    problems = _not_nested(config, kinds)
    found = {}
    for kind, convention in kinds.items() if not problems else ():
        try:
            found[kind] = from_hugging_face(_of_kind(config, kind, convention), convention)
        except ValueError as error:
            problems.append(f"{kind}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return found


def is_flat(config: Mapping[str, Any], kinds: Kinds) -> bool:
    """Return whether the ``rope_parameters`` of a config.json are one type and its numbers and not nested by kind, in a
    family whose kinds have one base: so transformers 5.0 wrote OLMo-3."""
    nested = config.get("rope_parameters")
    return _flat_names(config, kinds) != set() and isinstance(nested, Mapping) and nested.keys().isdisjoint(kinds)


def by_kind_to_hugging_face(
    ropes: Mapping[str, Rope], kinds: Kinds, spelling: Spelling = "rope_parameters"
) -> dict[str, Any]:
    """Return the inverse of :func:`by_kind`. Raises ValueError where the old spelling has no place for a rope."""
    each = {kind: to_hugging_face(ropes[kind], spelling, convention) for kind, convention in kinds.items()}
    if spelling == "rope_parameters":
        return {"rope_parameters": {kind: said["rope_parameters"] for kind, said in each.items()}}
    top: dict[str, Any] = {}
    for kind, said in each.items():
        if not kinds[kind].scaled and (scaling := said.pop("rope_scaling")):
            raise ValueError(f"rope_scaling cannot say the {scaling['rope_type']!r} of {kind}: write rope_parameters")
        if twice := [key for key in said if key in top and top[key] != said[key]]:
            raise ValueError(f"{kind} has another {', '.join(twice)} than the other layers: write rope_parameters")
        top |= said
    return top


def partial_rotary_factor(turning: int, head_dim: int) -> float:
    """Return the factor with which so many dimensions of a head turn, for families that say their number
    (``rotary_dim``)."""
    factor = turning / head_dim
    return factor if int(head_dim * factor) == turning else math.nextafter(factor, math.inf)


def override(base: Mapping[str, Any], fields: Mapping[str, Any], convention: Convention = PLAIN) -> dict[str, Any]:
    """Return a config.json of which some fields are replaced; what they do not name of its rope stays, in the base's
    spelling.

    ``rope_parameters`` and ``rope_scaling`` mean the same here: with a rope_type they replace the type and its numbers,
    without one they replace the numbers that they name, and null takes the scaling away. ``rope_theta`` and
    ``partial_rotary_factor`` stay until they are named themselves. An original length that neither names is the base's
    ``max_position_embeddings``, whatever they make of those. What contradicts itself is left as it stands, for
    :func:`from_hugging_face` to tell.
    """
    changed = {**base, **fields}
    (held, wrong), (given, also_wrong) = _said(base, convention), _flatten(fields, convention)
    if wrong or also_wrong:
        return changed
    beside = {name: key for name, key in convention.beside.items() if name in _BESIDE or base.get(key) is not None}
    scalings = [fields[key] for key in get_args(Spelling) if key in fields]
    if "rope_type" in given or (scalings and not any(scalings)):
        # A part that the class's own type says goes with it.
        gone = convention.parameters.keys() & {"partial_rotary_factor"}
        held = {name: value for name, value in held.items() if name in beside and name not in gone}
    named = {name for name, key in convention.beside.items() if key in fields}
    rope = {name: value for name, value in held.items() if name not in named} | given
    rope.setdefault("rope_type", "default")
    if _LENGTH in fields and base.get(_LENGTH) is not None and _falls_back(rope, convention):
        rope[_ORIGINAL] = base[_LENGTH]
    elif fields.keys().isdisjoint(convention.keys):
        return changed
    others = {name: value for name, value in changed.items() if name not in convention.keys}
    new = base.get("rope_parameters") or base.keys().isdisjoint(convention.keys)
    others |= {key: rope.pop(name) for name, key in beside.items() if name in rope and (name == _ORIGINAL or not new)}
    if new:
        return others | {"rope_parameters": rope}
    if rope["rope_type"] == "default" and not convention.parameters:
        del rope["rope_type"]
    return others | {"rope_scaling": rope or None}


def override_by_kind(base: Mapping[str, Any], fields: Mapping[str, Any], kinds: Kinds) -> dict[str, Any]:
    """Override as :func:`override` does the rope of each kind of layer that is named; the result is nested by kind."""
    keys = frozenset[str]().union(*(convention.keys for convention in kinds.values()))
    base, fields = _without_flat(base, kinds), _without_flat(fields, kinds)
    changed = {**base, **fields}
    if _not_nested(base, kinds) or _not_nested(fields, kinds):
        return changed
    nested, touched = {}, not fields.keys().isdisjoint(keys)
    for kind, convention in kinds.items():
        before, given = _of_kind(base, kind, convention), _of_kind(fields, kind, convention)
        made = override(before, given, convention)
        touched |= made != before | given
        nested[kind], wrong = _flatten(made, convention)
        if wrong:
            return changed
    if not touched:
        return changed
    return {name: value for name, value in changed.items() if name not in keys} | {"rope_parameters": nested}


def _flat_names(config: Mapping[str, Any], kinds: Kinds) -> set[str]:
    """Return the fields of a rope that stand where the kinds of layers should."""
    nested = config.get("rope_parameters")
    one_base = len({convention.theta_key for convention in kinds.values()}) == 1
    return {*nested} & _FIELDS if one_base and isinstance(nested, Mapping) else set()


def _without_flat(config: Mapping[str, Any], kinds: Kinds) -> Mapping[str, Any]:
    """Return a config.json in one of the other spellings, where ``rope_parameters`` are flat.

    Beside nested ones the flat ones say nothing: transformers 5.23 writes both after it has read flat ones, and
    computes by the nested ones.
    """
    flat = _flat_names(config, kinds)
    if not flat:
        return config
    given = config["rope_parameters"]
    others = {name: value for name, value in config.items() if name != "rope_parameters"}
    if not is_flat(config, kinds):
        return others | {"rope_parameters": {name: value for name, value in given.items() if name not in flat}}
    scaling = {name: value for name, value in given.items() if name != "rope_theta"}
    if scaling.get("rope_type", "default") == "default" and scaling.keys() <= {"rope_type"}:
        scaling = {}
    base = {"rope_theta": given["rope_theta"]} if given.get("rope_theta") is not None else {}
    return others | base | {"rope_scaling": scaling or None}


def _not_nested(config: Mapping[str, Any], kinds: Kinds) -> list[str]:
    """Return what is wrong with ``rope_parameters`` that should be nested by kind of layer."""
    nested = config.get("rope_parameters") or {}
    choices = f"choose from {', '.join(kinds)}"
    if not isinstance(nested, Mapping):
        return [f"rope_parameters is {nested!r}: it must be a mapping by kind of layer ({choices}), or null"]
    return [
        f"rope_parameters has no kind of layer {name!r}{nearest(name, kinds)} ({choices})"
        for name in nested
        if name not in kinds
    ]


def _of_kind(config: Mapping[str, Any], kind: str, convention: Convention) -> dict[str, Any]:
    """Return what a config.json says of the rope of one kind of layer, as if there were no other."""
    keys = convention.keys | {"max_position_embeddings"}
    nested = config.get("rope_parameters") or {kind: None}
    said = {name: value for name, value in config.items() if name in keys and name != "rope_parameters"}
    return said | ({"rope_parameters": nested[kind]} if "rope_parameters" in config and kind in nested else {})


def _said(config: Mapping[str, Any], convention: Convention) -> tuple[dict[str, Any], list[str]]:
    """Flatten as :func:`_flatten` does, with the family's type and numbers where the file has none."""
    given, problems = _flatten(config, convention)
    bare = not any(config.get(key) for key in get_args(Spelling))
    return ({**convention.parameters, **given} if bare else given), problems


def _falls_back(rope: Mapping[str, Any], convention: Convention) -> bool:
    """Return whether a rope, in the new spelling, is of a type with an original length that nothing says."""
    rope_type = convention.rope_types.get(str(rope["rope_type"]), str(rope["rope_type"]))
    said = rope.get(_ORIGINAL) is not None or convention.original_max_position_embeddings is not None
    return not said and _ORIGINAL in (each.name for each in fields(ROPE_TYPES.get(rope_type, DefaultRope)))


def _flatten(config: Mapping[str, Any], convention: Convention) -> tuple[dict[str, Any], list[str]]:
    """Return one dictionary in the new spelling, and what is no mapping or disagrees between its two places."""
    problems: list[str] = []
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping):
            return {}, [f"{name} is {value!r}: it must be a mapping with a rope_type, or null"]
    if new and old and new != old:
        problems.append(f"rope_parameters {dict(new)} and rope_scaling {dict(old)} disagree: remove one")
    given = dict(new or old)

    elsewhere = {name: (key, config.get(key)) for name, key in convention.beside.items()}
    elsewhere["rope_type"] = ("rope_type", given.pop("type", None))
    for name, (key, value) in elsewhere.items():
        if value is None:
            continue
        if given.get(name) is None:
            given[name] = value
        elif given[name] != value:
            problems.append(f"{key} is given twice, as {given[name]!r} and {value!r}: remove one")
    return given, problems


def _outside(rope: Rope, name: str, above: float, up_to: float = math.inf) -> list[str]:
    """Return the problem of a field that is not a number in (above, up_to]; an optional field may be None."""
    value = getattr(rope, name)
    optional = next(field.default is None for field in fields(rope) if field.name == name)
    if (value is None and optional) or (_is_number(value) and above < value <= up_to):
        return []
    limit = "" if up_to == math.inf else f" and at most {up_to}"
    return [f"{name} is {value!r}: it must be a number above {above}{limit}"]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
