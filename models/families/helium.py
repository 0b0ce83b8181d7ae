"""Helium 1 (Kyutai 2025): LLaMA whose heads turn in pairs."""

from dataclasses import dataclass

from megacore.models.decoder_config import DecoderConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class HeliumConfig(DecoderConfig):
    family = "helium"
    architecture = "HeliumForCausalLM"
    harmless = frozenset({"pretraining_tp"})
    defaults = {"num_key_value_heads": 20, "head_dim": 128}
    rope_convention = Convention(rope_theta=100000.0)
    in_pairs = True
    out_bias = False

    rms_norm_eps: float = 1e-8
    pad_token_id: int | None = 3
    attention_bias: bool = False
    mlp_bias: bool = False

    def problems(self) -> list[str]:
        heads, head, hidden = self.num_attention_heads, self.head_dim, self.hidden_size
        square = f"num_attention_heads ({heads}) times head_dim ({head}) must be hidden_size ({hidden})"
        return super().problems() + [square] * (heads * head != hidden)


PRESETS = {
    "helium-tiny": tiny(head_dim=16),
    "helium-1-preview-2b": shape(2560, 7040, 24, 20) | {"vocab_size": 48000, "max_position_embeddings": 4096},
}
