"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624): layers of one branch, a state space (Mamba-2), attention, a network or
experts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import FULL, LINEAR, Anatomy
from megacore.models.config import positive
from megacore.models.experts_config import grouped_sigmoids
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.presets import shape, tiny
from megacore.models.ssm_config import StateSpaceConfig
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param

_MLP, _MOE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(StateSpaceConfig, NoRopeConfig):
    family = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    further = ("mtp.",)
    reads = frozenset({"hybrid_override_pattern"})
    base_model_prefix = "backbone"
    tied = ("backbone.embeddings.weight", "lm_head.weight")
    more = (_MLP, _MOE)
    derived = frozenset({"rope_parameters"})
    eps = "layer_norm_epsilon"
    # Of kernels, initial values, and layers behind the model; time_step_limit is not what bounds the steps.
    harmless = frozenset(
        {
            "chunk_size", "mamba_chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts", "num_logits_to_keep",
            "num_nextn_predict_layers", "output_router_logits", "rescale_prenorm_residual", "residual_in_fp32",
            "sliding_window", "time_step_floor", "time_step_max", "use_mamba_kernels",
        }
    )  # fmt: skip
    fixed = {"attention_bias": False, "hidden_dropout": 0.0, "moe_latent_size": None}
    written = {"num_nextn_predict_layers": 0}
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "layer_types": [LINEAR, _MOE, FULL, _MLP],
        "mamba_d_head": 64,
    }
    saved = {
        "layer_types": "layers_block_type",
        "hidden_act": "mlp_hidden_act",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_conv_bias": "use_conv_bias",
    }
    layer = "backbone.layers.{layer}"
    last_norm = "backbone.norm_f"
    constants = {"norm": "rms", "padding_idx": None}
    told = {"mixer_activation": "mamba_hidden_act"}

    max_position_embeddings: int = 4096
    layer_norm_epsilon: float = 1e-5
    pad_token_id: int | None = 0
    hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    mamba_n_groups: int = 8
    mamba_d_state: int = 128
    mlp_bias: bool = False
    use_bias: bool = False
    time_step_min: float = 0.001
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int = 7688
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def inner(self) -> int:
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def routing(self) -> Routing | None:
        """The rule by which experts are chosen, where layers have some."""
        return grouped_sigmoids(self) if _MOE in self.kinds else None

    @property
    def sizes(self) -> Mapping[str, int]:
        experts = {
            "experts": self.n_routed_experts,
            "routes": self.n_routed_experts,
            "expert_mlp": self.moe_intermediate_size,
            "shared_mlp": self.moe_shared_expert_intermediate_size,
        }
        return {**super().sizes, **(experts if _MOE in self.kinds else {})}

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(routing=self.routing, step_limits=(self.time_step_min, math.inf), **own)

    def experts(self, t: Table) -> Rows:
        """Return the rows of the experts, and of the one that every token goes to."""
        experts = t.experts(
            hf="mixer.experts.{experts}.up_proj",
            down="mixer.experts.{experts}.down_proj",
            router="mixer.gate",
            correction="mixer.gate.e_score_correction_bias",
            held=("mixer.experts", "mixer.gate"),
            gated=False,
        )
        return experts + t.shared_expert("mixer.shared_experts", bias=self.mlp_bias, gated=False, up="up_proj")

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        ssm, attending, dense, sparse = map(self.layers_of, _LETTERS.values())
        attention = t.attention(hf="mixer.{q,k,v}_proj", out="mixer.o_proj")
        network = t.plain_mlp("mixer.up_proj", "mixer.down_proj", bias=self.mlp_bias)
        return t.model(
            in_layers(ssm + attending, t.norm("attn_norm", "norm")),
            in_layers(ssm, t.state_space("mixer", bias=self.use_bias, conv_bias=self.mamba_conv_bias)),
            in_layers(attending, attention),
            in_layers(dense + sparse, t.norm("mlp_norm", "norm")),
            in_layers(dense, network),
            in_layers(sparse, self.experts(t)),
            **self.ends,
        )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.mamba_hidden_act not in self.activations:
            found.append(f"mamba_hidden_act {self.mamba_hidden_act!r} is not one of {', '.join(self.activations)}")
        if _MOE in self.kinds:
            found += positive(self, "moe_intermediate_size", "moe_shared_expert_intermediate_size")
        return found + list(self.routing.problems() if self.routing else ())

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        letters = config.get("hybrid_override_pattern")
        if isinstance(letters, str) and config.get("layers_block_type") is None:
            if unknown := {*letters} - _LETTERS.keys():
                return {}, [f"hybrid_override_pattern has {', '.join(sorted(unknown))}: only M, *, - and E are known"]
            config = {**config, "layers_block_type": [_LETTERS[letter] for letter in letters]}
        values, problems = super()._read(config)
        values["tie_word_embeddings"] = False  # transformers' class ties nothing, whatever a file says
        if isinstance(values.get("layer_types"), tuple):
            values.setdefault("num_hidden_layers", len(values["layer_types"]))
        return values, problems


_EACH = {"vocab_size": 131072, "num_key_value_heads": 8, "max_position_embeddings": 8192}

PRESETS = {
    "nemotron_h-tiny": tiny(layers=5, head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2)
    | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "hybrid_override_pattern": "ME*M-"},
    "nemotron-h-8b": _EACH
    | shape(4096, 21504, 52, 32, hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    "nemotron-3-nano-30b-a3b": shape(2688, 1856, 52, 32)
    | {"vocab_size": 131072, "num_key_value_heads": 2, "max_position_embeddings": 262144, "mamba_num_heads": 64}
    | {"n_routed_experts": 128, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5}
    | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
    | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
}
