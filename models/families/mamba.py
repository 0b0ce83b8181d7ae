"""Mamba (Gu and Dao 2023, arXiv 2312.00752): state spaces alone, of channels."""

from dataclasses import dataclass
from typing import Any

from megacore.models.ssm_config import SelectiveScanConfig, StatesAloneConfig


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StatesAloneConfig, SelectiveScanConfig):
    family = "mamba"
    architecture = "MambaForCausalLM"
    derived = StatesAloneConfig.derived - {"intermediate_size"}
    harmless = StatesAloneConfig.harmless | SelectiveScanConfig.harmless
    saved = {**StatesAloneConfig.saved, "mamba_dt_rank": "time_step_rank"}
    # A file may say it, whatever `expand` says.
    axes = {**SelectiveScanConfig.axes, "channels": "intermediate_size"}

    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0


def _shape(hidden: int, layers: int) -> dict[str, Any]:
    return {"vocab_size": 50280, "hidden_size": hidden, "num_hidden_layers": layers}


PRESETS = {
    "mamba-tiny": _shape(64, 4) | {"vocab_size": 512},
    "mamba-130m": _shape(768, 24),
    "mamba-370m": _shape(1024, 48),
    "mamba-1.4b": _shape(2048, 48),
    "mamba-2.8b": _shape(2560, 64),
}
