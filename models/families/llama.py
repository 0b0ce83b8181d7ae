"""LLaMA 2, 3, 3.1, 3.2 (Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783)."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import llama3, rope, shape, tiny


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    family = "llama"
    architecture = "LlamaForCausalLM"
    harmless = frozenset({"is_llama_config", "pretraining_tp"})
    small_ends = True

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False


_LLAMA3 = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072}

_LLAMA2 = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}

PRESETS = {
    "llama-tiny": tiny(),
    "llama-2-7b": _LLAMA2 | shape(4096, 11008, 32, 32),
    "llama-2-13b": _LLAMA2 | shape(5120, 13824, 40, 40),
    "llama-2-70b": _LLAMA2 | shape(8192, 28672, 80, 64) | {"num_key_value_heads": 8},
    "llama-3-8b": _LLAMA3 | shape(4096, 14336, 32, 32) | {"max_position_embeddings": 8192, **rope(500000.0)},
    "llama-3.1-8b": _LLAMA3 | shape(4096, 14336, 32, 32) | {"rope_parameters": llama3(500000.0, 8.0)},
    "llama-3.1-70b": _LLAMA3 | shape(8192, 28672, 80, 64) | {"rope_parameters": llama3(500000.0, 8.0)},
    "llama-3.1-405b": _LLAMA3 | shape(16384, 53248, 126, 128) | {"rope_parameters": llama3(500000.0, 8.0)},
    "llama-3.2-1b": _LLAMA3
    | shape(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, rope_parameters=llama3(500000.0, 32.0)),
    "llama-3.2-3b": _LLAMA3
    | shape(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True, rope_parameters=llama3(500000.0, 32.0)),
}
