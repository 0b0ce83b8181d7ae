"""What layers with a state are handed at the beginning of a span of tokens: nothing, or what another rank has made.

Over cp a document's tokens are shared out in spans. What a span makes of a state is known without the state
(:mod:`parallel.kernels.delta_rule`): the ranks gather that, a message of one size whatever the number of
tokens, and each composes the states of its own spans of those before them. In the backward, which goes through the rule
again, it is gathered again, and the gradients go home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import start_all_gather, start_reduce_scatter
from megacore.parallel.context_split import ContextSplit
from megacore.parallel.kernels.convolution import causal_convolution
from megacore.parallel.kernels.delta_rule import Enter, delta_rule, handed_on
from megacore.parallel.kernels.linear_recurrence import linear_recurrence
from megacore.parallel.kernels.selective_scan import selective_scan
from megacore.parallel.kernels.spans import Spans
from megacore.parallel.mesh import Group


@dataclass(frozen=True, eq=False)
class States:
    """The states of documents that a rank has whole: each begins with none.

    Args:
        spans: This rank's tokens.
    """

    spans: Spans

    def convolve(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """x: [t, channels], weight: [channels, taps] -> [t, channels], as :func:`causal_convolution` does it; ``name``
        is the layer that asks."""
        return causal_convolution(x, weight, self.before(name, x, weight.shape[1] - 1), self.spans)

    def delta_rule(self, name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k: [t, heads, key], v: [t, heads, each, value], g: [t, heads, each] or [t, heads, each, key], beta: [t,
        heads, each] -> [t, heads, each, value], as :func:`~parallel.kernels.delta_rule.delta_rule` does it; ``name`` is
        the layer that asks."""
        return self._follow(kernels.gated_delta_rule, name, v.shape[-1], q, k, v, g, beta)

    def state_space(self, name: str, c: Tensor, b: Tensor, x: Tensor, g: Tensor, step: Tensor) -> Tensor:
        """Do as :meth:`delta_rule` with c, b, x and the steps for q, k, v and beta, without the correction."""
        return self._follow(partial(delta_rule, corrects=False), name, x.shape[-1], c, b, x, g, step)

    def selective_scan(self, name: str, c: Tensor, b: Tensor, x: Tensor, step: Tensor, rate: Tensor) -> Tensor:
        """c, b: [t, key], x: [t, channels, 1], step: [t, channels], rate: [channels, key] -> [t, channels, 1], as
        :func:`~parallel.kernels.selective_scan.selective_scan` does it; ``name`` is the layer that asks."""

        def scan(c: Tensor, b: Tensor, x: Tensor, step: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
            return selective_scan(c, b, x, step, rate, *how)

        return self._follow(scan, name, 1, c, b, x, step)

    def linear_recurrence(self, name: str, x: Tensor, g: Tensor) -> Tensor:
        """x, g: [t, channels] -> [t, channels], as
        :func:`~parallel.kernels.linear_recurrence.linear_recurrence` does it; ``name`` is the layer that asks."""
        return self._follow(linear_recurrence, name, 1, x, g)

    def _follow(self, rule: Callable[..., tuple[Tensor, Tensor]], name: str, value: int, *given: Tensor) -> Tensor:
        """Return what a rule makes of what it is given of each token; ``value`` is the last size of its states."""
        y, last = rule(*given, self.entering(name, value), self.spans)
        self.leaving(name, last)
        return y

    def before(self, name: str, x: Tensor, count: int) -> Tensor:
        """x: [t, channels] -> [spans, count, channels], what stands before each span."""
        return x.new_zeros(len(self.spans), count, x.shape[1])

    def entering(self, name: str, value: int) -> Tensor | Enter | None:
        """Return the states before the spans, [spans, heads, each, key, value], or what makes them of the spans'
        transitions; None for zeros."""
        return None

    def leaving(self, name: str, last: Tensor) -> None:
        """Take the states behind the spans, like those before them."""

    def last_tokens(self, x: Tensor, before: Tensor) -> Tensor:
        """x: [t, channels], before: [spans, count, channels] -> [documents, count, channels]: the last tokens of each
        document, and of a short one those before it."""
        return torch.cat([x, before.flatten(0, 1)])[self.spans.last(before.shape[1])]

    def last_states(self, last: Tensor) -> Tensor:
        """last: [spans, ...], the states behind the spans -> [documents, ...], those behind the documents."""
        return last


@dataclass(frozen=True, eq=False)
class ContextStates(States):
    """The states of documents whose tokens are shared out over cp.

    Args:
        spans: This rank's tokens.
        plan: The spans of all ranks.
        group: The ranks of cp.
    """

    plan: _Chains
    group: Group

    @classmethod
    def of(cls, split: ContextSplit, group: Group, device: torch.device, whole: bool = False) -> Self:
        """Return those of a rank of a microbatch that has been split; ``whole``: of documents that one rank has to
        itself the others are told, too."""
        plan = _chains(split, group.size, whole)
        return cls(Spans(plan.lengths[group.index], device), plan, group)

    def before(self, name: str, x: Tensor, count: int) -> Tensor:
        starts = partial(self.plan.of, self.group.index)
        return self._tokens("starts", x, super().before(name, x, count), starts)

    def entering(self, name: str, value: int) -> Tensor | Enter | None:
        def states(found: Tensor) -> Tensor:
            nothing = found.new_zeros(*found.shape[1:-1], value)
            entered = {(link.rank, link.span): state for link, state in self._composed(found, nothing)}
            own = ((self.group.index, span) for span in range(len(self.spans)))
            return torch.stack([entered.get(at, nothing) for at in own])

        return (lambda each: self._of_all(each, states)) if self.plan.most else None

    def last_tokens(self, x: Tensor, before: Tensor) -> Tensor:
        """Return those of the documents of all ranks, of a plan of whole documents."""
        return self._tokens("ends", x, torch.zeros_like(before), lambda: [(c, c[-1].stop) for c in self.plan.chains])

    def last_states(self, last: Tensor) -> Tensor:
        """Return those of the documents of all ranks, of a plan of whole documents."""
        ends = self.spans.kept("ends", lambda: [chain[-1].place for chain in self.plan.chains])
        return self._of_all(last, lambda found: found[ends])

    def _tokens(self, name: str, x: Tensor, nothing: Tensor, places: Callable[[], list[tuple[_Chain, int]]]) -> Tensor:
        """Return the tokens before these places of chains, which are called ``name``: rows of the last tokens of all
        ranks' spans, and of the zeros behind them."""
        if not self.plan.most:
            return nothing
        count = nothing.shape[1]
        rows = self.spans.kept(f"{name} {count}", lambda: [self.plan.rows(at, count) for at in places()])
        own = super().last_tokens(x, nothing)
        return self._of_all(own, lambda found: F.pad(found.flatten(0, 1), (0, 0, 0, 1))[rows])

    def _composed(self, found: Tensor, nothing: Tensor) -> Iterator[tuple[_Link, Tensor]]:
        """Yield each span of all ranks with the state before it."""
        for chain in self.plan.chains:
            state = nothing
            for link in chain:
                yield link, state
                state = handed_on(found[link.place], state)

    def _of_all(self, each: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
        """each: [spans, ...] of this rank -> what is made of those of all ranks: [place, ...]."""
        own = self.spans.kept("told", lambda: self.plan.told_by(self.group.index))
        rows = F.pad(each[own], (0, 0) * (each.dim() - 1) + (0, self.plan.most - len(own)))
        return _OfAll.apply(rows, self.group, made)


class _OfAll(torch.autograd.Function):
    """Each rank makes of the rows of all ranks what it needs; every rank goes through both collectives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, made: Callable[[Tensor], Tensor]) -> Tensor:
        found = start_all_gather(rows, group).wait()
        ctx.save_for_backward(found)
        ctx.group, ctx.made = group, made
        return made(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        found = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.made(found)
        # Whose spans all begin a document has been told nothing.
        dfound = torch.autograd.grad(y, found, dy)[0] if y.requires_grad else torch.zeros_like(found)
        return start_reduce_scatter(dfound, ctx.group).wait(), None, None


class _Link(NamedTuple):
    """A span of a document that several ranks have: whose it is, the number it has there, where it is among the rows
    that are gathered, and its [start, stop) in the microbatch."""

    document: int
    rank: int
    span: int
    place: int
    start: int
    stop: int


_Chain = tuple[_Link, ...]


@dataclass(frozen=True)
class _Chains:
    """The spans of a microbatch.

    Args:
        lengths: Those of each rank.
        chains: Those of each document that is told, in its order.
        most: The rows of each rank that are gathered.
    """

    lengths: tuple[tuple[int, ...], ...]
    chains: tuple[_Chain, ...]
    most: int

    def of(self, rank: int) -> list[tuple[_Chain, int]]:
        """Return the chain of each span of a rank, and where the span starts; of one that is not told no chain."""
        found = {link.span: (chain, link.start) for chain in self.chains for link in chain if link.rank == rank}
        return [found.get(span, ((), 0)) for span in range(len(self.lengths[rank]))]

    def told_by(self, rank: int) -> list[int]:
        """Return the numbers of the spans of a rank that are gathered, in the order of their places."""
        return [link.span for chain in self.chains for link in chain if link.rank == rank]

    def rows(self, at: tuple[_Chain, int], count: int) -> list[int]:
        """Return the rows of the ``count`` tokens before one of a chain, where each place has the last ``count`` of its
        span; behind them is one for what is before the document."""
        chain, end = at
        return [
            next(
                (link.place * count + count - (link.stop - token) for link in chain if link.start <= token < link.stop),
                len(self.lengths) * self.most * count,
            )
            for token in range(end - count, end)
        ]


@lru_cache(maxsize=16)
def _chains(split: ContextSplit, ranks: int, whole: bool) -> _Chains:
    lengths, links = list[tuple[int, ...]](), list[_Link]()
    for rank in range(ranks):
        tokens = split.indices(rank)
        documents = np.searchsorted(split.starts, tokens, side="right") - 1
        cuts = np.flatnonzero((np.diff(tokens) != 1) | (np.diff(documents) != 0)) + 1
        starts, stops = np.array([0, *cuts]), np.array([*cuts, len(tokens)])
        lengths.append(tuple((stops - starts).tolist()))
        for span, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            links.append(_Link(int(documents[start]), rank, span, 0, int(tokens[start]), int(tokens[stop - 1]) + 1))
    links.sort(key=lambda link: link.start)
    chains = [tuple(chain) for _, chain in groupby(links, key=lambda link: link.document)]
    chains = [chain for chain in chains if whole or len(chain) > 1]
    told = [0] * ranks
    for chain in chains:
        for link in chain:
            told[link.rank] += 1
    most, placed = max(told), [0] * ranks
    numbered = []
    for chain in chains:
        new = []
        for link in chain:
            new.append(link._replace(place=link.rank * most + placed[link.rank]))
            placed[link.rank] += 1
        numbered.append(tuple(new))
    return _Chains(tuple(lengths), tuple(numbered), most)
