"""OLMo 2 (OLMo team 2024, arXiv 2501.00656): norms of what branches give, and of all queries and all keys at once."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import rope, shape
from megacore.models.weight_rows import BRANCHES, OF_ALL, OUT_NORMS


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    family = "olmo2"
    architecture = "Olmo2ForCausalLM"
    parts = BRANCHES | OUT_NORMS
    head_norms = {"of": OF_ALL}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False


_EACH = {
    "vocab_size": 100352,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "pad_token_id": 100277,
    **rope(500000.0),
}

PRESETS = {
    "olmo2-tiny": _EACH | shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "pad_token_id": None},
    "olmo2-1b": _EACH | shape(2048, 8192, 16, 16),
    "olmo2-7b": _EACH | shape(4096, 11008, 32, 32),
    "olmo2-13b": _EACH | shape(5120, 13824, 40, 40),
    "olmo2-32b": _EACH | shape(5120, 27648, 64, 40) | {"num_key_value_heads": 8},
}
