"""Hunyuan A13B (Tencent 2025): Hunyuan with experts, beside one that every token goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig
from megacore.models.experts_config import MoEConfig
from megacore.models.families.hunyuan_v1_dense import HunYuanDenseV1Config
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class HunYuanMoEV1Config(MoEConfig, HunYuanDenseV1Config):
    family: ClassVar[str] = "hunyuan_v1_moe"
    architecture: ClassVar[str] = "HunYuanMoEV1ForCausalLM"
    harmless: ClassVar[frozenset[str]] = MoEConfig.harmless | HunYuanDenseV1Config.harmless
    saved: ClassVar[Mapping[str, str]] = {"num_experts_per_tok": "moe_topk"}
    spellings: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "experts": "num_experts",
        "expert_mlp": "intermediate_size",
        "shared_mlp": "intermediate_size",
    }
    rule: ClassVar[Mapping[str, Any]] = {"normalised": True}

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


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "hunyuan_v1_moe-tiny": tiny(32, num_experts=16, moe_topk=4),
    "hunyuan-a13b": shape(4096, 3072, 32, 32)
    | {"vocab_size": 128167, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768}
    | {"num_experts": 64, "moe_topk": 8, "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}},
}
