"""Ling 3.0 (inclusionAI 2026): the gated delta rule with a bounded gate for each channel in five layers of six, latent
attention whose heads are weighed in the sixth, and experts that are chosen as DeepSeek-V3's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.models.anatomy import FULL, LINEAR, Anatomy
from megacore.models.experts_config import TypedLayersConfig
from megacore.models.families.kimi_linear import KimiLinearConfig
from megacore.models.latent_config import LatentConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.presets import shape, tiny_latent
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import FADES, STATE_QKV, STATE_VALUES, STEPS, Rows, Table, in_layers


@dataclass(frozen=True, kw_only=True)
class BailingHybridConfig(HybridConfig, LatentConfig, TypedLayersConfig):
    """transformers 5.23 takes ``head_dim`` for that of the delta rule, and saves another one by this name: that of the
    part of latent attention which turns. Files that it has saved say the former in ``linear_head_dim``."""

    family = "bailing_hybrid"
    architecture = "BailingHybridForCausalLM"
    other = LINEAR
    interval = "layer_group_size"
    # Of predicting further tokens, which transformers leaves out, and what follows.
    harmless = TypedLayersConfig.harmless | {
        "linear_conv_kernel_dim", "linear_num_heads", "mtp_loss_scaling_factor", "num_mtp_layers", "pretraining_tp",
    }  # fmt: skip
    fixed = {"q_lora_rank": None}
    derived = LatentConfig.derived | {"num_nextn_predict_layers"}
    saved = KimiLinearConfig.saved
    spellings = {"num_local_experts": "n_routed_experts"}
    axes = {
        **LatentConfig.axes,
        **TypedLayersConfig.axes,
        "head": "qk_head_dim",
        "state_heads": "num_attention_heads",
        **dict.fromkeys(("state_key", "state_value"), "linear_head_dim"),
        "taps": "short_conv_kernel_size",
    }
    tied = ("model.word_embeddings.weight", "lm_head.weight")
    rope_convention = Convention(rope_theta=6e6)
    correction = "mlp.gate.expert_bias"
    constants = {"delta_gate": "sigmoid"}
    mtp_layers = 0

    pad_token_id: int | None = 156892
    max_position_embeddings: int = 262144
    q_lora_rank: int | None = None
    moe_intermediate_size: int = 768
    n_routed_experts: int = 512
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = field(default=2, compare=False)  # which mlp_layer_types says
    linear_head_dim: int = 128
    short_conv_kernel_size: int = 4
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0

    def attends(self, layer: int) -> bool:
        return (layer + 1) % 6 == 0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "each": 1}

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(delta_least=self.kda_lower_bound if self.kda_safe_gate else None, **own)

    def mixer(self, t: Table) -> Rows:
        named = {"hf": "attention", "out": "dense", "gate": "g_proj"}
        latent = t.latent_attention(latent_queries=False, bias=self.attention_bias, pairs=True, **named)
        return in_layers(self.layers_of(LINEAR), self.delta_rule(t)) + in_layers(self.layers_of(FULL), latent)

    def delta_rule(self, t: Table) -> Rows:
        """Return the rows of the layers that follow the delta rule."""
        keys = "state_heads each state_key"
        inner = f"({STATE_QKV} + z: {STATE_VALUES} + b: state_heads each + f: {keys})"
        return (
            *t.linear("delta.inner", inner, "embed", "attention.{q,k,v,g,b,f}_proj"),
            *t.convolution("delta.conv", f"({STATE_QKV})", "attention.{q,k,v}_conv1d"),
            t.row("delta.fade", "(state_heads each)", "attention.A_log", **FADES),
            t.row("delta.fade_bias", f"({keys})", "attention.dt_bias", **STEPS),
            *t.norm("delta.norm", "attention.o_norm", "state_value"),
            *t.linear("delta.out", "embed", f"({STATE_VALUES})", "attention.dense", ends=True),
        )

    def problems(self) -> list[str]:
        above = self.kda_safe_gate and not self.kda_lower_bound < 0
        return super().problems() + [f"kda_lower_bound is {self.kda_lower_bound}: it must be below 0"] * above

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The class always has a rope_theta, which counts where rope_parameters say nothing.
        said = config.get("rope_parameters") is not None
        named = cls._respelled(config).items()
        return super()._read_ropes({name: each for name, each in named if name != "rope_theta" or not said})

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        own = config.get("linear_head_dim") or config.get("head_dim")
        said = {**config, "head_dim": None} | ({} if own is None else {"linear_head_dim": own})
        values, problems = super()._read(said)
        # transformers' class ties nothing, whatever a file says; and it leaves out what predicts further tokens.
        return values | {"tie_word_embeddings": False, "num_nextn_predict_layers": 0}, problems

    def _write(self) -> dict[str, Any]:
        written = super()._write()
        return written | {"head_dim": written.pop("linear_head_dim")}


PRESETS = {
    "bailing_hybrid-tiny": tiny_latent(96, moe_intermediate_size=32, num_experts=16, num_experts_per_token=4)
    | {"q_lora_rank": None, "head_dim": 16, "pad_token_id": None, "num_hidden_layers": 4, "layer_group_size": 2}
    | {"first_k_dense_replace": 1, "num_expert_group": 4, "topk_group": 2},
    "ling-3.0-flash": shape(2560, 6144, 42, 32) | {"vocab_size": 157184},
}
