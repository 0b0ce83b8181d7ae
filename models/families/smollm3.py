"""SmolLM3 (Hugging Face 2025): LLaMA of which some layers do not rotate (Yang et al. 2025, arXiv 2501.18795)."""

from dataclasses import dataclass, replace

from megacore.models.anatomy import SLIDING, Anatomy
from megacore.models.layer_types import RotatingConfig, WindowedConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(RotatingConfig, WindowedConfig):
    family = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    harmless = frozenset({"max_window_layers", "pretraining_tp"})
    defaults = {"num_key_value_heads": 4}
    rope_convention = Convention(rope_theta=2e6)

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 128004
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and self.sliding_window is not None and not self.rotates(layer)

    @property
    def anatomy(self) -> Anatomy:
        plain = self.anatomy_of()
        layers = (each if self.rotates(i) else replace(each, rope=None) for i, each in enumerate(plain.layers))
        return replace(plain, layers=tuple(layers))

    def problems(self) -> list[str]:
        found = super().problems()
        if SLIDING in self.kinds and not self.use_sliding_window:
            found.append(f"layer_types names {SLIDING}, and use_sliding_window is false: say which")
        return found


PRESETS = {
    "smollm3-tiny": tiny(pad_token_id=None),
    "smollm3-3b": shape(2048, 11008, 36, 16)
    | {"vocab_size": 128256, "num_key_value_heads": 4, "max_position_embeddings": 65536}
    | rope(5e6),
}
