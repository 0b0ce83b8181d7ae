"""The config of families in which most layers follow the gated delta rule, and some attend (Qwen3-Next). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, LINEAR
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.mtp import QWEN, MtpConfig, MtpNames
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import STATE_QKV, STATE_VALUES, Rows, Table, in_layers

_B, _A = "b: state_heads each", "a: state_heads each"
DELTA_INNER = f"{STATE_QKV} + z: {STATE_VALUES} + {_B} + {_A}"
"""What a layer that follows the delta rule makes of a token, by one linear for each."""


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(HybridConfig):
    other: ClassVar[str] = LINEAR
    further: ClassVar[tuple[str, ...]] = ("mtp.",)
    interval: ClassVar[str | None] = "full_attention_interval"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2, "head_dim": 256}
    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "state_heads": "linear_num_key_heads",
        "state_key": "linear_key_head_dim",
        "state_value": "linear_value_head_dim",
        "taps": "linear_conv_kernel_dim",
    }
    rope_convention: ClassVar[Convention] = Convention(partial_rotary_factor=0.25)
    constants: ClassVar[Mapping[str, Any]] = {"norm_offset": 1.0}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def attends(self, layer: int) -> bool:
        return layer % 4 == 3

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "each": self.linear_num_value_heads // max(1, self.linear_num_key_heads)}

    def delta_rule(self, t: Table) -> Rows:
        """Return the rows of the layers that follow the delta rule: four linears, as Qwen3.5 has them."""
        inner = f"(qkv: ({STATE_QKV}) + z: {STATE_VALUES} + {_B} + {_A})"
        return t.delta_rule(inner, "in_proj_{qkv,z,b,a}")

    def mixer(self, t: Table) -> Rows:
        attention = t.gated_attention(bias=self.attention_bias) + t.norms_of_heads()
        return in_layers(self.layers_of(LINEAR), self.delta_rule(t)) + in_layers(self.layers_of(FULL), attention)

    def problems(self) -> list[str]:
        found = super().problems()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values < 1 or (keys > 0 and values % keys):
            found.append(f"linear_num_value_heads ({values}) is not a multiple of linear_num_key_heads ({keys})")
        return found


@dataclass(frozen=True, kw_only=True)
class QwenDeltaConfig(MtpConfig, DeltaConfig):
    """Behind the layers there may be one that attends, and predicts a further token."""

    mtp_names: ClassVar[MtpNames] = QWEN

    @property
    def mtp_block(self) -> int:
        return max(self.layers_of(FULL), default=0)
