"""What torch's flash operators for CUDA compute, by the formula, and in their place: FlashAttention documents it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def scores_of(q: Tensor, k: Tensor, starts: Tensor, key_starts: Tensor, sides: dict[str, Any]) -> Tensor:
    """[heads, queries, keys]. In each document the last query stands beside the last key; -inf is not seen."""
    at, keys = torch.arange(len(q)), torch.arange(len(k))
    document, of_key = torch.bucketize(at, starts, right=True), torch.bucketize(keys, key_starts, right=True)
    place = at - starts[document] + key_starts[document]
    left, right = sides["window_size_left"], sides["window_size_right"]
    seen = document[:, None] == of_key
    seen &= (left < 0) | (keys >= place[:, None] - left)
    seen &= (right < 0) | (keys <= place[:, None] + right)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * sides["scale"]
    return scores.masked_fill(~seen, float("-inf"))


def forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, *given: Any, **sides: Any) -> Any:
    """The output and the logarithms of the sums, and nothing in the places of seeds."""
    longest, longest_keys, dropout, causal, debug = given
    assert starts.dtype == key_starts.dtype == torch.int32 and starts[-1] == len(q) and key_starts[-1] == len(k)
    assert longest >= starts.diff().max() and longest_keys >= key_starts.diff().max() and not dropout and not debug
    assert causal == (sides["window_size_right"] == 0 and sides["window_size_left"] == -1)
    scores = scores_of(q, k, starts, key_starts, sides)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1), None, None, None


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *given: Any, **sides: Any
) -> Any:
    starts, key_starts, _, _, dropout, *_ = given
    assert log_sum.is_contiguous() and not dropout
    share, along = q.shape[1] // k.shape[1], (dy * out).sum(-1).T[..., None]
    keys, values = (x.repeat_interleave(share, 1) for x in (k, v))
    p = (scores_of(q, k, starts, key_starts, sides) - log_sum[..., None]).exp()
    ds = p * (torch.einsum("qhd,khd->hqk", dy, values) - along) * sides["scale"]
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, dy)
    return torch.einsum("hqk,khd->qhd", ds, keys), *(x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))


STAND_IN = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
