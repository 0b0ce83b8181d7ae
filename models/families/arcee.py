"""Arcee's AFM (Arcee AI 2025): LLaMA whose feed-forward networks are relu squared, without gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig, shape
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(DecoderConfig):
    family: ClassVar[str] = "arcee"
    architecture: ClassVar[str] = "ArceeForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.plain_mlp("up_proj", "down_proj", bias=self.mlp_bias),
            tied=self.tie_word_embeddings,
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "arcee-tiny": shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512},
}

PARAMETERS: Mapping[str, int] = {}
