"""Mistral Small 4 (Mistral AI 2026): latent attention and experts as DeepSeek has them, and the queries of Ministral 3,
which count more the later they stand."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.models.families.deepseek_v2 import DeepseekConfig
from megacore.models.families.ministral3 import TemperedConfig, TemperedYarnRope
from megacore.models.presets import EXPERTS, shape, tiny_latent, yarn
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table
from megacore.parallel.routing import Routing

_YARN = yarn(128.0, 8192, rope_theta=10000.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
_PART = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class Mistral4Config(TemperedConfig, DeepseekConfig):
    family = "mistral4"
    architecture = "Mistral4ForCausalLM"
    # The part of a head that turns follows from the sizes, see _read_ropes.
    rope_convention = Convention(
        parameters=_YARN | {"llama_4_scaling_beta": 0.1},
        own_types={"yarn": TemperedYarnRope},
        ignored=frozenset({_PART}),
    )

    pad_token_id: int | None = 11
    q_lora_rank: int | None = 1024
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    rope_interleave: bool = True

    @property
    def routing(self) -> Routing:
        plain, groups, kept = super().routing, self.n_group, self.topk_group
        return replace(plain, epsilon=1e-20, groups=groups, kept_groups=kept, group_score="top2")

    def experts(self, t: Table) -> Rows:
        router = t.linear("mlp.router", "routes", "embed", "mlp.gate")
        return router + t.stacked_experts(outputs_first=True) + t.shared_expert()

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        problems = super()._derive(values)
        values["head_dim"] = values.get("qk_head_dim")
        return problems

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        rotary, still = (config.get(name, getattr(cls, name)) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
        for said in (config, config.get("rope_parameters"), config.get("rope_scaling")):
            part = said.get(_PART) if isinstance(said, Mapping) else None
            if part is None or not isinstance(rotary, int) or not isinstance(still, int):
                continue
            if not isinstance(part, int | float) or part * (rotary + still) != rotary:
                taken = f"{cls.architecture} turns qk_rope_head_dim ({rotary}) of {rotary + still} dimensions"
                raise ValueError(f"{_PART} is {part!r}: {taken}")
        return super()._read_ropes(config)


PRESETS = {
    "mistral4-tiny": tiny_latent(96, first_k_dense_replace=1) | EXPERTS,
    "mistral-small-4-119b": shape(4096, 12288, 36, 32) | {"vocab_size": 131072, "max_position_embeddings": 1048576},
}
