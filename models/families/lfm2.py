"""LFM2 (Liquid AI 2025, arXiv 2511.23404): gated short convolutions in most layers, attention in the others."""

from dataclasses import dataclass

from megacore.models.anatomy import CONVOLUTION, FULL
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import HybridConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, around, in_layers


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionConfig(HybridConfig):
    """What LFM2 and LFM2 with experts have in common."""

    other = CONVOLUTION
    derived = frozenset({"attention_dropout", "head_dim", "hidden_act"})
    spellings = {"tie_embedding": "tie_word_embeddings"}
    eps = "norm_eps"
    axes = {**DecoderConfig.axes, "channels": "hidden_size", "taps": "conv_L_cache"}
    rope_convention = Convention(rope_theta=1e6)
    last_norm = "model.embedding_norm"
    parts = around("operator_norm", "ffn_norm")
    network_rows = ("feed_forward.{w1,w3}", "feed_forward.w2")
    taken = {"hidden_act": "silu", "attention_dropout": 0.0}

    norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 3

    def mixer(self, t: Table) -> Rows:
        attention = t.attention(out="self_attn.out_proj") + t.norms_of_heads("self_attn.{}_layernorm")
        convolution = t.short_convolution(bias=self.conv_bias)
        return in_layers(self.layers_of(CONVOLUTION), convolution) + in_layers(self.layers_of(FULL), attention)


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ShortConvolutionConfig):
    family = "lfm2"
    architecture = "Lfm2ForCausalLM"
    # Of published files; nothing reads them.
    harmless = frozenset(
        {
            "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
            "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc",
        }
    )  # fmt: skip
    defaults = {"num_key_value_heads": 8}
    spellings = {**ShortConvolutionConfig.spellings, "block_ff_dim": "intermediate_size"}
    axes = {**ShortConvolutionConfig.axes, "mlp": "feed_forward_size"}

    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    # The layers that attend where layer_types is null; None: all.
    full_attn_idxs: tuple[int, ...] | None = None

    def attends(self, layer: int) -> bool:
        return self.full_attn_idxs is None or layer in self.full_attn_idxs

    @property
    def feed_forward_size(self) -> int:
        """Hidden features of a feed-forward network."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size, multiple = int(2 * self.intermediate_size / 3), max(1, self.block_multiple_of)
        if self.block_ffn_dim_multiplier is None:
            return size
        return -(-int(self.block_ffn_dim_multiplier * size) // multiple) * multiple

    def problems(self) -> list[str]:
        return super().problems() + positive(self, "block_multiple_of")


_EACH = {"vocab_size": 65536, "num_key_value_heads": 8, "max_position_embeddings": 128000}

PRESETS = {
    "lfm2-tiny": tiny(192, full_attn_idxs=[1, 3], block_multiple_of=32),
    "lfm2-350m": _EACH | shape(1024, 6656, 16, 16) | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2-1.2b": _EACH | shape(2048, 12288, 16, 32) | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
}
