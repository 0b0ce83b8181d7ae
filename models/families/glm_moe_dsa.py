"""GLM-5 (Z.ai 2026, arXiv 2602.15763): DeepSeek-V3.2 with other sizes, of which several layers may look at what the
indexer of one chooses (arXiv 2603.12201)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megacore.models.families.deepseek_v32 import TINY, DeepseekV32Config
from megacore.models.layer_types import kind_problems
from megacore.models.presets import rope, shape, tiny_latent


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    family = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    fixed = {**DeepseekV32Config.fixed, "indexer_rope_interleave": True}
    index_pairs = True

    rms_norm_eps: float = 1e-5
    q_lora_rank: int = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    index_n_heads: int = 32
    # "full" layers have an indexer, "shared" ones see what that of the last full one chooses. None becomes what the
    # two others say: of so many layers one is full, behind the first ones.
    indexer_types: tuple[str, ...] | None = None
    index_topk_freq: int = field(default=1, compare=False)
    index_skip_topk_offset: int = field(default=2, compare=False)

    def __post_init__(self) -> None:
        first, every = self.index_skip_topk_offset - 1, max(self.index_topk_freq, 1)
        self.fill_in("indexer_types", lambda layer: "shared" if max(layer - first, 0) % every else "full")
        super().__post_init__()

    @property
    def choosers(self) -> Sequence[int]:
        kinds = enumerate(self.indexer_types or ())
        return [*accumulate((layer if kind == "full" else 0 for layer, kind in kinds), max)]

    def problems(self) -> list[str]:
        found, kinds = super().problems(), self.indexer_types
        if kinds is None:  # there are too many layers
            return found
        found += kind_problems("indexer_types", kinds, self.num_hidden_layers, ("full", "shared"))
        if "full" not in kinds[:1] or (self.mtp_layers and kinds[-1] != "full"):
            found.append("indexer_types: the first layer must be full, and the last where further tokens are predicted")
        return found


PRESETS = {
    "glm_moe_dsa-tiny": tiny_latent(96) | TINY,
    "glm-5": shape(6144, 12288, 78, 64) | {"vocab_size": 154880, "max_position_embeddings": 202752} | rope(1e6),
}
