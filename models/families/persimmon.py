"""Persimmon 8B (Adept 2023): LayerNorm, of each head too, squared relus, and half of each head turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import HEADS, QKV_BY_HEAD, QKV_EACH
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class PersimmonConfig(DecoderConfig):
    family: ClassVar[str] = "persimmon"
    architecture: ClassVar[str] = "PersimmonForCausalLM"
    eps: ClassVar[str] = "layer_norm_eps"
    # The class drops elements of one branch, and not of the other.
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_dropout": 0.0}
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim", "num_key_value_heads"})
    rope_convention: ClassVar[Convention] = Convention(partial_rotary_factor=0.5, pairs=True)

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = True

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(norm="layer")

    def params(self) -> tuple[Param, ...]:
        t = self.table(norm_bias=True)
        qkv, stored = ("attn.qkv", QKV_EACH, "embed", "self_attn.query_key_value"), f"{QKV_BY_HEAD} embed"
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.linear(*qkv, bias=True, stored=stored, stored_bias=QKV_BY_HEAD),
            t.linear("attn.out", "embed", HEADS, "self_attn.dense", bias=True, ends=True),
            *(t.norm(f"attn.{of}_norm", f"self_attn.{of}_layernorm", "head") for of in "qk" if self.qk_layernorm),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.plain_mlp("dense_h_to_4h", "dense_4h_to_h", bias=True),
            tied=self.tie_word_embeddings,
            norm="model.final_layernorm",
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "persimmon-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "persimmon-8b": shape(4096, 16384, 36, 64)
    | {"vocab_size": 262144, "max_position_embeddings": 16384}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 25000.0, "partial_rotary_factor": 0.5}},
}

PARAMETERS: Mapping[str, int] = {"persimmon-8b": 9_397_175_296}
