"""Attention in bands: blocks of queries, each beside the keys that they see, so that a window costs what it sees."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.kernels.scoring import Scoring, attend

# Queries of a block.
_BLOCK = 128


def by_formula(q: Tensor, k: Tensor, v: Tensor, first: Tensor, scoring: Scoring) -> Tensor:
    """q: [b, heads, s, head], k, v: [b, kv, s, head] -> [b, heads, s, head], in torch's operators.

    Args:
        q, k, v: Of b sequences.
        first: [b or 1, s], the first token of each token's document.
        scoring: What is made of them.
    """
    length, parts = q.shape[2], []
    at = torch.arange(length, device=q.device)
    if scoring.window is not None:
        first = torch.maximum(first, at - (scoring.window - 1))
    for start in range(0, length, _BLOCK):
        own = slice(start, min(start + _BLOCK, length))
        keys = slice(0 if scoring.window is None else max(0, start - scoring.window + 1), own.stop)
        seen = (at[keys] >= first[:, own, None]) & (at[keys] <= at[own, None])
        parts.append(attend(q[:, :, own], k[:, :, keys], v[:, :, keys], seen, scoring))
    return torch.cat(parts, 2)
