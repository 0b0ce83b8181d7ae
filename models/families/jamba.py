"""Jamba (AI21 2024, arXiv 2403.19887): state spaces of channels (Mamba), attention without positions, and experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.config import positive
from megacore.models.experts_config import MoEConfig
from megacore.models.learned_positions import NoRopeConfig
from megacore.models.presets import shape, tiny
from megacore.models.ssm_config import SelectiveScanConfig
from megacore.models.weight_rows import Rows, Table, around, in_layers
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class JambaConfig(SelectiveScanConfig, NoRopeConfig):
    family = "jamba"
    architecture = "JambaForCausalLM"
    derived = frozenset({"head_dim", "layer_types", "rope_parameters"})
    harmless = (
        SelectiveScanConfig.harmless
        | MoEConfig.harmless
        | {"calc_logits_for_entire_prompt", "n_ctx", "use_mamba_kernels"}
    )
    fixed = {"mamba_inner_layernorms": True, "sliding_window": None}
    defaults = {"num_key_value_heads": 8}
    spellings = {"num_local_experts": "num_experts"}
    last_norm = "model.final_layernorm"
    parts = around("input_layernorm", "pre_ff_layernorm")
    inner_norms = "{}_layernorm"
    constants = {"norm": "rms"}
    told = {"latent_norm_eps": "rms_norm_eps"}

    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    max_position_embeddings: int = 262144
    num_experts: int = 16
    num_experts_per_tok: int = 2
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    attn_layer_period: int = 8
    attn_layer_offset: int = 4

    def attends(self, layer: int) -> bool:
        return layer % (self.attn_layer_period or 1) == self.attn_layer_offset

    @property
    def sparse_layers(self) -> list[int]:
        """The layers that have experts; one is none."""
        period, layers = self.expert_layer_period or 1, range(self.num_hidden_layers)
        return [layer for layer in layers if self.num_experts > 1 and layer % period == self.expert_layer_offset]

    @property
    def routing(self) -> Routing | None:
        """The rule by which experts are chosen, where there are some."""
        return Routing(experts=self.num_experts, top_k=self.num_experts_per_tok) if self.sparse_layers else None

    @property
    def sizes(self) -> Mapping[str, int]:
        experts = {"experts": self.num_experts, "routes": self.num_experts, "expert_mlp": self.intermediate_size}
        return {**super().sizes, **(experts if self.sparse_layers else {})}

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(routing=self.routing, **own)

    def network(self, t: Table) -> Rows:
        hf, sparse = "feed_forward.{gate,up}_proj", {*self.sparse_layers}
        experts = t.experts(
            hf="feed_forward.experts.{experts}.{gate,up}_proj",
            down="feed_forward.experts.{experts}.down_proj",
            router="feed_forward.router",
            held=("feed_forward.experts", "feed_forward.router"),
        )
        dense = t.gated_mlp(hf, "feed_forward.down_proj")
        return in_layers(sparse, experts) + in_layers({*range(self.num_hidden_layers)} - sparse, dense)

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "num_experts")
        for kind in ("attn", "expert"):
            period, offset = (getattr(self, f"{kind}_layer_{each}") for each in ("period", "offset"))
            if not 0 <= offset < period:
                found.append(f"{kind}_layer_offset is {offset}: it must be below {kind}_layer_period ({period})")
        return found if found or self.routing is None else [*self.routing.problems()]


_EACH = {"vocab_size": 65536, "num_key_value_heads": 8}

PRESETS = {
    "jamba-tiny": tiny(64, attn_layer_period=2, attn_layer_offset=1, num_experts=4, expert_layer_offset=0),
    "jamba-1.5-mini": _EACH | shape(4096, 14336, 32, 32),
    "jamba-1.5-large": _EACH | shape(8192, 24576, 72, 64),
}
