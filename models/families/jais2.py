"""Jais 2 (Inception, MBZUAI 2025): LLaMA with LayerNorm, biases, and a feed-forward network of squared relus."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import tiny


@dataclass(frozen=True, kw_only=True)
class Jais2Config(DecoderConfig):
    family = "jais2"
    architecture = "Jais2ForCausalLM"
    eps = "layer_norm_eps"
    norm_bias = True
    constants = {"norm": "layer"}
    gated_network = False

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    mlp_bias: bool = True


PRESETS = {"jais2-tiny": tiny()}
