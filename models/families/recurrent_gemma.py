"""RecurrentGemma 2B and 9B (Griffin, De et al. 2024, arXiv 2402.19427, 2404.07839): linear recurrences in two layers of
three, and in the third attention to a window."""

import math
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import LINEAR, SLIDING, Anatomy, by_kind
from megacore.models.config import above_zero
from megacore.models.decoder_config import DecoderConfig
from megacore.models.layer_types import LayerTypesConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, around, in_layers

_KINDS = {"recurrent": LINEAR, "attention": SLIDING}


@dataclass(frozen=True, kw_only=True)
class RecurrentGemmaConfig(LayerTypesConfig):
    family = "recurrent_gemma"
    architecture = "RecurrentGemmaForCausalLM"
    other = LINEAR
    more = (SLIDING,)
    derived = frozenset({"head_dim", "initializer_range", "layer_types", "max_position_embeddings"})
    harmless = frozenset({"final_w_init_variance_scale", "w_init_variance_scale"})
    fixed = {"embeddings_scale_by_sqrt_dim": True}
    saved = {
        "hidden_act": "hidden_activation",
        "sliding_window": "attention_window_size",
    }
    axes = {
        **DecoderConfig.axes,
        "mlp": "features",
        "state_heads": "num_attention_heads",
        "state_value": "channels",
        "state_given": "channels",
        "taps": "conv1d_width",
    }
    rope_convention = Convention(partial_rotary_factor=0.5)
    parts = around("temporal_pre_norm", "channel_pre_norm")
    last_norm = "model.final_norm"
    constants = {"norm_offset": 1.0}
    told = {"logit_softcap": "logits_soft_cap"}
    network_rows = ("mlp_block.{gate,up}_proj", "mlp_block.down_proj")
    mlp_bias = True
    max_positions = None

    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    max_position_embeddings: int = 1  # there are none
    sliding_window: int = 2048
    block_types: tuple[str, ...] = ("recurrent", "recurrent", "attention")
    lru_width: int
    conv1d_width: int = 4
    logits_soft_cap: float = 30.0

    def kind(self, layer: int) -> str:
        block = self.block_types[layer % len(self.block_types)] if self.block_types else ""
        return _KINDS.get(block, block)

    @property
    def features(self) -> int:
        """The hidden features of a network: its gates count in ``intermediate_size``, too."""
        return self.intermediate_size // 2

    @property
    def channels(self) -> int:
        """Those of a head of a recurrence."""
        return self.lru_width // (self.num_attention_heads or 1)

    @property
    def anatomy(self) -> Anatomy:
        root, power = math.frexp(self.hidden_size**0.5)
        scale = math.ldexp(round(256 * root), power - 8)  # in bf16, whatever the model is in
        return self.anatomy_of(layers=by_kind(self.kinds, self.sliding_window), embedding_scale=scale)

    def mixer(self, t: Table) -> Rows:
        hf = "temporal_block.{q,k,v}_proj", "temporal_block.o_proj"
        attention = t.attention(hf=hf[0], out=hf[1], bias=self.attention_bias, out_bias=True)
        recurrent = in_layers(self.layers_of(LINEAR), t.recurrent_unit("temporal_block"))
        return recurrent + in_layers(self.layers_of(SLIDING), attention)

    def problems(self) -> list[str]:
        found = super().problems() + above_zero(self, "logits_soft_cap")
        if self.sliding_window < 1:
            found.append(f"attention_window_size is {self.sliding_window}: it must be at least 1")
        if not found and self.lru_width % self.num_attention_heads:
            heads = self.num_attention_heads
            found.append(f"lru_width ({self.lru_width}) is not a multiple of num_attention_heads ({heads})")
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("lru_width") is None:
            values["lru_width"] = values.get("hidden_size")
        return super()._derive(values)


_EACH = {"vocab_size": 256000, "num_key_value_heads": 1}

PRESETS = {
    "recurrent_gemma-tiny": {
        name: value for name, value in tiny(attention_window_size=128).items() if name != "max_position_embeddings"
    },
    "recurrentgemma-2b": _EACH | shape(2560, 15360, 26, 10),
    "recurrentgemma-9b": _EACH | shape(4096, 24576, 38, 16),
}
