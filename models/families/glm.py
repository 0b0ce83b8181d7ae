"""GLM-4-9B (GLM Team 2024, arXiv 2406.12793): biases of queries, keys and values; half of each head turns, in pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import GATE_UP, Pairs, Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class GlmConfig(DecoderConfig):
    family: ClassVar[str] = "glm"
    architecture: ClassVar[str] = "GlmForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2, "head_dim": 128}
    rope_convention: ClassVar[Convention] = Convention(partial_rotary_factor=0.5)

    rms_norm_eps: float = 1.5625e-7
    pad_token_id: int | None = 151329
    attention_bias: bool = True

    @property
    def pairs(self) -> Pairs:
        """The pairs of numbers that turn together in heads of queries and keys."""
        return Pairs(self.head_dim, self.rope_parameters.turning(self.head_dim))

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, **self.pairs.sizes}

    def norms_of_outputs(self, t: Table) -> tuple[Rows, Rows]:
        """Return the norms of what attention and the feed-forward network give."""
        return (), ()

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        of_attention, of_mlp = self.norms_of_outputs(t)
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, pairs=self.pairs),
            of_attention,
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.linear("mlp.up", GATE_UP, "embed", "mlp.gate_up_proj"),
            t.linear("mlp.down", "embed", "mlp", "mlp.down_proj", ends=True),
            of_mlp,
            tied=self.tie_word_embeddings,
        )


_GLM = {"vocab_size": 151552, "max_position_embeddings": 131072}
_EDGE = {
    "vocab_size": 59264,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "pad_token_id": 59246,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "glm-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": None},
    "glm-edge-1.5b": _EDGE | shape(2048, 6144, 28, 16) | {"num_key_value_heads": 4},
    "glm-edge-4b": _EDGE | shape(3072, 8192, 40, 24) | {"num_key_value_heads": 6},
    "glm-4-9b": _GLM | shape(4096, 13696, 40, 32) | {"max_position_embeddings": 8192},
    "glm-4-9b-chat": _GLM
    | shape(4096, 13696, 40, 32)
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}},
}

PARAMETERS: Mapping[str, int] = {
    "glm-edge-1.5b": 1_593_427_968,
    "glm-edge-4b": 4_327_984_128,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-chat": 9_399_951_360,
}
