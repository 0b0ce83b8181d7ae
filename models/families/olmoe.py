"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): 64 experts, norms of all queries and all keys at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import shape
from megacore.models.experts_config import MoEConfig
from megacore.models.weight_rows import HEADS, KV_HEADS
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    family: ClassVar[str] = "olmoe"
    architecture: ClassVar[str] = "OlmoeForCausalLM"
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    spellings: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    axes: ClassVar[Mapping[str, str]] = {**MoEConfig.axes, "experts": "num_experts", "routes": "num_experts"}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    @property
    def routing(self) -> Routing:
        return replace(super().routing, normalised=self.norm_topk_prob)

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(qkv_limit=self.clip_qkv)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            t.norm("attn.q_norm", "self_attn.q_norm", HEADS),
            t.norm("attn.k_norm", "self_attn.k_norm", KV_HEADS),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.experts(),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"clip_qkv": rng.choice((None, 0.3, 1.2))}

    def problems(self) -> list[str]:
        wrong = self.clip_qkv is not None and self.clip_qkv <= 0
        return super().problems() + [f"clip_qkv is {self.clip_qkv}: it must be above 0, or null"] * wrong


_EACH = {"vocab_size": 50304, "max_position_embeddings": 4096}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "olmoe-tiny": _EACH
    | shape(64, 32, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 4},
    "olmoe-1b-7b": _EACH | shape(2048, 1024, 16, 16),
}

PARAMETERS: Mapping[str, int] = {"olmoe-1b-7b": 6_919_161_856}
