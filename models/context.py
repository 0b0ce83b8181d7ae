"""Blocks are told of the tokens what their activations do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from megacore.parallel.balance import RoutedTokens
from megacore.parallel.layers.compressed import CompressedTokens
from megacore.parallel.layers.experts import Counts
from megacore.parallel.layers.indexed import Indexed
from megacore.parallel.layers.states import States
from megacore.parallel.layers.whole_attention import MaskedAttention


@dataclass(frozen=True, eq=False)
class Context:
    """All that blocks are told of t tokens, the same for each of them.

    Args:
        attention: The attention of the tokens, which knows its mask.
        positions: [t], those of the tokens in their sequences.
        rotations: The cos, sin: [t, turning/2] of each rope that layers name, at the tokens' positions.
        routed: The tokens that this rank routes to experts.
        states: What layers with a state are handed where a span of tokens begins.
        indexed: The attention to tokens that indexers choose, where there are some.
        compressed: The attention to blocks of tokens, where there are some.
        tokens: [t], what layers look up beside the embedding, where they do; and ``embedded``, [t/tp, embed], that.
        keys: {attention: its keys and values}, where layers behind it look at them, too; kept as the counts are.
        counts: {experts: how many rows they have}, kept for when a block is computed again.
    """

    attention: MaskedAttention
    positions: Tensor | None = None
    rotations: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    routed: RoutedTokens = field(default_factory=RoutedTokens)
    states: States | None = None
    indexed: Indexed | None = None
    compressed: CompressedTokens | None = None
    tokens: Tensor | None = None
    embedded: Tensor | None = None
    keys: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    counts: dict[nn.Module, Counts] = field(default_factory=dict)
