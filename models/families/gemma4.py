"""Gemma 4, its text models (Google 2026): other heads where a layer sees all, and experts beside the network."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.models.anatomy import FULL, SLIDING, Anatomy
from megacore.models.config import above_zero, positive
from megacore.models.families.gemma import GemmaConfig
from megacore.models.families.gemma3 import Gemma3Config
from megacore.models.local_rope import LocalHeadsConfig, LocalRopeConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, in_layers
from megacore.parallel import limits
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param

# The last one of so many layers sees all, where a file names none.
_EVERY = 6


@dataclass(frozen=True, kw_only=True)
class SharedKeysConfig(GemmaConfig, LocalRopeConfig):
    """Layers are told of tokens by embeddings of their own, and the last ones look at others' keys and values."""

    of_text = True
    harmless = frozenset()
    fixed = {}
    saved = {"hidden_act": "hidden_activation"}
    constants = {
        "attention_scale": 1.0,
        "norm_offset": 0.0,
        "both_ways": None,
        "plain_norms": frozenset({"attn.v_norm"}),
    }
    told = {"logit_softcap": "final_logit_softcapping"}
    parts = Gemma3Config.parts
    without = "layers that look at the keys and values of another one have none of their own"

    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    # Embeddings of each layer's own; 0: there are none.
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144
    # The last layers look at the keys and values of the last one of their kind before them.
    num_kv_shared_layers: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        told = {"input": self.hidden_size_per_layer_input, "input_vocab": self.vocab_size_per_layer_input}
        return {**super().sizes, **(told if self.hidden_size_per_layer_input else {})}

    @property
    def keys(self) -> Mapping[int, int]:
        """The layers that share keys and values, each with that whose they are."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        last = {kind: layer for layer, kind in enumerate(self.kinds[:first])}
        return {layer: last[kind] for layer, kind in enumerate(self.kinds) if layer >= first}

    def anatomy_of(self, **own: Any) -> Anatomy:
        made = super().anatomy_of(**own)
        layers = (replace(each, keys=self.keys.get(layer)) for layer, each in enumerate(made.layers))
        return replace(made, layers=tuple(layers))

    def attention_of(self, t: Table, layers: Collection[int], local: str = "", pieces: str = "qkv") -> Rows:
        """Return the rows of the attention of some layers, without ``v`` where keys are the values, too."""
        bias, name, head = self.attention_bias, f"{local}attn", f"{local}head"
        axes = {"q": f"heads {head}", "k": f"{local}kv {head}", "v": f"{local}kv {head}"}
        here = " + ".join(f"{piece}: {axes[piece]}" for piece in pieces)
        hf, q = f"self_attn.{{{','.join(pieces)}}}_proj", f"({axes['q']})"
        sharing = {*layers} & self.keys.keys()
        k_norm = t.norm(f"{name}.k_norm", "self_attn.k_norm", head)
        return (
            *in_layers({*layers} - sharing, t.linear(f"{name}.qkv", f"({here})", "embed", hf, bias=bias) + k_norm),
            *in_layers(sharing, t.linear(f"{name}.q", q, "embed", "self_attn.q_proj", bias=bias)),
            *t.linear(f"{name}.out", "embed", q, "self_attn.o_proj", bias=bias, ends=True),
            *t.norm(f"{name}.q_norm", "self_attn.q_norm", head),
        )

    def params(self) -> tuple[Param, ...]:
        return *super().params(), *(self.table().layer_inputs() if self.hidden_size_per_layer_input else ())

    @property
    def left_out(self) -> tuple[str, ...]:
        # Published files have what nothing multiplies.
        unused = ("k_proj.", "v_proj.", "k_norm.")
        return tuple(f"{self.layer.format(layer=layer)}.self_attn.{each}" for layer in self.keys for each in unused)

    def problems(self) -> list[str]:
        found = super().problems() + above_zero(self, "final_logit_softcapping")
        if self.hidden_size_per_layer_input < 0:
            found.append(f"hidden_size_per_layer_input is {self.hidden_size_per_layer_input}: it must be at least 0")
        elif self.hidden_size_per_layer_input:
            rows, padding = self.vocab_size_per_layer_input, self.pad_token_id or 0
            found += positive(self, "vocab_size_per_layer_input")
            if padding >= max(rows, 1):
                found.append(
                    f"pad_token_id is {padding}: it must be below vocab_size_per_layer_input ({rows}), or null"
                )
        shared, layers = self.num_kv_shared_layers, self.num_hidden_layers
        if not 0 <= shared < layers:
            found.append(f"num_kv_shared_layers is {shared}: it must be at least 0, and below {layers}, the layers")
        elif alone := sorted({*self.kinds} - {*self.kinds[: layers - shared]}):
            found.append(
                f"num_kv_shared_layers is {shared}: no layer before those is of {', '.join(alone)}, as some are"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharedKeysConfig, LocalHeadsConfig):
    family = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    reads = frozenset({"per_layer_config"})
    defaults = {**Gemma3Config.defaults, "vocab_size": 262144}
    axes = {
        **GemmaConfig.axes,
        "head": "global_head_dim",
        "kv": "global_kv",
        **{f"local_{axis}": GemmaConfig.axes[axis] for axis in ("kv", "head")},
    }
    rope_kinds = {
        FULL: Convention(parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}),
        SLIDING: Convention(),
    }

    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    # Tokens of images may look at those behind them, of which text has none.
    use_bidirectional_attention: str | None = None
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    use_double_wide_mlp: bool = False

    @property
    def global_kv(self) -> int:
        """Heads of keys in the layers that see all."""
        return (self.attention_k_eq_v and self.num_global_key_value_heads) or self.num_key_value_heads

    @property
    def sizes(self) -> Mapping[str, int]:
        sizes = {**super().sizes}
        if self.enable_moe_block:
            experts, hidden = self.num_experts or 0, self.moe_intermediate_size or 0
            sizes |= {"experts": experts, "routes": experts, "expert_mlp": hidden, "shared_mlp": sizes.pop("mlp")}
        return sizes | {"wide": 2}

    @property
    def routing(self) -> Routing | None:
        """The rule by which experts are chosen, where there are some."""
        experts, top_k, factor = self.num_experts or 0, self.top_k_experts or 0, self.hidden_size**-0.5
        many = self.enable_moe_block
        return Routing(experts=experts, top_k=top_k, logit_factor=factor, normalised=True) if many else None

    def anatomy_of(self, **own: Any) -> Anatomy:
        looks = None if self.use_bidirectional_attention is None else "images in windows"
        return super().anatomy_of(routing=self.routing, both_ways=looks, **own)

    def slides(self, layer: int) -> bool:
        return (layer + 1) % _EVERY > 0

    def attention(self, t: Table, kind: str) -> Rows:
        pieces = "qk" if self.attention_k_eq_v and kind == FULL else "qkv"
        return self.attention_of(t, self.layers_of(kind), "local_" if kind == SLIDING else "", pieces)

    def network(self, t: Table) -> Rows:
        if not self.enable_moe_block:
            sharing = self.keys.keys() if self.use_double_wide_mlp else set()
            wide, theirs = "(gate: wide mlp + up: wide mlp)", "mlp.{gate,up}_proj"
            return (
                *in_layers({*range(self.num_hidden_layers)} - sharing, t.gated_mlp()),
                *in_layers(sharing, t.linear("wide_mlp.up", wide, "embed", theirs)),
                *in_layers(sharing, t.linear("wide_mlp.down", "embed", "(wide mlp)", "mlp.down_proj", ends=True)),
            )
        return (
            *t.shared_expert("mlp"),
            *t.norm("mlp.shared_out_norm", "post_feedforward_layernorm_1"),
            *t.norm("mlp.experts_norm", "pre_feedforward_layernorm_2"),
            *t.norm("mlp.experts_out_norm", "post_feedforward_layernorm_2"),
            *t.linear("mlp.router", "routes", "embed", "router.proj"),
            t.row("mlp.router_norm.weight", "embed", "router.scale", mean=1.0, vector=True),
            t.row("mlp.router.scale", "routes", "router.per_expert_scale", mean=1.0, vector=True),
            *t.stacked_experts(hf="experts", outputs_first=True),
        )

    def params(self) -> tuple[Param, ...]:
        factor = self.table().row("factor", "one", "layer_scalar", mean=1.0, buffer=True)
        # What stands before the network is of it alone where there are experts beside it.
        place = "mlp.shared_norm" if self.enable_moe_block else "mlp_norm"
        return *(replace(row, name=row.name.replace("mlp_norm", place)) for row in super().params()), factor

    def problems(self) -> list[str]:
        found = super().problems() + above_zero(self, "num_global_key_value_heads")
        if self.use_bidirectional_attention not in (None, "vision"):
            seen = self.use_bidirectional_attention
            found.append(f"use_bidirectional_attention is {seen!r}: only 'vision', or null, leaves text as it is")
        if self.use_double_wide_mlp and self.enable_moe_block:
            found.append("use_double_wide_mlp and enable_moe_block: no model has both, set one of them to false")
        if self.enable_moe_block and not found:
            given = {name: getattr(self, name) or 0 for name in ("num_experts", "moe_intermediate_size")}
            found += [f"{name} is {n}: it must be at least 1" for name, n in given.items() if n < 1]
            found += (self.routing or Routing(experts=1, top_k=1)).problems()
        return found

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        layers, kinds = values.get("num_hidden_layers"), values.get("layer_types")
        if kinds is None and isinstance(layers, int) and layers <= limits.LAYERS:
            kinds = tuple(SLIDING if (layer + 1) % _EVERY else FULL for layer in range(layers))
        if isinstance(kinds, tuple) and kinds:
            values["layer_types"] = kinds = (*kinds[:-1], FULL)  # as their class has it, whatever a file says
        if (said := config.get("per_layer_config")) is None:
            return values, problems
        # What transformers saves in place of the sizes of layers that see all, where they are others.
        each = {str(layer).lstrip("0") or "0": own for layer, own in said.items()} if isinstance(said, Mapping) else {}
        own: Any = next(iter(each.values()), {})
        full = [str(layer) for layer, kind in enumerate(kinds if isinstance(kinds, tuple) else ()) if kind == FULL]
        known = {"head_dim"} | ({"num_key_value_heads"} if values.get("attention_k_eq_v") else set())
        alike = each == (dict.fromkeys(full, own) if own else {})
        if not alike or not isinstance(own, Mapping) or not known.issuperset(own):
            only = f"only the layers of {FULL} may have another {' and '.join(sorted(known))}"
            return values, [*problems, f"per_layer_config is {said!r}: {only}, and all the same"]
        values["global_head_dim"] = own.get("head_dim", values.get("head_dim"))
        values["num_global_key_value_heads"] = own.get("num_key_value_heads")
        return values, problems


_EACH = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}

# Four layers with windows to one that sees all, or five.
_FIVE = {"layer_types": [FULL if layer % 5 == 4 else SLIDING for layer in range(35)]}
_SMALL = {"final_logit_softcapping": 30.0}

PRESETS = {
    "gemma4_text-tiny": tiny(layers=6, head_dim=16, global_head_dim=32, sliding_window=128, attention_k_eq_v=True)
    | {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "gemma-4-e2b": _SMALL
    | shape(1536, 6144, 35, 8)
    | _FIVE
    | {"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "gemma-4-e4b": _SMALL | shape(2560, 10240, 42, 8) | {"num_key_value_heads": 2, "num_kv_shared_layers": 18},
    "gemma-4-31b": _EACH | shape(5376, 21504, 60, 32) | {"num_key_value_heads": 16, "num_global_key_value_heads": 4},
    "gemma-4-26b-a4b": _EACH
    | shape(2816, 2112, 30, 16)
    | {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True}
    | {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
}
