"""Attention of a microbatch that is split over cp: each rank's queries meet the keys of the others.

A rank holds a part's tokens, or with ``heads`` above 1 some of them, which it first changes for all the part's tokens
of some heads (Ulysses, arXiv 2309.14509). Then a part meets each other one in a hop: it takes the keys and values that
its queries look at, and no others, and merges what they give by the log-sum-exps (ring attention, arXiv 2310.01889). In
the backward the keys travel again, and their gradients come home.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.choices import ContextExchange
from parallel.collectives import start_all_to_all
from parallel.context_split import ContextSplit, Hop, Span
from parallel.kernels import bands
from parallel.kernels import partial_attention as partial
from parallel.kernels.documents import Documents
from parallel.kernels.scoring import Scoring
from parallel.mesh import Group

Kernel = Callable[[str, Tensor, Tensor, Tensor, Scoring], Tensor]


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """How the tokens of a rank's part look at all those before them in their documents.

    Args:
        split: Who holds what.
        group: The ranks of cp.
        inner: Those of them that share out the heads of this rank's part.
        exchange: The way keys and values come.
        whole: What computes if one part is all.
    """

    split: ContextSplit
    group: Group
    inner: Group
    exchange: ContextExchange
    whole: Kernel

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q: [t/cp, heads, head], k: [t/cp, kv, head], v: [t/cp, kv, value] -> [t/cp, heads, value]."""
        q, k, v, scoring = self._by_heads(q, k, v, scoring)
        if self.split.parts == 1:
            y = self.whole(name, q, k, v, scoring)
        else:
            y = _Exchange.apply(q, k, v, scoring.sinks, self, scoring)[0]
        return _by_tokens(y, self.inner)

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """[tokens of a rank, heads, n] -> [tokens of the part, heads/inner, n]."""
        size, index = self.inner.size, self.inner.index
        if size == 1:
            return q, k, v, scoring
        kv = k.shape[1]
        if kv % size:  # ranks share a kv head, and each is sent it
            whose = torch.arange(size, device=k.device) * kv // size
            k, v = k.index_select(1, whose), v.index_select(1, whose)
        sizes = [x.shape[1] // size * x.shape[2] for x in (q, k, v)]
        rows = torch.cat([x.unflatten(1, (size, -1)).flatten(2) for x in (q, k, v)], -1)
        rows = _AllToAll.apply(rows.transpose(0, 1).flatten(0, 1), self.inner)
        parts = zip(rows.split(sizes, -1), (q, k, v), strict=True)
        q, k, v = (x.unflatten(1, (-1, like.shape[2])) for x, like in parts)
        sinks = None if scoring.sinks is None else scoring.sinks.chunk(size)[index]
        return q, k, v, replace(scoring, sinks=sinks)


def _by_tokens(y: Tensor, inner: Group) -> Tensor:
    """[tokens of the part, heads/inner, n] -> [tokens of a rank, heads, n]."""
    if inner.size == 1:
        return y
    rows = _AllToAll.apply(y.flatten(1), inner)
    return rows.view(inner.size, -1, *y.shape[1:]).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """x: [n * t, ...], t rows for each of n ranks -> [n * t, ...], t of each; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        each = [len(x) // group.size] * group.size
        return start_all_to_all(x, group, each, each).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        each = [len(dy) // ctx.group.size] * ctx.group.size
        return start_all_to_all(dy, ctx.group, each, each).wait(), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: ContextAttention, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        part, own = how.group.index // how.split.heads, _documents(how, q, scoring)
        y, log_sum = partial.alone(q, k, v, own, replace(scoring, sinks=None))
        out = y.to(log_sum.dtype)
        for keys, values, hop, _ in _hops(how, k, v, scoring.window):
            for each in hop.rectangles:
                (first, last), (start, stop) = each.queries, each.keys
                y, more = partial.rectangle(q[first:last], keys[start:stop], values[start:stop], each.band, scoring)
                total = torch.logaddexp(log_sum[first:last], more)
                out[first:last] *= (log_sum[first:last] - total).exp()[..., None]
                out[first:last] += y * (more - total).exp()[..., None]
                log_sum[first:last] = total
        if sinks is not None:
            total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
            out *= (log_sum - total).exp()[..., None]
            log_sum = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, log_sum)
        ctx.how, ctx.scoring, ctx.part = how, scoring, part
        ctx.mark_non_differentiable(log_sum)
        return out, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, log_sum = ctx.saved_tensors
        how, scoring, wide = ctx.how, ctx.scoring, log_sum.dtype
        own = _documents(how, q, scoring)
        dq, dk, dv = (x.to(wide) for x in partial.alone_backward(dy, q, k, v, out, log_sum, own, scoring))
        for keys, values, hop, home in _hops(how, k, v, scoring.window):
            dkeys, dvalues = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
            for each in hop.rectangles:
                rows, some = slice(*each.queries), slice(*each.keys)
                found = partial.rectangle_backward(
                    dy[rows], q[rows], keys[some], values[some], out[rows], log_sum[rows], each.band, scoring
                )
                dq[rows] += found[0]
                dkeys[some] += found[1]
                dvalues[some] += found[2]
            home(dkeys, dvalues, dk, dv)
        of_sinks = bands.of_sinks(dy.transpose(0, 1)[None], out.transpose(0, 1)[None], log_sum.T[None], sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None


def _documents(how: ContextAttention, q: Tensor, scoring: Scoring) -> Documents:
    part = how.group.index // how.split.heads
    return Documents.of(how.split.alone(part, scoring.window), q.device)


def _hops(how: ContextAttention, k: Tensor, v: Tensor, window: int | None) -> Any:
    """Yield (keys, values, hop, home) of each other part, and of this one; home sends their gradients back."""
    split, group = how.split, how.group
    part, piece = divmod(group.index, split.heads)
    inside = split.hop(part, part, window)
    if inside.rectangles:

        def here(dkeys: Tensor, dvalues: Tensor, dk: Tensor, dv: Tensor) -> None:
            dk += dkeys
            dv += dvalues

        yield k, v, inside, here
    for distance in range(1, split.parts):
        source, target = (part - distance) % split.parts, (part + distance) % split.parts
        taken, given = split.hop(part, source, window), split.hop(target, part, window)
        ranks = group.ranks[source * split.heads + piece], group.ranks[target * split.heads + piece]
        keys, values = (
            _swap(_rows(x, given.taken), x.new_empty(taken.tokens, *x.shape[1:]), ranks, group) for x in (k, v)
        )

        def home(
            dkeys: Tensor,
            dvalues: Tensor,
            dk: Tensor,
            dv: Tensor,
            given: Hop = given,
            ranks: tuple[int, int] = ranks,
        ) -> None:
            for mine, whole in ((dkeys, dk), (dvalues, dv)):
                back = whole.new_empty(given.tokens, *whole.shape[1:])
                back = _swap(mine, back, (ranks[1], ranks[0]), group)
                at = 0
                for start, stop in given.taken:
                    whole[start:stop] += back[at : at + stop - start]
                    at += stop - start

        yield keys, values, taken, home


def _rows(x: Tensor, spans: tuple[Span, ...]) -> Tensor:
    return torch.cat([x[:0], *(x[start:stop] for start, stop in spans)])


def _swap(sent: Tensor, got: Tensor, ranks: tuple[int, int], group: Group) -> Tensor:
    """Send to one rank, receive of another one."""
    source, target = ranks
    works: list[dist.Work | None] = []
    if sent.numel():
        works.append(dist.isend(sent.contiguous(), target, group=group.process_group))
    if got.numel():
        works.append(dist.irecv(got, source, group=group.process_group))
    for work in works:
        if work is not None:
            work.wait()
    return got
