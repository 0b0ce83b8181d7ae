"""CWM 32B (Meta FAIR 2025, arXiv 2510.02387): LLaMA of which three layers of four have windows."""

from dataclasses import dataclass
from typing import Any

from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import llama3, shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class CwmConfig(WindowedConfig):
    family = "cwm"
    architecture = "CwmForCausalLM"
    harmless = frozenset({"pretraining_tp"})
    fixed = {"attention_bias": False, "mlp_bias": False}
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    rope_convention = Convention(rope_theta=1e6, parameters=llama3(1e6, 16.0))

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 8192

    def slides(self, layer: int) -> bool:
        return layer % 4 > 0

    def to_hugging_face(self) -> dict[str, Any]:
        # The class takes no null for it.
        return {name: value for name, value in super().to_hugging_face().items() if name != "bos_token_id"}


PRESETS = {
    "cwm-tiny": tiny(head_dim=16, sliding_window=128),
    "cwm-32b": shape(6144, 21504, 64, 48) | {"vocab_size": 128256, "max_position_embeddings": 131072},
}
