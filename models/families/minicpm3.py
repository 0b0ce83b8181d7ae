"""MiniCPM3 4B (Hu et al. 2024, arXiv 2404.06395): latent attention, and scaled embeddings, branches and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import shape
from megacore.models.latent_config import LatentConfig


@dataclass(frozen=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    family: ClassVar[str] = "minicpm3"
    architecture: ClassVar[str] = "MiniCPM3ForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})
    fixed: ClassVar[Mapping[str, Any]] = {"mlp_bias": False}

    initializer_range: float = 0.1
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int
    scale_emb: float = 12
    scale_depth: float = 1.4
    dim_model_base: int = 256

    @property
    def pairs(self) -> bool:
        return False

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(
            embedding_scale=self.scale_emb,
            branch_scale=self.scale_depth / math.sqrt(self.num_hidden_layers),
            logit_scale=self.dim_model_base / self.hidden_size,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        # The class takes no other: a multiple of the heads.
        drawn |= {"hidden_size": drawn["num_attention_heads"] * rng.choice((3, 5))}
        drawn |= {"scale_emb": rng.choice((1, 12.0)), "scale_depth": rng.choice((None, 1.4))}
        return drawn | {"dim_model_base": rng.choice((None, 7))}

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        # What transformers takes for a null; and a head of values is as wide as a part of x where nothing is said.
        heads, hidden, layers = (
            values.get(f"{of}") for of in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        if values.get("v_head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            values["v_head_dim"] = hidden // heads
        if values.get("scale_depth", 1.4) is None and isinstance(layers, int) and layers > 0:
            values["scale_depth"] = math.sqrt(layers)
        if values.get("dim_model_base", 256) is None:
            values["dim_model_base"] = hidden
        return super()._derive(values)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "minicpm3-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "max_position_embeddings": 1024, "q_lora_rank": 48, "kv_lora_rank": 32}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "dim_model_base": 32},
}

PARAMETERS: Mapping[str, int] = {}
