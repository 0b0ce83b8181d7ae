"""LFM3 (Liquid AI 2026): LFM2's convolutions beside attention with and without windows, and a gate of each head."""

from dataclasses import dataclass

from megacore.models.anatomy import CONVOLUTION, FULL, SLIDING
from megacore.models.families.lfm2 import ShortConvolutionConfig
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.presets import tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table, around, in_layers
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Lfm3Config(LocalRopeConfig):
    family = "lfm3"
    architecture = "Lfm3ForCausalLM"
    more = (CONVOLUTION,)
    # Of the gates there is no bias.
    fixed = {"attention_bias": False}
    derived = frozenset({"hidden_act"})
    defaults = {"num_key_value_heads": 4, "head_dim": 128}
    spellings = {**ShortConvolutionConfig.spellings, "rms_norm_eps": "norm_eps"}
    eps = "norm_eps"
    axes = ShortConvolutionConfig.axes
    rope_kinds = {
        SLIDING: Convention(scaled=False),
        FULL: Convention(parameters={"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}),
    }
    last_norm = ShortConvolutionConfig.last_norm
    parts = around("operator_norm", "ffn_norm", "post_operator_norm", "post_ffn_norm")
    network_rows = ("feed_forward.{w1,w3}", "feed_forward.w2")
    taken = {"hidden_act": "silu"}

    norm_eps: float = 1e-5
    pad_token_id: int | None = 124893
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 7
    sliding_window: int | None = 256
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    def slides(self, layer: int) -> bool:
        return layer % 4 == 0 and layer > 0

    def kind(self, layer: int) -> str:
        return SLIDING if self.slides(layer) else FULL if layer % 4 == 2 else CONVOLUTION

    def mixer(self, t: Table) -> Rows:
        gate = {"gate": "heads"} if self.use_attention_gate else {}
        pieces = {"q": "heads head", **gate, "k": "kv head", "v": "kv head"}
        here = " + ".join(f"{piece}: {axes}" for piece, axes in pieces.items())
        hf = f"self_attn.{{{','.join(pieces)}}}_proj"
        attention = t.attention(hf=hf, here=f"({here})") + t.norms_of_heads()
        attends = sorted(self.layers_of(FULL) + self.layers_of(SLIDING))
        return in_layers(self.layers_of(CONVOLUTION), t.short_convolution(bias=self.conv_bias)) + in_layers(
            attends, attention
        )

    def params(self) -> tuple[Param, ...]:
        return tuple(row for row in super().params() if self.use_sandwich_norm or "_out_norm." not in row.name)


PRESETS = {
    "lfm3-tiny": tiny(head_dim=16, sliding_window=128, pad_token_id=None)
    | {"layer_types": [CONVOLUTION, FULL, CONVOLUTION, SLIDING]}
}
