"""The selective scan of Mamba (Gu and Dao 2023, arXiv 2312.00752, algorithm 2): a state of a few numbers a channel.

A channel has a state h: [key], whose numbers fade each at a rate of its own. A token lets them fade for the length of
its step, and writes its x along b; what its c reads is its output:

    h = exp(step rate) h + step x b;    y = c' h

What is left of a state is the exponential of a sum of what is below 0: never more than 1, however the tokens are cut.
They are taken a chunk at a time, so that nothing but the state goes from one to the next, and within a chunk all is
done at once but for one product and sum a token. The backward goes through the chunks from the last to the first,
each computed again from the state before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.delta_rule import Enter
from megacore.parallel.kernels.spans import Chunks, Spans
from megacore.parallel.kernels.upcast import wide

CHUNK = 32
"""Tokens of a chunk."""


def selective_scan(
    c: Tensor,
    b: Tensor,
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    initial: Tensor | Enter | None,
    spans: Spans,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return y: [t, channels, 1] and the states behind the spans: [spans, channels, key, 1], in fp32 at least, in which
    all is computed. Autograd keeps the inputs, and the state before each chunk.

    Args:
        c, b: [t, key], of all channels.
        x: [t, channels, 1].
        step: [t, channels], 0 or more.
        rate: [channels, key], below 0.
        initial: [spans, channels, key, 1], the states before the spans, or what makes them of the transitions; None for
            zeros.
        spans: Those of the tokens.
        size: Tokens of a chunk.
    """
    chunks, nothing = spans.chunks(size), wide(x).new_zeros(len(spans), *rate.shape, 1)
    if callable(initial):
        of = spans.kept("of", lambda: np.repeat(np.arange(len(spans)), spans.lengths))
        through = (nothing.new_zeros(len(spans), step.shape[1]).index_add(0, of, wide(step))[..., None] * rate).exp()
        _, gained = _Scan.apply(c, b, x, step, rate, nothing, chunks)
        initial = initial(torch.cat([through[..., None], gained], -1))
    y, last = _Scan.apply(c, b, x, step, rate, nothing if initial is None else initial, chunks)
    return y, last


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, c: Tensor, b: Tensor, x: Tensor, step: Tensor, rate: Tensor, initial: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        state = initial.squeeze(-1).index_select(0, chunks.order)
        outputs, ended, before = list[Tensor](), list[Tensor](), list[Tensor]()
        for count, (c_, b_, x_, step_) in zip(chunks.counts, _cut(c, b, x, step, chunks), strict=True):
            ended.insert(0, state[count:])
            before.append(state := state[:count])
            _, states = _states(b_, x_, step_, rate, state)
            outputs.append((states[:, 1:] @ c_[..., None]).squeeze(-1))
            state = states[:, -1].clone()
        last = torch.cat([state, *ended]).index_select(0, chunks.back)
        ctx.save_for_backward(c, b, x, step, rate, torch.cat(before))
        ctx.chunks = chunks
        y = torch.cat(outputs).flatten(0, 1).index_select(0, chunks.places)
        return y[..., None].to(x.dtype), last[..., None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        c, b, x, step, rate, before = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        dends = dlast.squeeze(-1).index_select(0, chunks.order)
        dstate, drate = dends[: chunks.counts[-1]], torch.zeros_like(rate)
        given = _cut(c, b, x, step, chunks), _rows(dy.squeeze(-1), chunks), before.split(chunks.counts)
        found = []
        for count, (c_, b_, x_, step_), dy_, state in reversed([*zip(chunks.counts, *given, strict=True)]):
            dstate = torch.cat([dstate, dends[len(dstate) : count]])
            left, states = _states(b_, x_, step_, rate, state)
            # Of each state: what its token's output says, and the state behind it.
            dstates = dy_[..., None] * c_[:, :, None]
            dstates[:, -1] += dstate
            for token in range(chunks.size - 1, 0, -1):
                dstates[:, token - 1].addcmul_(left[:, token], dstates[:, token])
            dstate = left[:, 0] * dstates[:, 0]
            dc = (dy_[:, :, None] @ states[:, 1:]).squeeze(2)
            db = ((step_ * x_)[:, :, None] @ dstates).squeeze(2)
            dwritten = (dstates @ b_[..., None]).squeeze(-1)
            dleft = dstates.mul_(left).mul_(states[:, :-1])  # of its logarithm
            drate += (dleft * step_[..., None]).sum((0, 1))
            found.append((dc, db, dwritten * step_, (dleft * rate).sum(-1) + dwritten * x_))
        dc, db, dx, dstep = (
            torch.cat(each[::-1]).flatten(0, 1).index_select(0, chunks.places) for each in zip(*found, strict=True)
        )
        dinitial = dstate.index_select(0, chunks.back)[..., None]
        return dc.to(c.dtype), db.to(b.dtype), dx[..., None].to(x.dtype), dstep.to(step.dtype), drate, dinitial, None


def _states(b: Tensor, x: Tensor, step: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """b: [n, size, key], x, step: [n, size, channels], state: [n, channels, key] before these chunks -> [n, size,
    channels, key], what is left of the state at each token, and [n, 1 + size, channels, key], the states."""
    left = (step[..., None] * rate).exp_()
    states = state.new_empty(len(state), 1 + step.shape[1], *rate.shape)
    states[:, 0] = state
    torch.mul((step * x)[..., None], b[:, :, None], out=states[:, 1:])
    for token in range(step.shape[1]):
        states[:, token + 1].addcmul_(left[:, token], states[:, token])
    return left, states


def _cut(c: Tensor, b: Tensor, x: Tensor, step: Tensor, chunks: Chunks) -> list[tuple[Tensor, ...]]:
    """Return c, b, x and the steps of the first chunks of all spans, of the second ones, and so on: [n, size, ...].
    Behind a span's end nothing fades, and nothing is written."""
    *others, steps = (_rows(each, chunks) for each in (c, b, x.squeeze(-1), step))
    return [*zip(*others, steps, strict=True)]


def _rows(x: Tensor, chunks: Chunks) -> tuple[Tensor, ...]:
    """x: [t, n] -> that of the chunks at each turn, [chunks, size, n], with zeros behind a span's end."""
    rows = wide(x.index_select(0, chunks.tokens)).index_fill(0, chunks.behind, 0.0)
    return rows.unflatten(0, (-1, chunks.size)).split(chunks.counts)
