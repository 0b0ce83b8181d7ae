"""Arcee's AFM (Arcee AI 2025): LLaMA whose feed-forward networks are relu squared, without gates."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import tiny


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(DecoderConfig):
    family = "arcee"
    architecture = "ArceeForCausalLM"
    harmless = frozenset({"pretraining_tp"})
    gated_network = False

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


PRESETS = {"arcee-tiny": tiny()}
