"""GPT-NeoX Japanese (ABEJA 2022): GPT-NeoX with one branch after the other and one bias, of the last attention."""

from dataclasses import dataclass
from typing import Any

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BY_HEAD, Rows, Table


@dataclass(frozen=True, kw_only=True)
class GptNeoxJapaneseConfig(DecoderConfig):
    family = "gpt_neox_japanese"
    architecture = "GPTNeoXJapaneseForCausalLM"
    eps = "layer_norm_eps"
    base_model_prefix = "gpt_neox_japanese"
    tied = ("gpt_neox_japanese.embed_in.weight", "embed_out.weight")
    derived = frozenset({"head_dim", "intermediate_size", "num_key_value_heads"})
    rope_convention = Convention(
        partial_rotary_factor=1.0, theta_key="rotary_emb_base", partial_key="rotary_pct", pairs=True
    )
    layer = "gpt_neox_japanese.layers.{layer}"
    last_norm = "gpt_neox_japanese.final_layer_norm"
    norm_bias = True
    constants = {"norm": "layer", "padding_idx": None}
    told = {"branch_dropout": "hidden_dropout"}
    network_rows = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    gated_network = False

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.0
    intermediate_multiple_size: int = 4

    def mixer(self, t: Table) -> Rows:
        name, last = "attention.dense", (self.num_hidden_layers - 1,)
        bias = t.row("attn.out.bias", "embed", f"{name}_bias", layers=last)
        return *t.attention(hf="attention.query_key_value", out=name, **BY_HEAD), bias

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        hidden, times = values.get("hidden_size"), values.get("intermediate_multiple_size", 4)
        values |= {"intermediate_size": hidden * times} if isinstance(hidden, int) and isinstance(times, int) else {}
        return super()._derive(values)


def _shape(vocab: int, hidden: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    sizes = shape(hidden, 4 * hidden, layers, heads)
    return {"vocab_size": vocab, "max_position_embeddings": positions} | sizes


PRESETS = {
    "gpt_neox_japanese-tiny": _shape(512, 64, 4, 4, 512),
    "gpt-neox-japanese-2.7b": _shape(32000, 2560, 32, 32, 2048),
}
