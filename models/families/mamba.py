"""Mamba (Gu and Dao 2023, arXiv 2312.00752): state spaces alone, of channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.ssm_config import SelectiveScanConfig, StatesAloneConfig


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StatesAloneConfig, SelectiveScanConfig):
    family: ClassVar[str] = "mamba"
    architecture: ClassVar[str] = "MambaForCausalLM"
    derived: ClassVar[frozenset[str]] = StatesAloneConfig.derived - {"intermediate_size"}
    harmless: ClassVar[frozenset[str]] = StatesAloneConfig.harmless | SelectiveScanConfig.harmless
    saved: ClassVar[Mapping[str, str]] = {**StatesAloneConfig.saved, "mamba_dt_rank": "time_step_rank"}
    # A file may say it, whatever `expand` says.
    axes: ClassVar[Mapping[str, str]] = {**SelectiveScanConfig.axes, "channels": "intermediate_size"}

    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0


def _shape(hidden: int, layers: int) -> dict[str, Any]:
    return {"vocab_size": 50280, "hidden_size": hidden, "num_hidden_layers": layers}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "mamba-tiny": _shape(64, 4) | {"vocab_size": 512},
    "mamba-130m": _shape(768, 24),
    "mamba-370m": _shape(1024, 48),
    "mamba-1.4b": _shape(2048, 48),
    "mamba-2.8b": _shape(2560, 64),
}
