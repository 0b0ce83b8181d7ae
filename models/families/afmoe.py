"""Trinity (Arcee 2025): gated attention, windows that alone rotate, and experts chosen by sigmoids."""

from dataclasses import dataclass

from megacore.models.anatomy import Anatomy
from megacore.models.experts_config import SharedExpertConfig
from megacore.models.layer_types import PatternedConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table, around


@dataclass(frozen=True, kw_only=True)
class AfmoeConfig(SharedExpertConfig, PatternedConfig):
    family = "afmoe"
    architecture = "AfmoeForCausalLM"
    # Of the gates there is no bias; of the others the class reads none.
    harmless = SharedExpertConfig.harmless | {"load_balance_coeff", "use_grouped_mm"}
    fixed = {
        "attention_bias": False,
        "route_norm": True,
        "score_func": "sigmoid",
        **dict.fromkeys(("n_group", "num_expert_groups", "num_limited_groups", "topk_group"), 1),
    }
    defaults = {"head_dim": 128}
    saved = {
        "first_k_dense_replace": "num_dense_layers",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "route_scale",
    }
    interval = "global_attn_every_n_layers"
    pattern = 4
    correction = "mlp.expert_bias"
    rule = {"score": "sigmoid", "normalised": True, "epsilon": 1e-20}
    parts = around("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    all_rotate = False

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 1024
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    mup_enabled: bool = False

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(embedding_scale=self.hidden_size**0.5 if self.mup_enabled else 1.0)

    def mixer(self, t: Table) -> Rows:
        here = "(q: heads head + gate: heads head + k: kv head + v: kv head)"
        return t.attention(hf="self_attn.{q,gate,k,v}_proj", here=here) + t.norms_of_heads()

    def experts(self, t: Table) -> Rows:
        router = "mlp.router.gate"
        return t.experts(router=router, correction=self.correction, held=("mlp.experts", router)) + t.shared_expert()


_EACH = {
    "vocab_size": 200192,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "num_dense_layers": 2,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "mup_enabled": True,
    "route_scale": 2.826,
}

PRESETS = {
    "afmoe-tiny": tiny(
        96, head_dim=16, sliding_window=128, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4
    ),
    "trinity-nano": _EACH | shape(1024, 3072, 56, 8) | {"num_key_value_heads": 2, "moe_intermediate_size": 256},
    "trinity-mini": _EACH | shape(2048, 6144, 32, 32) | {"num_key_value_heads": 4, "moe_intermediate_size": 1024},
}
