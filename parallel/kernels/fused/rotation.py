"""Queries and keys turned by their positions, beside values that are copied: one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.fused import launching

# Heads of a program.
_HEADS = 16


@triton.jit
def _read(
    of_q: tl.tensor,
    of_k: tl.tensor,
    of_v: tl.tensor,
    in_q: tl.tensor,
    in_k: tl.tensor,
    in_v: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    x = tl.load(of_q + columns, mask=in_q & inside, other=0)
    x = tl.where(in_q, x, tl.load(of_k + columns, mask=in_k & inside, other=0))
    return tl.where(in_v, tl.load(of_v + columns, mask=in_v & inside, other=0), x)


@triton.jit
def rotate(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    heads: tl.tensor,
    kv: tl.tensor,
    blocks: tl.tensor,
    DIRECTION: tl.constexpr,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    STILL: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STILL_COLUMNS: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    in_q, in_k = head < heads, (head >= heads) & (head < heads + kv)
    in_v = (head >= heads + kv) & (head < heads + 2 * kv)
    of_q = q + token * q_token + head * q_head
    of_k = k + token * k_token + (head - heads) * k_head
    of_v = v + token * v_token + (head - heads - kv) * v_head
    target = out + (token * (heads + 2 * kv) + head) * (2 * HALF + STILL)
    inside = column < HALF
    here = (head < heads + 2 * kv) & inside
    first = _read(of_q, of_k, of_v, in_q, in_k, in_v, column, inside).to(WIDE)
    second = _read(of_q, of_k, of_v, in_q, in_k, in_v, HALF + column, inside).to(WIDE)
    along = tl.load(cos + token * HALF + column, mask=inside, other=0).to(WIDE)
    across = tl.load(sin + token * HALF + column, mask=inside, other=0).to(WIDE) * DIRECTION
    tl.store(target + column, tl.where(in_v, first, first * along - second * across), mask=here)
    tl.store(target + HALF + column, tl.where(in_v, second, second * along + first * across), mask=here)
    if STILL > 0:
        others = tl.arange(0, STILL_COLUMNS)[None, :]
        left = others < STILL
        passing = _read(of_q, of_k, of_v, in_q, in_k, in_v, 2 * HALF + others, left)
        tl.store(target + 2 * HALF + others, passing, mask=(head < heads + 2 * kv) & left)


class _SplitAndTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv, -1)).split([heads, kv, kv], 1)
        q, k, v = _turned(q, k, v, cos, sin, 1).split([heads, kv, kv], 1)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(dq, dk, dv, cos, sin, -1).flatten(1), None, None, None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(x, x[:, :0], x[:, :0], cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(dy, dy[:, :0], dy[:, :0], cos, sin, -1), None, None


def _turned(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """q: [t, heads, head], k, v: [t, kv, head] -> [t, heads + 2 kv, head], all but v turned in its first dimensions."""
    parts = [x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v)]
    (tokens, heads, head), kv = q.shape, k.shape[1]
    out = torch.empty(tokens, heads + 2 * kv, head, dtype=q.dtype, device=q.device)
    blocks, half = triton.cdiv(heads + 2 * kv, _HEADS), cos.shape[-1]
    still = head - 2 * half
    launching.launch(
        rotate,
        tokens * blocks,
        *(*parts, cos, sin, out, *(stride for x in parts for stride in x.stride()[:2]), heads, kv, blocks),
        DIRECTION=direction,
        WIDE=launching.wide(q.dtype),
        HALF=half,
        STILL=still,
        HEADS=_HEADS,
        COLUMNS=triton.next_power_of_2(half),
        STILL_COLUMNS=triton.next_power_of_2(max(still, 1)),
    )
    return out


def split_and_apply(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv: [t, (heads + 2 kv) * head], cos, sin: [t, turning/2] -> q: [t, heads, head], k, v: [t, kv, head].

    The queries and keys are turned. The three are views of one new buffer, so that qkv can be freed.
    """
    q, k, v = _SplitAndTurn.apply(qkv, cos, sin, heads, kv)
    return q, k, v


def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [t, heads, head], cos, sin: [t, turning/2] -> x turned, a new tensor."""
    return _Turn.apply(x, cos, sin)
