"""Keys and values of the tokens so far, so that each further token of a sequence is computed by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import Attention
from parallel import kernels
from parallel.kernels.documents import Documents
from parallel.kernels.scoring import Scoring, attend


@dataclass(frozen=True, eq=False)
class Cache:
    """Of this rank's heads, {attention: [rows, kv, length, head]}, of values [rows, kv, length, value]; a row is a
    sequence, from its first token on."""

    keys: Mapping[str, Tensor]
    values: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, attentions: Iterable[Attention], rows: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> Cache:
        """Memory for some sequences of at most ``length`` tokens."""
        keys, values = dict[str, Tensor](), dict[str, Tensor]()
        for attention in attentions:
            for kept, head in ((keys, attention.head), (values, attention.value)):
                kept[attention.name] = torch.zeros(rows, attention.kv, length, head, dtype=dtype, device=device)
        return cls(keys, values)

    def put(self, name: str, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """rows, positions: [n], where the first n of k: [t, kv, head], v: [t, kv, value] go."""
        n = len(positions)
        self.keys[name][rows, :, positions] = k[:n]
        self.values[name][rows, :, positions] = v[:n]

    def keep(self, rows: Sequence[int]) -> None:
        """Some rows, in ascending order, become the first ones; what is behind them does not count any more."""
        for tensor in (*self.keys.values(), *self.values.values()):
            for to, row in enumerate(rows):
                if to != row:
                    tensor[to] = tensor[row]


@dataclass(frozen=True, eq=False)
class Prefill:
    """Attention of whole prompts one after the other, whose keys and values are kept; what follows them is padding.

    Args:
        cache: Where they are kept.
        rows, positions: [n], of the prompts' tokens.
        documents: Each prompt, and the padding.
    """

    cache: Cache
    rows: Tensor
    positions: Tensor
    documents: Documents

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        self.cache.put(name, self.rows, self.positions, k, v)
        return kernels.documents_attention(q, k, v, self.documents, 1, scoring)


@dataclass(frozen=True, eq=False)
class Decode:
    """Attention of one more token of each of the cache's first n rows; what follows them is padding.

    Args:
        cache: Keys and values of the tokens before; those of these tokens are added.
        rows, positions: [n], where the tokens are.
        span: The lowest and the highest of the positions.
    """

    cache: Cache
    rows: Tensor
    positions: Tensor
    span: tuple[int, int]

    @classmethod
    def of(cls, cache: Cache, positions: Sequence[int], device: torch.device) -> Decode:
        at = torch.tensor(positions, device=device)
        return cls(cache, torch.arange(len(at), device=device), at, (min(positions), max(positions)))

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        self.cache.put(name, self.rows, self.positions, k, v)
        n, (low, high) = len(self.positions), self.span
        first = 0 if scoring.window is None else max(0, low - scoring.window + 1)
        keys, values = (kept[name][:n, :, first : high + 1] for kept in (self.cache.keys, self.cache.values))
        seen = self._seen(first, scoring.window)
        y = q.new_zeros(*q.shape[:-1], v.shape[-1])
        if scoring.softcap is None and scoring.sinks is None:
            # The queries that share a kv head see the same tokens, so they go through the kernel as if they were
            # several tokens of one head, and nobody repeats the keys for them.
            shared = q[:n].unflatten(1, (keys.shape[1], -1))
            y[:n] = F.scaled_dot_product_attention(
                shared, keys, values, seen[:, None], scoring.dropout, scale=scoring.scale
            ).flatten(1, 2)
        else:
            y[:n] = attend(q[:n, :, None], keys, values, seen, scoring)[:, :, 0]
        return y

    def _seen(self, first: int, window: int | None) -> Tensor:
        """[n, 1, span's end - first], True where a row's new token looks; layers ask for the same ones."""
        if window not in self._masks:
            tokens, at = torch.arange(first, self.span[1] + 1, device=self.positions.device), self.positions[:, None]
            seen = tokens <= at if window is None else (tokens <= at) & (tokens > at - window)
            self._masks[window] = seen[:, None]
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, Tensor]:
        """{window: who sees what}."""
        return {}
