"""Granite Swash (IBM 2026): Granite with windows, a sink of each head, and a rope for each layer, or none."""

from dataclasses import dataclass, replace
from typing import Any

from megacore.models.anatomy import ROPE, SLIDING, Anatomy, LayerAttention
from megacore.models.families.granite import GraniteConfig, Multipliers
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class SwashConfig(Multipliers, WindowedConfig):
    sliding_window: int | None = 128
    # The theta of each layer, 0 for none that turns; None becomes that of the rope.
    layer_rope_theta: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self.fill_in("layer_rope_theta", lambda layer: self.rope_parameters.rope_theta)
        super().__post_init__()

    @property
    def thetas(self) -> tuple[float, ...]:
        """The theta of each layer."""
        return self.layer_rope_theta or ()

    def slides(self, layer: int) -> bool:
        return layer % 4 > 0

    def anatomy_of(self, **own: Any) -> Anatomy:
        ropes = {f"{ROPE} {theta:g}": replace(self.rope_parameters, rope_theta=theta) for theta in {*self.thetas} - {0}}
        layers = (
            LayerAttention(f"{ROPE} {theta:g}" if theta else None, self.sliding_window if kind == SLIDING else None)
            for theta, kind in zip(self.thetas, self.kinds, strict=True)
        )
        return super().anatomy_of(**({"layers": tuple(layers), "ropes": ropes} | own))

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + t.sinks()

    def problems(self) -> list[str]:
        found, thetas = super().problems(), self.thetas
        if self.layer_rope_theta is not None and len(thetas) != self.num_hidden_layers:
            layers = f"num_hidden_layers is {self.num_hidden_layers}"
            found.append(f"layer_rope_theta has {len(thetas)} numbers, and {layers}: give as many, or null")
        return found or [f"layer_rope_theta has {n}: each must be above 1, or 0" for n in thetas if n and n <= 1]


@dataclass(frozen=True, kw_only=True)
class GraniteSWAConfig(SwashConfig, GraniteConfig):
    family = "granite_swa"
    architecture = "GraniteSWAForCausalLM"
    defaults = {"num_key_value_heads": 4}

    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


PRESETS = {
    "granite_swa-tiny": tiny(sliding_window=32, attention_multiplier=0.0625, layer_rope_theta=[0, 1e4, 1e4, 1e4])
}
