"""Gemma (Gemma Team 2024, arXiv 2403.08295): norms of 1 + weight, scaled embeddings, GeGLU, a tied head."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny

TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    family = "gemma"
    architecture = "GemmaForCausalLM"
    # The first releases have it beside hidden_act, and nothing reads it.
    harmless = frozenset({"hidden_activation"})
    fixed = {"use_bidirectional_attention": None}
    defaults = {"num_key_value_heads": 16, "head_dim": 256}
    constants = {
        "norm_offset": 1.0,
        "round_embedding_scale": True,
        "both_ways": "prompts",  # in PaliGemma
    }

    hidden_act: str = TANH
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(embedding_scale=math.sqrt(self.hidden_size))

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        # The first releases say gelu, and mean its approximation.
        return super()._read({**config, "hidden_act": TANH} if config.get("hidden_act") == "gelu" else config)


PRESETS = {
    "gemma-tiny": tiny(num_key_value_heads=1, head_dim=32),
    "gemma-2b": shape(2048, 16384, 18, 8, vocab_size=256000, num_key_value_heads=1, max_position_embeddings=8192),
    "gemma-7b": shape(3072, 24576, 28, 16) | {"vocab_size": 256000, "max_position_embeddings": 8192},
}
