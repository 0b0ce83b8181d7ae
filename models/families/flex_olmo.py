"""FlexOlmo (Shi et al. 2025, arXiv 2507.07024): OLMo 2 with experts that were trained apart."""

from dataclasses import dataclass

from megacore.models.experts_config import MoEConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BRANCHES, OF_ALL, OUT_NORMS


@dataclass(frozen=True, kw_only=True)
class FlexOlmoConfig(MoEConfig):
    family = "flex_olmo"
    architecture = "FlexOlmoForCausalLM"
    spellings = {"num_local_experts": "num_experts"}
    rope_convention = Convention(rope_theta=500000.0)
    parts = BRANCHES | OUT_NORMS
    head_norms = {"of": OF_ALL}

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 100277
    attention_bias: bool = False
    num_experts: int = 7
    num_experts_per_tok: int = 5
    norm_topk_prob: bool = False


PRESETS = {
    "flex_olmo-tiny": tiny(32, pad_token_id=None, num_experts=8, num_experts_per_tok=4),
    "flexolmo-7x7b": shape(4096, 11008, 32, 32) | {"vocab_size": 100352, "max_position_embeddings": 4096},
}
