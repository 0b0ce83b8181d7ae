"""Seed-OSS (ByteDance Seed 2025): LLaMA with biases of queries, keys and values, and dropout of what branches add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    family: ClassVar[str] = "seed_oss"
    architecture: ClassVar[str] = "SeedOssForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "head_dim": 128}
    told: ClassVar[Mapping[str, str]] = {"branch_dropout": "residual_dropout"}

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 1
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1

    def mixer(self, t: Table) -> Rows:
        return t.attention(bias=self.attention_bias, out_bias=self.attention_out_bias)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "seed_oss-tiny": tiny(head_dim=16),
    "seed-oss-36b": shape(5120, 27648, 64, 80)
    | {"vocab_size": 155136, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
    | rope(1e7),
}
