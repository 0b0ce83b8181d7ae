"""ERNIE-4.5 0.3B (Baidu 2025): LLaMA whose heads turn in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Pairs, Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(DecoderConfig):
    family: ClassVar[str] = "ernie4_5"
    architecture: ClassVar[str] = "Ernie4_5ForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"weight_share_add_bias"})
    derived: ClassVar[frozenset[str]] = frozenset({"attention_dropout"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2, "head_dim": 128}
    rope_convention: ClassVar[Convention] = Convention(rope_theta=500000.0, pairs=True)

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    use_bias: bool = False

    @property
    def pairs(self) -> Pairs:
        """The pairs of numbers that turn together in heads of queries and keys."""
        return Pairs(self.head_dim, self.head_dim)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **self.pairs.sizes}

    def block(self, t: Table, feed_forward: Rows) -> tuple[Rows, ...]:
        """Return the rows of a block around those of its feed-forward network."""
        return (
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.use_bias, out_bias=self.use_bias, pairs=self.pairs),
            t.norm("mlp_norm", "post_attention_layernorm"),
            feed_forward,
        )

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(*self.block(t, t.gated_mlp(bias=self.use_bias)), tied=self.tie_word_embeddings)

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        values["attention_dropout"] = 0.0  # the class has none
        return super()._derive(values)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ernie4_5-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
    "ernie-4.5-0.3b": shape(1024, 3072, 18, 16)
    | {"vocab_size": 103424, "max_position_embeddings": 131072, "head_dim": 128},
}

PARAMETERS: Mapping[str, int] = {"ernie-4.5-0.3b": 360_748_032}
