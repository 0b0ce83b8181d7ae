"""The costs of a part of a model on one rank for a microbatch, as `megacore.planning.measure` finds them. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all-reduce", "all-gather", "reduce-scatter", "send"
ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class MatMul:
    """``batch`` matrix products [m, k] x [k, n] in one call.

    Args:
        m, n, k, batch: The sizes: of a linear m are tokens, n outputs and k inputs in the forward. In the attention,
            whose two products count as one, m n is twice the pairs of a query and a key that it looks at.
        dtype: The dtype as torch calls it: "bfloat16".
        attention: Whether it is part of a kernel that softens the scores too.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    attention: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Collective:
    """A collective, or a message between stages.

    Args:
        kind: The kind of collective.
        axis: Dimensions of the mesh that its group lies along, as "tp".
        ranks: The size of the group.
        size: Bytes of the whole tensor that is summed or gathered, or of what is sent; of an all-to-all, of what a rank
            has for all or gets of all, whichever is more.
        hidden: Whether a product is started between its start and the wait for it.
    """

    kind: str
    axis: str
    ranks: int
    size: int
    hidden: bool


@dataclass(frozen=True)
class KeyExchange:
    """The turns of one attention among the parts of cp (`megacore.planning.exchange`).

    Args:
        window: The tokens that each one looks at; None: all before it.
        keys: Bytes of a token's keys and values, which a part takes of the others.
        gradients: Bytes of their gradients, which go back; 0 in a forward.
        flops: Operations of one score and of its use, in all heads of a rank.
    """

    window: int | None
    keys: int
    gradients: int
    flops: int


@dataclass(frozen=True, eq=False)
class OpCounts:
    """The operations of a part.

    Args:
        products, messages: {product or collective: how often}.
        passes: Bytes that operators of our own read and write beside their products: where no kernel does all of an
            attention, its scores pass through memory.
        exchanges: {attention among the parts of cp: how often}; its products are among the others.
    """

    products: Mapping[MatMul, int] = field(default_factory=Counter)
    messages: Mapping[Collective, int] = field(default_factory=Counter)
    passes: int = 0
    exchanges: Mapping[KeyExchange, int] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        return sum(product.flops * count for product, count in self.products.items())


@dataclass(frozen=True, eq=False)
class LayerCost:
    """The embedding, a block or the head: bytes, and work.

    Args:
        elements: The elements of its parameters.
        learning: The number of these that are trained.
        kept: The bytes kept from its forward to its backward, with what it is given if it keeps that.
        tables: {rope: bytes} of the cos and sin that it keeps, which blocks share.
        peak: The most that is there at once beside what is kept, in its forward or in its backward.
        left: Whether what comes out has a gradient: whether there is a backward.
        forward: The operations of its forward.
        backward: The operations of its backward, with all that is computed again.
    """

    elements: int
    learning: int
    kept: int
    tables: Mapping[str, int]
    peak: int
    left: bool
    forward: OpCounts
    backward: OpCounts
