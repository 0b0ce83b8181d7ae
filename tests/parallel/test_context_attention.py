"""Attention over cp: that of one process, and each rank does what the split says, no more."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attention_formula
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from megacore.parallel import collectives, kernels
from megacore.parallel.context_split import ContextParallel, ContextSplit
from megacore.parallel.enum_errors import ContextBalance, ContextExchange
from megacore.parallel.kernels import partial_attention
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import PLAIN, Scoring
from megacore.parallel.layers import context_attention
from megacore.parallel.layers.context_attention import ContextAttention
from megacore.parallel.mesh import ALONE, Group, Mesh
from megacore.parallel.rank_sets import inner_ranks, of_context
from megacore.parallel.weights.layout import MeshShape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Heads:
    """What queries, keys and values are like, and how they are scored."""

    name: str
    heads: int = 8
    kv: int = 8
    head: int = 4
    value: int = 4
    scoring: Scoring = PLAIN
    sinks: bool = False


HEADS = [
    Heads("plain"),
    Heads("groups", kv=2),
    Heads("one kv head", kv=1, scoring=Scoring(scale=0.3)),
    Heads("other values", kv=4, head=6, value=3),
    Heads("window", kv=4, scoring=Scoring(window=5)),
    Heads("chunks", kv=4, scoring=Scoring(chunk=7)),
    Heads("capped", kv=4, scoring=Scoring(softcap=0.8), sinks=True),
    Heads("all", kv=2, scoring=Scoring(window=17, softcap=1.5), sinks=True),
]
ONE = (96,)
PACKINGS = [ONE, (1, 2, 3, 4, 5, 81), (48, 47, 1), (31, 1, 1, 15, 7, 41), (1,) * 32 + (16,) * 4]
ROW = 48
"""A row's length, but where a document is longer."""


