"""The costs of a part of a model on one rank for a microbatch, as it is measured. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all-reduce", "all-gather", "reduce-scatter", "send"
ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class MatMul:
    """``batch`` matrix products [m, k] x [k, n] in one call. ``m, n, k, batch``: the sizes: of a linear m are tokens, n
    outputs and k inputs in the forward. In the attention, whose two products count as one, m n is twice the pairs of a
    query and a key that it looks at; ``dtype``: the dtype as torch calls it: "bfloat16"; ``attention``: whether it is
    part of a kernel that softens the scores too; ``weight``: whether the second factor is a weight."""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    attention: bool = False
    weight: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Collective:
    """A collective, or a message between stages. ``axis``: dimensions of the mesh that its group lies along, as "tp" or
    "dp x tp"; ``size``: bytes of the whole tensor that is summed or gathered, or of what is sent; of an all-to-all, of
    what a rank has for all or gets of all, whichever is more; ``hidden``: whether a product is started between its
    start and the wait for it."""

    kind: str
    axis: str
    ranks: int
    size: int
    hidden: bool


@dataclass(frozen=True)
class KeyExchange:
    """The turns of one attention among the parts of cp (`megacore.planning.setting`): bytes of a token's keys and
    values, which a part takes of the others, those of their gradients, which go back (0 in a forward), and the
    operations of one score and of its use, in all heads of a rank."""

    window: int | None
    keys: int
    gradients: int
    flops: int
    chunk: int | None = None


@dataclass(eq=False)
class OpCounts:
    """The operations of a part: {what: how often}; the products of the exchanges are among the others. ``passes``:
    bytes that operators of our own read and write beside their products: where no kernel does all of an attention, its
    scores pass through memory."""

    products: Counter[MatMul] = field(default_factory=Counter)
    messages: Counter[Collective] = field(default_factory=Counter)
    passes: int = 0
    exchanges: Counter[KeyExchange] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        return sum(product.flops * count for product, count in self.products.items())


@dataclass(frozen=True, eq=False)
class LayerCost:
    """The embedding, a block or the head: bytes, and work.

    Args:
        size: The bytes of its parameters.
        learning: The elements of its parameters that are trained.
        kept: The bytes kept from its forward to its backward, with what it is given if it keeps that.
        tables: {rope: bytes} of the cos and sin that it keeps, which blocks share.
        peak: The most that is there at once beside what is kept, in its forward or in its backward.
        left: Whether what comes out has a gradient: whether there is a backward.
        paused: The most that is there where its forward waits for rows of experts; 0 where it never does.
        backward: The operations of its backward, with all that is computed again.
        waiting: The bytes that its backward leaves where weight gradients come later.
        late: The most that is there at once beside these while they come.
        weights: The operations of weight gradients that come later; they are none of the backward's.
    """

    size: int
    learning: int
    kept: int
    tables: Mapping[str, int]
    peak: int
    left: bool
    forward: OpCounts
    backward: OpCounts
    paused: int = 0
    waiting: int = 0
    late: int = 0
    weights: OpCounts = field(default_factory=OpCounts)
