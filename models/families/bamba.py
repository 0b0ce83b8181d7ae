"""Bamba (IBM, Princeton, CMU, UIUC 2024): state spaces (Mamba-2) in most layers, attention in the others."""

from dataclasses import dataclass

from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention
from megacore.models.ssm_config import StateSpaceConfig
from megacore.models.weight_rows import around


@dataclass(frozen=True, kw_only=True)
class BambaConfig(StateSpaceConfig):
    family = "bamba"
    architecture = "BambaForCausalLM"
    # The layers that attend have their own field.
    derived = StateSpaceConfig.derived | {"layer_types"}
    harmless = StateSpaceConfig.harmless | {"attn_rotary_emb"}
    fixed = {"z_loss_coefficient": 0.0}
    defaults = {"num_key_value_heads": 8}
    rope_convention = Convention(partial_rotary_factor=0.5)
    last_norm = "model.final_layernorm"
    parts = around("input_layernorm", "pre_ff_layernorm")
    network_rows = ("feed_forward.{gate,up}_proj", "feed_forward.down_proj")
    taken = {"layer_types": None}

    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    mlp_bias: bool = False
    attn_layer_indices: tuple[int, ...] | None = None

    def attends(self, layer: int) -> bool:
        return layer in (self.attn_layer_indices or ())


_EACH = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 262144, "mamba_d_state": 128}

PRESETS = {
    "bamba-tiny": tiny(attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_state=16),
    "bamba-9b": _EACH | shape(4096, 14336, 32, 32) | {"attn_layer_indices": [9, 18, 27]},
}
