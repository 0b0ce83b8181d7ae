"""MiniMax-Text-01 and M1 (MiniMax 2025, arXiv 2501.08313, 2506.13585): lightning attention in most layers, experts, and
residuals behind norms."""

from dataclasses import dataclass

from megacore.models.anatomy import FULL, LINEAR, Anatomy, Factors
from megacore.models.families.minimax_m2 import RotaryDimConfig
from megacore.models.families.mixtral import MixtralConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, in_layers


@dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(RotaryDimConfig, HybridConfig, MixtralConfig):
    """transformers 5.23 turns all of a head whatever ``rotary_dim`` says; here so much turns, as its makers have it."""

    family = "minimax"
    architecture = "MiniMaxForCausalLM"
    other = LINEAR
    # Computed: what each head leaves of its state.
    ignored = MixtralConfig.ignored + tuple(
        f"model.layers.{{layer}}.self_attn.{each}"
        for each in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    )
    # Tokens that are computed at a time; and of shared experts, which there are none of.
    harmless = MixtralConfig.harmless | {"block_size", "shared_moe_mode"}
    fixed = {
        **MixtralConfig.fixed,
        "postnorm": True,
        "shared_intermediate_size": 0,
    }
    axes = {
        **MixtralConfig.axes,
        "state_heads": "num_attention_heads",
        "state_key": "head_dim",
        "state_value": "head_dim",
    }
    rope_convention = Convention(rope_theta=1e6, partial_rotary_factor=1.0)
    constants = {"delta_norm_eps": 1e-6}

    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    def attends(self, layer: int) -> bool:
        return layer % 2 == 0

    def mixer(self, t: Table) -> Rows:
        lightning, attention = t.lightning_attention(), super().mixer(t)
        return in_layers(self.layers_of(LINEAR), lightning) + in_layers(self.layers_of(FULL), attention)

    @property
    def anatomy(self) -> Anatomy:
        of = {"attn": "full_attn", "lightning": "linear_attn", "experts": "mlp"}
        alphas, betas = (
            {each: getattr(self, f"{of[each]}_{which}_factor") for each in of} for which in ("alpha", "beta")
        )
        return self.anatomy_of(factors={each: Factors(gives=betas[each], past=alphas[each]) for each in of})


_ALPHAS = dict.fromkeys(("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"), 3.5565588200778455)

PRESETS = {
    "minimax-tiny": tiny(88, head_dim=16, num_local_experts=8, layer_types=[LINEAR, FULL] * 2) | _ALPHAS,
    "minimax-text-01": shape(6144, 9216, 80, 64)
    | {"vocab_size": 200064, "head_dim": 128, "max_position_embeddings": 10240000, **rope(1e7), "rotary_dim": 64}
    | {"num_local_experts": 32, "layer_types": ([LINEAR] * 7 + [FULL]) * 10}
    | _ALPHAS,
}
