"""GLM-4-0414 (Zhipu AI 2025): GLM with norms of what each branch gives too."""

from dataclasses import dataclass

from megacore.models.families.glm import GlmConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import NORMS, around


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    family = "glm4"
    architecture = "Glm4ForCausalLM"
    parts = around(**NORMS, attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")


_GLM4 = {"vocab_size": 151552, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}

PRESETS = {
    "glm4-tiny": tiny(head_dim=16, pad_token_id=None),
    "glm-4-9b-0414": _GLM4 | shape(4096, 13696, 40, 32),
    "glm-4-32b-0414": _GLM4 | shape(6144, 23040, 61, 48) | {"attention_bias": False},
}
