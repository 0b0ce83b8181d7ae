"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and experts beside one that all tokens go to."""

from dataclasses import dataclass, replace

from megacore.models.experts_config import MoEConfig, SharedExpertConfig
from megacore.models.latent_config import LatentConfig
from megacore.models.presets import EXPERTS, shape, tiny_latent, yarn
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(LatentConfig, SharedExpertConfig):
    """The families of DeepSeek have this in common; fields carry their Hugging Face names."""

    harmless = MoEConfig.harmless | {"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"}
    axes = {**SharedExpertConfig.axes, **LatentConfig.axes}


_METHODS = ("greedy", "group_limited_greedy")


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    family = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    # Where norm_topk_prob is true, DeepSeek's own code divides by the sum, and transformers does not.
    fixed = {"mlp_bias": False, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"}

    moe_intermediate_size: int = 1407
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"

    @property
    def routing(self) -> Routing:
        # Where nothing limits them to groups, all are in one.
        groups, kept = (1, 1) if self.topk_method == "greedy" else (self.n_group or 1, self.topk_group or 1)
        return replace(super().routing, groups=groups, kept_groups=kept)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.topk_method not in _METHODS:
            found.append(f"topk_method {self.topk_method!r} is not one of {', '.join(_METHODS)}")
        elif self.topk_method != "greedy":
            found += [
                f"{name} is missing: topk_method {self.topk_method!r} needs it"
                for name in ("n_group", "topk_group")
                if getattr(self, name) is None
            ]
        return found


_YARN = yarn(40.0, 4096, rope_theta=10000.0, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707)
_EACH = {"vocab_size": 102400, "max_position_embeddings": 163840, "num_experts_per_tok": 6, "first_k_dense_replace": 1}

PRESETS = {
    "deepseek_v2-tiny": tiny_latent(96, q_lora_rank=None, first_k_dense_replace=1) | EXPERTS,
    "deepseek-v2-lite": _EACH
    | shape(2048, 10944, 27, 16, q_lora_rank=None, moe_intermediate_size=1408, rope_parameters=_YARN),
    "deepseek-v2": _EACH
    | shape(5120, 12288, 60, 128)
    | {"moe_intermediate_size": 1536, "n_routed_experts": 160, "routed_scaling_factor": 16.0, "rope_parameters": _YARN}
    | {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
}
