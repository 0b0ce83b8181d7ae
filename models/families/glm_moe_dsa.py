"""GLM-5 (Z.ai 2026, arXiv 2602.15763): DeepSeek-V3.2 with other sizes, of which several layers may look at what the
indexer of one chooses (arXiv 2603.12201)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy, LayerAttention
from megacore.models.families.deepseek_v32 import DeepseekV32Config
from megacore.models.layer_types import kind_problems
from megacore.models.presets import EXPERTS, rope, shape, tiny_latent
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel import limits


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    family: ClassVar[str] = "glm_moe_dsa"
    architecture: ClassVar[str] = "GlmMoeDsaForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {**DeepseekV32Config.fixed, "indexer_rope_interleave": True}
    index_pairs: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    q_lora_rank: int = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    index_n_heads: int = 32
    # "full" layers have an indexer, "shared" ones look at what that of the last full one before them chooses; None
    # becomes what index_topk_pattern says, or index_topk_freq and index_skip_topk_offset.
    indexer_types: tuple[str, ...] | None = None

    def mixer(self, t: Table) -> Rows:
        attention, full = t.latent_attention(latent_queries=True, bias=self.attention_bias), {*self._choosers}
        index = t.indexer(pairs=True)
        return attention + (index if len(full) == self.num_hidden_layers else in_layers(full, index))

    def anatomy_of(self, **own: Any) -> Anatomy:
        choosers = self._choosers
        several = {each for each in choosers if choosers.count(each) > 1}
        looks = (LayerAttention(top=self.index_topk, chooser=each if each in several else None) for each in choosers)
        return super().anatomy_of(layers=tuple(looks), **own)

    @property
    def _choosers(self) -> list[int]:
        """The layer whose indexer chooses, for each layer."""
        full = [layer for layer, kind in enumerate(self.indexer_types or ()) if kind == "full"]
        return [full[bisect_right(full, layer) - 1] for layer in range(self.num_hidden_layers)]

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, wrong = super()._read(config)
        layers, pattern = values.get("num_hidden_layers"), config.get("index_topk_pattern")
        every, first = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        if values.get("indexer_types") is not None or not isinstance(layers, int) or layers > limits.LAYERS:
            return values, wrong
        if isinstance(every, int) and isinstance(first, int) and isinstance(pattern, str | None):
            each = pattern or ["FS"[max(layer - first + 1, 0) % max(every, 1) > 0] for layer in range(layers)]
            values["indexer_types"] = tuple({"F": "full", "S": "shared"}.get(kind, kind) for kind in each)
            return values, wrong
        return values, [*wrong, "index_topk_freq and index_skip_topk_offset must be integers, and the pattern a word"]

    @classmethod
    def _consumed(cls) -> set[str]:
        return super()._consumed() | {"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"}

    def problems(self) -> list[str]:
        kinds, found = self.indexer_types or (), super().problems()
        found += kind_problems("indexer_types", kinds, self.num_hidden_layers, ("full", "shared"))
        if kinds and kinds[0] != "full":
            found.append("indexer_types begins with shared: the first layer has no layer before it to share with")
        if self.mtp_layers and kinds and kinds[-1] != "full":
            found.append("indexer_types ends with shared: layers that predict further tokens need an indexer as its")
        return found


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "glm_moe_dsa-tiny": tiny_latent(96, first_k_dense_replace=1)
    | EXPERTS
    | {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 4},
    "glm-5": shape(6144, 12288, 78, 64) | {"vocab_size": 154880, "max_position_embeddings": 202752} | rope(1e6),
}

PARAMETERS: Mapping[str, int] = {}
