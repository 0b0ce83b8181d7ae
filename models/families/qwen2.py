"""Qwen2, Qwen2.5 (Yang et al. 2024, arXiv 2407.10671, 2412.15115): LLaMA with biases of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.anatomy import Anatomy
from models.builder import build
from models.decoder_config import DecoderConfig, shape
from parallel.weights.schema import Param

__all__ = ["CONFIG", "PRESETS", "Qwen2Config", "build"]


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Fields carry their Hugging Face names."""

    family: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    # Where windows are off, how long they are and from which layer on changes nothing.
    harmless: ClassVar[frozenset[str]] = frozenset({"layer_types", "max_window_layers", "sliding_window"})
    fixed: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False}
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32}

    rms_norm_eps: float = 1e-6

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(norm_eps=self.rms_norm_eps)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=True),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def _unsupported(cls, config: Mapping[str, Any]) -> list[str]:
        kinds = config.get("layer_types")
        full = kinds is None or (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds))
        windows = [f"layer_types={kinds!r} would change the maths and is not supported: only 'full_attention' is"]
        return super()._unsupported(config) + windows * (not full)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen2-tiny": shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512},
    "qwen2-0.5b": shape(896, 4864, 24, 14)
    | {"vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 131072, "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
}

PARAMETERS: Mapping[str, int] = {"qwen2-0.5b": 494_032_768}
"""Published numbers of parameters."""

CONFIG: type[Qwen2Config] = Qwen2Config
