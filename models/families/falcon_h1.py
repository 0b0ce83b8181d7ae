"""Falcon-H1 (TII 2025, arXiv 2507.22448): attention and a state space (Mamba-2) side by side in each layer."""

from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy, Factors
from megacore.models.config import above_zero
from megacore.models.presets import shape, tiny
from megacore.models.ssm_config import StateSpaceConfig
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(StateSpaceConfig):
    family = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    derived = frozenset({"layer_types"})
    harmless = StateSpaceConfig.harmless | {"mamba_use_mlp"}
    defaults = {"num_key_value_heads": 8, "mamba_d_ssm": 1024}
    last_norm = "model.final_layernorm"
    told = {"embedding_scale": "embedding_multiplier", "logit_scale": "lm_head_multiplier"}
    parts = {"network": "", "mixer": "", "attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
    network_rows = ("feed_forward.{gate,up}_proj", "feed_forward.down_proj")
    taken = {"layer_types": None}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    max_position_embeddings: int = 8192
    mlp_bias: bool = False
    projectors_bias: bool = False
    mamba_d_ssm: int | None
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    # Of what gates, of what comes out; and of gates, x, B, C and steps.
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)
    ssm_multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        return super().inner if self.mamba_d_ssm is None else self.mamba_d_ssm

    @property
    def anatomy(self) -> Anatomy:
        factors = {
            "attn": Factors(self.attention_in_multiplier, self.attention_out_multiplier),
            "ssm": Factors(self.ssm_in_multiplier, self.ssm_out_multiplier, self.ssm_multipliers),
            "mlp": Factors(1.0, self.mlp_multipliers[1], (self.mlp_multipliers[0], 1.0)),
        }
        return self.anatomy_of(attention_scale=self.key_multiplier / self.head_dim**0.5, factors=factors)

    def mixer(self, t: Table) -> Rows:
        bias, conv, out = self.mamba_proj_bias, self.mamba_conv_bias, self.projectors_bias
        attention = t.attention(bias=self.attention_bias, out_bias=self.attention_bias)
        return t.state_space(bias=bias, conv_bias=conv, out_bias=out, norm=self.mamba_rms_norm) + attention

    def problems(self) -> list[str]:
        found = super().problems() + above_zero(self, "key_multiplier")
        for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            if len(given := getattr(self, name)) != count:
                found.append(f"{name} has {len(given)} numbers: it must have {count}")
        if self.mamba_rms_norm and self.mamba_norm_before_gate:
            found.append("mamba_norm_before_gate is true, and transformers' kernels norm behind the gate: say false")
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            if values.get(name) is None:
                values[name] = (1.0,) * count
        return super()._derive(values)


_EACH = {
    "num_key_value_heads": 2,
    "mamba_d_head": 64,
    "mamba_norm_before_gate": False,
    "max_position_embeddings": 16384,
    "rope_theta": 1e11,
    "ssm_in_multiplier": 1.25,
}

PRESETS = {
    "falcon_h1-tiny": tiny(mamba_d_ssm=96, mamba_n_heads=8, mamba_d_state=16, key_multiplier=0.5),
    "falcon-h1-0.5b": _EACH
    | shape(1024, 2048, 36, 8)
    | {"vocab_size": 32784, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 128}
    | {"embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625}
    | {"key_multiplier": 0.39062499999999994}
    | {"attention_out_multiplier": 0.9375, "ssm_out_multiplier": 0.23570226039551587}
    | {"mlp_multipliers": [0.8838834764831844, 0.5859375]}
    | {"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]},
}
