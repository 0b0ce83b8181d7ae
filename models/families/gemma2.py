"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): Gemma with norms around each branch, softcaps, and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import shape
from megacore.models.families.gemma import TANH, GemmaConfig
from megacore.models.layer_types import WindowedConfig
from megacore.models.weight_rows import Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig, WindowedConfig):
    family: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"cache_implementation", "sliding_window_size"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4, "head_dim": 256}
    derived: ClassVar[frozenset[str]] = frozenset({"hidden_act"})

    hidden_act: str = field()
    hidden_activation: str = TANH
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    @property
    def anatomy(self) -> Anatomy:
        return replace(
            super().anatomy,
            attention_scale=self.query_pre_attn_scalar**-0.5,
            attention_softcap=self.attn_logit_softcapping,
            logit_softcap=self.final_logit_softcapping,
        )

    def norms_of_heads(self, t: Table) -> Rows:
        """Return the norms of queries and keys."""
        return ()

    def norms_of_outputs(self, t: Table) -> tuple[Rows, Rows]:
        """Return the norms of what attention and the feed-forward network give."""
        return t.norm("attn_out_norm", "post_attention_layernorm"), t.norm("mlp_out_norm", "post_feedforward_layernorm")

    def params(self) -> tuple[Param, ...]:
        t = self.table(norm_mean=0.0)
        of_attention, of_mlp = self.norms_of_outputs(t)
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            self.norms_of_heads(t),
            of_attention,
            t.norm("mlp_norm", "pre_feedforward_layernorm"),
            t.gated_mlp(),
            of_mlp,
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        drawn |= {"hidden_activation": rng.choice((TANH, "relu")), "query_pre_attn_scalar": rng.choice((2, 7))}
        caps = {name: rng.choice((None, 3.0)) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        return {name: value for name, value in (drawn | caps).items() if name not in {*cls.fixed, *cls.derived}}

    def problems(self) -> list[str]:
        found = ["query_pre_attn_scalar must be above 0"] if self.query_pre_attn_scalar <= 0 else []
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                found.append(f"{name} is {cap}: it must be above 0, or null")
        return super().problems() + found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        values["hidden_act"] = values.get("hidden_activation", TANH)
        return super()._derive(values)


_GEMMA2 = {"vocab_size": 256000, "max_position_embeddings": 8192}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gemma2-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    | {"max_position_embeddings": 512, "sliding_window": 128},
    "gemma-2-2b": _GEMMA2 | shape(2304, 9216, 26, 8),
    "gemma-2-9b": _GEMMA2 | shape(3584, 14336, 42, 16) | {"num_key_value_heads": 8},
    "gemma-2-27b": _GEMMA2
    | shape(4608, 36864, 46, 32)
    | {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144},
}

PARAMETERS: Mapping[str, int] = {
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
}
