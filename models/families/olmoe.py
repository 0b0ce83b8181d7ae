"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): 64 experts, norms of all queries and all keys at once."""

from dataclasses import dataclass

from megacore.models.config import above_zero
from megacore.models.experts_config import MoEConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import OF_ALL


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    family = "olmoe"
    architecture = "OlmoeForCausalLM"
    derived = frozenset({"head_dim"})
    spellings = {"num_local_experts": "num_experts"}
    told = {"qkv_limit": "clip_qkv"}
    head_norms = {"of": OF_ALL}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    def problems(self) -> list[str]:
        return super().problems() + above_zero(self, "clip_qkv")


_EACH = {"vocab_size": 50304, "max_position_embeddings": 4096}

PRESETS = {
    "olmoe-tiny": tiny(32, max_position_embeddings=4096, num_experts=16, num_experts_per_tok=4),
    "olmoe-1b-7b": _EACH | shape(2048, 1024, 16, 16),
}
