"""Seed-OSS (ByteDance Seed 2025): LLaMA with biases of queries, keys and values, and dropout of what branches add."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    family = "seed_oss"
    architecture = "SeedOssForCausalLM"
    harmless = frozenset({"pretraining_tp"})
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    told = {"branch_dropout": "residual_dropout"}

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 1
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1

    def mixer(self, t: Table) -> Rows:
        return t.attention(bias=self.attention_bias, out_bias=self.attention_out_bias)


PRESETS = {
    "seed_oss-tiny": tiny(head_dim=16),
    "seed-oss-36b": shape(5120, 27648, 64, 80)
    | {"vocab_size": 155136, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
    | rope(1e7),
}
