"""Kernels under one roof, chosen once: :mod:`parallel.kernels.choice` says which."""

from parallel.kernels.choice import (
    adamw,
    add_product_,
    cast_transpose,
    causal_attention,
    chosen,
    cross_entropy,
    documents_attention,
    gated,
    layer_norm,
    rms_norm,
    rotate,
    set_updates,
    split_and_rotate,
    step_if,
    take_flash_attention,
    updates,
)

__all__ = [
    "adamw",
    "add_product_",
    "cast_transpose",
    "causal_attention",
    "chosen",
    "cross_entropy",
    "documents_attention",
    "gated",
    "layer_norm",
    "rms_norm",
    "rotate",
    "set_updates",
    "split_and_rotate",
    "step_if",
    "take_flash_attention",
    "updates",
]
