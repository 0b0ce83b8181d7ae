"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838): LLaMA with layer norms that have no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    family: ClassVar[str] = "olmo"
    architecture: ClassVar[str] = "OlmoForCausalLM"
    eps: ClassVar[str] = "norm_eps"
    norm_eps: ClassVar[float] = 1e-5

    pad_token_id: int | None = 1
    attention_bias: bool = False
    clip_qkv: float | None = None

    @property
    def anatomy(self) -> Anatomy:
        plain = frozenset({"attn_norm", "mlp_norm", "norm"})
        return self.anatomy_of(norm="layer", plain_norms=plain, qkv_limit=self.clip_qkv)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            t.gated_mlp(),
            tied=self.tie_word_embeddings,
            norm="",
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"clip_qkv": rng.choice((None, 0.3, 1.2))}

    def problems(self) -> list[str]:
        wrong = self.clip_qkv is not None and self.clip_qkv <= 0
        return super().problems() + [f"clip_qkv is {self.clip_qkv}: it must be above 0, or null"] * wrong


_EACH = {"vocab_size": 50304, "max_position_embeddings": 2048}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "olmo-tiny": _EACH | shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2},
    "olmo-1b": _EACH | shape(2048, 8192, 16, 16) | {"tie_word_embeddings": True},
    "olmo-7b": _EACH | shape(4096, 11008, 32, 32),
}

PARAMETERS: Mapping[str, int] = {"olmo-1b": 1_176_764_416, "olmo-7b": 6_888_095_744}
