"""Arcee's AFM (Arcee AI 2025): LLaMA whose feed-forward networks are relu squared, without gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(DecoderConfig):
    family: ClassVar[str] = "arcee"
    architecture: ClassVar[str] = "ArceeForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    def network(self, t: Table) -> Rows:
        return t.plain_mlp(bias=self.mlp_bias)


PRESETS: Mapping[str, Mapping[str, Any]] = {"arcee-tiny": tiny()}
