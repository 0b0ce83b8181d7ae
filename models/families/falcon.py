"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): branches side by side, keys and values of one head (7B) or of one
for each group of queries, stored group by group (11B, 40B, 180B)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig
from megacore.models.weight_rows import QKV, QKV_BY_HEAD, QKV_EACH, Rows, Table
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class FalconConfig(DecoderConfig):
    family = "falcon"
    architecture = "FalconForCausalLM"
    eps = "layer_norm_epsilon"
    base_model_prefix = "transformer"
    tied = ("transformer.word_embeddings.weight", "lm_head.weight")
    harmless = frozenset({"ff_factor"})  # which the class does not read
    # The class drops elements of the sum of two branches, and the attention's where there is no attention dropout.
    fixed = {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    ignored = ("transformer.h.{layer}.self_attention.rotary_emb.inv_freq",)
    derived = frozenset({"head_dim", "hidden_act", "intermediate_size", "num_key_value_heads"})
    layer = "transformer.h.{layer}"
    last_norm = "transformer.ln_f"
    norm_bias = True
    constants = {"norm": "layer", "padding_idx": None}

    activation: str = "gelu"
    layer_norm_epsilon: float = 1e-5
    ffn_hidden_size: int
    num_kv_heads: int
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    multi_query: bool = True
    parallel_attn: bool = True
    bias: bool = False
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True

    @property
    def sizes(self) -> Mapping[str, int]:
        sizes, kv = dict(super().sizes), self.num_key_value_heads
        if self.new_decoder_architecture:
            # Each rank has whole groups: ranks that share keys and values would share queries, too.
            del sizes["kv"]
            sizes |= {"groups": kv, "share": self.num_attention_heads // kv}
        return sizes

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(parallel=self.new_decoder_architecture or self.parallel_attn)

    def mixer(self, t: Table) -> Rows:
        (here, stored), hf, out = self._qkv, "self_attention.query_key_value", "self_attention.dense"
        return t.attention(hf=hf, out=out, here=here, stored=stored, bias=self.bias, out_bias=self.bias)

    def network(self, t: Table) -> Rows:
        return t.plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=self.bias)

    @property
    def _qkv(self) -> tuple[str, str]:
        """The sentences of queries, keys and values, ours and Hugging Face's."""
        if self.new_decoder_architecture:
            return (
                "(q: groups share head + k: groups head + v: groups head)",
                "(groups (q: share head + k: head + v: head))",
            )
        return (QKV, QKV) if self.multi_query else (QKV_EACH, QKV_BY_HEAD)

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(*(t.norm(*names) for names in self._norms.items()), self.mixer(t), self.network(t), **self.ends)

    @property
    def _norms(self) -> Mapping[str, str]:
        if self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2):
            return {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
        if self.new_decoder_architecture or self.parallel_attn:
            return {"attn_norm": "input_layernorm"}
        return {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

    def problems(self) -> list[str]:
        found, norms = super().problems(), self.num_ln_in_parallel_attn
        if self.new_decoder_architecture and not self.parallel_attn:
            found.append("parallel_attn is false: branches of new_decoder_architecture stand side by side")
        if norms not in ((None, 1, 2) if self.new_decoder_architecture else (None, 1)):
            found.append(
                f"num_ln_in_parallel_attn is {norms}: it must be 1 or null, or 2 with new_decoder_architecture"
            )
        return found

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        found, new = super()._derive(values), values.get("new_decoder_architecture")
        if values.get("ffn_hidden_size") is None and isinstance(values.get("hidden_size"), int):
            values["ffn_hidden_size"] = 4 * values["hidden_size"]
        if values.get("num_kv_heads") is None:
            values["num_kv_heads"] = values.get("num_attention_heads")
        if new or values.get("multi_query", True):
            values["num_key_value_heads"] = values["num_kv_heads"] if new else 1
        values["intermediate_size"] = values.get("ffn_hidden_size")
        values["hidden_act"] = values.get("activation", cls.activation)
        return found


def _shape(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"vocab_size": 65024, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


_NEW = {"new_decoder_architecture": True, "num_kv_heads": 8}

PRESETS = {
    "falcon-tiny": _shape(64, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "falcon-7b": _shape(4544, 32, 71),
    "falcon-40b": _shape(8192, 60, 128) | _NEW,
    "falcon-180b": _shape(14848, 80, 232) | _NEW,
}
