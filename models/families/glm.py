"""GLM-4-9B (GLM Team 2024, arXiv 2406.12793): biases of queries, keys and values; half of each head turns, in pairs."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class GlmConfig(DecoderConfig):
    family = "glm"
    architecture = "GlmForCausalLM"
    defaults = {"num_key_value_heads": 2, "head_dim": 128}
    rope_convention = Convention(partial_rotary_factor=0.5)
    in_pairs = True
    out_bias = False
    network_rows = ("mlp.gate_up_proj",)

    rms_norm_eps: float = 1.5625e-7
    pad_token_id: int | None = 151329
    attention_bias: bool = True


_GLM = {"vocab_size": 151552, "max_position_embeddings": 131072}
_EDGE = {
    "vocab_size": 59264,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "pad_token_id": 59246,
    **rope(10000.0, partial_rotary_factor=1.0),
}

PRESETS = {
    "glm-tiny": tiny(head_dim=16, pad_token_id=None),
    "glm-edge-1.5b": _EDGE | shape(2048, 6144, 28, 16) | {"num_key_value_heads": 4},
    "glm-edge-4b": _EDGE | shape(3072, 8192, 40, 24) | {"num_key_value_heads": 6},
    "glm-4-9b": _GLM | shape(4096, 13696, 40, 32) | {"max_position_embeddings": 8192},
    "glm-4-9b-chat": _GLM | shape(4096, 13696, 40, 32) | rope(5000000.0, partial_rotary_factor=0.5),
}
