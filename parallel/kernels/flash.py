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
    """Whether torch has it for this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def shares() -> bool:
    """Whether queries may share keys and values there, as in torch 2.11 they may not."""
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler along, a second of imports

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def takes(q: Tensor) -> bool:
    """Whether it takes heads like q's, [..., head]."""
    return q.device.type == "cuda" and fits(q) and available(q.device)


def fits(q: Tensor) -> bool:
    """Whether it takes such numbers and sizes, wherever they are."""
    return q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, ends: tuple[Tensor, int], scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """q: [t, heads, head], k, v: [t, kv, head] -> out: [t, heads, head], log_sum: [heads, t] in fp32.

    Args:
        q, k, v: Of tokens of documents.
        ends: int32 [documents + 1], where they begin, and the end; at least the length of the longest.
        scale: Factor of the scores.
        window: How many tokens a token looks at; None for all before it.
    """
    k, v = _shared(k, q), _shared(v, q)
    places, sides = _places(ends), _sides(window)
    out, log_sum, *_ = aten._flash_attention_forward(q, k, v, *places, 0.0, window is None, False, scale=scale, **sides)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv; ``out`` and ``log_sum`` may be with a sink."""
    kv, random, unused = k.shape[1], torch.empty(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    k, v = _shared(k, q), _shared(v, q)
    tensors, places, sides = (dy, q, k, v, out, log_sum), _places(ends), _sides(window)
    dq, dk, dv = aten._flash_attention_backward(
        *tensors, *places, 0.0, window is None, random, unused, scale=scale, **sides
    )
    if dk.shape[1] > kv:
        dk, dv = (x.unflatten(1, (kv, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """[t, kv, head] -> [t, kv or heads, head]."""
    return x if shares() else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _places(ends: tuple[Tensor, int]) -> tuple[Tensor, Tensor, int, int]:
    starts, longest = ends
    return starts, starts, longest, longest


def _sides(window: int | None) -> dict[str, int]:
    """How many tokens before and after itself a token sees."""
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
