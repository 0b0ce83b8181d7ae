"""Persimmon 8B (Adept 2023): LayerNorm, of each head too, squared relus, and half of each head turns."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import rope, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BY_HEAD, Rows, Table


@dataclass(frozen=True, kw_only=True)
class PersimmonConfig(DecoderConfig):
    family = "persimmon"
    architecture = "PersimmonForCausalLM"
    eps = "layer_norm_eps"
    # The class drops elements of one branch, and not of the other.
    fixed = {"hidden_dropout": 0.0}
    derived = frozenset({"head_dim", "num_key_value_heads"})
    rope_convention = Convention(partial_rotary_factor=0.5, pairs=True)
    norm_bias = True
    last_norm = "model.final_layernorm"
    constants = {"norm": "layer"}
    attention_rows = {"hf": "self_attn.query_key_value", "out": "self_attn.dense"} | BY_HEAD
    network_rows = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    attention_bias = mlp_bias = True
    gated_network = False

    hidden_act: str = "relu2"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = True

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + (t.norms_of_heads("self_attn.{}_layernorm") if self.qk_layernorm else ())


PRESETS = {
    "persimmon-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "persimmon-8b": shape(4096, 16384, 36, 64)
    | {"vocab_size": 262144, "max_position_embeddings": 16384}
    | rope(25000.0, partial_rotary_factor=0.5),
}
