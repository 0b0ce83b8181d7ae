"""Zamba2 (Zyphra 2024, arXiv 2411.15242): state spaces (Mamba-2), and in front of some a block that several layers
share, with adapters for each use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.models.anatomy import FULL, LINEAR, Anatomy, LayerAttention
from megacore.models.config import positive
from megacore.models.presets import shape, tiny
from megacore.models.ssm_config import StateSpaceConfig
from megacore.models.weight_rows import GATE_UP, HEADS, QKV, Rows, in_layers
from megacore.parallel.weights.schema import Param

HYBRID, _SHARED, _DECODER = "hybrid", "shared_transformer", "{layer}.mamba_decoder"
_EACH_A = "(q: adapter + k: adapter + v: adapter)"


@dataclass(frozen=True, kw_only=True)
class Zamba2Config(StateSpaceConfig):
    family = "zamba2"
    architecture = "Zamba2ForCausalLM"
    more = (HYBRID,)
    derived = frozenset({"attention_bias", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"})
    reads = frozenset({"attention_hidden_size", "hybrid_layer_ids"})
    # Of kernels, initial values and generating; sizes that follow from others; what transformers' class never asks for.
    harmless = frozenset(
        {
            "chunk_size", "ffn_hidden_size", "kv_channels", "num_logits_to_keep", "num_query_groups", "time_step_floor",
            "time_step_max", "use_conv_bias", "use_mamba_kernels", "use_mem_eff_path", "use_shared_attention_lora",
            "use_shared_block_lora", "use_shared_mlp_adapter", "use_shared_mlp_lora",
        }
    )  # fmt: skip
    # Where embedding and head are not tied, transformers' class ties no blocks either.
    fixed = {"tie_word_embeddings": True, "use_long_context": False}
    saved = {
        "head_dim": "attention_head_dim",
        "layer_types": "layers_block_type",
        "mamba_d_head": "mamba_headdim",
        "mamba_n_heads": "n_mamba_heads",
        "mamba_n_groups": "mamba_ngroups",
    }
    defaults = {"layer_types": [HYBRID if layer in (*range(6, 43, 6), 47, 51) else LINEAR for layer in range(54)]}
    axes = {**StateSpaceConfig.axes, "adapter": "adapter_rank", "turned": "hidden_size"}
    last_norm = "model.final_layernorm"
    constants = {"mixer_activation": "silu", "delta_norm_eps": 1e-5}

    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    hidden_act: str = "gelu"
    max_position_embeddings: int = 4096
    mamba_n_heads: int = 8
    mamba_d_state: int = 64
    time_step_min: float = 0.001
    add_bias_linear: bool = False
    num_mem_blocks: int = 1
    use_shared_attention_adapter: bool = False
    adapter_rank: int = 128
    use_mem_rope: bool = False

    @property
    def sizes(self) -> Mapping[str, int]:
        all_axes = {axis: getattr(self, field) for axis, field in self.axes.items()}  # all layers have states
        return {**super().sizes, **all_axes, "pair": 2 * self.hidden_size}

    def anatomy_of(self, **own: Any) -> Anatomy:
        layers = (LayerAttention() if self.use_mem_rope else LayerAttention(rope=None),) * self.num_hidden_layers
        ropes: dict[str, Any] = {} if self.use_mem_rope else {"ropes": {}}
        limits = self.time_step_min, math.inf
        return super().anatomy_of(
            layers=layers, attention_scale=(self.head_dim / 2) ** -0.5, step_limits=limits, **ropes, **own
        )

    def params(self) -> tuple[Param, ...]:
        t, bias, hybrid = self.table(), self.add_bias_linear, self.layers_of(HYBRID)
        own = t.norm("attn_norm", "input_layernorm") + t.state_space("mamba", bias=bias)
        then = (
            replace(row, name=row.name.replace("{layer}.", "{layer}.then."), hf=row.hf.replace("{layer}", _DECODER))
            for row in own
        )
        each = self.num_mem_blocks
        attention, network = f"{_SHARED}.self_attn", f"{_SHARED}.feed_forward"
        block = (
            *t.norm("pair_norm", f"{_SHARED}.input_layernorm", "pair"),
            *t.linear("attn.qkv", QKV, "pair", f"{attention}.{{q,k,v}}_proj"),
            *t.linear("attn.out", "embed", HEADS, f"{attention}.o_proj", ends=True),
            *t.norm("mlp_norm", f"{_SHARED}.pre_ff_layernorm"),
            *t.gated_mlp(f"{network}.gate_up_proj", f"{network}.down_proj", bias=bias),
        )
        also = tuple(tuple(hybrid[first + each :: each]) for first in range(len(hybrid[:each])))
        return t.model(
            in_layers(self.layers_of(LINEAR), own),
            tuple(replace(row, also=also) for row in in_layers(hybrid[:each], block)),
            *(self._adapters(hybrid[use % each], use, layer) for use, layer in enumerate(hybrid)),
            in_layers(hybrid, t.linear("join", "embed", "turned", "linear")),
            in_layers(hybrid, tuple(then)),
            **self.ends,
        )

    def _adapters(self, block: int, use: int, layer: int) -> Rows:
        """Return the adapters of a layer, the one that uses the block of a layer in this place of all."""

        def pair(of: str, a: str, b: str, inner: str, hf: str) -> Rows:
            ours, theirs = f"layers.{{layer}}.{of}.use{use}", f"model.layers.{block}.{_SHARED}.{hf}_list.{use}"
            std = self.initializer_range
            return (
                Param(f"{ours}_a", f"{a} {inner}", f"{theirs}.0.weight", layers=(layer,), std=std),
                Param(f"{ours}_b", f"{b} adapter", f"{theirs}.1.weight", layers=(layer,), std=std),
            )

        rows = pair("mlp.up", "adapter", GATE_UP, "embed", "feed_forward.gate_up_proj_adapter")
        if self.use_shared_attention_adapter:
            rows += pair("attn.qkv", _EACH_A, QKV, "pair", "self_attn.linear_{q,k,v}_adapter")
        return rows

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "num_mem_blocks")
        if FULL in self.kinds:
            found.append(f"layers_block_type names {FULL}: only {LINEAR} and {HYBRID} are supported")
        heads, head, kv = self.num_attention_heads, self.head_dim, self.num_key_value_heads
        if heads * head != 2 * self.hidden_size:
            found.append(
                f"num_attention_heads ({heads}) times attention_head_dim ({head}) is not {2 * self.hidden_size}: twice "
                f"hidden_size ({self.hidden_size})"
            )
        if self.use_shared_attention_adapter and kv != heads:
            found.append(
                f"num_key_value_heads ({kv}) is not num_attention_heads ({heads}), and adapters of keys and values are "
                "of as many: set use_shared_attention_adapter to false"
            )
        return found

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        kinds = values.get("layer_types")
        listed = kinds if isinstance(kinds, list | tuple) else ()
        hybrid = [layer for layer, kind in enumerate(listed) if kind == HYBRID]
        hidden = values.get("hidden_size")
        pair = 2 * hidden if isinstance(hidden, int) else None
        for name, value in (("attention_hidden_size", pair), ("hybrid_layer_ids", hybrid)):
            if config.get(name) not in (None, value):
                problems.append(f"{name} is {config[name]!r}: {cls.architecture} takes {value!r}")
        return values, problems

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if isinstance(hidden, int):
            values["intermediate_size"] = values.get("intermediate_size") or 4 * hidden
            if values.get("head_dim") is None and isinstance(heads, int) and heads > 0:
                values["head_dim"] = 2 * hidden // heads
        return super()._derive(values)


_EACH = {"vocab_size": 32000, "num_key_value_heads": 32, "n_mamba_heads": 64}


def _types(layers: int, *hybrid: int) -> dict[str, Any]:
    return {"layers_block_type": [HYBRID if layer in hybrid else LINEAR for layer in range(layers)]}


PRESETS = {
    "zamba2-tiny": tiny(layers=5, n_mamba_heads=8, mamba_d_state=16, num_mem_blocks=2, adapter_rank=4)
    | _types(5, 1, 2, 4),
    "zamba2-1.2b": _EACH
    | shape(2048, 8192, 38, 32, mamba_d_state=128, use_mem_rope=True, use_shared_attention_adapter=True)
    | _types(38, *range(5, 36, 6)),
}
