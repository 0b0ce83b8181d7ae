"""Qwen3.5's text models (Qwen Team 2026): three layers of four follow the gated delta rule, the fourth attends."""

from dataclasses import dataclass

from megacore.models.delta_config import QwenDeltaConfig
from megacore.models.mtp import FIELD
from megacore.models.presets import STATES, rope, shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(QwenDeltaConfig):
    family = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    defaults = {"num_key_value_heads": 4, "head_dim": 256}
    # Published files say these, and transformers' class has none of them.
    fixed = {
        "attn_output_gate": True,
        "mlp_only_layers": [],
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",  # of the delta rule; that of attention is a sigmoid, whatever a file says
    }
    harmless = frozenset({"mamba_ssm_dtype"})
    saved = {FIELD: "mtp_num_hidden_layers"}
    # Of text all three sections of a position are one number.
    rope_convention = Convention(partial_rotary_factor=0.25, ignored=frozenset({"mrope_interleaved", "mrope_section"}))
    of_text = True


EACH = {"vocab_size": 248320, "max_position_embeddings": 262144, **rope(1e7, partial_rotary_factor=0.25)}

PRESETS = {
    "qwen3_5_text-tiny": EACH | tiny(head_dim=16) | STATES,
    "qwen3.5-9b": EACH | shape(4096, 12288, 32, 16) | {"num_key_value_heads": 4},
}
