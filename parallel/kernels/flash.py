"""Torch's flash attention for CUDA (Dao 2023, arXiv 2307.08691), of documents: with a window, and with what sinks need.

These are the operators that ``torch.nn.attention.varlen`` is made of. Asked for by themselves they give the logarithms
of the sums and take others in the backward, which is all that sinks change.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch import Tensor

aten = torch.ops.aten


@cache
def available(device: torch.device) -> bool:
    """Return whether torch has it for this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def shares() -> bool:
    """Return whether queries may share keys and values there, as in torch 2.11 they may not."""
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler along, a second of imports

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def takes(q: Tensor) -> bool:
    """Return whether it takes heads like q's, [..., head]."""
    return q.device.type == "cuda" and fits(q) and available(q.device)


def fits(q: Tensor) -> bool:
    """Return whether it takes such numbers and sizes, wherever they are."""
    return q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ends: tuple[Tensor, int],
    scale: float,
    window: int | None,
    before: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """q: [t, heads, head], k, v: [t, kv, head] -> out: [t, heads, head], log_sum: [heads, t] in fp32.

    Args:
        q, k, v: Those of tokens of documents.
        ends: int32 [documents + 1], where they begin, and the end; at least the length of the longest.
        scale: Factor of the scores.
        window: The number of tokens that a token looks at; None for all before it.
        before: The ``ends`` of k and v, if these are tokens before those of q: then a query looks at all of them, or
            with a window the last one at so many of the last, and each before it at one more.
    """
    k, v = _shared(k, q), _shared(v, q)
    places, causal, sides = _places(ends, before), before is None and window is None, _sides(window, before)
    out, log_sum, *_ = aten._flash_attention_forward(q, k, v, *places, 0.0, causal, False, scale=scale, **sides)
    return out, log_sum


def backward(
    log_sum: Tensor,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    ends: tuple[Tensor, int],
    scale: float,
    window: int | None,
    before: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv; ``out`` and ``log_sum`` may be with a sink, or with other keys."""
    kv, random, unused = k.shape[1], torch.empty(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    k, v = _shared(k, q), _shared(v, q)
    places, causal, sides = _places(ends, before), before is None and window is None, _sides(window, before)
    tensors = dy, q, k, v, out, log_sum
    dq, dk, dv = aten._flash_attention_backward(*tensors, *places, 0.0, causal, random, unused, scale=scale, **sides)
    if dk.shape[1] > kv:
        dk, dv = (x.unflatten(1, (kv, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """x: [t, kv, head] -> [t, kv or heads, head]."""
    return x if shares() else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _places(ends: tuple[Tensor, int], before: tuple[Tensor, int] | None) -> tuple[Tensor, Tensor, int, int]:
    (starts, longest), (keys, most) = ends, before or ends
    return starts, keys, longest, most


def _sides(window: int | None, before: tuple[Tensor, int] | None) -> dict[str, int]:
    """Return how many tokens before and after itself a token sees, if the last one stands beside the last key."""
    left = -1 if window is None else window - 1
    return {"window_size_left": left, "window_size_right": 0 if before is None else -1}
