"""Cross entropy of logits whose columns are split: one read of them forward, one read and one write backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.parallel.kernels.fused import launching
from megacore.parallel.labels import IGNORE

# Columns that a program reads at a time.
_BLOCK = 4096
# Tokens of a program that finishes.
_TOKENS = 128


@triton.jit
def finished(x: tl.tensor, SCALE: tl.constexpr, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Finish as ``parallel.layers.loss.Finish`` does; a softcap of 0 is none."""
    if SCALE != 1:
        x = x * SCALE
    if SOFTCAP != 0:
        # tanh, of which Triton has none for all types.
        x = SOFTCAP * (2 / (1 + tl.exp(x * (-2 / SOFTCAP))) - 1)
    return x


@triton.jit
def cross_entropy_statistics(
    logits: tl.tensor,
    labels: tl.tensor,
    found: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    step: tl.tensor,
    start: tl.tensor,
    valid: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SUM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    top, total = tl.full((), float("-inf"), WIDE), tl.full((), 0, WIDE)
    # Of all logits less ``shift``, which is the maximum so far, or 0 as long as that is -inf.
    below, shift = tl.full((), 0, WIDE), tl.full((), 0, WIDE)
    for before in range(0, valid, BLOCK):
        column = before + tl.arange(0, BLOCK)
        z = tl.load(own + column * step, mask=column < valid, other=float("-inf")).to(WIDE)
        if SCALE != 1 or SOFTCAP != 0:
            z = tl.where(column < valid, finished(z, SCALE, SOFTCAP), float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        new = tl.where(higher == float("-inf"), 0.0, higher).to(WIDE)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
        if SUM:
            below += before * (shift - new) + tl.sum(tl.where(column < valid, z - new, 0.0), 0)
        top, shift = higher, new
    label = tl.load(labels + row) - start
    mine = (label >= 0) & (label < valid)
    tl.store(found + row, top)
    tl.store(found + tokens + row, total)
    on_label = tl.load(own + label * step, mask=mine, other=0).to(WIDE)
    tl.store(found + 2 * tokens + row, finished(on_label, SCALE, SOFTCAP))
    if SUM:
        tl.store(found + 3 * tokens + row, below)


@triton.jit
def cross_entropy_finish(
    found: tl.tensor,
    labels: tl.tensor,
    loss: tl.tensor,
    log_sum: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    RANKS: tl.constexpr,
    VOCAB: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    IGNORED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = token < tokens
    rows = tokens * (4 if SMOOTHING > 0 else 3)
    highest = tl.full((BLOCK,), float("-inf"), WIDE)
    for rank in range(RANKS):
        highest = tl.maximum(highest, tl.load(found + rank * rows + token, mask=here, other=0))
    total, on_label, below = tl.zeros((BLOCK,), WIDE), tl.zeros((BLOCK,), WIDE), tl.zeros((BLOCK,), WIDE)
    for rank in range(RANKS):
        own = found + rank * rows + token
        less = tl.load(own, mask=here, other=0) - highest
        total += tl.load(own + tokens, mask=here, other=1) * tl.exp(less)
        on_label += tl.load(own + 2 * tokens, mask=here, other=0)
        if SMOOTHING > 0:
            valid = tl.minimum(tl.maximum(VOCAB - rank * columns, 0), columns)
            # A rank that has padding alone has no maximum.
            below += tl.load(own + 3 * tokens, mask=here, other=0) + valid * tl.where(valid > 0, less, 0.0)
    log_total = tl.log(total)
    losses = log_total - (1 - SMOOTHING) * (on_label - highest)
    if SMOOTHING > 0:
        losses -= SMOOTHING / VOCAB * below
    log_total += highest
    if Z_LOSS > 0:
        losses += Z_LOSS * log_total * log_total
    counts = tl.load(labels + token, mask=here, other=IGNORED) != IGNORED
    tl.store(loss + token, tl.where(counts, losses, 0.0), mask=here)
    tl.store(log_sum + token, log_total, mask=here)


@triton.jit
def cross_entropy_gradient(
    logits: tl.tensor,
    labels: tl.tensor,
    log_sum: tl.tensor,
    dy: tl.tensor,
    stride: tl.tensor,
    step: tl.tensor,
    stride_dy: tl.tensor,
    columns: tl.tensor,
    start: tl.tensor,
    valid: tl.tensor,
    blocks: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VOCAB: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    IGNORED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + column * step
    label, log_total = tl.load(labels + row), tl.load(log_sum + row)
    d = tl.where(label != IGNORED, tl.load(dy + row * stride_dy).to(WIDE), 0.0)
    z = finished(tl.load(at, mask=column < valid, other=float("-inf")).to(WIDE), SCALE, SOFTCAP)
    p = tl.exp(z - log_total) * (d * (1 + 2 * Z_LOSS * log_total))
    p -= tl.where(column == label - start, d * (1 - SMOOTHING), 0.0)
    if SMOOTHING > 0:
        p -= d * (SMOOTHING / VOCAB)
    if SOFTCAP != 0:
        p *= 1 - (z / SOFTCAP) * (z / SOFTCAP)
    if SCALE != 1:
        p *= SCALE
    tl.store(at, tl.where(column < valid, p, 0.0), mask=column < columns)


def statistics(
    logits: Tensor,
    labels: Tensor,
    start: int,
    valid: int,
    everything: bool,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """logits: [t, columns], of which the first ``valid`` are no padding -> [3 or 4, t], for :func:`finish`: the
    maximum, the sum of the exponentials of what is below it, the label's logit, and with ``everything`` the sum of what
    is below.

    Args:
        logits: This rank's columns.
        labels: [t], of the whole vocabulary.
        start: The first of the columns, in the whole vocabulary.
        valid: Columns that are no padding.
        everything: Whether the last is needed.
        scale, softcap: Those of ``parallel.layers.loss.Finish``.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = torch.empty(3 + everything, len(labels), dtype=dtype, device=logits.device)
    launching.launch(
        cross_entropy_statistics,
        len(labels),
        *(logits, labels, found, len(labels), *logits.stride(), start, valid),
        SCALE=scale,
        SOFTCAP=softcap or 0.0,
        SUM=everything,
        WIDE=launching.wide(dtype),
        BLOCK=min(_BLOCK, triton.next_power_of_2(logits.shape[1])),
        num_warps=8,
    )
    return found


def finish(
    found: Tensor, labels: Tensor, columns: int, vocab: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """found: [ranks, 3 or 4, t], the statistics of all ranks -> the losses: [t], zero where the label is ignored, and
    ``log sum exp``: [t]."""
    loss, log_sum = torch.empty(2, len(labels), dtype=found.dtype, device=found.device)
    launching.launch(
        cross_entropy_finish,
        triton.cdiv(len(labels), _TOKENS),
        *(found, labels, loss, log_sum, len(labels), columns),
        RANKS=len(found),
        VOCAB=vocab,
        SMOOTHING=label_smoothing,
        Z_LOSS=z_loss,
        IGNORED=IGNORE,
        WIDE=launching.wide(found.dtype),
        BLOCK=_TOKENS,
    )
    return loss, log_sum


def gradient_(
    logits: Tensor,
    labels: Tensor,
    log_sum: Tensor,
    dy: Tensor,
    start: int,
    valid: int,
    vocab: int,
    label_smoothing: float,
    z_loss: float,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the gradient of what came before scale and softcap, in its memory; dy: [t] is that of the losses. The
    columns as for :func:`statistics`."""
    columns = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(columns))
    blocks = triton.cdiv(columns, block)
    launching.launch(
        cross_entropy_gradient,
        len(labels) * blocks,
        *(logits, labels, log_sum, dy, *logits.stride(), dy.stride(0), columns, start, valid, blocks),
        SCALE=scale,
        SOFTCAP=softcap or 0.0,
        VOCAB=vocab,
        SMOOTHING=label_smoothing,
        Z_LOSS=z_loss,
        IGNORED=IGNORE,
        WIDE=launching.wide(log_sum.dtype),
        BLOCK=block,
        num_warps=8,
    )
    return logits
