"""ERNIE-4.5 21B and 300B (Baidu 2025): experts chosen by corrected scores, in every so many layers, and shared ones."""

from collections.abc import Mapping
from dataclasses import dataclass

from megacore.models.config import positive
from megacore.models.experts_config import MoEConfig
from megacore.models.families.ernie4_5 import Ernie4_5Config
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Ernie4_5MoeConfig(MoEConfig, Ernie4_5Config):
    family = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    further = ("model.mtp_",)
    harmless = MoEConfig.harmless | Ernie4_5Config.harmless | {"moe_capacity", "num_nextn_predict_layers"}
    fixed = {"moe_gate": "topk", "moe_norm_min": 1e-12, "moe_use_aux_free": True}
    # Layers that are not read are not there: who looked for them would find nothing.
    written = {"num_nextn_predict_layers": 0}
    defaults = {"num_key_value_heads": 4}
    saved = {"num_experts_per_tok": "moe_k"}
    spellings = {"num_experts": "moe_num_experts"}
    axes = {**Ernie4_5Config.axes, "experts": "moe_num_experts", "expert_mlp": "moe_intermediate_size"}
    rule = {"normalised": True}

    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    moe_intermediate_size: int = 1536
    num_experts_per_tok: int = 6
    moe_num_experts: int = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    # The last layer that may have experts; -1: the last of all.
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1

    def __post_init__(self) -> None:
        if self.moe_layer_end_index == -1:
            object.__setattr__(self, "moe_layer_end_index", self.num_hidden_layers - 1)
        super().__post_init__()

    @property
    def sizes(self) -> Mapping[str, int]:
        shared = self.moe_num_shared_experts * self.moe_intermediate_size
        return {**super().sizes, **({"shared_mlp": shared} if shared > 0 else {})}

    @property
    def sparse_layers(self) -> list[int]:
        layers, every = range(self.num_hidden_layers), self.moe_layer_interval
        first, last = self.moe_layer_start_index, self.moe_layer_end_index
        return [i for i in layers if (i + 1) % every == 0 and first <= i <= last]

    @property
    def head_bias(self) -> bool:
        return self.use_bias

    def experts(self, t: Table) -> Rows:
        correction = "mlp.moe_statics.e_score_correction_bias"
        shared = t.shared_expert(bias=self.use_bias) if self.moe_num_shared_experts else ()
        return t.experts(correction=correction, of_correction="one routes") + shared

    def network(self, t: Table) -> Rows:
        return self.feed_forward(t, self.experts(t), bias=self.use_bias)

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "moe_layer_interval")
        if self.moe_num_shared_experts < 0:
            found.append(f"moe_num_shared_experts is {self.moe_num_shared_experts}: it must be at least 0")
        return found


PRESETS = {
    "ernie4_5_moe-tiny": tiny(96, moe_intermediate_size=32, moe_num_experts=16, moe_k=4),
    "ernie-4.5-21b-a3b": shape(2560, 12288, 28, 20) | {"vocab_size": 103424, "max_position_embeddings": 131072},
    "ernie-4.5-300b-a47b": shape(8192, 28672, 54, 64)
    | {"vocab_size": 103424, "max_position_embeddings": 131072, "num_key_value_heads": 8, "moe_k": 8}
    | {"moe_intermediate_size": 3584, "moe_num_shared_experts": 0, "moe_layer_start_index": 3}
    | {"tie_word_embeddings": False},
}
