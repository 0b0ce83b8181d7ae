"""Mixtral 8x7B and 8x22B (Jiang et al. 2024, arXiv 2401.04088): Mistral with experts in every layer."""

from dataclasses import dataclass

from megacore.models.experts_config import MoEConfig
from megacore.models.families.mistral import MistralConfig
from megacore.models.presets import rope, shape
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoEConfig, MistralConfig):
    family = "mixtral"
    architecture = "MixtralForCausalLM"
    fixed = {"router_jitter_noise": 0.0}
    spellings = {"num_experts": "num_local_experts"}
    axes = {**MoEConfig.axes, "experts": "num_local_experts"}
    rope_convention = Convention(rope_theta=1e6)
    rule = {"normalised": True}
    # The names of transformers for the modules of the experts and of the router in memory.
    held = ("mlp.experts", "mlp.gate")

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def experts(self, t: Table) -> Rows:
        moe = "block_sparse_moe"
        hf, down = f"{moe}.experts.{{experts}}.{{w1,w3}}", f"{moe}.experts.{{experts}}.w2"
        return t.experts(hf=hf, down=down, router=f"{moe}.gate", held=self.held)


_EACH = {"vocab_size": 32000, "num_key_value_heads": 8, "max_position_embeddings": 32768, **rope(1e6)}

PRESETS = {
    "mixtral-tiny": _EACH | shape(64, 88, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "num_local_experts": 8},
    "mixtral-8x7b": _EACH | shape(4096, 14336, 32, 32),
    "mixtral-8x22b": _EACH | shape(6144, 16384, 56, 48) | {"max_position_embeddings": 65536},
}
