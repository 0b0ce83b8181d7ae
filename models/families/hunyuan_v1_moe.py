"""Hunyuan A13B (Tencent 2025): Hunyuan with experts, beside one that every token goes to."""

from dataclasses import dataclass
from typing import Any

from megacore.models.decoder_config import DecoderConfig
from megacore.models.experts_config import MoEConfig
from megacore.models.families.hunyuan_v1_dense import HunYuanDenseV1Config
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class HunYuanMoEV1Config(MoEConfig, HunYuanDenseV1Config):
    family = "hunyuan_v1_moe"
    architecture = "HunYuanMoEV1ForCausalLM"
    harmless = MoEConfig.harmless | HunYuanDenseV1Config.harmless
    saved = {"num_experts_per_tok": "moe_topk"}
    spellings = {"num_local_experts": "num_experts"}
    axes = {
        **DecoderConfig.axes,
        "experts": "num_experts",
        "expert_mlp": "intermediate_size",
        "shared_mlp": "intermediate_size",
    }
    rule = {"normalised": True}

    pad_token_id: int | None = 0
    num_experts: int = 1
    num_experts_per_tok: int = 1

    def experts(self, t: Table) -> Rows:
        return t.experts(router="mlp.gate.wg", held=("mlp.experts", "mlp.gate.wg")) + t.shared_expert("mlp.shared_mlp")

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        # Files may say it of each layer; here it is one number.
        each = values.get("num_experts_per_tok")
        if isinstance(each, tuple) and len({*map(str, each)}) == 1:
            values["num_experts_per_tok"] = each[0]
        return super()._derive(values)


PRESETS = {
    "hunyuan_v1_moe-tiny": tiny(32, num_experts=16, moe_topk=4),
    "hunyuan-a13b": shape(4096, 3072, 32, 32)
    | {"vocab_size": 128167, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768}
    | {"num_experts": 64, "moe_topk": 8, "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}},
}
