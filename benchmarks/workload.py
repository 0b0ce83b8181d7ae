"""The work of the training benchmarks: a model, the tokens of a step, its FLOPs. The peers state the full one too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megacore.models.config import ModelConfig, flops_per_token
from megacore.models.registry import configure


@dataclass(frozen=True)
class Workload:
    """A step trains on `global_batch` sequences of `sequence` tokens, `micro_batch` of them at a time on each rank."""

    model: Mapping[str, Any]
    sequence: int
    micro_batch: int
    global_batch: int

    @cached_property
    def config(self) -> ModelConfig:
        return configure({"family": "llama", "max_position_embeddings": self.sequence, **self.model})

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.global_batch * self.sequence

    @property
    def flops(self) -> int:
        """Of one step, forward and backward; attention counts the half of the scores that is not masked."""
        return self.tokens * flops_per_token(self.config, self.sequence)


FULL = Workload(
    {
        "vocab_size": 32000,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1376,
        "rms_norm_eps": 1e-5,
    },
    sequence=512,
    micro_batch=4,
    global_batch=8,
)
TINY = Workload(
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "rms_norm_eps": 1e-5,
    },
    sequence=32,
    micro_batch=2,
    global_batch=8,
)
SMOLLM2 = Workload(
    {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    sequence=512,
    micro_batch=2,
    global_batch=2,
)
"""SmolLM2-135M with 4 of its 30 layers."""
_EXPERTS = {key: value for key, value in FULL.model.items() if key != "intermediate_size"} | {
    "vocab_size": 8192,
    "num_hidden_layers": 4,
}
MIXTRAL = Workload(
    {
        **_EXPERTS,
        "family": "mixtral",
        "sliding_window": None,
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    sequence=512,
    micro_batch=2,
    global_batch=4,
)
WORKLOADS: Mapping[str, Workload] = {"full": FULL, "tiny": TINY, "mixtral": MIXTRAL, "smollm2": SMOLLM2}
"""By the name of their shape; tiny shows that a benchmark runs."""

HEAP = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""What the launch scripts set, so that glibc keeps large allocations instead of mapping fresh pages for each."""
