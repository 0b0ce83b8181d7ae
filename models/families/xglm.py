"""XGLM 564M to 7.5B (Lin et al. 2021, arXiv 2112.10668): positions that are sinusoids, and scaled embeddings."""

from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy, Sinusoids
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import QKV_EACH, around


@dataclass(frozen=True, kw_only=True)
class XglmConfig(NoRopeConfig):
    family = "xglm"
    architecture = "XGLMForCausalLM"
    eps = "norm_eps"
    norm_eps = 1e-5
    # Of texts that another model has read.
    harmless = frozenset({"decoder_start_token_id"})
    fixed = {"activation_dropout": 0.0, "add_cross_attention": False, "layerdrop": 0.0}
    saved = {
        "hidden_act": "activation_function",
        "hidden_size": "d_model",
        "initializer_range": "init_std",
        "intermediate_size": "ffn_dim",
        "num_attention_heads": "attention_heads",
        "num_hidden_layers": "num_layers",
    }
    ignored = ("model.embed_positions.weights",)
    last_norm = "model.layer_norm"
    norm_bias = True
    constants = {"position_offset": 2}
    told = dict.fromkeys(("branch_dropout", "embedding_dropout"), "dropout")
    parts = around("self_attn_layer_norm", "final_layer_norm")
    attention_rows = {"out": "self_attn.out_proj", "here": QKV_EACH}
    network_rows = ("fc1", "fc2")
    attention_bias = mlp_bias = True
    gated_network = False

    hidden_act: str = "gelu"
    pad_token_id: int | None = 1
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.1
    dropout: float = 0.1
    scale_embedding: bool = True

    @property
    def anatomy(self) -> Anatomy:
        scale = self.hidden_size**0.5 if self.scale_embedding else 1.0
        waves = Sinusoids(self.hidden_size // 2 - 1, none=self.pad_token_id)  # whose row is another position's, too
        return self.anatomy_of(embedding_scale=scale, sinusoids=waves)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.hidden_size < 4:
            found.append(f"d_model is {self.hidden_size}: sinusoids take at least 4")
        if self.pad_token_id is not None and self.pad_token_id < 0:
            found.append(f"pad_token_id is {self.pad_token_id}: it must be at least 0, or null")
        return found


def _shape(hidden: int, mlp: int, layers: int, vocab: int = 256008) -> dict[str, Any]:
    sizes = shape(hidden, mlp, layers, 4 if hidden == 64 else 16)
    return {XglmConfig.saved.get(name, name): size for name, size in sizes.items()} | {"vocab_size": vocab}


PRESETS = {
    "xglm-tiny": _shape(64, 256, 4, 512) | {"max_position_embeddings": 512},
    "xglm-564m": _shape(1024, 4096, 24),
    "xglm-1.7b": _shape(2048, 8192, 24),
    "xglm-2.9b": _shape(2048, 8192, 48),
    "xglm-7.5b": _shape(4096, 16384, 32),
}
