"""dots.llm1 (rednote-hilab 2025, arXiv 2506.05767): norms of each head, and experts chosen as DeepSeek-V3's are."""

from dataclasses import dataclass

from megacore.models.experts_config import SigmoidConfig
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import EXPERTS, rope, shape, tiny


@dataclass(frozen=True, kw_only=True)
class Dots1Config(SigmoidConfig, WindowedConfig):
    family = "dots1"
    architecture = "Dots1ForCausalLM"
    # What the class does not read: it says what all models of the family are.
    harmless = SigmoidConfig.harmless | {"moe_layer_freq", "scoring_func", "topk_method", "use_sliding_window"}
    defaults = {"num_key_value_heads": 32}
    head_norms = {}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_window_layers: int = 62
    moe_intermediate_size: int = 1408
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None and layer >= self.max_window_layers


PRESETS = {
    "dots1-tiny": tiny(96, first_k_dense_replace=1, n_shared_experts=2) | EXPERTS,
    "dots.llm1": shape(4096, 10944, 62, 32)
    | {"vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {**rope(1e7), "norm_topk_prob": True}
    | {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
}
