"""SmolLM3 (Hugging Face 2025): LLaMA of which some layers do not rotate (Yang et al. 2025, arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import SLIDING, Anatomy
from megacore.models.config import positive
from megacore.models.decoder_config import shape
from megacore.models.layer_types import WindowedConfig
from megacore.models.rope_config import Convention
from megacore.parallel import limits
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig):
    family: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"max_window_layers", "pretraining_tp"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4}
    rope_convention: ClassVar[Convention] = Convention(rope_theta=2e6)

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 128004
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    # 1 for each layer that rotates, 0 for the others; None becomes a 0 for the last of every interval.
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4

    def __post_init__(self) -> None:
        if self.no_rope_layers is None and self.no_rope_layer_interval > 0 and self.num_hidden_layers <= limits.LAYERS:
            ends = (layer % self.no_rope_layer_interval == 0 for layer in range(1, self.num_hidden_layers + 1))
            object.__setattr__(self, "no_rope_layers", tuple(int(not end) for end in ends))
        super().__post_init__()

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has the rope."""
        return any((self.no_rope_layers or ())[layer : layer + 1])

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and self.sliding_window is not None and not self.rotates(layer)

    @property
    def anatomy(self) -> Anatomy:
        plain = self.anatomy_of()
        layers = (each if self.rotates(i) else replace(each, rope=None) for i, each in enumerate(plain.layers))
        return replace(plain, layers=tuple(layers))

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(bias=self.mlp_bias),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        used = rng.random() < 0.5
        drawn |= {"use_sliding_window": used, "layer_types": drawn["layer_types"] if used else None}
        rotate = [rng.randrange(2) for _ in range(layers)]
        return drawn | {"no_rope_layers": rng.choice((None, rotate)), "no_rope_layer_interval": rng.choice((1, 2, 4))}

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "no_rope_layer_interval")
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            found.append(
                f"no_rope_layers names {len(self.no_rope_layers)} layers, and num_hidden_layers is "
                f"{self.num_hidden_layers}: give as many, or null"
            )
        if SLIDING in self.kinds and not self.use_sliding_window:
            found.append(f"layer_types names {SLIDING}, and use_sliding_window is false: say which")
        return found


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "smollm3-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None},
    "smollm3-3b": shape(2048, 11008, 36, 16)
    | {"vocab_size": 128256, "num_key_value_heads": 4, "max_position_embeddings": 65536}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
}

PARAMETERS: Mapping[str, int] = {
    "smollm3-3b": 3_075_098_624,
}
