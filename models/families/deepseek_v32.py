"""DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv 2512.02556): DeepSeek-V3 whose tokens look at those that an indexer
chooses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy, LayerAttention
from megacore.models.config import positive
from megacore.models.experts_config import TypedLayersConfig
from megacore.models.families.deepseek_v3 import PRESETS as OF_V3
from megacore.models.families.deepseek_v3 import DeepseekV3Config
from megacore.models.presets import EXPERTS, tiny_latent
from megacore.models.weight_rows import Rows, Table, in_layers


@dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(DeepseekV3Config, TypedLayersConfig):
    family = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    fixed = {**DeepseekV3Config.fixed, "rope_interleave": True, "mlp_bias": False}
    # What kind of cache each layer has.
    harmless = DeepseekV3Config.harmless | {"layer_types"}
    axes = {**DeepseekV3Config.axes, "index_heads": "index_n_heads"}
    # Whether dimensions 2 i and 2 i + 1 of the indexer's heads turn together on disk.
    index_pairs = False

    q_lora_rank: int = 1536
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "index_rest": self.index_head_dim - self.qk_rope_head_dim}

    @property
    def choosers(self) -> Sequence[int]:
        """The layer whose indexer chooses the tokens that a layer sees, for each layer."""
        return range(self.num_hidden_layers)

    def mixer(self, t: Table) -> Rows:
        own, rows = {*self.choosers}, t.indexer(pairs=self.index_pairs)
        return super().mixer(t) + (rows if len(own) == self.num_hidden_layers else in_layers(own, rows))

    def anatomy_of(self, **own: Any) -> Anatomy:
        several = {layer for layer, count in Counter(self.choosers).items() if count > 1}
        layers = (LayerAttention(top=self.index_topk, chooser=c if c in several else None) for c in self.choosers)
        return super().anatomy_of(layers=tuple(layers), **own)

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "index_topk")
        if self.index_head_dim <= self.qk_rope_head_dim:
            turning = f"qk_rope_head_dim ({self.qk_rope_head_dim}), the part of it that turns"
            found.append(f"index_head_dim is {self.index_head_dim}: it must be above {turning}")
        return found


TINY = EXPERTS | {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 4, "first_k_dense_replace": 1}

PRESETS = {
    "deepseek_v32-tiny": tiny_latent(96, n_group=4, topk_group=2) | TINY,
    "deepseek-v3.2": OF_V3["deepseek-v3"],
}
