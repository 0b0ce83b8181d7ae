"""LongCat-Flash (Meituan 2025, arXiv 2509.01322): two blocks with latent attention in a layer, and experts beside the
second one, of which some do nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.experts_config import MoEConfig
from megacore.models.latent_config import LatentConfig
from megacore.models.presets import EXPERTS, shape, tiny_latent
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import GATE_UP, NORMS
from megacore.parallel.routing import Routing
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class LongcatFlashConfig(LatentConfig, MoEConfig):
    family = "longcat_flash"
    architecture = "LongcatFlashForCausalLM"
    derived = frozenset({"qk_head_dim"})
    # What transformers 5.23 makes of experts that do nothing, and nothing multiplies.
    ignored = LatentConfig.ignored + tuple(
        f"model.layers.{{layer}}.mlp.experts.{{experts}}.{each}_proj.weight" for each in ("gate", "up")
    )
    further = ("model.mtp.",)
    fixed = {
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "router_bias": False,
        "zero_expert_type": "identity",
    }
    saved = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
    }
    spellings = {"num_local_experts": "n_routed_experts"}
    axes = {**LatentConfig.axes, "experts": "n_routed_experts", "expert_mlp": "moe_intermediate_size"}
    defaults = {"head_dim": 64}
    rope_convention = Convention(rope_theta=1e7)

    rms_norm_eps: float = 1e-5
    q_lora_rank: int = 1536
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 512
    zero_expert_num: int = 256
    num_experts_per_tok: int = 12
    routed_scaling_factor: float = 6.0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "routes": self.n_routed_experts + self.zero_expert_num}

    @property
    def routing(self) -> Routing:
        idle = self.zero_expert_num
        every, factor = self.n_routed_experts + idle, self.routed_scaling_factor
        return Routing(experts=every, idle=idle, top_k=self.num_experts_per_tok, factor=factor)

    def anatomy_of(self, **own: Any) -> Anatomy:
        plain = super().anatomy_of(latent_scale=(self.hidden_size / self.kv_lora_rank) ** 0.5, **own)
        scale = plain.attention_scale or self.qk_head_dim**-0.5
        return replace(plain, attention_scale=scale * (self.hidden_size / self.q_lora_rank) ** 0.5)

    def params(self) -> tuple[Param, ...]:
        t, router, corrects = self.table(), "mlp.router.classifier", "mlp.router.e_score_correction_bias"
        return t.model(
            t.experts(router=router, correction=corrects, held=("mlp.experts", router)),
            *(tuple(_of_block(row, number) for row in self.mixer(t)) for number in (0, 1)),
            *(
                t.linear(f"{name}.up", GATE_UP, "embed", f"mlps.{number}.{{gate,up}}_proj")
                + t.linear(f"{name}.down", "embed", "mlp", f"mlps.{number}.down_proj", ends=True)
                for number, name in enumerate(("dense", "then.mlp"))
            ),
            *(
                t.norm(f"{where}{name}", f"{hf}.{number}")
                for name, hf in NORMS.items()
                for number, where in enumerate(("", "then."))
            ),
            **self.ends,
        )

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        given, problems = values.get("head_dim"), super()._derive(values)
        if given == (turning := values["qk_rope_head_dim"]):
            return problems
        return [*problems, f"head_dim is {given}: it must be qk_rope_head_dim ({turning}), of what turns"]


def _of_block(row: Param, number: int) -> Param:
    """Return a row of one of the two blocks of a layer."""
    name = row.name.replace("{layer}.", "{layer}.then.") if number else row.name
    return replace(row, name=name, hf=row.hf.replace("self_attn.", f"self_attn.{number}."))


PRESETS = {
    "longcat_flash-tiny": tiny_latent(96, head_dim=8, zero_expert_num=8) | EXPERTS,
    "longcat-flash": shape(6144, 12288, 28, 64) | {"vocab_size": 131072, "max_position_embeddings": 131072},
}
