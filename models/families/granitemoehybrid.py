"""Granite 4 (Granite Team, IBM 2025): state spaces (Mamba-2) and attention, Granite's multipliers, experts or none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import FULL, LINEAR, ROPE, Anatomy, LayerAttention
from megacore.models.config import positive
from megacore.models.experts_config import MoEConfig
from megacore.models.families.granite import Multipliers
from megacore.models.families.granitemoe import SHARED, STACKED
from megacore.models.presets import shape, tiny
from megacore.models.ssm_config import StateSpaceConfig
from megacore.models.weight_rows import Rows, Table
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(StateSpaceConfig, Multipliers):
    family = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    harmless = StateSpaceConfig.harmless | MoEConfig.harmless | {"init_method", "normalization_function"}
    spellings = {"layers_block_type": "layer_types"}
    # Without experts what all tokens go to is the only network.
    axes = {**StateSpaceConfig.axes, "mlp": "shared_intermediate_size"}

    rms_norm_eps: float = 1e-6
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    # Heads turn where it is "rope".
    position_embedding_type: str | None = None

    @property
    def routing(self) -> Routing | None:
        """The rule by which experts are chosen, where there are some."""
        experts, top_k = self.num_local_experts, self.num_experts_per_tok
        return Routing(experts=experts, top_k=top_k, weigh="chosen") if experts else None

    @property
    def sizes(self) -> Mapping[str, int]:
        sizes = {**super().sizes}
        if experts := self.num_local_experts:
            sizes |= {"experts": experts, "routes": experts, "expert_mlp": self.intermediate_size}
            sizes["shared_mlp"] = sizes.pop("mlp")
        return sizes

    def anatomy_of(self, **own: Any) -> Anatomy:
        turns = self.position_embedding_type == "rope"
        plain = (LayerAttention(ROPE if turns else None),) * self.num_hidden_layers
        positions = {"layers": plain} if turns else {"layers": plain, "ropes": {}}
        return super().anatomy_of(routing=self.routing, **positions, **own)

    def network(self, t: Table) -> Rows:
        if self.num_local_experts:
            return t.experts(**STACKED) + t.shared_expert(**SHARED)
        return t.gated_mlp("shared_mlp.input_linear", "shared_mlp.output_linear")

    def problems(self) -> list[str]:
        found = super().problems() + (positive(self, "intermediate_size") if self.num_local_experts else [])
        return found + list(self.routing.problems() if self.routing else ())


_EACH = {
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "mamba_d_state": 128,
    "layer_types": [FULL if layer in (5, 15, 25, 35) else LINEAR for layer in range(40)],
}
_DENSE = {"num_local_experts": 0, "attention_multiplier": 0.015625, "shared_intermediate_size": 8192}

PRESETS = {
    "granitemoehybrid-tiny": tiny(32, shared_intermediate_size=64, mamba_n_heads=8, mamba_d_state=16)
    | {"attention_multiplier": 0.0625, "layer_types": [LINEAR, FULL, LINEAR, LINEAR]},
    "granite-4.0-h-micro": _EACH
    | _DENSE
    | shape(2048, 8192, 40, 32, num_key_value_heads=8, mamba_n_heads=64, logits_scaling=8.0),
    "granite-4.0-micro": _EACH
    | _DENSE
    | shape(2560, 8192, 40, 40)
    | {"num_key_value_heads": 8, "mamba_n_heads": 80, "logits_scaling": 10.0}
    | {"layer_types": [FULL] * 40, "position_embedding_type": "rope", "rope_theta": 1e7},
    "granite-4.0-h-tiny-7b": _EACH
    | shape(1536, 512, 40, 12)
    | {"num_key_value_heads": 4, "mamba_n_heads": 48, "attention_multiplier": 0.0078125, "logits_scaling": 6.0}
    | {"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024},
    "granite-4.0-h-small": _EACH
    | shape(4096, 768, 40, 32)
    | {"num_key_value_heads": 8, "attention_multiplier": 0.0078125, "logits_scaling": 16.0}
    | {"num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536},
}
