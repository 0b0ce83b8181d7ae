"""Queries and keys turned by their positions, beside values that are copied: one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.kernels.fused import launching

# Heads of a program.
_HEADS = 16


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
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    here = (head < heads + 2 * kv) & (column < HALF)
    in_q, in_v = head < heads, head >= heads + kv
    of_q = q + token * q_token + head * q_head + column
    of_k = k + token * k_token + (head - heads) * k_head + column
    of_v = v + token * v_token + (head - heads - kv) * v_head + column
    is_k = here & (head >= heads) & (head < heads + kv)
    first = tl.load(of_q, mask=here & in_q, other=0)
    first = tl.where(in_q, first, tl.load(of_k, mask=is_k, other=0))
    first = tl.where(in_v, tl.load(of_v, mask=here & in_v, other=0), first).to(WIDE)
    second = tl.load(of_q + HALF, mask=here & in_q, other=0)
    second = tl.where(in_q, second, tl.load(of_k + HALF, mask=is_k, other=0))
    second = tl.where(in_v, tl.load(of_v + HALF, mask=here & in_v, other=0), second).to(WIDE)
    along = tl.load(cos + token * HALF + column, mask=column < HALF, other=0).to(WIDE)
    across = tl.load(sin + token * HALF + column, mask=column < HALF, other=0).to(WIDE) * DIRECTION
    target = out + (token * (heads + 2 * kv) + head) * 2 * HALF + column
    tl.store(target, tl.where(in_v, first, first * along - second * across), mask=here)
    tl.store(target + HALF, tl.where(in_v, second, second * along + first * across), mask=here)


class _SplitAndTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        q, k, v = qkv.unflatten(-1, (heads + 2 * kv, 2 * cos.shape[-1])).split([heads, kv, kv], 1)
        q, k, v = _turned(q, k, v, cos, sin, 1).split([heads, kv, kv], 1)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(dq, dk, dv, cos, sin, -1).flatten(1), None, None, None, None


def _turned(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """q: [t, heads, head], k, v: [t, kv, head] -> [t, heads + 2 kv, head], all but v turned."""
    parts = [x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v)]
    (tokens, heads, head), kv = q.shape, k.shape[1]
    out = torch.empty(tokens, heads + 2 * kv, head, dtype=q.dtype, device=q.device)
    blocks = triton.cdiv(heads + 2 * kv, _HEADS)
    launching.launch(
        rotate,
        tokens * blocks,
        *(*parts, cos, sin, out, *(stride for x in parts for stride in x.stride()[:2]), heads, kv, blocks),
        DIRECTION=direction,
        WIDE=launching.wide(q.dtype),
        HALF=head // 2,
        HEADS=_HEADS,
        COLUMNS=triton.next_power_of_2(head // 2),
    )
    return out


def split_and_apply(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv: [t, (heads + 2 kv) * head], cos, sin: [t, head/2] -> q: [t, heads, head], k, v: [t, kv, head].

    The queries and keys are turned. The three are views of one new buffer, so that qkv can be freed.
    """
    q, k, v = _SplitAndTurn.apply(qkv, cos, sin, heads, kv)
    return q, k, v
