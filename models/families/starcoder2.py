"""StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173): LLaMA with LayerNorm, a plain feed-forward network, biases and a
window over all layers."""

from dataclasses import dataclass

from megacore.models.layer_types import OneWindowConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import BRANCHES, NORMS, Rows, Table


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(OneWindowConfig):
    family = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    eps = "norm_epsilon"
    # Of the published files, from GPT-BigCode's, and not read by transformers' class.
    harmless = frozenset(
        {
            "activation_function",
            "attention_softmax_in_fp32",
            "layer_norm_epsilon",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        }
    )
    fixed = {"norm_type": "layer_norm", "mlp_type": "default"}
    derived = frozenset({"head_dim"})
    defaults = {"num_key_value_heads": 2}
    norm_bias = True
    constants = {"norm": "layer"}
    told = {"branch_dropout": "residual_dropout", "embedding_dropout": "embedding_dropout"}
    parts = BRANCHES | NORMS

    hidden_act: str = "gelu_pytorch_tanh"
    initializer_range: float = 0.018042
    norm_epsilon: float = 1e-5
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    use_bias: bool = True
    tie_word_embeddings: bool = True

    def mixer(self, t: Table) -> Rows:
        return t.attention(bias=self.use_bias, out_bias=self.use_bias)

    def network(self, t: Table) -> Rows:
        return t.plain_mlp("mlp.c_fc", "mlp.c_proj", bias=self.use_bias)


_STARCODER2 = {"vocab_size": 49152, "max_position_embeddings": 16384, "sliding_window": 4096}

PRESETS = {
    "starcoder2-tiny": tiny(256, sliding_window=64),
    "starcoder2-3b": _STARCODER2 | shape(3072, 12288, 30, 24, num_key_value_heads=2, rope_theta=999999.4420358813),
    "starcoder2-7b": _STARCODER2 | shape(4608, 18432, 32, 36) | {"num_key_value_heads": 4, "rope_theta": 1000000.0},
    "starcoder2-15b": _STARCODER2
    | shape(6144, 24576, 40, 48, num_key_value_heads=4, rope_theta=100000.0, tie_word_embeddings=False),
}
