"""Names that other trainers give to the tensors of a model, and how they store them: tables, one for each trainer.

A row says which of our parameters a trainer's tensor holds, or which pieces of one, and by which sentence. So it is
good for all families, and each tensor of Hugging Face's is made of views.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from megacore.models.config import ModelConfig
from megacore.parallel.weights.pattern import Pattern, Sizes
from megacore.parallel.weights.transfer import Stored, hugging_face
from megacore.store.tensor_files.distributed import Origin


@dataclass(frozen=True)
class TrainerTensor:
    """A tensor of a trainer's. ``param``: the name of our parameter that it holds, or holds pieces of; ``name``: the
    trainer's. Where the axes in its braces do not stand in a name, they are the first of the tensor; ``stored``: the
    sentence that the trainer stores it by, its pieces labelled as ours; empty: Hugging Face's."""

    param: str
    name: str
    stored: str = ""


@dataclass(frozen=True)
class TrainerNaming:
    """The names of a trainer. ``families``: those of the models that its table is about; ``anchor``: a name that any
    model has there; ``rows``: the table, of which the first row counts whose tensor is there; ``finer``: {axis: those
    that it is made of in the sentences of the table}."""

    trainer: str
    families: tuple[str, ...]
    anchor: str
    rows: tuple[TrainerTensor, ...]
    finer: Mapping[str, str] = field(default_factory=dict)


_L = "layers.{layer}."
_TITAN_ATTENTION = f"{_L}attention.qkv_linear.", f"{_L}attention."
TORCHTITAN = TrainerNaming(
    "torchtitan",
    ("llama",),
    "layers.0.attention_norm.weight",
    (
        TrainerTensor("embed.weight", "tok_embeddings.weight"),
        # The two numbers of a pair that turns lie side by side there, and half a head apart here.
        *(
            TrainerTensor(f"{_L}attn.qkv.weight", f"{attention}w{label}.weight", sentence)
            for attention in _TITAN_ATTENTION
            for label, sentence in (
                ("q", "(q: kv queries pairs two) embed"),
                ("k", "(k: kv pairs two) embed"),
                ("v", "(v: kv two pairs) embed"),
            )
        ),
        # As the optimizer has it, where the model computes the three at once.
        TrainerTensor(
            f"{_L}attn.qkv.weight",
            f"{_TITAN_ATTENTION[0]}wqkv.weight",
            "(kv (q: queries pairs two + k: pairs two + v: two pairs)) embed",
        ),
        TrainerTensor(f"{_L}attn.out.weight", f"{_L}attention.wo.weight"),
        TrainerTensor(f"{_L}mlp.up.weight", f"{_L}feed_forward.w1.weight", "(gate: mlp) embed"),
        TrainerTensor(f"{_L}mlp.up.weight", f"{_L}feed_forward.w3.weight", "(up: mlp) embed"),
        TrainerTensor(f"{_L}mlp.down.weight", f"{_L}feed_forward.w2.weight"),
        TrainerTensor(f"{_L}attn_norm.weight", f"{_L}attention_norm.weight"),
        TrainerTensor(f"{_L}mlp_norm.weight", f"{_L}ffn_norm.weight"),
        TrainerTensor("norm.weight", "norm.weight"),
        TrainerTensor("head.weight", "lm_head.weight"),
        TrainerTensor("head.weight", "output.weight"),
    ),
    {"heads": "kv queries", "head": "two pairs"},
)

