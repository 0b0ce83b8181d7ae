"""Kolibri 1 (Aleph Alpha 2026): EXAONE 4.0's attention with norms around branches, and experts chosen by logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.experts_config import MoEConfig
from megacore.models.families.exaone4 import Exaone4Config
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table, around


@dataclass(frozen=True, kw_only=True)
class Kolibri1Config(MoEConfig, Exaone4Config):
    family: ClassVar[str] = "kolibri1"
    architecture: ClassVar[str] = "Kolibri1ForCausalLM"
    # No layer is without experts: the size of such a network is of nothing.
    derived: ClassVar[frozenset[str]] = frozenset({"intermediate_size"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4, "head_dim": 128}
    spellings: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    axes: ClassVar[Mapping[str, str]] = {
        **MoEConfig.axes,
        "experts": "num_local_experts",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "shared_expert_intermediate_size",
    }
    rule: ClassVar[Mapping[str, Any]] = {"score": "sigmoid", "choose": "logits"}
    interval: ClassVar[str | None] = None
    pattern: ClassVar[int] = 5
    parts: ClassVar[Mapping[str, str]] = around(
        "input_layernorm", "post_attention_layernorm", "post_attn_norm", "post_ffn_norm"
    )

    intermediate_size: int = 0
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 513
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_local_experts: int = 384
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = False

    def experts(self, t: Table) -> Rows:
        return t.experts(correction="moe.router.expert_bias") + t.shared_expert()

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        values["intermediate_size"] = 0
        return super()._derive(values)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "kolibri1-tiny": tiny(0, head_dim=16, sliding_window=128, moe_intermediate_size=32, num_experts=16)
    | {"shared_expert_intermediate_size": 64, "num_experts_per_tok": 4}
}
