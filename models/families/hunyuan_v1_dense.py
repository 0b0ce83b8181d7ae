"""Hunyuan 0.5B to 7B (Tencent 2025): LLaMA with norms of heads that have rotated."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import AlphaRope, Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(DecoderConfig):
    family = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    harmless = frozenset({"attention_head_dim", "eod_token_id", "pretraining_tp"})
    fixed = {"mlp_bias": False, "use_cla": False, "use_qk_norm": True}
    rope_convention = Convention(own_types={"dynamic": AlphaRope})
    constants = {"norms_after_rope": True}

    pad_token_id: int | None = 0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def mixer(self, t: Table) -> Rows:
        queries = t.norm("attn.q_norm", "self_attn.query_layernorm", "head")
        return super().mixer(t) + queries + t.norm("attn.k_norm", "self_attn.key_layernorm", "head")


_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}

PRESETS = {
    "hunyuan_v1_dense-tiny": tiny(),
    "hunyuan-7b": shape(4096, 14336, 32, 32)
    | {"vocab_size": 128167, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768}
    | {"tie_word_embeddings": True, "rope_parameters": _ROPE},
}
