"""The configs of families whose layers are state spaces, of heads (Mamba-2) or of channels (Mamba): most of them, while
some attend, or all. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, LINEAR
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.weight_rows import Rows, Table, in_layers

INFINITY = {"__float__": "Infinity"}
"""What transformers writes for it in a file."""
KINDS = {"mamba": LINEAR, "attention": FULL}
"""{the kind of a layer in a file of transformers 4: in others}"""
_OF_STATES = ("state_heads", "state_groups", "state_key", "state_value", "taps")


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(HybridConfig):
    other: ClassVar[str] = LINEAR
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    # How many tokens are computed at a time, here and there; and of generating.
    harmless: ClassVar[frozenset[str]] = frozenset({"mamba_chunk_size", "num_logits_to_keep"})
    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "state_heads": "mamba_n_heads",
        "state_groups": "mamba_n_groups",
        "state_key": "mamba_d_state",
        "state_value": "mamba_d_head",
        "taps": "mamba_d_conv",
    }

    told: ClassVar[Mapping[str, str]] = {"step_limits": "time_step_limit"}
    # transformers' name of a layer.
    mamba: ClassVar[str] = "mamba"

    attention_bias: bool = False
    mamba_n_heads: int = 128
    mamba_d_head: int
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, ...] = (0.0, math.inf)

    def attends(self, layer: int) -> bool:
        return False

    @property
    def sizes(self) -> Mapping[str, int]:
        sizes = super().sizes
        # Where all layers attend, nothing of a state is split.
        return sizes if LINEAR in self.kinds else {axis: n for axis, n in sizes.items() if axis not in _OF_STATES}

    @property
    def inner(self) -> int:
        """What all heads together must have."""
        return self.mamba_expand * self.hidden_size

    def state_space(self, t: Table) -> Rows:
        """Return the rows of the layers that are state spaces."""
        return t.state_space(self.mamba, bias=self.mamba_proj_bias, conv_bias=self.mamba_conv_bias)

    def mixer(self, t: Table) -> Rows:
        attention = super().mixer(t)
        return in_layers(self.layers_of(LINEAR), self.state_space(t)) + in_layers(self.layers_of(FULL), attention)

    def problems(self) -> list[str]:
        found = super().problems()
        heads, head, groups = self.mamba_n_heads, self.mamba_d_head, self.mamba_n_groups
        inner = self.inner
        if heads * head != inner:
            found.append(
                f"mamba_n_heads ({heads}) times mamba_d_head ({head}) is not {inner}: mamba_expand "
                f"({self.mamba_expand}) times hidden_size ({self.hidden_size}), or what mamba_d_ssm says"
            )
        if groups > 0 and heads % groups:
            found.append(f"mamba_n_heads ({heads}) is not a multiple of mamba_n_groups ({groups})")
        return found + limit_problems(self.time_step_limit)

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        limits, kinds = values.get("time_step_limit"), values.get("layer_types")
        if isinstance(kinds, tuple):
            values["layer_types"] = tuple(KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds)
        if isinstance(limits, tuple):
            values["time_step_limit"] = tuple(math.inf if each == INFINITY else each for each in limits)
        return values, problems

    def _write(self) -> dict[str, Any]:
        written = super()._write()
        low, high = written.pop("time_step_limit", (0.0, math.inf))
        if (low, high) == (0.0, math.inf):  # what is left out means this
            return written
        return self.as_written(written | {"time_step_limit": [low, high]})

    @classmethod
    def as_written(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        made, limits = super().as_written(raw), raw.get("time_step_limit")
        if isinstance(limits, list | tuple):
            made["time_step_limit"] = [INFINITY if each == math.inf else each for each in limits]
        return made

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        problems = super()._derive(values)
        expand, heads = (values.get(name) or default for name, default in (("mamba_expand", 2), ("mamba_n_heads", 128)))
        given = values.get("mamba_d_ssm")
        known = all(isinstance(each, int) for each in (expand, heads, given or values.get("hidden_size")))
        if values.get("mamba_d_head") in (None, "auto") and known:
            values["mamba_d_head"] = (given or expand * values["hidden_size"]) // heads
        return problems


@dataclass(frozen=True, kw_only=True)
class SelectiveScanConfig(HybridConfig):
    """State spaces of channels, as Mamba has them."""

    other: ClassVar[str] = LINEAR
    # Of kernels, and of generating.
    harmless: ClassVar[frozenset[str]] = frozenset({"num_logits_to_keep", "use_associative_scan", "use_mambapy"})
    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "channels": "inner",
        "state_key": "mamba_d_state",
        "dt_latent": "mamba_dt_rank",
        "taps": "mamba_d_conv",
    }
    # transformers' names of a layer, and of its norms of what makes steps, of B and of C; empty: they have no weights.
    mamba: ClassVar[str] = "mamba"
    inner_norms: ClassVar[str] = ""

    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @property
    def inner(self) -> int:
        """The channels of a layer."""
        return self.mamba_expand * self.hidden_size

    def mixer(self, t: Table) -> Rows:
        sizes, biases = (self.mamba_d_state, self.mamba_dt_rank), (self.mamba_proj_bias, self.mamba_conv_bias)
        scan = t.selective_scan(*sizes, self.mamba, bias=biases[0], conv_bias=biases[1], norm=self.inner_norms)
        return in_layers(self.layers_of(LINEAR), scan) + in_layers(self.layers_of(FULL), super().mixer(t))

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("mamba_dt_rank") in (None, "auto") and isinstance(values.get("hidden_size"), int):
            values["mamba_dt_rank"] = -(-values["hidden_size"] // 16)
        return super()._derive(values)


@dataclass(frozen=True, kw_only=True)
class StatesAloneConfig(HybridConfig, NoRopeConfig):
    """No layer attends, and each has one branch, as in Mamba and Mamba-2."""

    other: ClassVar[str] = LINEAR
    base_model_prefix: ClassVar[str] = "backbone"
    tied: ClassVar[tuple[str, str]] = ("backbone.embeddings.weight", "lm_head.weight")
    layer: ClassVar[str] = "backbone.layers.{layer}"
    last_norm: ClassVar[str] = "backbone.norm_f"
    parts: ClassVar[Mapping[str, str]] = {"attn_norm": "norm", "mixer": ""}
    mamba: ClassVar[str] = "mixer"
    eps: ClassVar[str] = "layer_norm_epsilon"
    derived: ClassVar[frozenset[str]] = NoRopeConfig.derived | {
        "attention_dropout",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
    }
    # Of kernels, initial values, and the width of the residual stream.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "rescale_prenorm_residual",
            "residual_in_fp32", "ssm_cfg", "time_step_floor", "time_step_init_scheme", "time_step_max",
            "time_step_min", "time_step_scale",
        }
    )  # fmt: skip
    fixed: ClassVar[Mapping[str, Any]] = {"rms_norm": True}
    saved: ClassVar[Mapping[str, str]] = {
        "mamba_d_state": "state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }
    constants: ClassVar[Mapping[str, Any]] = {"norm": "rms", "padding_idx": None}
    max_positions = None

    initializer_range: float = 0.1
    layer_norm_epsilon: float = 1e-5
    max_position_embeddings: int = 1  # there are none

    def attends(self, layer: int) -> bool:
        return False

    @property
    def sizes(self) -> Mapping[str, int]:
        return {axis: n for axis, n in super().sizes.items() if axis not in ("heads", "kv", "head", "mlp")}

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        problems = super()._derive(values)
        alone = {"num_attention_heads": 1, "num_key_value_heads": 1, "attention_dropout": 0.0, "layer_types": None}
        values |= alone | {"head_dim": values.get("mamba_d_head", 1)}
        expand, hidden = values.get("mamba_expand", 2), values.get("hidden_size")
        if "intermediate_size" in cls.derived or values.get("intermediate_size") is None:
            values["intermediate_size"] = expand * hidden if isinstance(expand, int) and isinstance(hidden, int) else 0
        return problems


def limit_problems(limits: tuple[float, ...]) -> list[str]:
    """Return what is wrong with a ``time_step_limit``."""
    if len(limits) == 2 and 0 <= limits[0] < limits[1]:
        return []
    return [f"time_step_limit is {list(limits)}: it must be two numbers, the lower one first, 0 or more"]
