"""VaultGemma 1B (Google 2025, arXiv 2510.15001): Gemma 2 without norms of what branches give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.families.gemma2 import Gemma2Config
from megacore.models.presets import tiny
from megacore.models.weight_rows import around


@dataclass(frozen=True, kw_only=True)
class VaultGemmaConfig(Gemma2Config):
    family: ClassVar[str] = "vaultgemma"
    architecture: ClassVar[str] = "VaultGemmaForCausalLM"
    parts: ClassVar[Mapping[str, str]] = around("input_layernorm", "pre_feedforward_layernorm")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vaultgemma-tiny": tiny(head_dim=32, query_pre_attn_scalar=32, sliding_window=128)
}
