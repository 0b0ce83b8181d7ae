"""The config of families that spell their fields as LLaMA does: rotary positions, heads that may share keys and values.

A family adds its own fields, its weights table and its anatomy. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from megacore.models import rope_config
from megacore.models.anatomy import ACTIVATIONS, ROPE, Anatomy, LayerAttention
from megacore.models.config import ModelConfig, positive, probabilities
from megacore.models.rope_config import PLAIN, Convention, DefaultRope, Rope
from megacore.models.weight_rows import Pairs, Rows, Table, around
from megacore.parallel import limits
from megacore.parallel.enum_errors import nearest
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Fields carry their Hugging Face names."""

    base_model_prefix: ClassVar[str] = "model"
    tied: ClassVar[tuple[str, str]] = ("model.embed_tokens.weight", "lm_head.weight")
    # Rotary frequencies, which are computed.
    ignored: ClassVar[tuple[str, ...]] = (
        "model.layers.{layer}.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )
    axes: ClassVar[Mapping[str, str]] = {
        "layer": "num_hidden_layers",
        "vocab": "vocab_size",
        "embed": "hidden_size",
        "heads": "num_attention_heads",
        "kv": "num_key_value_heads",
        "head": "head_dim",
        "mlp": "intermediate_size",
    }
    # Fields that transformers' class does not have, for they follow from others: not written, and right or refused.
    derived: ClassVar[frozenset[str]] = frozenset()
    # What transformers' class takes where a field is left out; a null there means what it means to the class.
    defaults: ClassVar[Mapping[str, Any]] = {}
    # The field that holds what norms add.
    eps: ClassVar[str] = "rms_norm_eps"
    # The names of the activation functions that there are.
    activations: ClassVar[Collection[str]] = tuple(ACTIVATIONS)
    # How its config.json says a rope.
    rope_convention: ClassVar[Convention] = PLAIN
    # The parts of a block in transformers' order, norms with their names there; and the norm behind all blocks.
    parts: ClassVar[Mapping[str, str]] = around("input_layernorm", "post_attention_layernorm")
    last_norm: ClassVar[str] = "model.norm"
    # The beginning of Hugging Face's names of a block.
    layer: ClassVar[str] = "model.layers.{layer}"
    # Whether norms have biases; whether heads turn in pairs of neighbours on disk; whether the last linear of attention
    # has a bias where the others have.
    norm_bias: ClassVar[bool] = False
    in_pairs: ClassVar[bool] = False
    out_bias: ClassVar[bool] = True
    # Whether linears that end branches are drawn smaller, so that the sum of the branches keeps its size (GPT-2).
    small_ends: ClassVar[bool] = False
    # Hugging Face's names of attention and its sentences, as `Table.attention` takes them; and what `norms_of_heads`
    # does, where heads have norms.
    attention_rows: ClassVar[Mapping[str, Any]] = {}
    head_norms: ClassVar[Mapping[str, Any] | None] = None
    # Hugging Face's names of the linears of a network, where they are not LLaMA's; whether it is gated.
    network_rows: ClassVar[tuple[str, ...]] = ()
    gated_network: ClassVar[bool] = True
    # The values of fields that transformers' class has whatever a file says; and how many times `hidden_size`
    # `intermediate_size` is, where that is so in any case. Both are among `derived`.
    taken: ClassVar[Mapping[str, Any]] = {}
    mlp_ratio: ClassVar[int] = 0
    # Of a class and its bases together: what its anatomy has in any case, and {what it has: the field that says it}.
    constants: ClassVar[Mapping[str, Any]] = {}
    told: ClassVar[Mapping[str, str]] = {}

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str = "silu"
    # The token whose embedding gets no gradient from being looked up (padding_idx of transformers' nn.Embedding).
    pad_token_id: int | None = None
    attention_dropout: float = 0.0
    rope_parameters: Rope = field(default_factory=DefaultRope)

    def __post_init__(self) -> None:
        """Fill in what a null stands for."""

    def fill_in(self, name: str, of: Callable[[int], object]) -> None:
        """Fill in a field that says something of each layer, where it is null, unless there are too many layers."""
        if getattr(self, name) is None and self.num_hidden_layers <= limits.LAYERS:
            object.__setattr__(self, name, tuple(of(layer) for layer in range(self.num_hidden_layers)))

    @classmethod
    def _of_bases(cls, table: str) -> dict[str, Any]:
        """Return what the tables of this name say, of the class and its bases; the class wins."""
        return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).get(table, {}).items()}

    @classmethod
    def _dropouts(cls) -> list[str]:
        """Return the fields that are probabilities of dropping something."""
        return [each.name for each in fields(cls) if each.name.endswith(("dropout", "pdrop"))]

    @property
    def attention_bias(self) -> bool:
        """Whether attention has biases; a field, where the family has one."""
        return False

    @property
    def mlp_bias(self) -> bool:
        """Whether feed-forward networks have biases; a field, where the family has one."""
        return False

    @property
    def head_bias(self) -> bool:
        """Whether the head has a bias; a field, where the family has one of this name."""
        return False

    @property
    def pairs(self) -> Pairs | None:
        """The pairs of numbers that turn together in heads of queries and keys, where neighbours do on disk."""
        return Pairs(self.head_dim, self.rope_parameters.turning(self.head_dim)) if self.in_pairs else None

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "one": 1, **(self.pairs.sizes if self.pairs else {})}

    @property
    def max_positions(self) -> int | None:
        return self.max_position_embeddings

    def table(self, **own: Any) -> Table:
        """Return the rows of the weights table, with every weight drawn alike, as transformers does it."""
        std = self.initializer_range
        drawn = {"std": std, "out_std": std / math.sqrt(2 * self.num_hidden_layers) if self.small_ends else std}
        mean = 1.0 - self._of_bases("constants").get("norm_offset", 0.0)
        return Table(**({"layer": self.layer, "norm_bias": self.norm_bias, "norm_mean": mean} | drawn | own))

    def mixer(self, t: Table) -> Rows:
        """Return the rows of what mixes tokens: attention, as LLaMA's."""
        bias = self.attention_bias
        plain = {"bias": bias, "out_bias": bias and self.out_bias, "pairs": self.pairs}
        attention = t.attention(**{**plain, **self.attention_rows})
        return attention if self.head_norms is None else attention + t.norms_of_heads(**self.head_norms)

    def network(self, t: Table) -> Rows:
        """Return the rows of what each token goes through by itself: a feed-forward network."""
        return (t.gated_mlp if self.gated_network else t.plain_mlp)(*self.network_rows, bias=self.mlp_bias)

    @property
    def ends(self) -> Mapping[str, Any]:
        """How the ends of the model are named, and whether its head has a bias."""
        embed, head = (name.removesuffix(".weight") for name in self.tied)
        names = {"embed": embed, "head": head, "norm": self.last_norm}
        return {**names, "tied": self.tie_word_embeddings, "head_bias": self.head_bias}

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        made = {"mixer": self.mixer(t), "network": self.network(t)}
        return t.model(
            *(made[part] if part in made else t.norm(part, hf) for part, hf in self.parts.items()), **self.ends
        )

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of()

    def anatomy_of(self, **own: Any) -> Anatomy:
        """Return what the fields above say, and the family's own."""
        plain = (LayerAttention(),) * self.num_hidden_layers
        common: dict[str, Any] = {
            "layers": plain,
            "norm_eps": getattr(self, self.eps),
            "ropes": {ROPE: self.rope_parameters},
            "activation": self.hidden_act,
            "attention_dropout": self.attention_dropout,
            "padding_idx": self.pad_token_id,
        }
        told = {name: getattr(self, field) for name, field in self._of_bases("told").items()}
        return Anatomy(**(common | self._of_bases("constants") | told | own))

    def problems(self) -> list[str]:
        found = positive(self, *dict.fromkeys(self.axes.values()), "max_position_embeddings")
        found += probabilities(self, *self._dropouts())
        if self.num_hidden_layers > limits.LAYERS:  # what each of them is, some families list
            found.append(f"num_hidden_layers is {self.num_hidden_layers}: it may be up to {limits.LAYERS}")
        if self.hidden_act not in self.activations:
            near = nearest(self.hidden_act, self.activations)
            found.append(f"hidden_act {self.hidden_act!r} is not one of {', '.join(self.activations)}{near}")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            found.append(
                f"pad_token_id is {self.pad_token_id}: it must be below vocab_size ({self.vocab_size}), or null"
            )
        if not found and self.num_attention_heads % self.num_key_value_heads:
            heads, kv = self.num_attention_heads, self.num_key_value_heads
            # Bounded, for the numbers may come from a hostile file.
            near_kv = next(n for n in range(min(kv, heads, 1024), 0, -1) if heads % n == 0)
            found.append(
                f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv}): "
                f"choose {near_kv}, or {heads}"
            )
        return found + (self.rope_problems() if self.head_dim > 0 else [])

    def rope_problems(self) -> list[str]:
        """Return what is wrong with the rotary embeddings."""
        found = self.rope_parameters.problems(self.head_dim)
        return found or (self.rope_parameters.odd_part(self.head_dim) if self.rope_convention.pairs else [])

    @classmethod
    def override(cls, base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Do as the base class; of the rope, what the fields do not name stays
        (:func:`models.rope_config.override`)."""
        # Where a field is named, by whatever name, none of its names stays.
        spellings = cls._spellings()
        named = cls._respelled(fields).keys() & {*spellings.values()}
        kept = {name: value for name, value in base.items() if spellings.get(name, name) not in named}
        return rope_config.override(kept, fields, cls.rope_convention)

    @classmethod
    def _respelled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with one name for each field."""
        spellings = cls._spellings()
        return {spellings.get(name, name): value for name, value in config.items()}

    @classmethod
    def _spellings(cls) -> dict[str, str]:
        return {**cls.spellings, **{other: name for name, other in cls.saved.items()}}

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read({**cls.defaults, **cls._respelled(config)})
        for other, name in cls._spellings().items():
            if {name, other} <= config.keys() and config[name] != config[other]:
                problems.append(f"{name} is {config[name]!r}, and {other} is {config[other]!r}: they are one field")
        values |= cls.taken
        problems += cls._derive(values)
        follow = cls.derived | cls.taken.keys() | ({"intermediate_size"} if cls.mlp_ratio else set())
        for name in sorted(follow & config.keys()):
            if config[name] is not None and config[name] != values.get(name):
                problems.append(f"{name} is {config[name]!r}: {cls.architecture} takes {values.get(name)!r}")
        values.pop("rope_parameters", None)
        try:
            values |= cls._read_ropes(config)
        except ValueError as error:
            problems.append(str(error))
        return values, problems

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        """Fill in the sizes that follow from others; what keeps them from it."""
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        if cls.mlp_ratio and isinstance(hidden, int):
            values["intermediate_size"] = cls.mlp_ratio * hidden
        if not isinstance(heads, int):
            return []
        if heads < 1:
            return [f"num_attention_heads is {heads}: it must be at least 1"]
        if values.get("num_key_value_heads") is None or "num_key_value_heads" in cls.derived:
            values["num_key_value_heads"] = heads
        if (values.get("head_dim") is None or "head_dim" in cls.derived) and isinstance(hidden, int):
            values["head_dim"], rest = divmod(hidden, heads)
            if rest:
                way = "choose others" if "head_dim" in cls.derived else "give head_dim"
                return [f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}): {way}"]
        return []

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that hold ropes. Raises ValueError with all that is wrong with them."""
        return {"rope_parameters": rope_config.from_hugging_face(config, cls.rope_convention)}

    @classmethod
    def readable(cls) -> set[str]:
        return {*super().readable(), *cls.rope_convention.keys, *cls._spellings()}

    def _write(self) -> dict[str, Any]:
        unwritten = {"rope_parameters", *self.derived}
        written = super()._write().items()
        plain = {self.saved.get(name, name): value for name, value in written if name not in unwritten}
        return plain | rope_config.to_hugging_face(self.rope_parameters, convention=self.rope_convention)
