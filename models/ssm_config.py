"""The config of families in which most layers are state spaces (Mamba-2), and some attend. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, LINEAR
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.weight_rows import Rows, Table, in_layers

INFINITY = {"__float__": "Infinity"}
"""What transformers writes for it in a file."""
KINDS = {"mamba": LINEAR, "attention": FULL}
"""{the kind of a layer in a file of transformers 4: in others}"""
_OF_STATES = ("state_heads", "state_groups", "state_key", "state_value", "taps")


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(HybridConfig):
    """Fields carry their Hugging Face names."""

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
        return t.state_space(bias=self.mamba_proj_bias, conv_bias=self.mamba_conv_bias)

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
        low, high = written.pop("time_step_limit")
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
        if values.get("mamba_d_head") in (None, "auto") and all(isinstance(each, int) for each in (expand, heads)):
            values["mamba_d_head"] = (values.get("mamba_d_ssm") or expand * values["hidden_size"]) // heads
        return problems


def limit_problems(limits: tuple[float, ...]) -> list[str]:
    """Return what is wrong with a ``time_step_limit``."""
    if len(limits) == 2 and 0 <= limits[0] < limits[1]:
        return []
    return [f"time_step_limit is {list(limits)}: it must be two numbers, the lower one first, 0 or more"]
