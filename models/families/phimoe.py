"""Phi-3.5-MoE (Abdin et al. 2024, arXiv 2404.14219): Mixtral with layer norms, whose two experts are each weighed among
those that are close to it.

The paper trains with experts that are drawn at random and inputs that are jittered (SparseMixer, arXiv 2409.12136).
Here the best two are trained, as they are when it is asked.
"""

from dataclasses import dataclass

from megacore.models.families.mixtral import MixtralConfig
from megacore.models.presets import shape
from megacore.models.rope_config import Convention, ScaledLongRope
from megacore.parallel.routing import Routing


@dataclass(frozen=True, kw_only=True)
class PhimoeConfig(MixtralConfig):
    family = "phimoe"
    architecture = "PhimoeForCausalLM"
    harmless = MixtralConfig.harmless | {"hidden_dropout", "input_jitter_noise", "original_max_position_embeddings"}
    fixed = {"num_experts_per_tok": 2}
    derived = frozenset({"head_dim"})
    rope_convention = Convention(rope_theta=1e6, own_types={"longrope": ScaledLongRope})
    norm_bias = True
    constants = {"norm": "layer"}
    held = ("mlp.experts", "mlp.router")

    max_position_embeddings: int = 131072
    num_local_experts: int = 16
    router_jitter_noise: float = 0.01
    attention_bias: bool = False
    lm_head_bias: bool = False

    @property
    def routing(self) -> Routing:
        return Routing(experts=self.num_local_experts, top_k=2, weigh="close", reach=2 * self.router_jitter_noise)

    @property
    def head_bias(self) -> bool:
        return self.lm_head_bias


PRESETS = {
    "phimoe-tiny": shape(64, 88, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "num_local_experts": 8},
    "phi-3.5-moe": shape(4096, 6400, 32, 32)
    | {"vocab_size": 32064, "num_key_value_heads": 8, "attention_bias": True, "lm_head_bias": True},
}
