"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm with bias, GELU, tied head, dropout.

Hugging Face stores its matrices transposed (Conv1D): the axis that is read is spelled first there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import ACTIVATIONS, Anatomy, LayerAttention
from megacore.models.config import ModelConfig, positive, probabilities
from megacore.models.weight_rows import HEADS, QKV_EACH, Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(ModelConfig):
    family = "gpt2"
    architecture = "GPT2LMHeadModel"
    # How the scores are rounded, and heads for other tasks; neither changes the function that is computed. Nor does the
    # token for padding, whose embedding is trained as any other.
    harmless = frozenset(
        {
            "gradient_checkpointing", "n_ctx", "n_special", "output_past", "pad_token_id", "predict_special_tokens",
            "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj",
        }
    )  # fmt: skip
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    base_model_prefix = "transformer"
    tied = ("transformer.wte.weight", "lm_head.weight")
    # The causal mask and its fill value.
    ignored: ClassVar[tuple[str, ...]] = ("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias")
    axes = {"layer": "n_layer", "vocab": "vocab_size", "position": "n_positions", "embed": "n_embd", "heads": "n_head"}

    n_positions: int = 1024
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    @property
    def sizes(self) -> Mapping[str, int]:
        mlp = self.n_inner if self.n_inner is not None else 4 * self.n_embd
        return {**super().sizes, "head": self.n_embd // self.n_head, "mlp": mlp}

    @property
    def max_positions(self) -> int | None:
        return self.n_positions

    @property
    def anatomy(self) -> Anatomy:
        return Anatomy(
            layers=(LayerAttention(rope=None),) * self.n_layer,
            norm="layer",
            norm_eps=self.layer_norm_epsilon,
            activation=self.activation_function,
            attention_dropout=self.attn_pdrop,
            branch_dropout=self.resid_pdrop,
            embedding_dropout=self.embd_pdrop,
        )

    def block(self, t: Table) -> tuple[Rows, ...]:
        """Return the rows of a block."""
        return (
            t.norm("attn_norm", "ln_1"),
            t.linear("attn.qkv", QKV_EACH, "embed", "attn.c_attn", bias=True, stored=f"embed {QKV_EACH}"),
            t.linear("attn.out", "embed", HEADS, "attn.c_proj", bias=True, stored=f"{HEADS} embed", ends=True),
            t.norm("mlp_norm", "ln_2"),
            t.linear("mlp.up", "mlp", "embed", "mlp.c_fc", bias=True, stored="embed mlp"),
            t.linear("mlp.down", "embed", "mlp", "mlp.c_proj", bias=True, stored="mlp embed", ends=True),
        )

    def params(self) -> tuple[Param, ...]:
        std = self.initializer_range
        # The residual branches end smaller, so that their sum keeps its size.
        out_std = std / math.sqrt(2 * self.n_layer)
        t = Table(layer="transformer.h.{layer}", std=std, out_std=out_std, norm_bias=True)
        embed, *others = t.model(
            *self.block(t), tied=self.tie_word_embeddings, embed="transformer.wte", norm="transformer.ln_f"
        )
        return embed, Param("positions.weight", "position embed", "transformer.wpe.weight", std=std), *others

    def problems(self) -> list[str]:
        found = positive(self, *self.axes.values())
        found += probabilities(self, "resid_pdrop", "embd_pdrop", "attn_pdrop")
        if not found and self.n_embd % self.n_head:
            found.append(f"n_embd ({self.n_embd}) is not a multiple of n_head ({self.n_head})")
        if self.n_inner is not None and self.n_inner < 1:
            found.append(f"n_inner is {self.n_inner}: it must be at least 1")
        if self.activation_function not in ACTIVATIONS:
            found.append(f"activation_function {self.activation_function!r} is not one of {', '.join(ACTIVATIONS)}")
        return found


def _shape(embed: int, layers: int, heads: int) -> dict[str, Any]:
    return {"vocab_size": 50257, "n_positions": 1024, "n_embd": embed, "n_layer": layers, "n_head": heads}


PRESETS = {
    "gpt2-tiny": _shape(64, 4, 4) | {"vocab_size": 512, "n_positions": 512},
    "gpt2": _shape(768, 12, 12),
    "gpt2-medium": _shape(1024, 24, 16),
    "gpt2-large": _shape(1280, 36, 20),
    "gpt2-xl": _shape(1600, 48, 25),
}
