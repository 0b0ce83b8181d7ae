"""The config of families with latent attention, as DeepSeek-V2 has it (arXiv 2405.04434). No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import ROPE, Anatomy
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.models.rope_config import YarnRope
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class LatentConfig(DecoderConfig):
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim", "qk_head_dim"})
    axes: ClassVar[Mapping[str, str]] = {
        **DecoderConfig.axes,
        "head": "qk_head_dim",
        "rest": "qk_nope_head_dim",
        "value": "v_head_dim",
        "kv_latent": "kv_lora_rank",
    }

    qk_head_dim: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    @property
    def sizes(self) -> Mapping[str, int]:
        latent = {} if self.q_lora_rank is None else {"q_latent": self.q_lora_rank}
        return {**super().sizes, **latent, "two": 2, "half": self.qk_rope_head_dim // 2}

    @property
    def rope_interleave(self) -> bool:
        """Whether dimensions 2 i and 2 i + 1 turn together on disk; a field, where the family has one."""
        return True

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(rotary_heads={ROPE: self.qk_rope_head_dim}, attention_scale=_scale(self), **own)

    def mixer(self, t: Table) -> Rows:
        latent, bias = self.q_lora_rank is not None, self.attention_bias
        return t.latent_attention(latent_queries=latent, bias=bias, pairs=self.rope_interleave)

    def rope_problems(self) -> list[str]:
        return self.rope_parameters.problems(self.qk_rope_head_dim)

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "qk_rope_head_dim")
        if self.q_lora_rank is not None:
            found += positive(self, "q_lora_rank")
        if self.num_key_value_heads != self.num_attention_heads:
            found.append(
                f"num_key_value_heads is {self.num_key_value_heads}: every head has keys and values of its own, "
                f"so it must be num_attention_heads ({self.num_attention_heads})"
            )
        if self.v_head_dim > self.qk_head_dim:
            found.append(
                f"v_head_dim is {self.v_head_dim}: it may be up to {self.qk_head_dim}, qk_nope_head_dim + "
                "qk_rope_head_dim"
            )
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        rotary, still = (
            values.setdefault(name, getattr(cls, name)) for name in ("qk_rope_head_dim", "qk_nope_head_dim")
        )
        if isinstance(rotary, int) and isinstance(still, int):
            values["head_dim"], values["qk_head_dim"] = rotary, rotary + still
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values.get("num_attention_heads")
        return []


def _scale(config: LatentConfig) -> float | None:
    """Return the scale of scores, of which yarn's ``mscale_all_dim`` is a part."""
    rope = config.rope_parameters
    if not isinstance(rope, YarnRope) or not rope.mscale_all_dim or rope.factor <= 1:
        return None
    factor = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return config.qk_head_dim**-0.5 * factor * factor
