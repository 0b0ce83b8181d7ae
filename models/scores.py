"""Heads that give numbers of a whole sequence, at its last token, in place of logits of the next one: classes, or one
reward. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megacore.parallel.weights.schema import Param

AXIS = "labels"
"""The axis of the numbers."""
WEIGHT = "score.weight"
"""Our name of the head, and Hugging Face's."""

FAMILIES = frozenset(
    {
        "arcee", "axk1", "biogpt", "bloom", "deepseek_v2", "deepseek_v3", "exaone4", "falcon", "gemma", "gemma2",
        "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "helium",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "jamba", "llama", "minicpm3", "minimax", "ministral", "ministral3",
        "mistral", "mistral4", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "openai-gpt", "opt", "persimmon",
        "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
        "smollm3", "stablelm", "starcoder2", "zamba2",
    }
)  # fmt: skip
"""Those of which transformers has such a class."""


def scored(rows: Iterable[Param], std: float) -> tuple[Param, ...]:
    """Return the rows of a model with such a head: an embedding is no head any more."""
    kept = (row for row in rows if row.name not in ("head.weight", "head.bias"))
    return (
        *(replace(row, at="first") if row.name == "embed.weight" else row for row in kept),
        Param(WEIGHT, f"{AXIS} embed", WEIGHT, at="last", std=std),
    )
