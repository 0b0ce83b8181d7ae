"""Keys and values of the tokens so far, or states that they left, so that further tokens of a sequence are computed by
themselves.

The ranks of cp share out the tokens of each sequence, and each keeps its own: a new token's attention to them is merged
of the ranks' parts by the log-sum-exps. Of layers with a state every rank of cp keeps the whole state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.collectives import all_gather, start_all_gather
from megacore.parallel.kernels import indexed
from megacore.parallel.kernels.delta_rule import Enter
from megacore.parallel.kernels.scoring import Scoring, attend, attend_partly
from megacore.parallel.kernels.spans import Spans
from megacore.parallel.layers.compressed import CompressedTokens
from megacore.parallel.layers.indexed import Indexed, IndexVectors
from megacore.parallel.layers.states import States
from megacore.parallel.layers.whole_attention import MaskedAttention
from megacore.parallel.mesh import Group

_FREE = torch.iinfo(torch.int64).max
"""The position of a slot without a token, which no token sees."""


class Attends(Protocol):
    """An attention that is kept for: its heads of keys on this rank, and the sizes of those of keys and of values."""

    name: str
    kv: int
    head: int
    value: int


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys {attention: [rows, kv, slots, head]} and values {attention: [rows, kv, slots, value]} of this rank's heads
    and tokens; a row is a sequence, from its first token on.

    Args:
        keys, values: Those that are kept.
        positions: [rows, slots], where the tokens of the slots are in their sequences.
        held: The positions that each rank of cp keeps of each row, in ascending order and that of its slots.
        group: The ranks of cp.
        states: What layers with a state keep of each row: {layer: [rows, heads, each, key, value]}.
        tails: {layer: [rows, taps - 1, channels]}, the last tokens that their convolutions mix in.
        index: {attention: [rows, slots, head]}, the keys of its indexer; and what else is kept of each token, by name.
    """

    keys: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    positions: Tensor
    held: list[list[list[int]]]
    group: Group
    states: dict[str, Tensor] = field(default_factory=dict)
    tails: dict[str, Tensor] = field(default_factory=dict)
    index: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        attentions: Iterable[Attends],
        held: list[list[list[int]]],
        longest: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> Cache:
        """Memory for some sequences.

        Args:
            attentions: The layers' attentions, which ask for it.
            held: The class's, at the beginning.
            longest: The tokens that each row may come to; new ones go to the rank of cp that keeps fewest of them.
            dtype, device: Those of keys and values.
            group: The ranks of cp.
        """
        most = (max(-(-length // group.size), *map(len, ranks)) for length, ranks in zip(longest, held, strict=True))
        slots = max(most)
        own = [[*ranks[group.index]] for ranks in held]
        positions = torch.tensor([row + [_FREE] * (slots - len(row)) for row in own], device=device)
        keys, values = dict[str, Tensor](), dict[str, Tensor]()
        for attention in {each.name: each for each in attentions}.values():  # several may share keys
            for kept, head in ((keys, attention.head), (values, attention.value)):
                kept[attention.name] = torch.zeros(len(held), attention.kv, slots, head, dtype=dtype, device=device)
        return cls(keys, values, positions, held, group)

    def own(self, row: int) -> list[int]:
        """Return the positions of a row that this rank keeps."""
        return self.held[row][self.group.index]

    def put(self, name: str, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """rows, slots: [n], where k: [n, kv, head], v: [n, kv, value] go."""
        self.keys[name][rows, :, slots] = k
        self.values[name][rows, :, slots] = v

    def keep(self, rows: Sequence[int]) -> None:
        """Make some rows, in ascending order, the first ones; what is behind them does not count any more."""
        kept = self.keys, self.values, self.states, self.tails, self.index
        for tensor in (*chain(*(each.values() for each in kept)), self.positions):
            for to, row in enumerate(rows):
                if to != row:
                    tensor[to] = tensor[row]
        self.held[:] = [self.held[row] for row in rows]

    def back_to(self, ends: Sequence[int]) -> None:
        """Forget the keys and values of the tokens of each row from its end on."""
        for row, end in enumerate(ends):
            self.positions[row, bisect_left(self.own(row), end) :] = _FREE
            for held in self.held[row]:
                del held[bisect_left(held, end) :]


@dataclass(frozen=True, eq=False)
class Prefill:
    """Attention of whole prompts one after the other, whose keys and values are kept; what follows them is padding.

    Args:
        cache: The cache that keeps them.
        rows, slots: [n], where those of this rank's tokens are.
        whole: The attention.
    """

    cache: Cache
    rows: Tensor
    slots: Tensor
    whole: MaskedAttention

    @classmethod
    def of(cls, cache: Cache, whole: MaskedAttention) -> Prefill:
        """Return that of the tokens that a new cache holds."""
        counts, device = [len(cache.own(row)) for row in range(len(cache.held))], cache.positions.device
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        slots = [slot for count in counts for slot in range(count)]
        own, to = (torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, slots))
        return cls(cache, own, to, whole)

    def keep(self, name: str, x: Tensor) -> None:
        """x: [tokens, n], which is kept of each token beside keys and values."""
        kept = x.new_zeros(*self.cache.positions.shape, x.shape[1])
        kept[self.rows, self.slots] = x[: len(self.rows)]
        self.cache.index[name] = kept

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        n = len(self.rows)
        self.cache.put(name, self.rows, self.slots, k[:n], v[:n])
        return self.whole(name, q, k, v, scoring)


@dataclass(frozen=True, eq=False)
class Decode:
    """Attention of t more tokens of the cache's first n rows; what follows them is padding.

    Args:
        cache: Keys and values of the tokens before; those of these tokens are added.
        positions: The tokens' positions in their sequences.
        counts: The successive tokens of each row, at least one.
        at: [t], the same as the positions.
        rows, slots: The rows and slots of those tokens that this rank keeps.
        kept: Those tokens, among these.
    """

    cache: Cache
    positions: Sequence[int]
    counts: Sequence[int]
    at: Tensor
    rows: Tensor
    slots: Tensor
    kept: Tensor | slice

    @classmethod
    def of(
        cls, cache: Cache, positions: Sequence[int], device: torch.device, counts: Sequence[int] | None = None
    ) -> Decode:
        """Give each token to the rank that keeps fewest of its sequence. ``counts``: the class's; None: one of each."""
        counts = [1] * len(positions) if counts is None else counts
        rows, slots, kept = list[int](), list[int](), list[int]()
        own = (row for row, count in enumerate(counts) for _ in range(count))
        for token, (row, position) in enumerate(zip(own, positions, strict=True)):
            shortest = min(cache.held[row], key=len)
            if shortest is cache.own(row):
                rows.append(row)
                slots.append(len(shortest))
                kept.append(token)
            shortest.append(position)
        at = torch.tensor(positions, device=device)
        of_rows, to = (torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, slots))
        of = slice(len(kept)) if len(kept) == len(positions) else torch.tensor(kept, dtype=torch.int64, device=device)
        cache.positions[of_rows, to] = at[of]
        return cls(cache, positions, counts, at, of_rows, to, of)

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return self.among(name, q, k, v, scoring)

    def among(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, chosen: Tensor | None = None
    ) -> Tensor:
        """Attend to those slots alone that are ``chosen``, [t, slots], where it says so."""
        self.cache.put(name, self.rows, self.slots, k[self.kept], v[self.kept])
        t, (first, stop, seen) = len(self.at), self._seen(scoring.window, scoring.chunk)
        seen = seen if chosen is None else seen & self._by_row(chosen[:t, first:stop])
        keys, values = (kept[name][: len(self.counts), :, first:stop] for kept in (self.cache.keys, self.cache.values))
        queries = self._by_row(q[:t]).transpose(1, 2)
        if self.cache.group.size > 1:
            found = self._merged(*attend_partly(queries, keys, values, seen, scoring), scoring)
        elif scoring.softcap is None and scoring.sinks is None:
            # The queries that share a kv head see the same tokens, so they go through the kernel as if they were
            # several tokens of one head, and nobody repeats the keys for them.
            shared = queries.unflatten(1, (keys.shape[1], -1))
            each = seen[:, None] if self.places is None else seen[:, None].repeat(1, 1, shared.shape[2], 1)
            how = each, scoring.dropout
            made = F.scaled_dot_product_attention(shared.flatten(2, 3), keys, values, *how, scale=scoring.scale)
            found = made.unflatten(2, shared.shape[2:4]).flatten(1, 2)
        else:
            found = attend(queries, keys, values, seen, scoring)
        y = q.new_zeros(*q.shape[:-1], v.shape[-1])
        y[:t] = found[:, :, 0] if self.places is None else found[self.own, :, self.nth]
        return y

    def _by_row(self, x: Tensor) -> Tensor:
        """x: [t, ...] -> [n, most, ...]."""
        return x[:, None] if self.places is None else x[self.places]

    @cached_property
    def own(self) -> Tensor:
        """[t], the row of each token."""
        return torch.tensor([row for row, count in enumerate(self.counts) for _ in range(count)], device=self.at.device)

    @cached_property
    def nth(self) -> Tensor:
        """[t], the place of each token in its row."""
        return torch.tensor([place for count in self.counts for place in range(count)], device=self.at.device)

    @cached_property
    def places(self) -> Tensor | None:
        """[n, most], the tokens of each row, the last one again behind them; None: each row has one."""
        most, starts = max(self.counts), self._starts
        places = [
            [start + min(j, count - 1) for j in range(most)] for start, count in zip(starts, self.counts, strict=True)
        ]
        return torch.tensor(places, device=self.at.device) if most > 1 else None

    @property
    def _starts(self) -> list[int]:
        """The first token of each row."""
        return list(accumulate(self.counts, initial=0))[:-1]

    def _merged(self, own: Tensor, log_sum: Tensor, scoring: Scoring) -> Tensor:
        """own: [n, heads, most, value], log_sum: [n, heads, most] of this rank's tokens -> [n, heads, most, value] of
        all."""
        parts = all_gather(torch.cat([own, log_sum[..., None]], -1)[None], self.cache.group)
        outputs, sums = parts[..., :-1], parts[..., -1]
        if scoring.sinks is not None:
            sums = torch.cat([sums, scoring.sinks.to(sums)[:, None].expand_as(sums[:1])])
        weights = sums.softmax(0)[: len(outputs)]
        return (outputs * weights[..., None]).sum(0)

    def back_to(self, kept: Sequence[int]) -> None:
        """Forget these tokens but for the first ones of each row, as many as are kept."""
        self.cache.back_to([self.positions[start] + count for start, count in zip(self._starts, kept, strict=True)])

    def _seen(self, window: int | None, chunk: int | None) -> tuple[int, int, Tensor]:
        """first, stop, [n, most, stop - first]: the slots that are looked at, True where a row's new tokens look;
        layers ask for the same ones."""
        if (window, chunk) not in self._masks:
            held = [self.cache.own(row) for row in range(len(self.counts))]
            firsts = (_first(self.positions[start], window, chunk) for start in self._starts)
            first = min(bisect_left(own, each) for own, each in zip(held, firsts, strict=True))
            stop = max(map(len, held))
            there, at = self.cache.positions[: len(held), None, first:stop], self._by_row(self.at)[..., None]
            seen = there <= at
            if window is not None:
                seen &= there > at - window
            if chunk is not None:
                seen &= there >= at - at % chunk
            self._masks[window, chunk] = first, stop, seen
        return self._masks[window, chunk]

    @cached_property
    def _masks(self) -> dict[tuple[int | None, int | None], tuple[int, int, Tensor]]:
        """{(window, chunk): what is seen}."""
        return {}


def _first(at: int, window: int | None, chunk: int | None) -> int:
    """Return the first position that a token at some position looks at."""
    return max(0 if window is None else at - window + 1, 0 if chunk is None else at - at % chunk)


@dataclass(frozen=True, eq=False)
class PrefillStates(States):
    """States of whole prompts one after the other, which are kept; what follows them is padding.

    Args:
        spans: This rank's tokens.
        cache: The cache that keeps them.
        whole: How they enter the spans.
    """

    cache: Cache
    whole: States

    @classmethod
    def of(cls, cache: Cache, whole: States) -> PrefillStates:
        return cls(whole.spans, cache, whole)

    def before(self, name: str, x: Tensor, count: int) -> Tensor:
        before = self.whole.before(name, x, count)
        self.cache.tails[name] = self.whole.last_tokens(x, before)[: len(self.cache.held)]
        return before

    def entering(self, name: str, value: int) -> Tensor | Enter | None:
        return self.whole.entering(name, value)

    def leaving(self, name: str, last: Tensor) -> None:
        self.cache.states[name] = self.whole.last_states(last)[: len(self.cache.held)]


@dataclass(frozen=True, eq=False)
class DecodeStates(States):
    """States of the cache's first n rows, of each of which there are more tokens; what follows them is padding.

    Args:
        spans: The tokens of each row, and the padding.
        cache: The states before the tokens, in the place of which those behind them come.
        counts: The tokens of each row.
        again: For each state, what puts the one behind some of the tokens in its place, of these and their spans.
    """

    cache: Cache
    counts: Sequence[int]
    again: list[Callable[[Tensor, States], None]] = field(default_factory=list)

    @classmethod
    def of(cls, cache: Cache, counts: Sequence[int], padding: int, device: torch.device) -> DecodeStates:
        return cls(Spans((*counts, *[padding] * (padding > 0)), device), cache, counts)

    @property
    def rows(self) -> int:
        return len(self.counts)

    def back_to(self, kept: Sequence[int]) -> None:
        """Go back to the states behind the first tokens of each row, as many as are kept."""
        starts = accumulate(self.counts, initial=0)
        tokens = [start + j for start, count in zip(starts, kept, strict=False) for j in range(count)]
        spans, device = States(Spans(tuple(kept), self.spans.device)), self.spans.device
        for each in self.again:
            each(torch.tensor(tokens, device=device), spans)

    def before(self, name: str, x: Tensor, count: int) -> Tensor:
        before, tails = super().before(name, x, count), self.cache.tails[name][: self.rows]
        before[: self.rows] = tails
        tails[:] = self.last_tokens(x, before)[: self.rows]

        def again(tokens: Tensor, states: States) -> None:
            tails[:] = states.last_tokens(x[tokens], before[: self.rows])

        self._take(again)
        return before

    def _follow(self, rule: Callable[..., tuple[Tensor, Tensor]], name: str, value: int, *given: Tensor) -> Tensor:
        entering = self.entering(name, value)
        y, last = rule(*given, entering, self.spans)
        self.leaving(name, last)

        def again(tokens: Tensor, states: States) -> None:
            self.leaving(name, rule(*(each[tokens] for each in given), entering[: self.rows], states.spans)[1])

        self._take(again)
        return y

    def _take(self, again: Callable[[Tensor, States], None]) -> None:
        if max(self.counts) > 1:  # else there is nothing to go back to, and no need to keep what the tokens say
            self.again.append(again)

    def entering(self, name: str, value: int) -> Tensor:
        kept = self.cache.states[name][: self.rows]
        return F.pad(kept, (0, 0) * (kept.dim() - 1) + (0, len(self.spans) - self.rows))

    def leaving(self, name: str, last: Tensor) -> None:
        self.cache.states[name][: self.rows] = last[: self.rows]


@dataclass(frozen=True, eq=False)
class PrefillIndexed(Indexed):
    """Attention of whole prompts to tokens that indexers choose, whose keys are kept, too.

    Args:
        prefill: The prompts.
        whole: The attention.
    """

    prefill: Prefill
    whole: Indexed

    def choose(self, name: str, index: IndexVectors, top: int) -> Tensor:
        self.prefill.keep(name, index.k)
        return self.whole.choose(name, index, top)

    def attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scoring: Scoring) -> Tensor:
        n = len(self.prefill.rows)
        self.prefill.cache.put(name, self.prefill.rows, self.prefill.slots, k[:n], v[:n])
        return self.whole.attend(name, q, k, v, chosen, scoring)


@dataclass(frozen=True, eq=False)
class DecodeIndexed(Indexed):
    """Attention of more tokens of each row to those that indexers choose; what is chosen are slots of this rank.

    Args:
        decode: The tokens.
    """

    decode: Decode

    def choose(self, name: str, index: IndexVectors, top: int) -> Tensor:
        cache, t, count = self.decode.cache, len(self.decode.at), len(index.q)
        if name not in cache.index:  # of layers that no prompt has gone through
            cache.index[name] = index.k.new_zeros(*cache.positions.shape, index.k.shape[1])
        cache.index[name][self.decode.rows, self.decode.slots] = index.k[self.decode.kept]
        own = slice(index.group.index * count, min(t, (index.group.index + 1) * count))
        there, rows = self.decode.at[own], own if self.decode.places is None else self.decode.own[own]
        scores = indexed.index_scores(index.q[: len(there)], cache.index[name][rows], index.weights[: len(there)])
        # In the order of their positions, as the earlier of two equals is chosen.
        every, slots = (self._of_all(each) for each in (scores, cache.positions[rows]))
        slots, order = slots.sort(-1)
        best = indexed.best_of(every.gather(1, order), slots <= there[:, None], top)
        places = order.gather(1, best.clamp(min=0).long()).masked_fill(best < 0, -1)
        size, rank = scores.shape[1], cache.group.index
        places = torch.where(places // size == rank, places - rank * size, -1)
        return F.pad(places, (0, 0, 0, count - len(places)), value=-1).int()

    def attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scoring: Scoring) -> Tensor:
        slots = self.decode.cache.positions.shape[1]
        return self.decode.among(name, q, k, v, scoring, indexed.marked(chosen, slots))

    def _of_all(self, x: Tensor) -> Tensor:
        """x: [n, slots] of this rank -> [n, slots of all ranks of cp]."""
        parts = start_all_gather(x[None], self.decode.cache.group).wait()
        return parts.transpose(0, 1).flatten(1)


@dataclass(frozen=True, eq=False)
class PrefillCompressed(CompressedTokens):
    """Attention of whole prompts to their last tokens and to blocks of them; what these are made of is kept.

    Args:
        prefill: The prompts.
    """

    prefill: Prefill = field(kw_only=True)

    def every(self, name: str, x: Tensor) -> Tensor:
        self.prefill.keep(name, x)
        return super().every(name, x)


@dataclass(frozen=True, eq=False)
class DecodeCompressed(CompressedTokens):
    """That of one more token of each row, to whose tokens on all ranks of cp each rank looks.

    Args:
        documents: The lengths of the rows, and of what follows them, which is padding.
        decode: The tokens.
    """

    decode: Decode = field(kw_only=True)

    @cached_property
    def own(self) -> npt.NDArray[np.int64]:
        rows, ends = len(self.decode.at), np.cumsum(self.documents)
        return np.concatenate([ends[:rows] - 1, np.arange(ends[rows - 1], ends[-1])])

    @cached_property
    def _places(self) -> Tensor:
        """Where the tokens of the rows, in their order, are among the slots of all ranks."""
        held, slots = self.decode.cache.held[: len(self.decode.at)], self.decode.cache.positions.shape[1]
        places = list[int]()
        for row, ranks in enumerate(held):
            found = {at: (rank, slot) for rank, own in enumerate(ranks) for slot, at in enumerate(own)}
            places += [(rank * len(held) + row) * slots + slot for rank, slot in map(found.__getitem__, sorted(found))]
        return torch.tensor(places, device=self.device)

    def every(self, name: str, x: Tensor) -> Tensor:
        cache, n = self.decode.cache, len(self.decode.at)
        cache.index[name][self.decode.rows, self.decode.slots] = x[self.decode.kept]
        kept = start_all_gather(cache.index[name][None, :n], cache.group).wait().flatten(0, 2)
        return torch.cat([kept[self._places], x[n:]])
