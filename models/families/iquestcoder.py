"""IQuest-Coder-V1 (IQuest Lab 2026): LLaMA under a name of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.families.llama import LlamaConfig
from megacore.models.presets import tiny


@dataclass(frozen=True, kw_only=True)
class IQuestCoderConfig(LlamaConfig):
    family: ClassVar[str] = "iquestcoder"
    # What its own code can do, and no published file asks for.
    fixed: ClassVar[Mapping[str, Any]] = {"clip_qkv": None, "use_sliding_window": False}
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "head_dim": 128}

    rms_norm_eps: float = 1e-5


PRESETS: Mapping[str, Mapping[str, Any]] = {"iquestcoder-tiny": tiny(head_dim=16)}
