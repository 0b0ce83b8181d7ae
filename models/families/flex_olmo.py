"""FlexOlmo (Shi et al. 2025, arXiv 2507.07024): OLMo 2 with experts that were trained apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megacore.models.decoder_config import shape
from megacore.models.experts_config import MoEConfig
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import HEADS, KV_HEADS
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class FlexOlmoConfig(MoEConfig):
    family: ClassVar[str] = "flex_olmo"
    architecture: ClassVar[str] = "FlexOlmoForCausalLM"
    spellings: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    axes: ClassVar[Mapping[str, str]] = {**MoEConfig.axes, "experts": "num_experts", "routes": "num_experts"}
    rope_convention: ClassVar[Convention] = Convention(rope_theta=500000.0)

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 100277
    attention_bias: bool = False
    num_experts: int = 7
    num_experts_per_tok: int = 5
    norm_topk_prob: bool = False

    @property
    def routing(self) -> Routing:
        return replace(super().routing, normalised=self.norm_topk_prob)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            t.norm("attn.q_norm", "self_attn.q_norm", HEADS),
            t.norm("attn.k_norm", "self_attn.k_norm", KV_HEADS),
            t.experts(),
            t.norm("attn_out_norm", "post_attention_layernorm"),
            t.norm("mlp_out_norm", "post_feedforward_layernorm"),
            tied=self.tie_word_embeddings,
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "flex_olmo-tiny": shape(64, 32, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None}
    | {"num_experts": 8, "num_experts_per_tok": 4},
    "flexolmo-7x7b": shape(4096, 11008, 32, 32) | {"vocab_size": 100352, "max_position_embeddings": 4096},
}

PARAMETERS: Mapping[str, int] = {"flexolmo-7x7b": 33_270_665_216}
