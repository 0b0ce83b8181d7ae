"""Hunyuan 0.5B to 7B (Tencent 2025): LLaMA with norms of heads that have rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import AlphaRope, Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(DecoderConfig):
    family: ClassVar[str] = "hunyuan_v1_dense"
    architecture: ClassVar[str] = "HunYuanDenseV1ForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"attention_head_dim", "eod_token_id", "pretraining_tp"})
    fixed: ClassVar[Mapping[str, Any]] = {"mlp_bias": False, "use_cla": False, "use_qk_norm": True}
    rope_convention: ClassVar[Convention] = Convention(own_types={"dynamic": AlphaRope})
    constants: ClassVar[Mapping[str, Any]] = {"norms_after_rope": True}

    pad_token_id: int | None = 0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def mixer(self, t: Table) -> Rows:
        queries = t.norm("attn.q_norm", "self_attn.query_layernorm", "head")
        return super().mixer(t) + queries + t.norm("attn.k_norm", "self_attn.key_layernorm", "head")


_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "hunyuan_v1_dense-tiny": tiny(),
    "hunyuan-7b": shape(4096, 14336, 32, 32)
    | {"vocab_size": 128167, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768}
    | {"tie_word_embeddings": True, "rope_parameters": _ROPE},
}
