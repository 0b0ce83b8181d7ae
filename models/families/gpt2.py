"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm with bias, GELU, tied head, dropout.

The config and the weights table import without torch; :func:`build` imports the layers when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from models.config import ModelConfig, positive, probabilities
from parallel.weights.schema import Param

if TYPE_CHECKING:
    from models.decoder import Decoder
    from parallel.parameters import Parameters

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu")


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(ModelConfig):
    """Fields carry their Hugging Face names."""

    family: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    # How the scores are rounded, and heads for other tasks; neither changes the function that is computed. Nor does the
    # token for padding, whose embedding is trained as any other.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "gradient_checkpointing",
            "n_ctx",
            "pad_token_id",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    )
    fixed: ClassVar[Mapping[str, Any]] = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    base_model_prefix: ClassVar[str] = "transformer"
    tied: ClassVar[tuple[str, str]] = ("transformer.wte.weight", "lm_head.weight")
    # The causal mask and its fill value.
    ignored: ClassVar[tuple[str, ...]] = ("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias")
    axes: ClassVar[Mapping[str, str]] = {
        "layer": "n_layer",
        "vocab": "vocab_size",
        "position": "n_positions",
        "embed": "n_embd",
        "heads": "n_head",
    }

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

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        heads = tp * rng.choice((1, 2, 3))
        return {
            "vocab_size": vocab,
            "n_positions": positions,
            "n_embd": heads * rng.choice((2, 3, 8)),
            "n_layer": layers,
            "n_head": heads,
            "n_inner": rng.choice((None, 7, 40)),
            "activation_function": rng.choice(ACTIVATIONS),
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            "layer_norm_epsilon": rng.choice((1e-5, 1e-2)),
            "pad_token_id": rng.choice((None, 5)),
            "tie_word_embeddings": rng.random() < 0.5,
        }

    @property
    def max_positions(self) -> int | None:
        return self.n_positions

    def params(self) -> tuple[Param, ...]:
        ours, theirs = "layers.{layer}", "transformer.h.{layer}"
        std = self.initializer_range
        out = std / math.sqrt(2 * self.n_layer)
        qkv = "(q: heads head + k: heads head + v: heads head)"
        tied = self.tie_word_embeddings
        head = Param("head.weight", "vocab embed", "lm_head.weight", at="last", std=std)
        # Hugging Face stores these matrices transposed (Conv1D): the embed axis is spelled first there.
        return (
            Param(
                "embed.weight", "vocab embed", "transformer.wte.weight", at="first last" if tied else "first", std=std
            ),
            Param("positions.weight", "position embed", "transformer.wpe.weight", std=std),
            Param(f"{ours}.attn_norm.weight", "embed", f"{theirs}.ln_1.weight", mean=1),
            Param(f"{ours}.attn_norm.bias", "embed", f"{theirs}.ln_1.bias"),
            Param(f"{ours}.attn.qkv.weight", f"{qkv} embed", f"{theirs}.attn.c_attn.weight", f"embed {qkv}", std=std),
            Param(f"{ours}.attn.qkv.bias", qkv, f"{theirs}.attn.c_attn.bias"),
            Param(
                f"{ours}.attn.out.weight",
                "embed (heads head)",
                f"{theirs}.attn.c_proj.weight",
                "(heads head) embed",
                std=out,
            ),
            Param(f"{ours}.attn.out.bias", "embed", f"{theirs}.attn.c_proj.bias"),
            Param(f"{ours}.mlp_norm.weight", "embed", f"{theirs}.ln_2.weight", mean=1),
            Param(f"{ours}.mlp_norm.bias", "embed", f"{theirs}.ln_2.bias"),
            Param(f"{ours}.mlp.up.weight", "mlp embed", f"{theirs}.mlp.c_fc.weight", "embed mlp", std=std),
            Param(f"{ours}.mlp.up.bias", "mlp", f"{theirs}.mlp.c_fc.bias"),
            Param(f"{ours}.mlp.down.weight", "embed mlp", f"{theirs}.mlp.c_proj.weight", "mlp embed", std=out),
            Param(f"{ours}.mlp.down.bias", "embed", f"{theirs}.mlp.c_proj.bias"),
            Param("norm.weight", "embed", "transformer.ln_f.weight", at="last", mean=1),
            Param("norm.bias", "embed", "transformer.ln_f.bias", at="last"),
            *([] if tied else [head]),
        )

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


def build(config: Gpt2Config, parameters: Parameters, chunk: int) -> Decoder:
    """The modules of one pipeline chunk of this rank, over parameters that the layout has cut."""
    from models.attention import Attention
    from models.blocks import Block, Mlp
    from models.decoder import Decoder, Head, PositionEmbedding
    from parallel.layers.norm import LayerNorm

    p, mesh = parameters, parameters.mesh

    def norm(name: str) -> LayerNorm:
        return LayerNorm.of(p[f"{name}.weight"], p[f"{name}.bias"], config.layer_norm_epsilon, mesh)

    def block(layer: int) -> Block:
        name = f"layers.{layer}"
        return Block(
            norm(f"{name}.attn_norm"),
            Attention(p, f"{name}.attn", dropout=config.attn_pdrop),
            norm(f"{name}.mlp_norm"),
            Mlp(p, f"{name}.mlp", config.activation_function),
            dropout=config.resid_pdrop,
        )

    table = "embed.weight" if config.tie_word_embeddings else "head.weight"
    return Decoder.chunk(
        p,
        chunk,
        embedding=lambda: PositionEmbedding(
            p, "embed.weight", "positions.weight", config.vocab_size, config.embd_pdrop
        ),
        block=block,
        head=lambda: Head(norm("norm"), p[table], config.vocab_size, mesh.tp),
    )


def _shape(embed: int, layers: int, heads: int) -> dict[str, Any]:
    return {"vocab_size": 50257, "n_positions": 1024, "n_embd": embed, "n_layer": layers, "n_head": heads}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-tiny": _shape(64, 4, 4) | {"vocab_size": 512, "n_positions": 512},
    "gpt2": _shape(768, 12, 12),
    "gpt2-medium": _shape(1024, 24, 16),
    "gpt2-large": _shape(1280, 36, 20),
    "gpt2-xl": _shape(1600, 48, 25),
}

CONFIG: type[Gpt2Config] = Gpt2Config
