"""dots.llm1 (rednote-hilab 2025, arXiv 2506.05767): norms of each head, and experts chosen as DeepSeek-V3's are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.decoder_config import shape
from megacore.models.experts_config import SigmoidConfig
from megacore.models.layer_types import WindowedConfig
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Dots1Config(SigmoidConfig, WindowedConfig):
    family: ClassVar[str] = "dots1"
    architecture: ClassVar[str] = "Dots1ForCausalLM"
    # What the class does not read: it says what all models of the family are.
    harmless: ClassVar[frozenset[str]] = SigmoidConfig.harmless | {"scoring_func", "topk_method", "use_sliding_window"}
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_window_layers: int = 62
    moe_intermediate_size: int = 1408
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None and layer >= self.max_window_layers

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(bias=self.attention_bias, out_bias=self.attention_bias),
            *(t.norm(f"attn.{of}_norm", f"self_attn.{of}_norm", "head") for of in "qk"),
            t.norm("mlp_norm", "post_attention_layernorm"),
            self.feed_forward(t, self.experts(t)),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"max_window_layers": rng.randint(0, layers)}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "dots1-tiny": shape(64, 96, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "dots.llm1": shape(4096, 10944, 62, 32)
    | {"vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "norm_topk_prob": True}
    | {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
}

PARAMETERS: Mapping[str, int] = {"dots.llm1": 142_774_373_888}
