"""IQuest-Coder-V1 (IQuest Lab 2026): LLaMA under a name of its own."""

from dataclasses import dataclass

from megacore.models.families.llama import LlamaConfig
from megacore.models.presets import tiny


@dataclass(frozen=True, kw_only=True)
class IQuestCoderConfig(LlamaConfig):
    family = "iquestcoder"
    # What its own code can do, and no published file asks for.
    fixed = {"clip_qkv": None, "use_sliding_window": False}
    defaults = {"num_key_value_heads": 8, "head_dim": 128}

    rms_norm_eps: float = 1e-5


PRESETS = {"iquestcoder-tiny": tiny(head_dim=16)}
