"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838): LLaMA with layer norms that have no weights."""

from dataclasses import dataclass

from megacore.models.config import above_zero
from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import BRANCHES


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    family = "olmo"
    architecture = "OlmoForCausalLM"
    eps = "norm_eps"
    norm_eps = 1e-5
    last_norm = ""
    constants = {"norm": "layer", "plain_norms": frozenset({"attn_norm", "mlp_norm", "norm"})}
    told = {"qkv_limit": "clip_qkv"}
    parts = BRANCHES

    pad_token_id: int | None = 1
    attention_bias: bool = False
    clip_qkv: float | None = None

    def problems(self) -> list[str]:
        return super().problems() + above_zero(self, "clip_qkv")


_EACH = {"vocab_size": 50304, "max_position_embeddings": 2048}

PRESETS = {
    "olmo-tiny": _EACH | shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2},
    "olmo-1b": _EACH | shape(2048, 8192, 16, 16) | {"tie_word_embeddings": True},
    "olmo-7b": _EACH | shape(4096, 11008, 32, 32),
}
