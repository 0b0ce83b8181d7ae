"""The work of `train_step.py`: the model, the tokens of a step, its FLOPs. The scripts of the peers state the same."""

from __future__ import annotations

from models.config import flops_per_token
from models.registry import configure

SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 512, 4, 8

TOKENS = GLOBAL_BATCH * SEQUENCE
"""Tokens of one step."""

CONFIG = configure(
    {
        "family": "llama",
        "vocab_size": 32000,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1376,
        "max_position_embeddings": SEQUENCE,
        "rms_norm_eps": 1e-5,
    }
)

FLOPS = TOKENS * flops_per_token(CONFIG, SEQUENCE)
"""FLOPs of one step, forward and backward; attention counts the half of the scores that is not masked."""

HEAP = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
"""What the launch scripts set, so that glibc keeps large allocations instead of mapping fresh pages for each."""
