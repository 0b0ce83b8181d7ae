"""Solar Open 100B (Upstage 2025): experts in every layer, chosen as DeepSeek-V3's are."""

from dataclasses import dataclass

from megacore.models.experts_config import SigmoidConfig
from megacore.models.presets import EXPERTS, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class SolarOpenConfig(SigmoidConfig):
    family = "solar_open"
    architecture = "SolarOpenForCausalLM"
    fixed = {"first_k_dense_replace": 0, "use_qk_norm": False}
    # No layer is without experts: the size of such a network is of nothing.
    derived = frozenset({"intermediate_size"})
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    axes = {axis: name for axis, name in SigmoidConfig.axes.items() if axis != "mlp"}
    rope_convention = Convention(rope_theta=1e6)
    out_bias = False

    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    moe_intermediate_size: int = 1280
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0

    def network(self, t: Table) -> Rows:
        return self.experts(t)


PRESETS = {"solar_open-tiny": tiny(0, head_dim=16) | EXPERTS}
