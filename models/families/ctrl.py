"""CTRL (Keskar et al. 2019, arXiv 1909.05858): positions that are sinusoids, and texts that begin with a word for their
kind."""

from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy, Sinusoids
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.weight_rows import QKV_EACH, around


@dataclass(frozen=True, kw_only=True)
class CtrlConfig(NoRopeConfig):
    family = "ctrl"
    architecture = "CTRLLMHeadModel"
    eps = "norm_eps"
    # Of the norms of blocks whatever a file says, so that it is that of the last one, too.
    norm_eps = 1e-6
    fixed = {"layer_norm_epsilon": 1e-6}
    derived = NoRopeConfig.derived | {"attention_dropout", "hidden_act", "pad_token_id"}
    # Of classifying, and of the token for padding, whose embedding is trained as any other.
    harmless = frozenset(
        {
            "attn_pdrop", "from_tf", "n_ctx", "pad_token_id", "summary_activation", "summary_first_dropout",
            "summary_proj_to_labels", "summary_type", "summary_use_proj",
        }
    )  # fmt: skip
    saved = {
        "hidden_size": "n_embd",
        "intermediate_size": "dff",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    base_model_prefix = "transformer"
    tied = ("transformer.w.weight", "lm_head.weight")
    layer = "transformer.h.{layer}"
    last_norm = "transformer.layernorm"
    norm_bias = True
    told = {"branch_dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"}
    parts = around("layernorm1", "layernorm2")
    attention_rows = {"hf": "multi_head_attention.W{q,k,v}", "out": "multi_head_attention.dense", "here": QKV_EACH}
    network_rows = ("ffn.0", "ffn.2")
    attention_bias = mlp_bias = head_bias = True
    gated_network = False

    hidden_act: str = "relu"
    max_position_embeddings: int = 256
    tie_word_embeddings: bool = True
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1

    @property
    def anatomy(self) -> Anatomy:
        waves = Sinusoids(self.hidden_size / 2, of_power=True)
        return self.anatomy_of(embedding_scale=self.hidden_size**0.5, padding_idx=None, sinusoids=waves)


def _shape(embed: int, mlp: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {"n_embd": embed, "dff": mlp, "n_layer": layers, "n_head": heads, "vocab_size": vocab}


PRESETS = {
    "ctrl-tiny": _shape(64, 256, 4, 4, 512),
    "ctrl": _shape(1280, 8192, 48, 16, 246534),
}
