"""Blocks are told of the tokens what their activations do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from einops import rearrange
from torch import Tensor, nn

from megacore.parallel import kernels
from megacore.parallel.balance import RoutedTokens
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.experts import Counts
from megacore.parallel.layers.states import States


class MaskedAttention(Protocol):
    """An attention whose mask is settled: it knows which tokens look at each other."""

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value] -> [t, heads, value]; softmax in fp32 (fp64 for
        fp64).

        Args:
            name: The attention that asks.
            q, k, v: Those of this rank's heads.
            scoring: The rule by which scores become weights.
        """
        ...


@dataclass(frozen=True, eq=False)
class CausalAttention:
    """Each token looks at those before it in its sequence; there are ``sequences`` of equal length."""

    sequences: int

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        q, k, v = (rearrange(a, "(b s) heads head -> b heads s head", b=self.sequences) for a in (q, k, v))
        return rearrange(kernels.causal_attention(q, k, v, scoring), "b heads s head -> (b s) heads head")


@dataclass(frozen=True, eq=False)
class DocumentAttention:
    """Each token looks at those before it in its document; none lies in two of the ``sequences`` of equal length."""

    documents: Documents
    sequences: int

    def __call__(self, name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return kernels.documents_attention(q, k, v, self.documents, self.sequences, scoring)


@dataclass(frozen=True, eq=False)
class Context:
    """All that blocks are told of t tokens, the same for each of them.

    Args:
        attention: The attention of the tokens, which knows its mask.
        positions: [t], those of the tokens in their sequences.
        rotations: The cos, sin: [t, turning/2] of each rope that layers name, at the tokens' positions.
        routed: The tokens that this rank routes to experts.
        states: What layers with a state are handed where a span of tokens begins.
        counts: {experts: how many rows they have}, kept for when a block is computed again.
    """

    attention: MaskedAttention
    positions: Tensor | None = None
    rotations: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    routed: RoutedTokens = field(default_factory=RoutedTokens)
    states: States | None = None
    counts: dict[nn.Module, Counts] = field(default_factory=dict)
