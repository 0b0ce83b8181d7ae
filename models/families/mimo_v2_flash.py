"""MiMo-V2-Flash (Xiaomi 2026): experts, and windows with sinks and twice the heads of keys of other layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.models.anatomy import FULL, SLIDING, Anatomy, Factors
from megacore.models.experts_config import TypedLayersConfig
from megacore.models.layer_types import PatternedConfig
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.mtp import MIMO
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, in_layers

# Published files say by numbers of what kind layers are, how many tokens before one a window has, and the sizes of its
# heads; what says nothing is null.
_PATTERNS = {
    "hybrid_layer_pattern": ("layer_types", (FULL, SLIDING)),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}
_BEFORE, _NULL = "sliding_window_size", ("n_shared_experts", "routed_scaling_factor")
_SAME = "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"


@dataclass(frozen=True, kw_only=True)
class MimoV2FlashConfig(LocalRopeConfig, PatternedConfig, TypedLayersConfig):
    family = "mimo_v2_flash"
    architecture = "MiMoV2FlashForCausalLM"
    further = ("model.mtp.",)
    reads = frozenset({*_PATTERNS, _BEFORE, *(f"swa_{name}" for name in _SAME)})
    mtp_names = MIMO
    derived = frozenset({"n_shared_experts"})  # no expert is shared
    harmless = TypedLayersConfig.harmless | {"attention_chunk_size", "hybrid_block_size"}
    fixed = {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    defaults = {"num_key_value_heads": 4, "head_dim": 192}
    spellings = {"layernorm_epsilon": "rms_norm_eps"}
    axes = {
        **{axis: name for axis, name in TypedLayersConfig.axes.items() if axis != "shared_mlp"},
        "value": "v_head_dim",
        "local_kv": "local_key_value_heads",
    }
    rope_kinds = {
        FULL: Convention(rope_theta=5e6, partial_rotary_factor=0.334),
        SLIDING: Convention(theta_key="swa_rope_theta", partial_rotary_factor=0.334),
    }
    pattern = 6

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    v_head_dim: int = 128
    attention_value_scale: float | None = 0.707
    sliding_window: int | None = 129
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 0
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = field(default=1, compare=False)  # which mlp_layer_types says

    @property
    def local_key_value_heads(self) -> int:
        """Heads of keys and values in layers with windows."""
        return 2 * self.num_key_value_heads

    @property
    def mtp_block(self) -> int:
        return max(self.layers_of(SLIDING), default=0)

    def mtp_rows(self, rows: Rows) -> Rows:
        """Return those of a layer with a window and without experts, whose second norm has another name."""
        t = self.table()
        norms = t.norm("attn_norm", "input_layernorm"), t.norm("mlp_norm", "pre_mlp_layernorm")
        return norms[0] + self.windowed(t) + norms[1] + t.gated_mlp()

    def slides(self, layer: int) -> bool:
        return layer > 0 and super().slides(layer)

    def anatomy_of(self, **own: Any) -> Anatomy:
        scale = Factors(gives=1.0 if self.attention_value_scale is None else self.attention_value_scale)
        return super().anatomy_of(factors={"attn": scale, "local_attn": scale}, **own)

    def attention(self, t: Table, name: str, kv: str) -> Rows:
        """Return the rows of an attention of this name whose heads of keys are those of this axis."""
        here = f"(q: heads head + k: {kv} head + v: {kv} value)"
        return t.attention(name=name, here=here, heads="(heads value)", bias=self.attention_bias)

    def windowed(self, t: Table) -> Rows:
        """Return the rows of the attention of layers with windows."""
        sinks = t.sinks("self_attn.attention_sink_bias", name="local_attn")
        return self.attention(t, "local_attn", "local_kv") + sinks

    def mixer(self, t: Table) -> Rows:
        full = in_layers(self.layers_of(FULL), self.attention(t, "attn", "kv"))
        return full + in_layers(self.layers_of(SLIDING), self.windowed(t))

    def experts(self, t: Table) -> Rows:
        return t.experts(correction=self.correction)

    def problems(self) -> list[str]:
        found, heads, local = super().problems(), self.num_attention_heads, self.local_key_value_heads
        if not found and heads % local:
            found.append(f"num_attention_heads ({heads}) is not a multiple of {local}, twice num_key_value_heads")
        if self.mtp_layers and SLIDING not in self.kinds:
            found.append("layer_types: a layer must have a window where further tokens are predicted")
        if self.v_head_dim > self.head_dim:
            found.append(f"v_head_dim is {self.v_head_dim}: it may be up to head_dim ({self.head_dim})")
        return found

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        said = {name: value for name, value in config.items() if name not in _NULL or value is not None}
        for name, (field_name, words) in _PATTERNS.items():
            if isinstance(each := config.get(name), list) and config.get(field_name) is None:
                said[field_name] = [words[bool(number)] for number in each]
        if isinstance(before := config.get(_BEFORE), int):
            said["sliding_window"] = before + 1  # the token itself, too
        values, problems = super()._read(said)
        for name in _SAME:
            own, theirs = values.get(name, getattr(cls, name, None)), config.get(f"swa_{name}")
            own = 2 * own if name == "num_key_value_heads" and isinstance(own, int) else own
            if theirs not in (None, own):
                problems.append(f"swa_{name} is {theirs!r}: {cls.architecture} takes {own!r}")
        return values, problems


PRESETS = {
    "mimo_v2_flash-tiny": tiny(96, head_dim=24, v_head_dim=16, sliding_window=128, moe_intermediate_size=32)
    | {"n_routed_experts": 16, "num_experts_per_tok": 4},
    "mimo-v2-flash": shape(4096, 16384, 48, 64)
    | {"vocab_size": 152576, "num_key_value_heads": 4, "head_dim": 192, "max_position_embeddings": 262144},
}
