"""StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173): LLaMA with LayerNorm, a plain feed-forward network, biases and a
window over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy, LayerAttention
from megacore.models.config import probabilities
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(DecoderConfig):
    family: ClassVar[str] = "starcoder2"
    architecture: ClassVar[str] = "Starcoder2ForCausalLM"
    eps: ClassVar[str] = "norm_epsilon"
    fixed: ClassVar[Mapping[str, Any]] = {"norm_type": "layer_norm", "mlp_type": "default"}
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}

    hidden_act: str = "gelu_pytorch_tanh"
    initializer_range: float = 0.018042
    norm_epsilon: float = 1e-5
    sliding_window: int | None = None
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    use_bias: bool = True
    tie_word_embeddings: bool = True

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(
            layers=(LayerAttention(window=self.sliding_window),) * self.num_hidden_layers,
            norm="layer",
            branch_dropout=self.residual_dropout,
            embedding_dropout=self.embedding_dropout,
        )

    def params(self) -> tuple[Param, ...]:
        t = self.table(norm_bias=True)
        return t.model(
            t.attention(bias=self.use_bias, out_bias=self.use_bias),
            t.plain_mlp("c_fc", "c_proj", bias=self.use_bias),
            t.norm("attn_norm", "input_layernorm"),
            t.norm("mlp_norm", "post_attention_layernorm"),
            tied=self.tie_word_embeddings,
        )

    def problems(self) -> list[str]:
        return super().problems() + probabilities(self, "residual_dropout", "embedding_dropout")

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"sliding_window": rng.choice((None, 1, 5))}


_STARCODER2 = {"vocab_size": 49152, "max_position_embeddings": 16384, "sliding_window": 4096}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "starcoder2-tiny": shape(64, 256, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 64},
    "starcoder2-3b": _STARCODER2
    | shape(3072, 12288, 30, 24)
    | {"num_key_value_heads": 2, "rope_theta": 999999.4420358813},
    "starcoder2-7b": _STARCODER2 | shape(4608, 18432, 32, 36) | {"num_key_value_heads": 4, "rope_theta": 1000000.0},
    "starcoder2-15b": _STARCODER2
    | shape(6144, 24576, 40, 48)
    | {"num_key_value_heads": 4, "rope_theta": 100000.0, "tie_word_embeddings": False},
}

PARAMETERS: Mapping[str, int] = {
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
}
