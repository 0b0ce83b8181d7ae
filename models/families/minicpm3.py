"""MiniCPM3 4B (Hu et al. 2024, arXiv 2404.06395): latent attention, and scaled embeddings, branches and logits."""

import math
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.latent_config import LatentConfig
from megacore.models.presets import tiny_latent


@dataclass(frozen=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    family = "minicpm3"
    architecture = "MiniCPM3ForCausalLM"
    harmless = frozenset({"pretraining_tp"})
    fixed = {"mlp_bias": False}
    told = {"embedding_scale": "scale_emb"}
    rope_interleave = False

    initializer_range: float = 0.1
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int
    scale_emb: float = 12
    scale_depth: float = 1.4
    dim_model_base: int = 256

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(
            branch_scale=self.scale_depth / math.sqrt(self.num_hidden_layers),
            logit_scale=self.dim_model_base / self.hidden_size,
        )

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        # What transformers takes for a null; and a head of values is as wide as a part of x where nothing is said.
        heads, hidden, layers = (
            values.get(f"{of}") for of in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        if values.get("v_head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            values["v_head_dim"] = hidden // heads
        if values.get("scale_depth", 1.4) is None and isinstance(layers, int) and layers > 0:
            values["scale_depth"] = math.sqrt(layers)
        if values.get("dim_model_base", 256) is None:
            values["dim_model_base"] = hidden
        return super()._derive(values)


PRESETS = {"minicpm3-tiny": tiny_latent(dim_model_base=32)}
