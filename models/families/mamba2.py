"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): state spaces alone, of heads."""

from dataclasses import dataclass

from megacore.models.ssm_config import StatesAloneConfig, StateSpaceConfig


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(StatesAloneConfig, StateSpaceConfig):
    family = "mamba2"
    architecture = "Mamba2ForCausalLM"
    derived = StatesAloneConfig.derived | {"attention_bias"}
    # Files of transformers 4.44 say norm_before_gate, which its class never read: the norm is behind the gate.
    harmless = StatesAloneConfig.harmless | {"chunk_size", "norm_before_gate", "time_step_rank"}
    defaults = {"mamba_d_head": 64}
    saved = {
        **StatesAloneConfig.saved,
        "mamba_n_heads": "num_heads",
        "mamba_d_head": "head_dim",
        "mamba_n_groups": "n_groups",
    }

    pad_token_id: int | None = 1
    mamba_n_groups: int = 8
    mamba_d_state: int = 128


PRESETS = {
    "mamba2-tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 16}
    | {"state_size": 16, "n_groups": 2},
    "mamba-codestral-7b": {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64},
}
