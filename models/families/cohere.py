"""Command R (Cohere 2024), Aya (arXiv 2405.15032): branches side by side behind one norm, a rope of pairs."""

from dataclasses import dataclass
from typing import Any

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import BRANCHES, Pairs, Rows, Table


@dataclass(frozen=True, kw_only=True)
class CommandConfig(DecoderConfig):
    """Command R's generations have this in common. Fields carry their Hugging Face names."""

    eps = "layer_norm_eps"
    in_pairs = True
    constants = {"norm": "layer", "parallel": True}
    told = {"logit_scale": "logit_scale"}
    parts = {"attn_norm": "input_layernorm"} | BRANCHES

    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625


@dataclass(frozen=True, kw_only=True)
class CohereConfig(CommandConfig):
    family = "cohere"
    architecture = "CohereForCausalLM"
    harmless = frozenset({"model_max_length", "pretraining_tp"})
    rope_convention = Convention(rope_theta=500000.0)

    use_qk_norm: bool = False

    def mixer(self, t: Table) -> Rows:
        if not self.use_qk_norm:
            return super().mixer(t)
        pairs = Pairs(self.head_dim, self.rope_parameters.turning(self.head_dim))
        here, stored = f"({pairs.here})", f"({pairs.stored})"
        queries = t.norm("attn.q_norm", "self_attn.q_norm", f"heads {here}", stored=f"heads {stored}")
        keys = t.norm("attn.k_norm", "self_attn.k_norm", f"kv {here}", stored=f"kv {stored}")
        return super().mixer(t) + queries + keys


def _rope(theta: float) -> dict[str, Any]:
    return {"vocab_size": 256000, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


PRESETS = {
    "cohere-tiny": tiny(use_qk_norm=True),
    "aya-23-8b": _rope(10000.0) | shape(4096, 14336, 32, 32, num_key_value_heads=8, max_position_embeddings=8192),
    "command-r": _rope(8000000.0) | shape(8192, 22528, 40, 64) | {"max_position_embeddings": 8192},
    "command-r-08-2024": _rope(4000000.0)
    | shape(8192, 24576, 40, 64, num_key_value_heads=8, max_position_embeddings=131072),
    "command-r-plus": _rope(75000000.0)
    | shape(12288, 33792, 64, 96)
    | {"num_key_value_heads": 8, "max_position_embeddings": 8192, "use_qk_norm": True, "logit_scale": 0.8333},
}
