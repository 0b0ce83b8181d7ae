"""The attention kernel that torch takes on an H100, cuDNN aside, for tensors without numbers."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do as ``F.scaled_dot_product_attention``: flash attention for two bytes without a mask, the efficient one for up
    to four of heads that each have keys, else all scores."""
    mask = attn_mask
    if q.dtype.itemsize == 2 and mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if q.dtype.itemsize <= 4 and q.shape[1] == k.shape[1]:
        bias = mask if mask is None or mask.is_floating_point() else torch.zeros_like(mask, dtype=q.dtype)
        if bias is not None:
            bias = bias.expand(*q.shape[:3], k.shape[2])
        needs = any(x.requires_grad for x in (q, k, v))
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs, dropout_p, is_causal, scale=scale)[0]
    more = {"scale": scale, "enable_gqa": enable_gqa}
    return aten._scaled_dot_product_attention_math(q, k, v, mask, dropout_p, is_causal, **more)[0]
