"""GLM-4.5, GLM-4.6 (GLM Team 2025, arXiv 2508.06471): experts behind some layers without, chosen as DeepSeek-V3's are,
and heads of which half turns."""

from dataclasses import dataclass

from megacore.models.experts_config import SigmoidConfig
from megacore.models.presets import EXPERTS, rope, shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(SigmoidConfig):
    family = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    defaults = {"num_key_value_heads": 8}
    rope_convention = Convention(partial_rotary_factor=0.5)
    out_bias = False

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + (t.norms_of_heads() if self.use_qk_norm else ())


_EACH = {"vocab_size": 151552, "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True} | {
    **rope(1e6, partial_rotary_factor=0.5)
}

PRESETS = {
    "glm4_moe-tiny": tiny(96, head_dim=16) | EXPERTS,
    "glm-4.5-air": _EACH | shape(4096, 10944, 46, 96),
    "glm-4.5": _EACH
    | shape(5120, 12288, 92, 96)
    | {"use_qk_norm": True, "moe_intermediate_size": 1536, "n_routed_experts": 160}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
}
