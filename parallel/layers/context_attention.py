"""Attention of a microbatch that is split over cp: each rank's queries meet the keys of the others.

A rank holds a part's tokens, or with ``heads`` above 1 some of them, which it first changes for all the part's tokens
of some heads (Ulysses, arXiv 2309.14509). Then a part takes the keys and values that its queries look at, and no
others: hop by hop, of one other part in each (ring attention, arXiv 2310.01889), or those of all parts in one hop. What
they give is merged by the log-sum-exps. In the backward the keys travel again, and their gradients come home.

Each part sends its own keys straight to who needs them. What a hop brings is under way while the one before computes,
and so is what goes home. All ranks send and receive in the order of the hops, so no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from megacore.parallel.collectives import Pending, all_to_all, start_messages
from megacore.parallel.context_split import ContextParallel, ContextSplit, Gathered, Rectangle, Span, split
from megacore.parallel.kernels import bands
from megacore.parallel.kernels import partial_attention as partial
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.mesh import Group

Kernel = Callable[[str, Tensor, Tensor, Tensor, Scoring], Tensor]


@dataclass(frozen=True, eq=False)
class ContextAttention:
    """The attention of the tokens of a rank's part to all those before them in their documents.

    Args:
        context: The way microbatches are split.
        documents: The lengths of this one's documents; on the host, so that code that is compiled serves all of them.
        length: The length of its rows.
        group: The ranks of cp.
        inner: Those of them that share out the heads of this rank's part.
        whole: The kernel that serves if one part is all.
    """

    context: ContextParallel
    documents: Tensor
    length: int
    group: Group
    inner: Group
    whole: Kernel

    @classmethod
    def of(
        cls, own: ContextSplit, length: int, context: ContextParallel, group: Group, inner: Group, whole: Kernel
    ) -> Self:
        """Make it of a microbatch that has been split.

        Raises:
            ValueError: not as ``context`` splits it.
        """
        if context.split(own.documents, length).spans != own.spans:
            raise ValueError(f"a microbatch of {own.tokens} tokens is split otherwise than its model's {context}")
        return cls(context, torch.tensor(own.documents), length, group, inner, whole)

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q: [t/cp, heads, head], k: [t/cp, kv, head], v: [t/cp, kv, value] -> [t/cp, heads, value].

        Raises:
            ValueError: attention weights are to be dropped, and there are several parts.
        """
        context = self.context
        if scoring.dropout and context.parts > 1:
            raise ValueError(
                f"{name}: attention weights cannot be dropped ({scoring.dropout}) with context.exchange="
                f"{context.exchange}: choose heads, or no dropout of them"
            )
        q, k, v, scoring = self._by_heads(q, k, v, scoring)
        if context.parts == 1:
            y = self.whole(name, q, k, v, scoring)
        else:
            y = _attend(
                q, k, v, scoring.sinks, self.documents, scoring.scale, scoring.window, scoring.chunk,
                scoring.softcap, self.length, context.exchange, context.balance, context.heads, self.group.name,
            )[0]  # fmt: skip
        return _by_tokens(y, self.inner)

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor, Scoring]:
        """q, k, v: [tokens of a rank, heads, n] -> [tokens of the part, heads/inner, n]."""
        size, index = self.inner.size, self.inner.index
        if size == 1:
            return q, k, v, scoring
        if size > k.shape[1]:  # ranks share a kv head, and each is sent it; autograd sums what they give back
            k, v = (x.repeat_interleave(size // x.shape[1], 1) for x in (k, v))
        sizes = [x.shape[1] // size * x.shape[2] for x in (q, k, v)]
        rows = torch.cat([x.unflatten(1, (size, -1)).flatten(2) for x in (q, k, v)], -1)
        rows = all_to_all(rows.transpose(0, 1).flatten(0, 1), self.inner)
        parts = zip(rows.split(sizes, -1), (q, k, v), strict=True)
        q, k, v = (x.unflatten(1, (-1, like.shape[2])) for x, like in parts)
        sinks = None if scoring.sinks is None else scoring.sinks.chunk(size)[index]
        return q, k, v, replace(scoring, sinks=sinks)


def _by_tokens(y: Tensor, inner: Group) -> Tensor:
    """y: [tokens of the part, heads/inner, n] -> [tokens of a rank, heads, n]."""
    if inner.size == 1:
        return y
    rows = all_to_all(y.flatten(1), inner)
    return rows.view(inner.size, -1, *y.shape[1:]).transpose(0, 1).flatten(1, 2)


# -- what a rank does in each hop

Rows = slice | Tensor
"""Some of a tensor's rows; none of them twice."""


@dataclass(frozen=True, eq=False)
class _RankHop:
    """The keys that a rank has at one time, and what it computes with them. Ranks are places among those of cp.

    Args:
        got: (rank, number of rows) of each that something comes from.
        sent: (rank, rows of this rank) of each that something goes to.
        own: Rows of this rank that stand behind those that come.
        places: The places of all these in the order of the documents; None: they are in it.
        rectangles: The scores, of keys in that order.
    """

    got: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, Rows], ...]
    own: Rows
    places: Rows | None
    rectangles: tuple[Rectangle, ...]

    def take(self, rows: Tensor, group: Group) -> Pending:
        """rows: [t, n] of this rank -> [rows of the hop, n]."""
        own = rows[self.own]
        counts = [*(count for _, count in self.got), len(own)]
        arrived = rows.new_empty(sum(counts), rows.shape[1])
        *parts, last = arrived.split(counts)
        works = start_messages([(rank, rows[some]) for rank, some in self.sent], self._from(parts), group)
        last.copy_(own)

        def finish() -> Tensor:
            if self.places is None:
                return arrived
            ordered = torch.empty_like(arrived)
            ordered[self.places] = arrived
            return ordered

        return Pending(works, finish, "exchange", group)

    def give_back(self, gradients: Tensor, home: Tensor, dtype: torch.dtype, group: Group) -> Pending:
        """gradients: [rows of the hop, n] -> home: [t, n], to which what all add to this rank's rows is added.

        They travel in ``dtype``, and are added in that of ``home``.
        """
        if self.places is not None:
            gradients = gradients[self.places]
        counts = [count for _, count in self.got]
        narrow = gradients[: sum(counts)].to(dtype)
        back = [(rank, narrow.new_empty(_count(some), home.shape[1])) for rank, some in self.sent]
        works = start_messages(self._from(narrow.split(counts)), back, group)
        home[self.own] += gradients[sum(counts) :]

        def finish() -> Tensor:
            for (_, some), (_, more) in zip(self.sent, back, strict=True):
                home[some] += more
            return home

        return Pending(works, finish, "exchange", group)

    def _from(self, parts: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        return [(rank, part) for (rank, _), part in zip(self.got, parts, strict=True)]


def _count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


@dataclass(frozen=True, eq=False)
class _HopPlan:
    """The plan of a rank: the lengths of its own tokens that are documents by themselves, and its hops."""

    alone: Documents
    hops: tuple[_RankHop, ...]

    def take(self, number: int, rows: Tensor, group: Group) -> Pending:
        """Start a hop, if there is one of that number."""
        return self.hops[number].take(rows, group) if number < len(self.hops) else Pending([], lambda: rows)


@lru_cache(maxsize=16)
def _plan(own: ContextSplit, rank: int, exchange: str, window: int | None, device: torch.device) -> _HopPlan:
    """Kept, as every layer asks for it, forward and backward; nobody waits for the device."""
    part, piece = divmod(rank, own.heads)
    others = [(part + distance) % own.parts for distance in range(1, own.parts)]

    def hop(sources: Sequence[int], targets: Sequence[int], found: Gathered) -> _RankHop:
        """Return what comes of some parts and goes to some; and of this part itself what is taken."""
        taken = [(source, found.taken[source]) for source in sources]
        given = [(target, own.hop(target, part, window).taken) for target in targets]
        places = [span for each in (*sources, part) for span in found.places[each]]
        return _RankHop(
            tuple((source * own.heads + piece, _length(spans)) for source, spans in taken if spans),
            tuple((target * own.heads + piece, _rows(spans, device)) for target, spans in given if spans),
            _rows(found.taken[part], device),
            None if len(_joined(places)) <= 1 else _rows(places, device),
            found.rectangles,
        )

    if exchange == "gather":
        hops = [hop(others, others, own.gathered(part, window))]
    else:  # what takes nothing of others comes last, while gradients go home
        pairs = [([source], [target]) for source, target in zip(reversed(others), others, strict=True)]
        hops = [hop(*pair, _of_one(own, part, pair[0][0], window)) for pair in pairs]
        hops.append(hop((), (), _of_one(own, part, part, window)))
    # Empty ones stay: where one rank left out a hop, its messages would come in another order than others wait for.
    return _HopPlan(Documents.of(own.alone(part, window), device), tuple(hops))


def _of_one(own: ContextSplit, part: int, other: int, window: int | None) -> Gathered:
    """Return what a part takes of one part, as of all of them; of itself all, where it looks at its own keys again."""
    hop, nothing = own.hop(part, other, window), [()] * own.parts
    taken = hop.taken
    if part == other and hop.rectangles:
        taken = ((0, _length(own.spans[part])),)
    return Gathered((*nothing[:other], taken, *nothing[other + 1 :]), tuple(nothing), hop.rectangles)


def _length(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Make one of spans that follow each other."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _rows(spans: Sequence[Span], device: torch.device) -> Rows:
    joined = _joined(spans)
    if len(joined) <= 1:
        return slice(*joined[0]) if joined else slice(0)
    rows = torch.cat([torch.arange(start, stop) for start, stop in joined])
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


# -- the operator


def _found(
    q: Tensor,
    documents: Tensor,
    window: int | None,
    chunk: int | None,
    length: int,
    exchange: str,
    balance: Any,
    heads: int,
    name: str,
) -> tuple[_HopPlan, Group]:
    group = Group.named(name)
    own = split(tuple(documents.tolist()), length, group.size // heads, balance, heads).in_chunks(chunk)
    return _plan(own, group.index, exchange, window, q.device), group


@torch.library.custom_op("megacore::context_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    length: int,
    exchange: str,
    balance: str,
    heads: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """-> out: [t, heads, value], log_sum: [t, heads], of the exponentials of the scores, in fp32 at least."""
    scoring = Scoring(scale, window, softcap)
    plan, ranks = _found(q, documents, window, chunk, length, exchange, balance, heads, group)
    rows = _together(k, v)
    coming = plan.take(0, rows, ranks)
    out, log_sum = partial.alone(q, k, v, plan.alone, scoring)
    out = out.to(log_sum.dtype)
    for number, hop in enumerate(plan.hops):
        arrived, coming = coming, plan.take(number + 1, rows, ranks)
        keys, values = _apart(arrived.wait(), k, v)
        for each in hop.rectangles:
            of, some = slice(*each.queries), slice(*each.keys)
            y, more = partial.rectangle(q[of], keys[some], values[some], each.band, scoring)
            total = torch.logaddexp(log_sum[of], more)
            out[of].lerp_(y.to(out.dtype), (more - total).exp_()[..., None])
            log_sum[of] = total
    if sinks is not None:
        total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
        out *= (log_sum - total).exp_()[..., None]
        log_sum = total
    return out.to(q.dtype).contiguous(), log_sum.contiguous()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    log_sum = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:2], v.shape[2]), log_sum


@torch.library.custom_op("megacore::context_attention_backward", mutates_args=())
def _attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    documents: Tensor,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    length: int,
    exchange: str,
    balance: str,
    heads: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv."""
    scoring, wide = Scoring(scale, window, softcap), log_sum.dtype
    plan, ranks = _found(q, documents, window, chunk, length, exchange, balance, heads, group)
    rows = _together(k, v)
    coming = plan.take(0, rows, ranks)
    met = any(hop.rectangles for hop in plan.hops)
    found = partial.alone_backward(dy, q, k, v, out, log_sum, plan.alone, scoring, exact=met)
    dq, dk, dv = (x.to(wide) for x in found)
    home = _together(dk, dv)
    returning = Pending([], lambda: home)
    for number, hop in enumerate(plan.hops):
        arrived, coming = coming, plan.take(number + 1, rows, ranks)
        keys, values = _apart(arrived.wait(), k, v)
        gradients = home.new_zeros(len(keys), home.shape[1])
        dkeys, dvalues = _apart(gradients, k, v)
        for each in hop.rectangles:
            of, some = slice(*each.queries), slice(*each.keys)
            found = partial.rectangle_backward(
                dy[of], q[of], keys[some], values[some], out[of], log_sum[of], each.band, scoring
            )
            dq[of] += found[0]
            dkeys[some] += found[1]
            dvalues[some] += found[2]
        returned, returning = returning, hop.give_back(gradients, home, k.dtype, ranks)
        returned.wait()
    dk, dv = _apart(returning.wait(), k, v)
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


@_attend_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.chunk, ctx.softcap = inputs[:9]
    ctx.length, ctx.exchange, ctx.balance, ctx.heads, ctx.group = inputs[9:]
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, documents, out, log_sum = ctx.saved_tensors
    how = ctx.scale, ctx.window, ctx.chunk, ctx.softcap, ctx.length, ctx.exchange, ctx.balance, ctx.heads, ctx.group
    grads = _attend_backward(dy, q, k, v, out, log_sum, documents, *how)
    of_sinks = bands.of_sinks(dy.transpose(0, 1)[None], out.transpose(0, 1)[None], log_sum.T[None], sinks)
    return *grads, of_sinks, *[None] * 10


_attend.register_autograd(_backward, setup_context=_save)


def _together(k: Tensor, v: Tensor) -> Tensor:
    """k: [t, kv, head], v: [t, kv, value] -> [t, kv * (head + value)]."""
    return torch.cat([k.flatten(1), v.flatten(1)], 1)


def _apart(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Take rows apart into keys and values like these, which are views."""
    keys, values = rows.split([k[0].numel(), v[0].numel()], 1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])
