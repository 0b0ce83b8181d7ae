"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): which linears have them, and their sentences. No torch.

A linear's weight W: [out, in] stays as it is, and scale B A is added to it, with A: [rank, in] and B: [out, rank]. Both
are declared by sentences that are derived from W's, so that they are split, initialised, summed, saved and resharded as
everything else is. What Hugging Face keeps as a linear of its own (q, k and v of LLaMA) has an A and a B of its own:

    attn.qkv.weight   (q: heads head + k: kv head + v: kv head) embed
    attn.qkv.lora_a   (q: rank + k: rank + v: rank) embed
    attn.qkv.lora_b   (q: heads head + k: kv head + v: kv head) rank

Experts have an A and a B each, of all that transformers holds as one stacked parameter. The peft library flattens them
by expert and rank, and B the other way round:

    mlp.experts.down.weight   experts embed expert_mlp
    mlp.experts.down.lora_a   experts rank expert_mlp    (experts rank) expert_mlp
    mlp.experts.down.lora_b   experts embed rank         embed (rank experts)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.models import scores
from megacore.models.names import in_block, matches, unmatched, without_block
from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.weights.pattern import FusedGroup, Node, Pattern, outermost
from megacore.parallel.weights.schema import WORDS, Param, Schema
from megacore.parallel.weights.transfer import Stored

RANK = "rank"
"""The axis between A and B."""
A, B = "lora_a", "lora_b"
WEIGHT = ".weight"

# Axes of what is no linear to transformers, and that of the gate of a shared expert, which has no adapters.
_EXPERTS, _ONE = frozenset({"experts", "routes"}), "one"
# As the peft library names them.
_PREFIX, _PEFT = "base_model.model.", {A: ".lora_A.weight", B: ".lora_B.weight"}
_NESTED = ".base_layer"
# Families whose linears of these names it (0.21) takes for those of experts, which transformers 4 listed one by one.
MISTAKEN_IN = frozenset(
    {
        "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "qwen3_moe",
        "qwen3_next", "solar_open",
    }
)  # fmt: skip
UNKNOWN_TO_PEFT = frozenset({"bailing_hybrid", "deepseek_v4", "hy_v3", "kimi_linear", "laguna", "lfm3", "nemotron_h"})
"""Families some of whose modules have other names in memory than in their files, where the peft library finds none."""
_MISTAKEN = frozenset({"gate_proj", "up_proj", "down_proj"})
_PASSED_BY = frozenset({"classifier", "dt_proj"})
REFUSED_BY_PEFT = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2"), "out_proj")
"""{a family: the name of a linear of its state spaces that the peft library refuses to adapt}."""


