"""Generating tokens through the parallel model, with a cache of keys and values: for checking a model, not for serving.

A batch of prompts is computed at once, one prompt after the other without padding between them; from then on a step
is one token of each. Every rank of the mesh goes through the same steps and learns each token. The ranks of cp share
out the tokens of each prompt, and keep their keys and values; a further token is computed by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.inference.sampling import Choice
from megacore.models.assemble import Model
from megacore.models.attention import Attention
from megacore.models.cached_steps import Cache, decode_step, prefill_step
from megacore.models.decoder import Microbatch
from megacore.parallel.collectives import all_reduce_, broadcast_
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import Coordinates


@dataclass(frozen=True)
class Ending:
    """The end of a sequence: one of the tokens ``stops``, or ``most`` new ones.

    Of a model whose positions have a limit, the last new token is the first that has none.
    """

    stops: frozenset[int]
    most: int
    positions: int | None = None

    def limit(self, prompt: Sequence[int]) -> int:
        """Return the number of new tokens that a prompt can have."""
        return self.most if self.positions is None else min(self.most, self.positions - len(prompt) + 1)


@dataclass(frozen=True)
class NewToken:
    """A new token: after which prompt, and whether it is the last one there."""

    prompt: int
    token: int
    last: bool


@dataclass
class _Sequence:
    """One that has not ended: the number of its prompt, how many tokens it has and how many it may have."""

    prompt: int
    length: int
    longest: int
    last: int
    new: int = 0


def generate(
    model: Model, prompts: Sequence[Sequence[int]], choose: Choice, ending: Ending, together: int
) -> Iterator[list[NewToken]]:
    """Yield the next token of each prompt that has not ended, until all have.

    Every rank of the model's mesh, which has one data-parallel rank, iterates to the end. So many prompts as
    `together` says, of at least one token each, are computed at a time; the token that ends one is given too.
    """
    for first in range(0, len(prompts), together):
        numbers = range(first, min(first + together, len(prompts)))
        yield from _batch(model, {number: prompts[number] for number in numbers}, choose, ending)


def _batch(
    model: Model, prompts: Mapping[int, Sequence[int]], choose: Choice, ending: Ending
) -> Iterator[list[NewToken]]:
    alive = [_Sequence(number, len(ids), len(ids) + ending.limit(ids), ids[-1]) for number, ids in prompts.items()]
    mesh = model.parameters.mesh
    cache, logits = prefill(model, list(prompts.values()), [s.longest for s in alive])
    while alive:
        tokens = _choose(mesh, logits, choose, [(s.prompt, s.new) for s in alive])
        for sequence, token in zip(alive, tokens, strict=True):
            sequence.last, sequence.length, sequence.new = token, sequence.length + 1, sequence.new + 1
        left = [row for row, s in enumerate(alive) if s.last not in ending.stops and s.length < s.longest]
        yield [NewToken(s.prompt, s.last, row not in left) for row, s in enumerate(alive)]
        cache.keep(left)
        alive = [alive[row] for row in left]
        if alive:
            logits = model.logits(_decode_step(model, cache, alive))


def _choose(mesh: Mesh, logits: Tensor | None, choose: Choice, which: Sequence[tuple[int, int]]) -> list[int]:
    """Return the tokens that the first rank of the last stage chooses, on all ranks."""
    source = mesh.shape.rank(Coordinates(mesh.shape.pp - 1, 0, 0, 0, 0))
    tokens = torch.empty(len(which), dtype=torch.int64, device=mesh.device)
    if mesh.rank == source:
        assert logits is not None  # it is of the last stage
        tokens = choose(logits, which)
    chosen: list[int] = broadcast_(tokens, mesh.world, source).tolist()
    return chosen


# -- a step's tokens


def prefill(model: Model, prompts: Sequence[Sequence[int]], longest: Sequence[int]) -> tuple[Cache, Tensor | None]:
    """Compute some prompts -> the cache, and the logits of their last tokens on all ranks of the last stage; longest:
    the tokens that each may come to, the last of which is not looked at any more."""
    parameters, mesh = model.parameters, model.parameters.mesh
    lengths, cp = [len(ids) for ids in prompts], mesh.shape.cp
    tokens = [token for ids in prompts for token in ids]
    at = [position for length in lengths for position in range(length)]
    documents = _padded(lengths, len(tokens), mesh.shape.tp * cp)
    whole = _microbatch(model, tokens, at, documents, documents)
    # Of each prompt every rank has as many tokens: the cache has as much room for a sequence as the fullest one needs.
    context = ContextParallel(cp, balance="documents")
    split = context.split(documents, sum(documents))
    shares = [split.indices(rank) for rank in range(cp)]
    rooms = [length - 1 for length in longest]
    attentions = [m for chunk in model.chunks for m in chunk.modules() if isinstance(m, Attention)]
    cache = Cache.of(attentions, _held(lengths, shares), rooms, parameters.dtype, mesh.device, mesh.cp)
    share, last = shares[mesh.place.cp], np.cumsum(lengths) - 1
    where = np.searchsorted(share, last).clip(max=len(share) - 1)
    own, wanted, here = (torch.from_numpy(each).to(mesh.device) for each in (share, where, share[where] == last))
    step = replace(
        whole,
        tokens=whole.tokens[own],
        positions=whole.positions[own],
        activation=(len(own) // mesh.shape.tp, whole.activation[1]),
        wanted=wanted,
        split=split if cp > 1 else None,
    )
    decoder = model.chunks[0]
    step = prefill_step(step, cache, decoder, context)
    logits = model.logits(step)
    # A rank that does not hold the last token of a prompt has computed the logits of another one.
    return cache, None if logits is None else all_reduce_(logits.masked_fill(~here[:, None], 0.0), mesh.cp)


def _held(lengths: Sequence[int], shares: Sequence[npt.NDArray[np.int64]]) -> list[list[list[int]]]:
    """Return the positions of each prompt that each rank of cp holds; its share of all tokens is in ascending order."""
    starts = np.cumsum([0, *lengths])
    cuts = [np.searchsorted(share, starts) for share in shares]
    return [
        [(share[cut[row] : cut[row + 1]] - starts[row]).tolist() for share, cut in zip(shares, cuts, strict=True)]
        for row in range(len(lengths))
    ]


def _decode_step(model: Model, cache: Cache, alive: Sequence[_Sequence]) -> Microbatch:
    """Return the last token of each sequence."""
    mesh = model.parameters.mesh
    at = [sequence.length - 1 for sequence in alive]
    documents = _padded([1] * len(alive), len(alive), mesh.shape.tp)
    lengths = [sequence.length for sequence in alive] + documents[len(alive) :]
    step = _microbatch(model, [s.last for s in alive], at, documents, lengths)
    wanted = torch.arange(len(alive), device=mesh.device)
    return decode_step(replace(step, wanted=wanted), cache, at, documents, model.chunks[0])


def _padded(documents: list[int], tokens: int, ranks: int) -> list[int]:
    """Add one more document where the tokens alone would not divide over the ranks that share them out: the one place
    where there is padding."""
    rest = -tokens % ranks
    return documents + [rest] * (rest > 0)


def _microbatch(
    model: Model, tokens: list[int], positions: list[int], documents: list[int], lengths: list[int]
) -> Microbatch:
    """Return tokens, and the padding that the documents have beyond them."""
    mesh, total = model.parameters.mesh, sum(documents)
    zeros = [0] * (total - len(tokens))
    ids, at = (torch.tensor(each + zeros, device=mesh.device) for each in (tokens, positions))
    activation = (total // mesh.shape.tp, model.config.width)
    return Microbatch(ids, ids, at, 1, activation, tuple(documents), lengths=tuple(lengths))
