"""InternLM3 8B (InternLM Team 2025): LLaMA, whose class transformers takes, with one field for all biases."""

from dataclasses import dataclass

from megacore.models.families.llama import LlamaConfig
from megacore.models.presets import shape, tiny


@dataclass(frozen=True, kw_only=True)
class InternLM3Config(LlamaConfig):
    family = "internlm3"
    harmless = frozenset({"pretraining_tp"})
    spellings = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    defaults = {"num_key_value_heads": 2, "head_dim": 128}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 2

    def problems(self) -> list[str]:
        found = super().problems()
        if self.attention_bias != self.mlp_bias:
            found.append(
                f"qkv_bias is {self.attention_bias}, and bias is {self.mlp_bias}: the class takes one for both"
            )
        return found


PRESETS = {
    "internlm3-tiny": tiny(head_dim=16),
    "internlm3-8b": shape(4096, 10240, 48, 32)
    | {"vocab_size": 128512, "max_position_embeddings": 32768}
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e7, "factor": 6.0}},
}
