"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, sinks, every other layer a window."""

from dataclasses import dataclass

from megacore.models.experts_config import MoEConfig
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import shape, tiny, yarn
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table

_YARN = yarn(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig, WindowedConfig):
    family = "gpt_oss"
    architecture = "GptOssForCausalLM"
    fixed = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    harmless = MoEConfig.harmless | {"initial_context_length"}
    defaults = {"num_key_value_heads": 8, "head_dim": 64}
    spellings = {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}
    rope_convention = Convention(rope_theta=150000.0, parameters=_YARN)
    axes = {**MoEConfig.axes, "experts": "num_local_experts"}
    rule = {"weigh": "chosen"}
    constants = {"activation": "swiglu_oai"}

    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_local_experts: int = 128
    num_experts_per_tok: int = 4

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + t.sinks()

    def experts(self, t: Table) -> Rows:
        router = t.linear("mlp.router", "routes", "embed", "mlp.router", bias=True)
        return router + t.stacked_experts("(expert_mlp (gate: + up:))", bias=True)


_EACH = {"vocab_size": 201088, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072}

PRESETS = {
    "gpt_oss-tiny": tiny(64, max_position_embeddings=131072, head_dim=16, num_local_experts=8, sliding_window=32),
    "gpt-oss-20b": _EACH | shape(2880, 2880, 24, 64) | {"num_local_experts": 32},
    "gpt-oss-120b": _EACH | shape(2880, 2880, 36, 64),
}
