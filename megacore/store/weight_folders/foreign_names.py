"""Names that other trainers give to the tensors of a model, and how they store them: tables, one for each trainer.

Each tensor is a view of what the trainer stores, or all of it: two sentences of named axes say which elements go where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megacore.models.config import ModelConfig
from megacore.parallel.weights.pattern import Pattern, Sizes
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.tensor_files.distributed import Origin


@dataclass(frozen=True)
class TrainerTensor:
    """A tensor of Hugging Face's among those of a trainer.

    Args:
        hf: Hugging Face's name, with ``{layer}``.
        name: The trainer's.
        stored: The sentence that the trainer stores it by; empty where it is stored as Hugging Face has it.
        label: The piece of that sentence which is meant.
        pattern: The sentence that Hugging Face stores it by.
    """

    hf: str
    name: str
    stored: str = ""
    label: str = ""
    pattern: str = ""


@dataclass(frozen=True)
class TrainerNaming:
    """The names of a trainer. ``families``: those of the models that its table is about; ``rows``: the table, of which
    the first row counts whose tensor is there."""

    trainer: str
    families: tuple[str, ...]
    rows: tuple[TrainerTensor, ...]


_HALVES = "(heads two pairs) embed", "(kv two pairs) embed"
_TITAN, _FUSED = "layers.{layer}.", "(kv (q: queries pairs two + k: pairs two + v: head)) embed"
_ATTENTION = "model.layers.{layer}.self_attn."
TORCHTITAN = TrainerNaming(
    "torchtitan",
    ("llama",),
    (
        TrainerTensor("model.embed_tokens.weight", "tok_embeddings.weight"),
        # The two numbers of a pair that turns lie side by side there, and half a head apart here.
        *(
            row
            for attention in (f"{_TITAN}attention.qkv_linear.", f"{_TITAN}attention.")
            for row in (
                TrainerTensor(
                    f"{_ATTENTION}q_proj.weight", f"{attention}wq.weight", "(heads pairs two) embed", "", _HALVES[0]
                ),
                TrainerTensor(
                    f"{_ATTENTION}k_proj.weight", f"{attention}wk.weight", "(kv pairs two) embed", "", _HALVES[1]
                ),
                TrainerTensor(f"{_ATTENTION}v_proj.weight", f"{attention}wv.weight"),
            )
        ),
        # As the optimizer has it, where the model computes the three at once.
        *(
            TrainerTensor(
                f"{_ATTENTION}{label}_proj.weight", f"{_TITAN}attention.qkv_linear.wqkv.weight", _FUSED, label, pattern
            )
            for label, pattern in (
                ("q", "(kv queries two pairs) embed"),
                ("k", "(kv two pairs) embed"),
                ("v", "(kv head) embed"),
            )
        ),
        TrainerTensor(f"{_ATTENTION}o_proj.weight", f"{_TITAN}attention.wo.weight"),
        TrainerTensor("model.layers.{layer}.mlp.gate_proj.weight", f"{_TITAN}feed_forward.w1.weight"),
        TrainerTensor("model.layers.{layer}.mlp.down_proj.weight", f"{_TITAN}feed_forward.w2.weight"),
        TrainerTensor("model.layers.{layer}.mlp.up_proj.weight", f"{_TITAN}feed_forward.w3.weight"),
        TrainerTensor("model.layers.{layer}.input_layernorm.weight", f"{_TITAN}attention_norm.weight"),
        TrainerTensor("model.layers.{layer}.post_attention_layernorm.weight", f"{_TITAN}ffn_norm.weight"),
        TrainerTensor("model.norm.weight", "norm.weight"),
        TrainerTensor("lm_head.weight", "lm_head.weight"),
        TrainerTensor("lm_head.weight", "output.weight"),
    ),
)
NAMINGS = (TORCHTITAN,)


@dataclass(frozen=True)
class Placed:
    """A tensor of Hugging Face's where a trainer has it, and the shapes of both."""

    origin: Origin
    shape: tuple[int, ...]
    stored: tuple[int, ...]


def anchors(config: ModelConfig) -> Iterator[tuple[str, TrainerNaming | None]]:
    """Yield (a tensor of the first layer, the naming that has it) of all namings of a model: None is Hugging Face's."""
    of_layer = next(param for param in config.schema.params if "{layer}" in param.hf)
    template = of_layer.hf_names[0]
    yield template.format(**next(iter(config.schema.indices(of_layer, template)))), None
    for naming in NAMINGS:
        if config.family in naming.families:
            yield next(row.name for row in naming.rows if row.name.endswith("norm.weight")).format(layer=0), naming


def placed(naming: TrainerNaming, config: ModelConfig, names: Collection[str]) -> Mapping[str, Placed]:
    """Return {Hugging Face's name: where it is} of those tensors of a trainer that its table knows."""
    sizes, found = _sizes(config), dict[str, Placed]()
    shapes = {stored.name: stored.shape for stored in hugging_face(config.schema)}
    head, embedding = reversed(config.tied)
    shapes.setdefault(head, shapes[embedding])
    for row in naming.rows:
        for layer in range(config.sizes["layer"]) if "{layer}" in row.hf else (0,):
            hf, name = row.hf.format(layer=layer), row.name.format(layer=layer)
            if name in names and hf not in found and hf in shapes:
                found[hf] = _placed(row, name, shapes[hf], sizes)
    return found


def _placed(row: TrainerTensor, name: str, shape: tuple[int, ...], sizes: Sizes) -> Placed:
    if not row.stored:
        return Placed(Origin(name), shape, shape)
    stored, pattern = Pattern.parse(row.stored), Pattern.parse(row.pattern)
    view = next(piece for piece in stored.pieces(sizes) if piece.label == row.label)
    return Placed(Origin(name, view, pattern.piece_axes("")), shape, stored.shape(sizes))


def _sizes(config: ModelConfig) -> Sizes:
    """Return the sizes of the axes that the tables name, of a model whose heads all turn whole."""
    sizes = config.sizes
    return {**sizes, "queries": sizes["heads"] // sizes["kv"], "two": 2, "pairs": sizes["head"] // 2}
