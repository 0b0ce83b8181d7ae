"""Cross entropy over a vocabulary that is split over tp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.collectives import all_reduce_, start_all_gather
from parallel.labels import IGNORE
from parallel.mesh import Group

# Elements of the logits that are held in fp32 at a time: what stays in cache on a CPU, what fills a GPU.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: Group, vocab: int, label_smoothing: float, z_loss: float
    ) -> Tensor:
        start = group.index * logits.shape[1]
        valid = max(0, min(logits.shape[1], vocab - start))
        counted = labels != IGNORE
        mine = (labels >= start) & (labels < start + valid)
        local = (labels - start) * mine
        wide = _wide(logits.dtype)

        # Each rank sums exp(logits - its own maximum), so that one pass over its logits is enough.
        top = torch.full(labels.shape, -torch.inf, dtype=wide, device=logits.device)
        # Three sums in one message: exp, the label's logit, and, for smoothing, all logits; each less the maximum.
        sums = top.new_zeros(3 if label_smoothing else 2, len(labels))
        for rows in _chunks(logits) if valid else ():
            z = logits[rows, :valid].to(wide, copy=True)
            top[rows] = z.amax(1)
            z.sub_(top[rows, None])
            if label_smoothing:
                sums[2, rows] = z.sum(1)
            sums[0, rows] = z.exp_().sum(1)
        highest = all_reduce_(top.clone(), group, dist.ReduceOp.MAX)
        if valid:
            below = top - highest
            sums[0] *= below.exp()
            sums[1] = (logits.gather(1, local[:, None])[:, 0] - highest) * mine
            if label_smoothing:
                sums[2] += valid * below
        all_reduce_(sums, group)
        log_sum = sums[0].log_()
        loss = log_sum - (1 - label_smoothing) * sums[1]
        if label_smoothing:
            loss -= label_smoothing / vocab * sums[2]
        log_sum = log_sum + highest
        if z_loss:
            loss += z_loss * log_sum.square()
        ctx.save_for_backward(logits, log_sum, counted, mine, local)
        ctx.group, ctx.valid, ctx.vocab, ctx.label_smoothing, ctx.z_loss = group, valid, vocab, label_smoothing, z_loss
        share = len(labels) // group.size
        own = slice(group.index * share, (group.index + 1) * share)
        return torch.where(counted[own], loss[own], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, counted, mine, local = ctx.saved_tensors
        dy = start_all_gather(dy, ctx.group).wait() * counted
        scale = dy * (1 + 2 * ctx.z_loss * log_sum) if ctx.z_loss else dy
        on_label = dy * mine * (1 - ctx.label_smoothing)
        # The logits have no reader after this: their memory takes the gradient, so that no second copy of them exists.
        gradient = logits.detach()
        for rows in _chunks(gradient):
            z = gradient[rows, : ctx.valid]
            p = z.to(log_sum.dtype, copy=True).sub_(log_sum[rows, None]).exp_().mul_(scale[rows, None])
            if ctx.valid:
                p.scatter_add_(1, local[rows, None], -on_label[rows, None])
            if ctx.label_smoothing:
                p.sub_(dy[rows, None] * (ctx.label_smoothing / ctx.vocab))
            z.copy_(p)
        gradient[:, ctx.valid :] = 0
        return gradient, None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK.get(logits.device.type, _CHUNK["cuda"]) // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def cross_entropy(
    logits: Tensor, labels: Tensor, group: Group, vocab: int, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """logits: [t, padded vocab/tp], labels: [t] -> the loss of this rank's tokens: [t/tp], in fp32 at least.

    ``log sum exp`` and all sums are taken in fp32 (fp64 for fp64) over a few rows at a time; a wide copy of all logits
    is never made, and the backward writes the gradient into the memory of the logits. Padded columns count as -inf.

    Args:
        logits: This rank's columns.
        labels: Of all tokens; :data:`IGNORE` for those that do not count (their loss is zero).
        group: The tensor parallel group.
        vocab: Number of tokens of the vocabulary, without padding.
        label_smoothing: Probability that is spread evenly over the vocabulary.
        z_loss: Weight of the squared log-partition (Chowdhery et al. 2022, arXiv 2204.02311).

    Raises:
        ValueError: t does not divide over the group.
    """
    if len(labels) % group.size:
        raise ValueError(
            f"cannot split the losses of {len(labels)} tokens over {group.size} ranks: "
            f"choose a multiple of {group.size}"
        )
    loss: Tensor = _CrossEntropy.apply(logits, labels, group, vocab, label_smoothing, z_loss)
    return loss
