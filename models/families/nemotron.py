"""Nemotron-3, Nemotron-4, Minitron (Parmar et al. 2024, arXiv 2402.16819; Muralidharan et al. 2024, arXiv 2407.14679):
LayerNorm with 1 + weight, a squared ReLU without a gate, heads of which a half turns."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BRANCHES, NORMS


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(DecoderConfig):
    family = "nemotron"
    architecture = "NemotronForCausalLM"
    harmless = frozenset({"kv_channels"})  # which the class does not read
    eps = "norm_eps"
    rope_convention = Convention(partial_rotary_factor=0.5)
    norm_bias = True
    constants = {"norm": "layer", "norm_offset": 1.0}
    parts = BRANCHES | NORMS
    gated_network = False

    hidden_act: str = "relu2"
    initializer_range: float = 0.0134
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


_NEMOTRON = {"vocab_size": 256000, "num_key_value_heads": 8, "max_position_embeddings": 4096}

PRESETS = {
    "nemotron-tiny": tiny(256),
    "minitron-4b": _NEMOTRON | shape(3072, 9216, 32, 24),
    "minitron-8b": _NEMOTRON | shape(4096, 16384, 32, 48) | {"head_dim": 128},
    "nemotron-4-340b": _NEMOTRON | shape(18432, 73728, 96, 96),
}
