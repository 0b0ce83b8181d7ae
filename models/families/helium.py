"""Helium 1 (Kyutai 2025): LLaMA whose heads turn in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Pairs
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class HeliumConfig(DecoderConfig):
    family: ClassVar[str] = "helium"
    architecture: ClassVar[str] = "HeliumForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 20, "head_dim": 128}
    rope_convention: ClassVar[Convention] = Convention(rope_theta=100000.0)

    rms_norm_eps: float = 1e-8
    pad_token_id: int | None = 3
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def pairs(self) -> Pairs:
        """The pairs of numbers that turn together in heads of queries and keys."""
        return Pairs(self.head_dim, self.head_dim)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **self.pairs.sizes}

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, pairs=self.pairs),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(bias=self.mlp_bias),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"hidden_size": drawn["num_attention_heads"] * drawn["head_dim"]}

    def problems(self) -> list[str]:
        heads, head, hidden = self.num_attention_heads, self.head_dim, self.hidden_size
        square = f"num_attention_heads ({heads}) times head_dim ({head}) must be hidden_size ({hidden})"
        return super().problems() + [square] * (heads * head != hidden)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "helium-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    "helium-1-preview-2b": shape(2560, 7040, 24, 20) | {"vocab_size": 48000, "max_position_embeddings": 4096},
}

PARAMETERS: Mapping[str, int] = {"helium-1-preview-2b": 2_172_643_840}
