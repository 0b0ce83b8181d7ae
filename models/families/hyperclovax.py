"""HyperCLOVA X SEED Think 14B (NAVER 2025): Granite's multipliers, and norms of what branches give."""

from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.families.granite import GraniteConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import around
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class HyperCLOVAXConfig(GraniteConfig):
    family = "hyperclovax"
    architecture = "HyperCLOVAXForCausalLM"
    parts = around("input_layernorm", "post_attention_layernorm", "post_norm1", "post_norm2")

    use_post_norm: bool = True

    def params(self) -> tuple[Param, ...]:
        return tuple(row for row in super().params() if self.use_post_norm or "_out_norm." not in row.name)

    def anatomy_of(self, **own: Any) -> Anatomy:
        # By which the logits are multiplied here.
        return super().anatomy_of(**({"logit_scale": self.logits_scaling} | own))

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        found, head = super()._derive(values), values.get("head_dim")
        if values.get("attention_multiplier") is None and isinstance(head, int) and head > 0:
            values["attention_multiplier"] = head**-0.5
        return found


PRESETS = {"hyperclovax-tiny": tiny(logits_scaling=0.125)}
