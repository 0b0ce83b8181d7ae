"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): 64 experts, norms of all queries and all keys at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.config import above_zero
from megacore.models.experts_config import MoEConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import OF_ALL, Rows, Table


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    family: ClassVar[str] = "olmoe"
    architecture: ClassVar[str] = "OlmoeForCausalLM"
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    spellings: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    told: ClassVar[Mapping[str, str]] = {"qkv_limit": "clip_qkv"}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + t.norms_of_heads(of=OF_ALL)

    def problems(self) -> list[str]:
        return super().problems() + above_zero(self, "clip_qkv")


_EACH = {"vocab_size": 50304, "max_position_embeddings": 4096}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "olmoe-tiny": _EACH
    | shape(64, 32, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4},
    "olmoe-1b-7b": _EACH | shape(2048, 1024, 16, 16),
}
