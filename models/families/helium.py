"""Helium 1 (Kyutai 2025): LLaMA whose heads turn in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class HeliumConfig(DecoderConfig):
    family: ClassVar[str] = "helium"
    architecture: ClassVar[str] = "HeliumForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 20, "head_dim": 128}
    rope_convention: ClassVar[Convention] = Convention(rope_theta=100000.0)
    in_pairs: ClassVar[bool] = True
    out_bias: ClassVar[bool] = False

    rms_norm_eps: float = 1e-8
    pad_token_id: int | None = 3
    attention_bias: bool = False
    mlp_bias: bool = False

    def problems(self) -> list[str]:
        heads, head, hidden = self.num_attention_heads, self.head_dim, self.hidden_size
        square = f"num_attention_heads ({heads}) times head_dim ({head}) must be hidden_size ({hidden})"
        return super().problems() + [square] * (heads * head != hidden)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "helium-tiny": tiny(head_dim=16),
    "helium-1-preview-2b": shape(2560, 7040, 24, 20) | {"vocab_size": 48000, "max_position_embeddings": 4096},
}
