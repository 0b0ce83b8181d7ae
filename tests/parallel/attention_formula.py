"""Attention as it is written down, which every way of computing it is compared with: all scores, a mask, a softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.parallel.kernels.scoring import PLAIN, Scoring


def scores_of(q: Tensor, k: Tensor, lengths: Sequence[int], scoring: Scoring) -> Tensor:
    """q: [t, heads, head], k: [t, kv, head] -> [heads, t, t], of tokens that do not see each other -inf."""
    document, t = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.arange(len(q))
    seen = (document[:, None] == document) & (t[:, None] >= t)
    if scoring.window is not None:
        seen &= t[:, None] - t < scoring.window
    if scoring.chunk is not None:
        piece = torch.cat([torch.arange(n) for n in lengths]) // scoring.chunk
        seen &= piece[:, None] == piece
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    return scores.masked_fill(~seen, float("-inf"))


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scoring: Scoring = PLAIN) -> Tensor:
    """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value] of packed documents -> [t, heads, value]."""
    scores = scores_of(q, k, lengths, scoring)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def distances(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """|got - want| / |want| of each."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
