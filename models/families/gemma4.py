"""Gemma 4, its text models (Google 2026): Gemma 3 with heads of other sizes in the layers that see all, whose keys may be
their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.config import above_zero
from megacore.models.families.gemma import TANH, GemmaConfig
from megacore.models.layer_types import PatternedConfig
from megacore.models.local_rope import LocalHeadsConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention, Kinds
from megacore.models.weight_rows import OUT_NORMS, QKV, Rows, Table, around
from megacore.parallel import limits
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig, LocalHeadsConfig, PatternedConfig):
    family: ClassVar[str] = "gemma4_text"
    architecture: ClassVar[str] = "Gemma4ForCausalLM"
    of_text: ClassVar[bool] = True
    # Of layers that share keys and values, and of inputs of each layer.
    harmless: ClassVar[frozenset[str]] = frozenset({"use_double_wide_mlp", "vocab_size_per_layer_input"})
    fixed: ClassVar[Mapping[str, Any]] = {
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
    saved: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    axes: ClassVar[Mapping[str, str]] = {
        **GemmaConfig.axes,
        "head": "global_head_dim",
        "kv": "global_kv",
        "local_heads": "num_attention_heads",
        "local_head": "head_dim",
        "local_kv": "num_key_value_heads",
    }
    rope_kinds: ClassVar[Kinds] = {
        FULL: Convention(parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}),
        SLIDING: Convention(),
    }
    interval: ClassVar[str | None] = None
    pattern: ClassVar[int] = 6
    constants: ClassVar[Mapping[str, Any]] = {
        "norm_offset": 0.0,
        "attention_scale": 1.0,
        "plain_norms": frozenset({"attn.v_norm"}),
    }
    told: ClassVar[Mapping[str, str]] = {"logit_softcap": "final_logit_softcapping"}
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "hidden_act": (TANH, "relu"),
        "global_head_dim": (4, 8),
        "num_global_key_value_heads": (None, 1),
        "final_logit_softcapping": (None, 3.0),
        "use_bidirectional_attention": (None, "vision"),
    }
    parts: ClassVar[Mapping[str, str]] = around("input_layernorm", "pre_feedforward_layernorm", **OUT_NORMS)

    sliding_window: int | None = 512
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None
    # Tokens of images may look at those behind them, of which text has none.
    use_bidirectional_attention: str | None = None

    @property
    def global_kv(self) -> int:
        """Heads of keys in the layers that see all."""
        own = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return self.num_key_value_heads if own is None else own

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "one": 1}

    def attention(self, t: Table, kind: str) -> Rows:
        alone, bias = self.attention_k_eq_v and kind == FULL, self.attention_bias
        how = {"here": "(q: heads head + k: kv head)", "hf": "self_attn.{q,k}_proj"} if alone else {"here": QKV}
        return t.attention(bias=bias, out_bias=bias, **how) + t.norms_of_heads()

    def params(self) -> tuple[Param, ...]:
        factor = Param("layers.{layer}.factor", "one", f"{self.layer}.layer_scalar", mean=1.0, buffer=True)
        return *super().params(), factor

    def problems(self) -> list[str]:
        found = super().problems() + above_zero(self, "final_logit_softcapping")
        if self.use_bidirectional_attention not in (None, "vision"):
            seen = self.use_bidirectional_attention
            found.append(f"use_bidirectional_attention is {seen!r}: only null and 'vision' leave text as it is")
        if self.kinds and self.kinds[-1] != FULL:
            found.append(f"layer_types ends with {self.kinds[-1]}: {self.architecture} takes {FULL} in any case")
        return found

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        kinds = drawn["layer_types"] and [*drawn["layer_types"][:-1], FULL]
        return drawn | {"layer_types": kinds, "hidden_size_per_layer_input": 0}

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        layers = values.get("num_hidden_layers")
        if values.get("layer_types") is None and isinstance(layers, int) and layers <= limits.LAYERS:
            ends = (layer % cls.pattern and layer < layers for layer in range(1, layers + 1))
            values["layer_types"] = tuple(SLIDING if end else FULL for end in ends)
        if (said := config.get("per_layer_config")) is None:
            return values, problems
        # What transformers makes of the sizes of layers that see all, and saves in their place.
        kinds = values.get("layer_types")
        full = [str(layer) for layer, kind in enumerate(kinds if isinstance(kinds, tuple) else ()) if kind == FULL]
        each = {str(layer).lstrip("0") or "0": own for layer, own in said.items()} if isinstance(said, Mapping) else {}
        own = each.get(full[0], {}) if full else {}
        known = {"head_dim"} | ({"num_key_value_heads"} if values.get("attention_k_eq_v") else set())
        if not isinstance(own, Mapping) or {*own} - known or each != (dict.fromkeys(full, own) if own else {}):
            problems.append(
                f"per_layer_config is {said!r}: only the layers of {FULL} may have another {' and '.join(sorted(known))}"
            )
            return values, problems
        values["global_head_dim"] = own.get("head_dim", values.get("head_dim"))
        values["num_global_key_value_heads"] = own.get("num_key_value_heads")
        return values, problems

    @classmethod
    def _unsupported(cls, config: Mapping[str, Any]) -> list[str]:
        found, field = super()._unsupported(config), "hidden_size_per_layer_input"
        return found if field in config else [*found, f"field {field!r} is missing, which stands for 256: only 0 is supported"]

    @classmethod
    def _consumed(cls) -> set[str]:
        return super()._consumed() | {"per_layer_config"}


_31B = {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text-tiny": tiny(layers=6, head_dim=16, global_head_dim=32, sliding_window=128, attention_k_eq_v=True)
    | {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "gemma-4-31b": shape(5376, 21504, 60, 32)
    | _31B
    | {"max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0},
}
