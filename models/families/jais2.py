"""Jais 2 (Inception, MBZUAI 2025): LLaMA with LayerNorm, biases, and a feed-forward network of squared relus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Jais2Config(DecoderConfig):
    family: ClassVar[str] = "jais2"
    architecture: ClassVar[str] = "Jais2ForCausalLM"
    eps: ClassVar[str] = "layer_norm_eps"

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    mlp_bias: bool = True

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(norm="layer")

    def params(self) -> tuple[Param, ...]:
        t = self.table(norm_bias=True)
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.plain_mlp("up_proj", "down_proj", bias=self.mlp_bias),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        # The class takes no other: a multiple of the heads.
        given = {"hidden_size": drawn["num_attention_heads"] * rng.choice((3, 5))} if "head_dim" in drawn else {}
        return drawn | given


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "jais2-tiny": shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512},
}

PARAMETERS: Mapping[str, int] = {}
