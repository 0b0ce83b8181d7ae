"""Gradients in 8 bits on their way, with error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847).

256 elements share a scale, a power of two, so that ``x = sent + left`` holds exactly in fp32. What each rank receives
is summed in fp32, in the order of ranks. What rounding leaves is sent with the gradients of the next step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.budgets import ROUNDING_BLOCK
from megacore.parallel.collectives import Pending, start_all_gather, start_all_to_all
from megacore.parallel.mesh import Group

# The largest element of a block lies in [64, 128) scales: 2^6 of them are at its leading bit.
_LEADING, _NOT_FINITE = 6, 255


def pack(x: Tensor) -> Tensor:
    """x: [n, m], fp32 -> [n, blocks, 257], bytes: the elements of a block as multiples of its scale from -127 to 127,
    and the scale's exponent as fp32 has it.

    An element is off by at most 1/128 of the largest of its block. A block that is not all finite is finite nowhere.
    """
    blocks = _padded(x, -x.shape[1] % ROUNDING_BLOCK).view(len(x), -1, ROUNDING_BLOCK)
    exponents = blocks.abs().amax(-1, keepdim=True).view(torch.int32) >> 23
    exponents = torch.where(exponents == _NOT_FINITE, exponents, (exponents - _LEADING).clamp(min=1))
    codes = (blocks / _scales(exponents)).round_().clamp_(-127, 127).nan_to_num_().to(torch.int8)
    return torch.cat([codes.view(torch.uint8), exponents.to(torch.uint8)], -1)


def unpack(packed: Tensor, m: int) -> Tensor:
    """The inverse of :func:`pack`: [n, blocks, 257] -> [n, m]."""
    codes, exponents = packed[..., :-1].view(torch.int8), packed[..., -1:].to(torch.int32)
    return (codes * _scales(exponents)).flatten(1)[:, :m]


def _padded(x: Tensor, zeros: int) -> Tensor:
    return F.pad(x, (0, zeros)) if zeros else x  # which would be copied


def _scales(exponents: Tensor) -> Tensor:
    return (exponents << 23).view(torch.float32)


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """x: [n * m] partial sums -> [m], this rank's part of the sum of what ranks send; what is left stays in x."""
    if group.size == 1:
        whole = x.clone()
        x.zero_()
        return Pending([], lambda: whole)
    parts = x.view(group.size, -1)
    sent, m = pack(parts), parts.shape[1]
    parts.sub_(unpack(sent, m))
    pending = _start_exchange(sent, group)
    return pending.then(lambda: unpack(pending.finish(), m).sum(0))


def start_all_reduce(x: Tensor, left: Tensor, group: Group) -> Pending:
    """x: [t] partial -> the sum, in place, the same bits on all ranks; what is left is added to ``left``: [t].

    Each rank sums a part of t, and the sums are rounded as they are sent back.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    t, m = len(x), -(-len(x) // group.size)
    sent = pack(_padded(x, group.size * m - t).view(group.size, m))
    left.add_(x - unpack(sent, m).flatten()[:t])
    pending = _start_exchange(sent, group)

    def finish() -> Tensor:
        own = unpack(pending.finish(), m).sum(0, keepdim=True)
        back = pack(own)
        mine = left[group.index * m : (group.index + 1) * m]
        mine.add_((own - unpack(back, m))[0, : len(mine)])
        return x.copy_(unpack(start_all_gather(back, group).wait(), m).flatten()[:t])

    return pending.then(finish)


def _start_exchange(sent: Tensor, group: Group) -> Pending:
    each = [1] * group.size
    return start_all_to_all(sent, group, each, each)
