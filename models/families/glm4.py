"""GLM-4-0414 (Zhipu AI 2025): GLM with norms of what each branch gives too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.families.glm import GlmConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import NORMS, around


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    family: ClassVar[str] = "glm4"
    architecture: ClassVar[str] = "Glm4ForCausalLM"
    parts: ClassVar[Mapping[str, str]] = around(
        **NORMS, attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    )


_GLM4 = {"vocab_size": 151552, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "glm4-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": None},
    "glm-4-9b-0414": _GLM4 | shape(4096, 13696, 40, 32),
    "glm-4-32b-0414": _GLM4 | shape(6144, 23040, 61, 48) | {"attention_bias": False},
}
