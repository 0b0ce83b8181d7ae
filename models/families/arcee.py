"""Arcee's AFM (Arcee AI 2025): LLaMA whose feed-forward networks are relu squared, without gates."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(DecoderConfig):
    family = "arcee"
    architecture = "ArceeForCausalLM"
    harmless = frozenset({"pretraining_tp"})

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    def network(self, t: Table) -> Rows:
        return t.plain_mlp(bias=self.mlp_bias)


PRESETS = {"arcee-tiny": tiny()}
