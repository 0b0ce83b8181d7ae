"""Jais 2 (Inception, MBZUAI 2025): LLaMA with LayerNorm, biases, and a feed-forward network of squared relus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Jais2Config(DecoderConfig):
    family: ClassVar[str] = "jais2"
    architecture: ClassVar[str] = "Jais2ForCausalLM"
    eps: ClassVar[str] = "layer_norm_eps"
    norm_bias: ClassVar[bool] = True
    constants: ClassVar[Mapping[str, Any]] = {"norm": "layer"}

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    mlp_bias: bool = True

    def network(self, t: Table) -> Rows:
        return t.plain_mlp(bias=self.mlp_bias)


PRESETS: Mapping[str, Mapping[str, Any]] = {"jais2-tiny": tiny()}
