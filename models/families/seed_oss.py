"""Seed-OSS (ByteDance Seed 2025): LLaMA with biases of queries, keys and values, and dropout of what branches add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import probabilities
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    family: ClassVar[str] = "seed_oss"
    architecture: ClassVar[str] = "SeedOssForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "head_dim": 128}

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 1
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(branch_dropout=self.residual_dropout)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_out_bias),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(bias=self.mlp_bias),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"attention_dropout": 0.0, "residual_dropout": 0.0}

    def problems(self) -> list[str]:
        return super().problems() + probabilities(self, "residual_dropout")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "seed_oss-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    "seed-oss-36b": shape(5120, 27648, 64, 80)
    | {"vocab_size": 155136, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
}

PARAMETERS: Mapping[str, int] = {
    "seed-oss-36b": 36_151_104_512,
}
