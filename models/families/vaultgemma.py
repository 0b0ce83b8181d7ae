"""VaultGemma 1B (Google 2025, arXiv 2510.15001): Gemma 2 without norms of what branches give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import shape
from megacore.models.families.gemma2 import Gemma2Config
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class VaultGemmaConfig(Gemma2Config):
    family: ClassVar[str] = "vaultgemma"
    architecture: ClassVar[str] = "VaultGemmaForCausalLM"

    def norms_of_outputs(self, t: Table) -> tuple[Rows, Rows]:
        return (), ()


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vaultgemma-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    | {"max_position_embeddings": 512, "sliding_window": 128},
}

PARAMETERS: Mapping[str, int] = {}
