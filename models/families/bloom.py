"""BLOOM (BigScience 2022, arXiv 2211.05100): no positions but slopes of heads (ALiBi), and a norm of the embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Alibi, Anatomy
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.weight_rows import BY_HEAD
from megacore.parallel.weights.schema import Param

_DERIVED = frozenset({"hidden_act", "intermediate_size", "max_position_embeddings"})


@dataclass(frozen=True, kw_only=True)
class BloomConfig(NoRopeConfig):
    family = "bloom"
    architecture = "BloomForCausalLM"
    eps = "layer_norm_epsilon"
    base_model_prefix = "transformer"
    tied = ("transformer.word_embeddings.weight", "lm_head.weight")
    # How kernels fuse and sums are rounded, and what nobody reads.
    harmless = frozenset(
        {
            "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi",
            "pretraining_tp", "seq_length", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
        }
    )  # fmt: skip
    fixed = {"apply_residual_connection_post_layernorm": False}
    derived = NoRopeConfig.derived | _DERIVED
    spellings = {"n_embed": "hidden_size"}
    saved = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    layer = "transformer.h.{layer}"
    last_norm = "transformer.ln_f"
    norm_bias = True
    constants = {"alibi": Alibi(of_power=True), "padding_idx": None}
    told = {"branch_dropout": "hidden_dropout"}
    attention_rows = {"hf": "self_attention.query_key_value", "out": "self_attention.dense"} | BY_HEAD
    network_rows = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    attention_bias = mlp_bias = True
    gated_network = False
    taken = {"hidden_act": "gelu_new", "max_position_embeddings": 2048}
    mlp_ratio = 4
    max_positions = None

    hidden_act: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    hidden_dropout: float = 0.0
    tie_word_embeddings: bool = True

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(attention_scale=self.head_dim**-0.5)

    def params(self) -> tuple[Param, ...]:
        embed, *others = super().params()
        return embed, *self.table().embed_norm("transformer.word_embeddings_layernorm"), *others

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        # Whatever a file says of lengths, the class does not read it.
        return super()._read({name: value for name, value in config.items() if name != "max_position_embeddings"})


def _shape(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"vocab_size": 250880, "hidden_size": hidden, "n_layer": layers, "n_head": heads}


PRESETS = {
    "bloom-tiny": _shape(64, 4, 4) | {"vocab_size": 512},
    "bloom-560m": _shape(1024, 24, 16),
    "bloom-1b7": _shape(2048, 24, 16),
    "bloom-7b1": _shape(4096, 30, 32),
    "bloom-176b": _shape(14336, 70, 112),
}
