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


def llama(vocab: int, hidden: int, layers: int, heads: int, kv: int, mlp: int) -> dict[str, Any]:
    """Return the fields of a LLaMA of these sizes."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "rms_norm_eps": 1e-5,
    }


FULL = Workload(
    llama(vocab=32000, hidden=512, layers=8, heads=8, kv=4, mlp=1376), sequence=512, micro_batch=4, global_batch=8
)
TINY = Workload(
    llama(vocab=256, hidden=64, layers=2, heads=4, kv=2, mlp=160), sequence=32, micro_batch=2, global_batch=8
)
SMOLLM2 = Workload(
    {**llama(vocab=49152, hidden=576, layers=4, heads=9, kv=3, mlp=1536), "tie_word_embeddings": True},
    sequence=512,
    micro_batch=2,
    global_batch=2,
)
"""SmolLM2-135M with 4 of its 30 layers."""
MIXTRAL = Workload(
    {
        **llama(vocab=8192, hidden=512, layers=4, heads=8, kv=4, mlp=1024),
        "family": "mixtral",
        "sliding_window": None,
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