@dataclass(frozen=True)
class Way:
    """A rank's way with a microbatch of a packing."""

    context: ContextParallel
    packing: tuple[int, ...]
    heads: Heads

    @property
    def length(self) -> int:
        """Of a row: documents do not lie in two."""
        ends = set(itertools.accumulate(self.packing))
        return ROW if ROW in ends else sum(self.packing)

    @property
    def split(self) -> ContextSplit:
        return self.context.split(self.packing, self.length)

    def as_written(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return attention_formula.attention(q, k, v, self.packing, scoring)


def ways(cp: int) -> list[Way]:
    """Each exchange, balance and kind of heads, of packings in turn."""
    exchanges: tuple[ContextExchange, ...] = ("ring", "gather")
    balances: tuple[ContextBalance, ...] = ("rows", "documents", "auto")
    contexts = [
        ContextParallel(cp, exchange, balance, inner)
        for inner in ((1, 2) if cp == 4 else (1,) if cp == 2 else (4,))
        for exchange in exchanges
        for balance in balances
    ]
    contexts.append(ContextParallel(cp, "heads", "rows", cp))
    packings = itertools.cycle(PACKINGS)
    return [Way(context, next(packings), heads) for context in contexts for heads in HEADS]


@dataclass(frozen=True)
class Tensors:
    """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value], dy: [t, heads, value], sinks: [heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor
    sinks: Tensor | None

    @classmethod
    def drawn(cls, heads: Heads, t: int, dtype: torch.dtype = torch.float64) -> Tensors:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        return cls(
            normal(t, heads.heads, heads.head),
            normal(t, heads.kv, heads.head),
            normal(t, heads.kv, heads.value),
            normal(t, heads.heads, heads.value),
            normal(heads.heads) if heads.sinks else None,
        )

    def of_rows(self, rows: Any) -> Tensors:
        return Tensors(self.q[rows], self.k[rows], self.v[rows], self.dy[rows], self.sinks)

    def double(self) -> Tensors:
        sinks = None if self.sinks is None else self.sinks.double()
        return Tensors(self.q.double(), self.k.double(), self.v.double(), self.dy.double(), sinks)


def results(attention: Any, x: Tensors, scoring: Scoring) -> list[Tensor]:
    """The output, and the gradients of q, k, v and, where there are some, the sinks."""
    leaves = [each.clone().requires_grad_() for each in (x.q, x.k, x.v, x.sinks) if each is not None]
    q, k, v, *sinks = leaves
    y = attention(q, k, v, replace(scoring, sinks=sinks[0] if sinks else None))
    return [y.detach(), *torch.autograd.grad(y, leaves, x.dy)]


def spread(way: Way, mesh: Mesh) -> Any:
    """The same over the ranks of cp, of a rank's own tokens."""

    def whole(name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return kernels.documents_attention(q, k, v, Documents.of(way.packing, CPU), len(q) // way.length, scoring)

    inner = mesh.group(inner_ranks(mesh.cp.ranks, mesh.cp.index, way.context.heads))
    attention = ContextAttention.of(way.split, way.length, way.context, mesh.cp, inner, whole)
    return lambda q, k, v, scoring: attention("attn", q, k, v, scoring)


def mesh_of(found: list[Way]) -> Mesh:
    shape = MeshShape(cp=found[0].context.size)
    mesh = Mesh.create(shape)
    for heads in {way.context.heads for way in found}:
        mesh.make_groups(of_context(shape, heads))
    return mesh


# -- numbers, and what was done for them


KERNELS = ("alone", "rectangle", "alone_backward", "rectangle_backward")


@dataclass
class Done:
    """What a rank has done: pairs that it has computed forward and backward, bytes that it has sent."""

    pairs: Counter[str]
    sent: int = 0


@contextmanager
def counting() -> Iterator[Done]:
    """Count the pairs of each call of a kernel, the bytes of each message to another rank."""
    done = Done(Counter())
    own = {name: getattr(partial_attention, name) for name in KERNELS}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **options: bool) -> Any:
            *_, where, scoring = arguments
            if name.startswith("alone"):
                lengths = where.host.diff().tolist()
                rows = np.concatenate([np.arange(1, length + 1) for length in lengths])
                pairs = np.minimum(rows, scoring.window or len(rows)).sum()
            else:
                q, k = arguments[:2] if name == "rectangle" else arguments[1:3]
                first = np.zeros(len(q)) if where is None else np.maximum(0, np.arange(len(q)) + where)
                assert (first < len(k)).all()
                pairs = (len(k) - first).sum()
            done.pairs["backward" if name.endswith("backward") else "forward"] += int(pairs)
            return own[name](*arguments, **options)

        return call

    posted = dist.batch_isend_irecv

    def post(messages: list[dist.P2POp]) -> Any:
        assert all(message.tensor.numel() for message in messages)
        done.sent += sum(message.tensor.nbytes for message in messages if message.op is dist.isend)
        return posted(messages)

    changed = collectives.start_all_to_all

    def change(x: Tensor, group: Group, *counts: Any) -> Any:
        done.sent += x.nbytes * (group.size - 1) // group.size
        return changed(x, group, *counts)

    with (
        patch.object(context_attention, "partial", SimpleNamespace(**{name: counted(name) for name in own})),
        patch.object(dist, "batch_isend_irecv", post),
        patch.object(collectives, "start_all_to_all", change),
    ):
        yield done


def compared(cp: int) -> list[tuple[list[float], list[int], list[int]]]:
    """Of each way: distances to attention as it is written down, and what was done beside what the split says."""
    found = ways(cp)
    mesh, out = mesh_of(found), []
    for way in found:
        x = Tensors.drawn(way.heads, sum(way.packing))
        own = way.split.indices(mesh.cp.index)
        want = results(way.as_written, x, way.heads.scoring)
        with counting() as done:
            got = results(spread(way, mesh), x.of_rows(own), way.heads.scoring)
        if way.heads.sinks:  # each rank has what its tokens give
            dist.all_reduce(got[-1])
        pairs = zip(got, [each[own] for each in want[:4]] + want[4:], strict=True)
        distances = [float((mine - theirs).abs().max()) for mine, theirs in pairs]
        out.append((distances, [*done.pairs.values(), done.sent], said(way, mesh.cp.index)))
    return out


def said(way: Way, rank: int) -> list[int]:
    """Pairs forward and backward, and bytes sent, as the split has it."""
    context, heads = way.context, way.heads
    kv = max(heads.kv, context.heads)  # each rank has one at least
    one = kv * (heads.head + heads.value)
    # Queries, keys, values and the output for other heads, there and back.
    changed = heads.heads * (heads.head + heads.value) + one
    sent = 2 * sum(way.packing) // context.size * changed * (context.heads - 1) // context.heads
    if context.parts == 1:
        return [sent * 8]
    part, window, split = rank // context.heads, heads.scoring.window, way.split.in_chunks(heads.scoring.chunk)
    taken, given = split.travel(part, window)
    # Keys and values to others, twice; what they add to the gradients of others' home.
    sent += (2 * sum(given) + sum(taken)) * one // context.heads
    return [split.pairs(part, window)] * 2 + [sent * 8]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_each_exchange_is_attention_as_it_is_written_down(pool: Pool, cp: int) -> None:
    answers = zip(ways(cp), *pool.run(cp, compared, cp), strict=True)
    for way, *ranks in answers:
        for rank, (distances, did, should) in enumerate(ranks):
            assert max(distances) < 1e-12, (way, rank, distances)
            assert did == should, (way, rank)


# -- the law of adjoints


def products(cp: int) -> list[tuple[float, float]]:
    """Of each message and change of each way: this rank's share of <A x, y> and of <x, A' y>."""
    found = [way for way in ways(cp) if way.context.exchange != "heads"]
    mesh, out = mesh_of(found), []
    generator = torch.Generator().manual_seed(mesh.cp.index)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for way in found:
        own, scoring = way.split, way.heads.scoring
        plan = context_attention._plan(own, mesh.cp.index, way.context.exchange, scoring.window, CPU)
        for hop in plan.hops:
            x = drawn(own.tokens // own.parts, 3)
            there = hop.take(x, mesh.cp).wait()
            y = drawn(*there.shape)
            back = hop.give_back(y, torch.zeros_like(x), x.dtype, mesh.cp).wait()
            out.append((float((there * y).sum()), float((x * back).sum())))
        inner = mesh.group(inner_ranks(mesh.cp.ranks, mesh.cp.index, own.heads))
        attention = ContextAttention.of(own, way.length, way.context, mesh.cp, inner, lambda *_: torch.empty(0))
        t = own.tokens // way.context.size
        q, k, v = (drawn(t, n, 3).requires_grad_() for n in (way.heads.heads, way.heads.kv, way.heads.kv))
        *changed, _ = attention._by_heads(q, k, v, PLAIN)
        ys = [drawn(*each.shape) for each in changed]
        backs = torch.autograd.grad(changed, (q, k, v), ys)
        one, other = (
            sum(float((a * b).detach().sum()) for a, b in zip(*pair, strict=True))
            for pair in ((changed, ys), ((q, k, v), backs))
        )
        out.append((one, other))
    return out


@pytest.mark.parametrize("cp", [2, 4])
def test_what_goes_back_is_the_adjoint_of_what_came(pool: Pool, cp: int) -> None:
    """Uneven spans, and heads of keys that are sent to several ranks, included."""
    there, back = np.array(pool.run(cp, products, cp)).sum(0).T
    assert len(there) > 100 and (there != 0).sum() > 50
    assert np.abs(there - back).max() < 1e-10


# -- rounding


LONG = 512
OF_LONG = [Heads(f"window {window}", 4, 2, 32, 32, Scoring(window=window)) for window in (None, 40, 300)]


def in_bf16(cp: int) -> list[Way]:
    exchanges: tuple[ContextExchange, ...] = ("ring", "gather")
    return [Way(ContextParallel(cp, each, "rows"), (LONG,), heads) for each in exchanges for heads in OF_LONG]


def rounded(cp: int) -> list[list[Tensor]]:
    """Of each way the output and the gradients of this rank's tokens in bf16."""
    ways, made = in_bf16(cp), list[list[Tensor]]()
    mesh = mesh_of(ways)
    for way in ways:
        own = Tensors.drawn(way.heads, LONG, torch.bfloat16).of_rows(way.split.indices(mesh.cp.index))
        made.append(results(spread(way, mesh), own, way.heads.scoring))
    return made


@pytest.mark.parametrize("cp", [2, 4])
def test_exchanges_round_as_one_call_of_the_kernel_does(pool: Pool, cp: int) -> None:
    documents = Documents.of((LONG,), CPU)

    def once(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return kernels.documents_attention(q, k, v, documents, 1, scoring)

    for way, *ranks in zip(in_bf16(cp), *pool.run(cp, rounded, cp), strict=True):
        x = Tensors.drawn(way.heads, LONG, torch.bfloat16)
        want = results(way.as_written, x.double(), way.heads.scoring)
        one = results(once, x, way.heads.scoring)
        order = np.argsort(np.concatenate([way.split.indices(rank) for rank in range(cp)]))
        for name, right, call, *parts in zip("yqkv", want, one, *ranks, strict=True):
            mine, one_call, rounded_once = (
                float((each.double() - right).norm()) for each in (torch.cat(parts)[order], call, right.bfloat16())
            )
            # On a CPU without instructions for bf16 a call rounds no more than its result. Parts are rounded before
            # they are summed, and once more: the root of two of that, and more where parts of gradients cancel.
            twice = (1.03 if name == "y" else 1.1) * 2**0.5 * rounded_once
            assert mine < max(1.2 * one_call, twice), (way, name, mine / one_call)


# -- the order of things


def happened(exchange: ContextExchange) -> list[str]:
    """What a rank does one after the other, forward and backward."""
    way = Way(ContextParallel(4, exchange, "rows"), ONE, HEADS[0])
    mesh, events = mesh_of([way]), list[str]()

    def noted(name: str, call: Any) -> Any:
        def note(*arguments: Any, **options: bool) -> Any:
            events.append(name)
            return call(*arguments, **options)

        return note

    x = Tensors.drawn(way.heads, sum(way.packing)).of_rows(way.split.indices(mesh.cp.index))
    own = {name: noted(name, getattr(partial_attention, name)) for name in KERNELS}
    with (
        patch.object(context_attention, "partial", SimpleNamespace(**own)),
        patch.object(dist, "batch_isend_irecv", noted("post", dist.batch_isend_irecv)),
    ):
        results(spread(way, mesh), x, PLAIN)
    return events


FORWARD = ["post", "alone", "post", "rectangle", "post", "rectangle", "rectangle"]
HOME = ["rectangle_backward", "post"]
RING = [*FORWARD, "post", "alone_backward", "post", *HOME, "post", *HOME, *HOME]
GATHER = ["post", "alone", *["rectangle"] * 2, "post", "alone_backward", *["rectangle_backward"] * 2, "post"]


def test_messages_are_under_way_while_the_hop_before_computes(pool: Pool) -> None:
    """What a hop brings is posted before the one before computes, what goes home right after it has been computed."""
    assert pool.run(4, happened, "ring") == [RING] * 4
    assert pool.run(4, happened, "gather")[1:3] == [GATHER] * 2


def test_weights_are_not_dropped_in_parts() -> None:
    attention = ContextAttention(
        ContextParallel(2, "ring"), torch.tensor([8]), 8, ALONE, ALONE, lambda *_: torch.empty(0)
    )
    x = torch.zeros(4, 1, 2)
    with pytest.raises(ValueError, match=r"layer 3: .* dropped \(0.1\) with context.exchange=ring: choose heads"):
        attention("layer 3", x, x, x, Scoring(dropout=0.1))
