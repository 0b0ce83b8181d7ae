"""Granite 3 (Granite Team, IBM 2024): LLaMA with four multipliers (Yang et al. 2022, arXiv 2203.03466)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import above_zero
from megacore.models.decoder_config import DecoderConfig
from megacore.models.families.llama import LlamaConfig
from megacore.models.presets import shape, tiny


@dataclass(frozen=True, kw_only=True)
class Multipliers(DecoderConfig):
    """The multipliers of embeddings, scores, branches and logits. Fields carry their Hugging Face names."""

    told: ClassVar[Mapping[str, str]] = {
        "embedding_scale": "embedding_multiplier",
        "attention_scale": "attention_multiplier",
        "branch_scale": "residual_multiplier",
    }

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(**({"logit_scale": 1 / self.logits_scaling} | own))

    def problems(self) -> list[str]:
        found = ["logits_scaling is 0: the logits are divided by it"] if self.logits_scaling == 0 else []
        return super().problems() + above_zero(self, "attention_multiplier") + found


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(Multipliers, LlamaConfig):
    family = "granite"
    architecture = "GraniteForCausalLM"


GRANITE3 = {
    "vocab_size": 49155,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}

PRESETS = {
    "granite-tiny": GRANITE3 | tiny(attention_multiplier=0.0625, logits_scaling=8.0),
    "granite-3.0-2b": shape(2048, 8192, 40, 32) | GRANITE3 | {"attention_multiplier": 0.015625, "logits_scaling": 8.0},
    "granite-3.0-8b": shape(4096, 12800, 40, 32)
    | GRANITE3
    | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0},
}
