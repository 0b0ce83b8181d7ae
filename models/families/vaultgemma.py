"""VaultGemma 1B (Google 2025, arXiv 2510.15001): Gemma 2 without norms of what branches give."""

from dataclasses import dataclass

from megacore.models.families.gemma2 import Gemma2Config
from megacore.models.presets import tiny
from megacore.models.weight_rows import around


@dataclass(frozen=True, kw_only=True)
class VaultGemmaConfig(Gemma2Config):
    family = "vaultgemma"
    architecture = "VaultGemmaForCausalLM"
    parts = around("input_layernorm", "pre_feedforward_layernorm")


PRESETS = {"vaultgemma-tiny": tiny(head_dim=32, query_pre_attn_scalar=32, sliding_window=128)}
