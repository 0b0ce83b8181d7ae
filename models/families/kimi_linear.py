"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692): the gated delta rule with a gate for each channel in three layers of
four, latent attention without a rope in the fourth, and experts that are chosen as DeepSeek-V3's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.models.anatomy import FULL, LINEAR
from megacore.models.config import Shapes
from megacore.models.experts_config import TypedLayersConfig
from megacore.models.latent_config import LatentConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.presets import shape, tiny_latent
from megacore.models.weight_rows import FADES, STATE_QKV, STEPS, Rows, Table, in_layers
from megacore.parallel import limits

_MOE, _TABLE = "block_sparse_moe", "linear_attn_config"
# What published files say of layers with a state in a table: sizes, and the numbers of the layers, from 1.
_SIZES = {
    f"{_TABLE}.head_dim": "linear_head_dim",
    f"{_TABLE}.num_heads": "linear_num_heads",
    f"{_TABLE}.short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LAYERS = f"{_TABLE}.full_attn_layers", f"{_TABLE}.kda_layers"


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(NoRopeConfig, HybridConfig, LatentConfig, TypedLayersConfig):
    family = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    by_tensors = frozenset({"dense_name"})
    reads = frozenset({_TABLE})
    other = LINEAR
    # What the class computes, and the name of networks of layers without experts, which a folder's tensors tell.
    derived = LatentConfig.derived | {"rope_parameters", "dense_name"}
    harmless = TypedLayersConfig.harmless | {"pretraining_tp", "rope_scaling", "rope_theta"}
    fixed = {
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
    }
    saved = {
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
    }
    spellings = {**_SIZES, "num_local_experts": "n_routed_experts"}
    axes = {
        **LatentConfig.axes,
        **TypedLayersConfig.axes,
        "head": "qk_head_dim",
        "state_heads": "linear_num_heads",
        **dict.fromkeys(("state_key", "state_value", "state_latent"), "linear_head_dim"),
        "taps": "linear_conv_kernel_dim",
    }
    correction = f"{_MOE}.gate.e_score_correction_bias"
    constants = {"norm": "rms", "delta_gate": "sigmoid"}

    pad_token_id: int | None = 163839
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = None
    moe_intermediate_size: int = 1024
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int = field(default=1, compare=False)  # which mlp_layer_types says
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4
    dense_name: str = _MOE

    def attends(self, layer: int) -> bool:
        return layer > 0 and layer % 4 == 0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **dict.fromkeys(("each", "row", "column"), 1)}

    def rope_problems(self) -> list[str]:
        rest = f"qk_rope_head_dim is {self.qk_rope_head_dim}: it must be even, though nothing of it turns"
        return [rest] * (self.qk_rope_head_dim % 2)

    def mixer(self, t: Table) -> Rows:
        return in_layers(self.layers_of(LINEAR), self.delta_rule(t)) + in_layers(self.layers_of(FULL), super().mixer(t))

    def delta_rule(self, t: Table) -> Rows:
        """Return the rows of the layers that follow the delta rule."""
        keys, values = (f"(state_heads each state_{of})" for of in ("key", "value"))
        qkv, heads, latent = f"{STATE_QKV} + b: state_heads each", "one row (state_heads each) column", "state_latent"
        return (
            *t.linear("delta.inner", f"({qkv})", "embed", "self_attn.{q,k,v,b}_proj"),
            *t.linear("delta.fades_a", latent, "embed", "self_attn.f_a_proj"),
            *t.linear("delta.fades_b", keys, latent, "self_attn.f_b_proj"),
            *t.linear("delta.gates_a", latent, "embed", "self_attn.g_a_proj"),
            *t.linear("delta.gates_b", values, latent, "self_attn.g_b_proj"),
            *t.convolution("delta.conv", f"({STATE_QKV})", "self_attn.{q,k,v}_conv1d"),
            t.row("delta.fade", heads, "self_attn.A_log", vector=True, **FADES),
            t.row("delta.fade_bias", keys, "self_attn.dt_bias", **STEPS),
            *t.norm("delta.norm", "self_attn.o_norm", "state_value"),
            *t.linear("delta.out", "embed", values, "self_attn.o_proj", ends=True),
        )

    def network(self, t: Table) -> Rows:
        dense = t.gated_mlp(f"{self.dense_name}.{{gate,up}}_proj", f"{self.dense_name}.down_proj")
        return self.feed_forward(t, self.experts(t), dense)

    def experts(self, t: Table) -> Rows:
        of = f"{_MOE}.experts.{{experts}}"
        experts = t.experts(hf=f"{of}.{{w1,w3}}", down=f"{of}.w2", router=f"{_MOE}.gate", correction=self.correction)
        return experts + t.shared_expert(f"{_MOE}.shared_experts")

    @classmethod
    def as_held(cls, raw: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], str | None]:
        made, told = super().as_held(raw, shapes)
        published = any(name.endswith(".mlp.down_proj.weight") for name in shapes)
        return made | ({"dense_name": "mlp"} if published else {}), told

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        table, layers = config.get(_TABLE) or {}, config.get("num_hidden_layers")
        told = {f"{_TABLE}.{name}": value for name, value in table.items()} if isinstance(table, Mapping) else table
        if not isinstance(told, Mapping) or told.keys() - {*_SIZES, *_LAYERS}:
            return {}, [f"{_TABLE} is {table!r}: it may say {', '.join((*_SIZES, *_LAYERS))}, and nothing else"]
        # transformers' class reads no head_dim, and published files have another.
        said = {**config, **told, "head_dim": None}
        full, linear = (found if isinstance(found := told.get(name), list) else [] for name in _LAYERS)
        if full + linear and isinstance(layers, int) and layers <= limits.LAYERS and not config.get("layer_types"):
            kinds = (FULL if layer in full else LINEAR if layer in linear else "none" for layer in range(1, layers + 1))
            said["layer_types"] = [*kinds]
        values, problems = super()._read(said)
        values["tie_word_embeddings"] = False  # transformers' class ties nothing, whatever a file says
        return values, problems


PRESETS = {
    "kimi_linear-tiny": tiny_latent(96, moe_intermediate_size=32, num_experts=16, num_experts_per_token=4)
    | {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4, "pad_token_id": None, "num_hidden_layers": 5},
    "kimi-linear-48b-a3b": shape(2304, 9216, 27, 32)
    | {"vocab_size": 163840, "model_max_length": 1048576}
    | {"layer_types": [*[LINEAR, LINEAR, LINEAR, FULL] * 6, LINEAR, LINEAR, FULL]},
}
