"""Jais 2 (Inception, MBZUAI 2025): LLaMA with LayerNorm, biases, and a feed-forward network of squared relus."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Jais2Config(DecoderConfig):
    family = "jais2"
    architecture = "Jais2ForCausalLM"
    eps = "layer_norm_eps"
    norm_bias = True
    constants = {"norm": "layer"}

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    mlp_bias: bool = True

    def network(self, t: Table) -> Rows:
        return t.plain_mlp(bias=self.mlp_bias)


PRESETS = {"jais2-tiny": tiny()}
