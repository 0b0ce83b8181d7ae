"""Qwen2, Qwen2.5 (Yang et al. 2024, arXiv 2407.10671, 2412.15115): LLaMA with biases of queries, keys and values."""

from dataclasses import dataclass
from typing import Any

from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import rope, shape, tiny


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(WindowedConfig):
    family = "qwen2"
    architecture = "Qwen2ForCausalLM"
    harmless = frozenset({"use_mrope"})
    defaults = {"num_key_value_heads": 32}
    attention_bias = True
    out_bias = False

    rms_norm_eps: float = 1e-6
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None and layer >= self.max_window_layers

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        # What transformers makes of a window that is not used.
        if not values.get("use_sliding_window"):
            values["sliding_window"] = None
        return super()._derive(values)


def _sizes(hidden: int, mlp: int, layers: int, heads: int, kv: int, **others: Any) -> dict[str, Any]:
    common = {"num_key_value_heads": kv, "vocab_size": 152064, "max_position_embeddings": 131072}
    theta = rope(1e6)
    return common | shape(hidden, mlp, layers, heads) | theta | others


_TIED = {"vocab_size": 151936, "tie_word_embeddings": True}

PRESETS = {
    "qwen2-tiny": tiny(),
    "qwen2-0.5b": _sizes(896, 4864, 24, 14, 2, **_TIED),
    "qwen2-1.5b": _sizes(1536, 8960, 28, 12, 2, **_TIED),
    "qwen2-7b": _sizes(3584, 18944, 28, 28, 4),
    "qwen2-72b": _sizes(8192, 29568, 80, 64, 8),
    "qwen2.5-0.5b": _sizes(896, 4864, 24, 14, 2, **_TIED, max_position_embeddings=32768),
    "qwen2.5-1.5b": _sizes(1536, 8960, 28, 12, 2, **_TIED),
    "qwen2.5-3b": _sizes(2048, 11008, 36, 16, 2, **_TIED, max_position_embeddings=32768),
    "qwen2.5-7b": _sizes(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _sizes(5120, 13824, 48, 40, 8, rms_norm_eps=1e-5),
    "qwen2.5-32b": _sizes(5120, 27648, 64, 40, 8, rms_norm_eps=1e-5),
    "qwen2.5-72b": _sizes(8192, 29568, 80, 64, 8, rms_norm_eps=1e-5),
}
