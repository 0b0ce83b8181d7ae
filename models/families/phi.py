"""Phi-1, Phi-1.5, Phi-2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463): branches side by
side behind one LayerNorm, biases everywhere, the head's included, and heads of which a part turns."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BRANCHES, Rows, Table


@dataclass(frozen=True, kw_only=True)
class PhiConfig(DecoderConfig):
    family = "phi"
    architecture = "PhiForCausalLM"
    eps = "layer_norm_eps"
    derived = frozenset({"head_dim"})
    rope_convention = Convention(partial_rotary_factor=0.5, pairs=True)
    norm_bias = True
    last_norm = "model.final_layernorm"
    constants = {"norm": "layer", "parallel": True}
    told = {"branch_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"}
    parts = BRANCHES | {"attn_norm": "input_layernorm"}
    attention_rows = {"out": "self_attn.dense"}
    network_rows = ("mlp.fc1", "mlp.fc2")
    attention_bias = mlp_bias = head_bias = True
    gated_network = False

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + (t.norms_of_heads("self_attn.{}_layernorm") if self.qk_layernorm else ())


_PHI = {"vocab_size": 51200, "max_position_embeddings": 2048}

PRESETS = {
    "phi-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "phi-1.5": _PHI | shape(2048, 8192, 24, 32) | {"partial_rotary_factor": 0.5},
    "phi-2": _PHI | shape(2560, 10240, 32, 32) | {"partial_rotary_factor": 0.4},
}
