"""Kernels under one roof, chosen once: :mod:`parallel.kernels.choice` says which."""

from parallel.kernels.choice import (
    adamw,
    causal_attention,
    documents_attention,
    layer_norm,
    rms_norm,
    set_updates,
    step_if,
    updates,
)

__all__ = [
    "adamw",
    "causal_attention",
    "documents_attention",
    "layer_norm",
    "rms_norm",
    "set_updates",
    "step_if",
    "updates",
]
