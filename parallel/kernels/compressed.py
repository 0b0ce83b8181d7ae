"""Attention to the last tokens and, beyond them, to blocks of tokens of which each is one key (DeepSeek-V4), in torch's
operators.

A block is a mean of its tokens' vectors, weighed dimension by dimension. A token looks at those blocks of its document
that end before it or with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.indexed import Reaches
from megacore.parallel.kernels.scoring import Scoring, apply, weigh
from megacore.parallel.kernels.upcast import wide


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """The blocks of successive documents, m in all, each of as many tokens; what is left of a document is in none.

    Args:
        starts: [m], the first token of each.
        positions: [m], where that is in its document.
        reaches: The blocks that each of this rank's n tokens may look at.
    """

    starts: Tensor
    positions: Tensor
    reaches: Reaches

    @classmethod
    def of(cls, documents: npt.NDArray[np.int64], own: npt.NDArray[np.int64], rate: int, device: torch.device) -> Self:
        """Return those of documents of these lengths, in blocks of ``rate`` tokens, for the tokens at the places
        ``own``."""
        counts, ends = documents // rate, np.cumsum(documents)
        first = np.cumsum(counts) - counts  # the number of a document's first block
        positions = (np.arange(counts.sum()) - np.repeat(first, counts)) * rate
        starts = positions + np.repeat(ends - documents, counts)
        of = np.searchsorted(ends, own, side="right")
        whole = (own - (ends - documents)[of] + 1) // rate
        here = on(np.stack([starts, positions]), device)
        return cls(here[0], here[1], Reaches(first[of], first[of] + whole - 1, device))


def on(array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Return the numbers on a device, for which nobody waits."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pool(x: Tensor, bias: Tensor, blocks: TokenBlocks, head: int) -> Tensor:
    """x: [t, 2 width], values and logits, bias: [rate, width] -> [m, head], the means of the blocks by the softmax of
    their tokens' logits and the biases of their places, in fp32 at least.

    Where the width is two heads, the second half is a token's part in its own block, and the first one that in the next
    block of its document: the mean is over both. Autograd keeps the inputs alone.
    """
    (means,) = keeping_inputs(partial(_pool, starts=blocks.starts, positions=blocks.positions, head=head), x, bias)
    return means


def _pool(x: Tensor, bias: Tensor, *, starts: Tensor, positions: Tensor, head: int) -> tuple[Tensor]:
    rate = len(bias)
    places = starts[:, None] + torch.arange(rate, device=starts.device)
    values, logits = wide(x)[places].chunk(2, -1)
    logits = logits + wide(bias)
    if bias.shape[1] > head:
        before, of_before = wide(x)[(places - rate).clamp(min=0)].chunk(2, -1)
        of_before = (of_before + wide(bias)).masked_fill((positions == 0)[:, None, None], -torch.inf)
        values = torch.cat([before[..., :head], values[..., head:]], 1)
        logits = torch.cat([of_before[..., :head], logits[..., head:]], 1)
    return ((values * logits.softmax(1)).sum(1).to(x.dtype),)


def attention(
    q: Tensor, k: Tensor, means: Tensor, near: Reaches, far: Reaches, chosen: Tensor | None, scoring: Scoring
) -> Tensor:
    """q: [n, heads, head], k: [t, head], means: [m, head] -> [n, heads, head]; softmax in fp32 (fp64 for fp64).

    Args:
        q, k, means: Queries, and what is key and value of all heads: tokens and blocks.
        near, far: The tokens and the blocks that each query may look at.
        chosen: [n, top], the blocks among those that each looks at, -1 where there are no more; None: all of them.
        scoring: The rule by which scores become weights; the window is in ``near``.
    """
    found = list[Tensor]()
    for tokens, blocks, seen, queries in _parts(near, far, chosen):
        given = q[queries], k[tokens], means[blocks], scoring.sinks
        formula = partial(_attend, seen=seen, scoring=scoring)
        found += formula(*given) if scoring.dropout else keeping_inputs(formula, *given)
    return torch.cat(found)


def attention_weights(
    q: Tensor, k: Tensor, means: Tensor, near: Reaches, far: Reaches, chosen: Tensor, scoring: Scoring
) -> Tensor:
    """Return the weights of the blocks that were chosen, of these heads together: [n, top], 0 where none was. They have
    no gradient."""
    found = list[Tensor]()
    with torch.no_grad():
        for tokens, blocks, seen, queries in _parts(near, far, chosen):
            keys = torch.cat([k[tokens], means[blocks]])[None, None]
            weights = weigh(q[queries].transpose(0, 1)[None], keys, seen[None], replace(scoring, dropout=0.0))
            of_blocks = weights[0].sum((0, 1))[:, tokens.stop - tokens.start :]
            places = chosen[queries].long() - blocks.start
            found.append(of_blocks.gather(1, places.clamp(min=0)).masked_fill(chosen[queries] < 0, 0))
    return torch.cat(found)


def _parts(near: Reaches, far: Reaches, chosen: Tensor | None) -> Iterator[tuple[slice, slice, Tensor, slice]]:
    """Yield tokens, blocks, what each of some queries sees of them, [queries, tokens + blocks], and those queries."""
    for tokens, blocks in zip(near.blocks(), far.blocks(), strict=True):
        of_blocks = blocks.may_see() if chosen is None else blocks.sees(chosen)
        yield tokens.keys, blocks.keys, torch.cat([tokens.may_see(), of_blocks], 1), tokens.queries


def _attend(
    q: Tensor, k: Tensor, means: Tensor, sinks: Tensor | None, *, seen: Tensor, scoring: Scoring
) -> tuple[Tensor]:
    keys = torch.cat([k, means])[None, None]
    weights = weigh(q.transpose(0, 1)[None], keys, seen[None], replace(scoring, sinks=sinks))
    return (apply(weights, keys)[0].transpose(0, 1),)
