"""BioGPT (Luo et al. 2022, arXiv 2210.10341): learned positions, and embeddings that are scaled."""

from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.learned_positions import LearnedPositionsConfig
from megacore.models.presets import shape
from megacore.models.weight_rows import QKV_EACH, around


@dataclass(frozen=True, kw_only=True)
class BioGptConfig(LearnedPositionsConfig):
    family = "biogpt"
    architecture = "BioGptForCausalLM"
    eps = "norm_eps"
    # Whatever a file says.
    norm_eps = 1e-5
    harmless = frozenset({"layer_norm_eps"})
    fixed = {"activation_dropout": 0.0, "layerdrop": 0.0}
    saved = {"attention_dropout": "attention_probs_dropout_prob", "hidden_dropout": "hidden_dropout_prob"}
    base_model_prefix = "biogpt"
    tied = ("biogpt.embed_tokens.weight", "output_projection.weight")
    positions = "biogpt.embed_positions"
    layer = "biogpt.layers.{layer}"
    last_norm = "biogpt.layer_norm"
    norm_bias = True
    constants = {"position_offset": 2}
    told = dict.fromkeys(("branch_dropout", "embedding_dropout"), "hidden_dropout")
    parts = around("self_attn_layer_norm", "final_layer_norm")
    attention_rows = {"out": "self_attn.out_proj", "here": QKV_EACH}
    network_rows = ("fc1", "fc2")
    attention_bias = mlp_bias = True
    gated_network = False

    hidden_act: str = "gelu"
    pad_token_id: int | None = 1
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    scale_embedding: bool = True

    def anatomy_of(self, **own: Any) -> Anatomy:
        scale = self.hidden_size**0.5 if self.scale_embedding else 1.0
        return super().anatomy_of(**({"embedding_scale": scale} | own))


PRESETS = {
    "biogpt-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "biogpt": shape(1024, 4096, 24, 16) | {"vocab_size": 42384, "max_position_embeddings": 1024},
}
