"""OLMo Hybrid (Ai2 2026): the gated delta rule in three layers of four, with shares up to 2, and in the fourth OLMo 3's
attention, mostly without a rope.

Published files have the convolutions of queries, of keys and of values, as they are written here; transformers 5.23
reads these, and saves the three in equal parts, which are those only where values are as wide as keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import FULL, LINEAR, ROPE, Anatomy, LayerAttention
from megacore.models.config import ModelConfigError, Shapes
from megacore.models.delta_config import DELTA_INNER, DeltaConfig
from megacore.models.presets import STATES, shape, tiny
from megacore.models.rope_config import PLAIN
from megacore.models.weight_rows import OF_ALL, Rows, Table, in_layers
from megacore.parallel.weights.schema import Param

_NOPE = {"rope_type": "default", "rope_theta": None}
_NORM, _PUBLISHED_NORM = "feedforward_layer_norm", "post_attention_layernorm"


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DeltaConfig):
    family = "olmo_hybrid"
    architecture = "OlmoHybridForCausalLM"
    interval = None
    # Whether heads turn follows from the rope, and the name of a norm of layers that attend from a folder's tensors.
    derived = frozenset({"attended_norm", "head_dim", "rotates"})
    # Of initial values.
    harmless = frozenset(f"linear_{name}" for name in ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min"))
    defaults = {}
    rope_convention = PLAIN
    constants = {"norm_offset": 0.0, "delta_norm_eps": 1e-5}
    by_tensors = frozenset({"attended_norm"})
    further = ()

    pad_token_id: int | None = 100277
    linear_allow_neg_eigval: bool = True
    rotates: bool = True
    attended_norm: str = _NORM

    def attends(self, layer: int) -> bool:
        return layer % 4 == 3 or layer == self.num_hidden_layers - 1 < 3

    def anatomy_of(self, **own: Any) -> Anatomy:
        layers = (LayerAttention(ROPE if self.rotates else None),) * self.num_hidden_layers
        positions = {"layers": layers} if self.rotates else {"layers": layers, "ropes": {}}
        return super().anatomy_of(delta_share=2.0 if self.linear_allow_neg_eigval else 1.0, **positions, **own)

    def delta_rule(self, t: Table) -> Rows:
        return t.delta_rule(f"({DELTA_INNER})", "{q,k,v,g,b,a}_proj", "{q,k,v}_conv1d", "o_norm", "o_proj")

    def params(self) -> tuple[Param, ...]:
        t, bias = self.table(), self.attention_bias
        return t.model(
            in_layers(self.layers_of(LINEAR), t.norm("attn_norm", "attention_layer_norm") + self.delta_rule(t)),
            in_layers(self.layers_of(LINEAR), t.norm("mlp_norm", _NORM)),
            in_layers(self.layers_of(FULL), t.attention(bias=bias, out_bias=bias) + t.norms_of_heads(of=OF_ALL)),
            in_layers(self.layers_of(FULL), t.norm("attn_out_norm", self.attended_norm)),
            in_layers(self.layers_of(FULL), t.norm("mlp_out_norm", "post_feedforward_layernorm")),
            t.gated_mlp(),
            **self.ends,
        )

    def problems(self) -> list[str]:
        alike = len({*self.kinds}) == 1
        return super().problems() + ["layer_types names one kind of layers: its class takes both"] * alike

    @classmethod
    def as_held(cls, raw: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], str | None]:
        made, told = super().as_held(raw, shapes)
        own, rows = cls.from_hugging_face(raw), {name: shape[0] for name, shape in shapes.items() if shape}
        held = {name.rpartition(".linear_attn.")[2]: size for name, size in rows.items()}
        keys = own.linear_num_key_heads * own.linear_key_head_dim
        wanted = [keys, keys, own.linear_num_value_heads * own.linear_value_head_dim]
        found = [held.get(f"{each}_conv1d.weight", 0) for each in "qkv"]
        if found != wanted and sum(found) == sum(wanted):
            problem = f"{{q,k,v}}_conv1d have {found} channels, as transformers 5.23 cuts them when it saves"
            raise ModelConfigError(cls.family, [f"{problem}: concatenate them and cut them into {wanted}"])
        published = any(name.endswith(f".{_PUBLISHED_NORM}.weight") for name in shapes)
        return made | ({"attended_norm": _PUBLISHED_NORM} if published else {}), told

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        problems = super()._derive(values)
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            values[name] = values.get(name) or heads
        keys = values["linear_num_key_heads"]
        if values.get("linear_key_head_dim") is None and isinstance(hidden, int) and isinstance(keys, int) and keys:
            values["linear_key_head_dim"] = int(0.75 * hidden / keys)
        if values.get("linear_value_head_dim") is None and isinstance(key := values.get("linear_key_head_dim"), int):
            values["linear_value_head_dim"] = 2 * key
        return problems

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        said = config.get("rope_parameters") or config
        still = isinstance(said, Mapping) and "rope_theta" in said and said["rope_theta"] is None
        return {**super()._read_ropes(config), "rotates": not still}

    def _write(self) -> dict[str, Any]:
        return super()._write() | ({} if self.rotates else {"rope_parameters": _NOPE})


_EACH = {"rms_norm_eps": 1e-6, "rope_parameters": _NOPE}

PRESETS = {
    "olmo_hybrid-tiny": _EACH | tiny(pad_token_id=None) | STATES,
    "olmo-hybrid-7b": _EACH
    | shape(3840, 11008, 32, 30, vocab_size=100352, max_position_embeddings=65536, linear_key_head_dim=96),
}
