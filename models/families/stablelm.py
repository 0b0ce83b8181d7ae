"""StableLM-3B-4E1T, StableLM-2 (Bellagente et al. 2024, arXiv 2402.17834): LLaMA with LayerNorm, of which a quarter of
each head turns; the branches may stand side by side, and each head may have a norm of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    family: ClassVar[str] = "stablelm"
    architecture: ClassVar[str] = "StableLmForCausalLM"
    eps: ClassVar[str] = "layer_norm_eps"
    # The class drops elements of one branch, and not of the other.
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_dropout": 0.0}
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32}
    rope_convention: ClassVar[Convention] = Convention(partial_rotary_factor=0.25, pairs=True)

    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(norm="layer", parallel=self.use_parallel_residual)

    def params(self) -> tuple[Param, ...]:
        t = self.table(norm_bias=True)
        of_heads = replace(t, norm_bias=False)
        return t.model(
            t.attention(bias=self.use_qkv_bias),
            *(
                of_heads.norm(f"attn.{of}_norm", f"self_attn.{of}_layernorm.norms.{{{axis}}}", f"{axis} head")
                for of, axis in (("q", "heads"), ("k", "kv"))
                if self.qk_layernorm
            ),
            t.gated_mlp(),
            t.norm("attn_norm", "input_layernorm"),
            *([] if self.use_parallel_residual else [t.norm("mlp_norm", "post_attention_layernorm")]),
            tied=self.tie_word_embeddings,
        )


_STABLELM2 = {"vocab_size": 100352, "max_position_embeddings": 4096}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "stablelm-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512},
    "stablelm-3b-4e1t": shape(2560, 6912, 32, 32) | {"vocab_size": 50304, "max_position_embeddings": 4096},
    "stablelm-2-1.6b": _STABLELM2 | shape(2048, 5632, 24, 32) | {"use_qkv_bias": True},
    "stablelm-2-12b": _STABLELM2
    | shape(5120, 13824, 40, 32)
    | {"num_key_value_heads": 8, "qk_layernorm": True, "use_parallel_residual": True},
}

PARAMETERS: Mapping[str, int] = {
    "stablelm-3b-4e1t": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
}