_D = f"decoder.{_L}"
_EXPERT = f"{_D}mlp.experts.experts.{{experts}}."
MEGATRON = TrainerNaming(
    "Megatron-Core",
    ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    "embedding.word_embeddings.weight",
    (
        TrainerTensor("embed.weight", "embedding.word_embeddings.weight", "vocab embed"),
        TrainerTensor("positions.weight", "embedding.position_embeddings.weight"),
        # A group of queries with the key and the value that they share, group by group.
        *(
            TrainerTensor(
                f"{_L}attn.qkv.{kind}",
                f"{_D}self_attention.linear_qkv.{kind}",
                f"(kv (q: queries head + k: head + v: head)){columns}",
            )
            for kind, columns in (("weight", " embed"), ("bias", ""))
        ),
        TrainerTensor(f"{_L}attn.out.weight", f"{_D}self_attention.linear_proj.weight", "embed (kv queries head)"),
        TrainerTensor(f"{_L}attn.out.bias", f"{_D}self_attention.linear_proj.bias"),
        TrainerTensor(f"{_L}attn.q_norm.weight", f"{_D}self_attention.q_layernorm.weight"),
        TrainerTensor(f"{_L}attn.k_norm.weight", f"{_D}self_attention.k_layernorm.weight"),
        # Gate and up are one tensor, or (`singleton_local_shards`) two; without a gate there is one.
        TrainerTensor(f"{_L}mlp.up.weight", f"{_D}mlp.linear_fc1.weight", "(gate: mlp + up: mlp) embed"),
        TrainerTensor(f"{_L}mlp.up.weight", f"{_D}mlp.linear_fc1.weight_w", "(gate: mlp) embed"),
        TrainerTensor(f"{_L}mlp.up.weight", f"{_D}mlp.linear_fc1.weight_v", "(up: mlp) embed"),
        TrainerTensor(f"{_L}mlp.up.weight", f"{_D}mlp.linear_fc1.weight", "mlp embed"),
        TrainerTensor(f"{_L}mlp.up.bias", f"{_D}mlp.linear_fc1.bias"),
        TrainerTensor(f"{_L}mlp.down.weight", f"{_D}mlp.linear_fc2.weight", "embed mlp"),
        TrainerTensor(f"{_L}mlp.down.bias", f"{_D}mlp.linear_fc2.bias"),
        TrainerTensor(f"{_L}mlp.router.weight", f"{_D}mlp.router.weight"),
        TrainerTensor(
            f"{_L}mlp.experts.up.weight", f"{_EXPERT}linear_fc1.weight", "(gate: expert_mlp + up: expert_mlp) embed"
        ),
        TrainerTensor(f"{_L}mlp.experts.up.weight", f"{_EXPERT}linear_fc1.weight_w", "(gate: expert_mlp) embed"),
        TrainerTensor(f"{_L}mlp.experts.up.weight", f"{_EXPERT}linear_fc1.weight_v", "(up: expert_mlp) embed"),
        TrainerTensor(f"{_L}mlp.experts.down.weight", f"{_EXPERT}linear_fc2.weight"),
        # A norm is the first part of the linear map behind it, or stands by itself.
        *(
            TrainerTensor(f"{_L}{ours}.{kind}", f"{_D}{theirs}{kind}")
            for ours, names in (
                ("attn_norm", ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")),
                ("mlp_norm", ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")),
            )
            for theirs in names
            for kind in ("weight", "bias")
        ),
        TrainerTensor("norm.weight", "decoder.final_layernorm.weight"),
        TrainerTensor("norm.bias", "decoder.final_layernorm.bias"),
        TrainerTensor("head.weight", "output_layer.weight", "vocab embed"),
    ),
    {"heads": "kv queries"},
)
NAMINGS = TORCHTITAN, MEGATRON


@dataclass(frozen=True)
class Placed:
    """A tensor of Hugging Face's where a trainer has it, and the shapes of both."""

    origin: Origin
    shape: tuple[int, ...]
    stored: tuple[int, ...]


def anchors(config: ModelConfig) -> Iterator[tuple[str, TrainerNaming | None]]:
    """Yield (a tensor of the first layer, or that any model has; the naming that has it) of all namings of a model:
    None is Hugging Face's."""
    of_layer = next(param for param in config.schema.params if "{layer}" in param.hf)
    template = of_layer.hf_names[0]
    yield template.format(**next(iter(config.schema.indices(of_layer, template)))), None
    for naming in NAMINGS:
        if config.family in naming.families:
            yield naming.anchor, naming


def placed(naming: TrainerNaming, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Placed]:
    """Return {Hugging Face's name: where it is} of those tensors of a trainer, {name: shape}, that its table knows."""
    sizes, found, rows = _sizes(config), dict[str, Placed](), dict[str, list[TrainerTensor]]()
    for row in naming.rows:
        rows.setdefault(row.param, []).append(row)
    for tensor in _of_hugging_face(config):
        for row in rows.get(tensor.param, ()):
            place = _placed(row, tensor, naming, sizes, shapes)
            if place is not None:
                found[tensor.name] = place
                break
    return found


def _of_hugging_face(config: ModelConfig) -> Iterator[Stored]:
    embedding, head = config.tied
    for tensor in hugging_face(config.schema):
        yield tensor
        if config.tie_word_embeddings and tensor.name == embedding:
            yield replace(tensor, name=head, param="head.weight")  # which a trainer may have all the same


def _placed(
    row: TrainerTensor, tensor: Stored, naming: TrainerNaming, sizes: Sizes, shapes: Mapping[str, tuple[int, ...]]
) -> Placed | None:
    """Return where a tensor is, if it is what a row is about and that is there."""
    pattern = str(tensor.pattern)
    for axis, parts in naming.finer.items():
        pattern = re.sub(rf"\b{axis}\b(?!:)", parts, pattern)
    stored = Pattern.parse(row.stored or pattern)
    labels = stored.labels if row.stored else tensor.labels
    index = {axis: start for axis, (start, _) in tensor.box.items() if axis not in tensor.pattern.axes}
    there = _there(row.name, index, shapes)
    if there is None or not set(labels) >= set(tensor.labels):
        return None
    name, stacked = there
    held = dict(sizes)
    if row.stored.startswith("vocab "):  # which is filled up there to what can be split
        held["vocab"] = max([sizes["vocab"], *shapes[name][:1]])
    pieces = dict(zip(labels, stored.pieces(held), strict=True))
    views = tuple(
        (pieces[label].box({axis: (0, sizes[axis]) for axis in pieces[label].axes}), filled)
        for label, filled in zip(tensor.labels, Pattern.parse(pattern).pieces(sizes), strict=True)
    )
    origin = Origin(name, tuple(index[axis] for axis in stacked), views)
    return Placed(origin, tensor.shape, (*(sizes[axis] for axis in stacked), *stored.shape(held)))


def _there(template: str, index: Mapping[str, int], names: Collection[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return (the name that is there of a row's, the axes that do not stand in it); None where none is."""
    named = [axis for axis in index if f".{{{axis}}}" in template]
    for stacked in itertools.chain.from_iterable(itertools.combinations(named, n) for n in range(len(named) + 1)):
        name = template
        for axis in stacked:
            name = name.replace(f".{{{axis}}}", "")
        if (name := name.format(**index)) in names:
            return name, stacked
    return None


def _sizes(config: ModelConfig) -> Sizes:
    """Return the sizes of the axes that the tables name, of a model whose heads all turn whole."""
    sizes = {"kv": config.sizes["heads"], **config.sizes}
    return {**sizes, "queries": sizes["heads"] // sizes["kv"], "two": 2, "pairs": sizes["head"] // 2}
