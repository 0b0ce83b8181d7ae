"""What presets of many families have: sizes, ropes, and models of less than a million parameters. No torch."""

from __future__ import annotations

from typing import Any


def shape(hidden: int, mlp: int, layers: int, heads: int, **own: Any) -> dict[str, Any]:
    """Return the sizes of a preset, and its own fields."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | own


EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4}
"""The experts of a preset of less than a million parameters, by DeepSeek's names."""
STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} | {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""And its gated delta rule."""


def tiny(mlp: int = 176, layers: int = 4, **own: Any) -> dict[str, Any]:
    """Return a preset of less than a million parameters."""
    few = {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return shape(64, mlp, layers, 4) | few | own


def tiny_latent(mlp: int = 176, **own: Any) -> dict[str, Any]:
    """Return such a preset with latent attention."""
    sizes = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    return shape(64, mlp, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 1024} | sizes | own


def rope(theta: float, **own: Any) -> dict[str, Any]:
    """Return the field of a plain rope."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **own}}


def llama3(theta: float, factor: float, high: float = 4.0) -> dict[str, Any]:
    """Return a rope of the type llama3."""
    ends = {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **ends}


def yarn(factor: float, original: int, **own: Any) -> dict[str, Any]:
    """Return a rope of the type yarn."""
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **own}