@dataclass(frozen=True)
class Lora:
    """Adapters of a model.

    Args:
        rank: That of each adapter.
        alpha: The adapters' product is scaled by alpha / rank.
        targets: Patterns of the linears that have adapters: our names (``attn.qkv``, ``attn.qkv.q``, ``mlp.*``) or
            Hugging Face's (``q_proj``).
        dropout: Probability of dropping an element of an adapter's input in training.
        rslora: Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv 2312.03732).
        base_dtype: The format that the model's own linears and experts are held in, with adapters or not (QLoRA,
            Dettmers et al. 2023, arXiv 2305.14314); None: that of the run.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    rslora: bool = False
    base_dtype: BaseDtype | None = None

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class LinearTarget:
    """One linear of a block as Hugging Face keeps it: a weight, or some pieces of one, or those of all experts.

    Args:
        param: The weight.
        labels: The pieces.
        hf: Hugging Face's name of the module, with its layer in braces; of the parameter, where it is no linear there.
        alone: Whether it is all of the weight.
    """

    param: Param
    labels: tuple[str, ...]
    hf: str
    alone: bool

    @property
    def is_parameter(self) -> bool:
        """Whether transformers holds it as a parameter of a module that is no linear: of a router, of experts."""
        return not _EXPERTS.isdisjoint(self.param.sentence.axes)

    @property
    def name(self) -> str:
        """Ours, within a block: ``attn.out``, ``attn.qkv.q``."""
        linear = in_block(self.param.name).removesuffix(WEIGHT)
        return linear if self.alone else f"{linear}.{outermost(self.labels[0])}"

    @property
    def hf_name(self) -> str:
        """Hugging Face's, within a block: ``self_attn.q_proj``."""
        return in_block(self.hf)

    @property
    def transposed(self) -> bool:
        """Whether Hugging Face stores it as [in, out] (GPT-2's Conv1D)."""
        return Pattern.parse(self.param.hf_pattern or self.param.pattern).dims[-2] != _hf_dims(self.param)[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which it can be chosen."""
        return *without_block(self.name), self.hf_name, self.hf_name.rpartition(".")[2]


def linears(schema: Schema) -> Iterator[LinearTarget]:
    """Yield all that can have adapters: the linears of the blocks, routers and experts."""
    for param in schema.params:
        if "layer" not in param.named_axes or not param.name.endswith(WEIGHT) or not param.decays:
            continue
        if param.hf and "{layer}" not in param.hf:  # a part of what Hugging Face keeps for all layers together
            continue
        if not _EXPERTS.isdisjoint(param.sentence.axes):
            yield LinearTarget(param, param.sentence.labels, param.hf_held or param.hf, True)
        elif _ONE not in param.sentence.axes:
            modules: dict[str, list[str]] = {}
            for label, (template, _) in param.hf_tensors.items():
                modules.setdefault(template.removesuffix(WEIGHT), []).append(label)
            for name, labels in modules.items():
                yield LinearTarget(param, tuple(labels), name, len(modules) == 1)


def quantised(schema: Schema, lora: Lora) -> dict[str, BaseDtype]:
    """Return {weight: the format that it is held in} of the linears and experts; routers choose by small differences,
    and are small."""
    if lora.base_dtype is None:
        return {}
    return {each.param.name: lora.base_dtype for each in linears(schema) if "routes" not in each.param.sentence.axes}


def targets(schema: Schema, patterns: Sequence[str]) -> list[LinearTarget]:
    """Return the linears that one of the patterns matches."""
    return [linear for linear in linears(schema) if any(matches(each, linear.names) for each in patterns)]


def peft_problems(family: str, chosen: Sequence[LinearTarget], whole: str | None) -> Iterator[str]:
    """Yield why the peft library would load adapters of a family wrongly, or find no place for them; ``whole``: the
    larger model of which the adapted one is a part."""
    if mistaken := mistaken_by_peft(family, chosen):
        yield f"peft takes those of {', '.join(mistaken)} for those of {family}'s experts"
    transposed = {linear.transposed: linear.hf_name for linear in chosen if not linear.is_parameter}
    if len(transposed) > 1:
        yield f"peft has one fan_in_fan_out for all adapters, and {' and '.join(sorted(transposed.values()))} differ"
    refused = REFUSED_BY_PEFT.get(family)
    names = {linear.hf_name.removesuffix(".weight").rpartition(".")[2] for linear in chosen}
    for past in sorted(_PASSED_BY & names):
        yield f"transformers' {family} multiplies by the weight of {past} itself, past its adapters"
    if refused in names:
        yield f"peft refuses adapters of {refused} of {family}"
    if family in UNKNOWN_TO_PEFT:
        yield f"modules of {family} have other names in memory than in its files, and peft would not find them"
    if shared := sorted({linear.hf_name for linear in chosen if linear.param.also}):
        yield f"several layers of {family} share {', '.join(shared)}, and peft adapts those of each layer by themselves"
    if whole is not None:
        inside = "and peft would find no linear of these names in it"
        yield f"{whole} is a larger model of which {family} is a part, {inside}"


def mistaken_by_peft(family: str, chosen: Iterable[LinearTarget]) -> list[str]:
    """Hugging Face's names of linears, of dense layers and shared experts, whose adapters the peft library would put at
    the experts of a family."""
    names = {linear.hf_name for linear in chosen if not linear.is_parameter} if family in MISTAKEN_IN else ()
    return sorted(name for name in names if name.rpartition(".")[2] in _MISTAKEN)


def problems(schema: Schema, lora: Lora) -> list[str]:
    """Return what is wrong with ``lora.targets``, and with ``lora.dropout`` for them."""
    patterns = lora.targets
    if not patterns:
        names = ", ".join(linear.name for linear in linears(schema))
        return [f"lora.targets names no linear: choose from {names}"]
    found = unmatched("lora.targets", patterns, [linear.names for linear in linears(schema)])
    whole = [linear.name for linear in targets(schema, patterns) if linear.is_parameter]
    if lora.dropout and whole:
        found.append(
            f"lora.dropout is {lora.dropout}, and adapters of {', '.join(whole)} have none: set it to 0, or name "
            "others in lora.targets"
        )
    return found


def adapters(schema: Schema, lora: Lora) -> Schema:
    """Return the adapters of a model by themselves."""
    chosen: dict[str, list[LinearTarget]] = {}
    for linear in targets(schema, lora.targets):
        chosen.setdefault(linear.param.name, []).append(linear)
    parameters = [linear for found in chosen.values() for linear in found if linear.is_parameter]
    pairs = (pair for found in chosen.values() for pair in _pair(schema, found, parameters))
    return Schema(tuple(pairs), {**schema.sizes, RANK: lora.rank})


def in_full(schema: Schema) -> frozenset[str]:
    """Return the weights of a model that are trained in full beside its adapters: a head of scores, which mostly begins
    as random numbers. The peft library saves such weights by ``modules_to_save``."""
    return frozenset({scores.WEIGHT}) & schema.by_name.keys()


def trained(schema: Schema, lora: Lora) -> Schema:
    """Return the adapters of a model and what is trained beside them, under the peft library's names."""
    found = adapters(schema, lora)
    beside = (replace(param, hf=_PREFIX + param.hf) for param in schema.params if param.name in in_full(schema))
    return Schema((*found.params, *beside), found.sizes)


def adapted(schema: Schema, lora: Lora) -> Schema:
    """Return a model with its adapters."""
    found = adapters(schema, lora)
    return Schema((*schema.params, *found.params), found.sizes)


def _pair(schema: Schema, chosen: Sequence[LinearTarget], parameters: Sequence[LinearTarget]) -> tuple[Param, Param]:
    """Return A and B of one weight, of which some linears have adapters.

    Args:
        chosen: Those linears.
        parameters: All of the model that are parameters to transformers, and have adapters.
    """
    param = chosen[0].param
    *stacked, out, inner = param.sentence.dims
    hf_out, hf_inner = _hf_dims(param)
    if chosen[0].alone:
        first, words = RANK, ""
    else:
        labels = [outermost(linear.labels[0]) for linear in chosen]
        first = f"({' + '.join(f'{label}: {RANK}' for label in labels)})"
        out, hf_out = (_terms(param, dim, labels) for dim in (out, hf_out))
        words = ",".join(_word(param, label) for label in labels)
    # As nn.Linear draws its weight (He et al. 2015 with a = sqrt 5): uniform between -1 and 1 over sqrt(in).
    std = 1 / math.sqrt(3 * Pattern((inner,)).shape(schema.sizes)[0])
    name, each = param.name.removesuffix(WEIGHT), "".join(f"{_text(dim)} " for dim in stacked)
    module = param.hf
    if chosen[0].is_parameter:
        module = _wrapper(chosen[0], parameters)
    elif words:  # a single one needs no braces
        module = WORDS.sub(f"{{{words}}}" if "," in words else words, param.hf)
    hf = _PREFIX + module.removesuffix(WEIGHT)
    hf_first, hf_last = (f"({each}{first})", f"({RANK} {each.strip()})") if stacked else (first, RANK)
    of_a, of_b, rows, columns = A, B, hf_out, hf_inner
    if param.hf_turned:  # there the product is that of the transposed weight
        of_a, of_b, rows, columns = B, A, hf_inner, hf_out
    theirs = {A: f"{hf_first} {_text(columns)}", B: f"{_text(rows)} {hf_last}"}
    a = Param(f"{name}.{A}", f"{each}{first} {_text(inner)}", hf + _PEFT[of_a], theirs[of_a], std=std, uniform=True)
    b = Param(f"{name}.{B}", f"{each}{_text(out)} {RANK}", hf + _PEFT[of_b], theirs[of_b])
    return replace(a, layers=param.layers, also=param.also), replace(b, layers=param.layers, also=param.also)


def _wrapper(linear: LinearTarget, parameters: Sequence[LinearTarget]) -> str:
    """Return the name of what the peft library puts around the module of a parameter: several of one module are nested,
    the last one outermost."""
    module = linear.hf.rpartition(".")[0]
    of_module = [other.hf for other in parameters if other.hf.rpartition(".")[0] == module]
    return module + _NESTED * (len(of_module) - 1 - of_module.index(linear.hf))


def factors(adapters: Schema, stored: Stored) -> tuple[Stored, ...]:
    """Return the two parts of adapters whose product has the shape of a tensor of Hugging Face, B and A or, where that
    has its inputs first, A and B transposed; of experts that are stacked, one product for each. None where it has no
    adapter.
    """
    name = stored.param.removesuffix(WEIGHT)
    if f"{name}.{A}" not in adapters.by_name:
        return ()
    a, b = adapters[f"{name}.{A}"], adapters[f"{name}.{B}"]
    of_a = a.sentence.labels if a.sentence.labels == ("",) else (outermost(stored.labels[0]),)
    if of_a[0] not in a.sentence.labels:
        return ()
    *stacked, rows, columns = stored.pattern.dims
    left, right = (b, stored.labels), (a, of_a)
    if not Pattern((rows,)).axes <= Pattern(b.sentence.dims[-2:-1]).axes:
        left, right = right, left
    patterns = Pattern((*stacked, rows, RANK)), Pattern((*stacked, RANK, columns))
    box = {**stored.box, RANK: (0, adapters.sizes[RANK])}
    named = stored.box.keys() - stored.pattern.axes
    return tuple(
        Stored(place, stored.name, param.name, labels, pattern, {axis: box[axis] for axis in {*pattern.axes, *named}})
        for place, (param, labels), pattern in zip(("left", "right"), (left, right), patterns, strict=True)
    )


def _hf_dims(param: Param) -> tuple[Node, Node]:
    """Return the outputs and inputs of a weight as Hugging Face stores them, whichever it puts first."""
    stored = Pattern.parse(param.hf_pattern or param.pattern)
    axes = Pattern(param.sentence.dims[-2:-1]).axes
    one, other = stored.dims[-2:]
    return (one, other) if Pattern((one,)).axes == axes else (other, one)


def _text(dim: Node) -> str:
    return str(Pattern((dim,)))


def _terms(param: Param, out: Node, labels: Sequence[str]) -> FusedGroup:
    """Return the pieces of a fused group that have these labels."""
    if not isinstance(out, FusedGroup) or tuple(term.label for term in out.terms) != param.sentence.outer_labels:
        raise ValueError(f"{param.name}: {param.pattern!r} is not fused in its first dimension alone")
    return replace(out, terms=tuple(term for term in out.terms if term.label in labels))


def _word(param: Param, label: str) -> str:
    found = WORDS.search(param.hf)
    assert found  # Hugging Face keeps the pieces apart
    return found.group(1).split(",")[param.sentence.outer_labels.index(label)]
