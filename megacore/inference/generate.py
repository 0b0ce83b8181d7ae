"""Generating tokens through the parallel model, with a cache of keys and values: for checking a model, not for serving.

A batch of prompts is computed at once, one prompt after the other without padding between them; from then on a step
is one token of each. Every rank of the mesh goes through the same steps and learns each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megacore.inference.sampling import Choice
from models.assemble import Model
from models.attention import Attention
from models.cache import Cache, Decode, Prefill
from models.decoder import Microbatch
from parallel.collectives import broadcast_
from parallel.kernels.documents import Documents
from parallel.mesh import Mesh
from parallel.weights.layout import Coordinates


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
class New:
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
) -> Iterator[list[New]]:
    """Yield the next token of each prompt that has not ended, until all have.

    Every rank of the model's mesh iterates to the end.

    Args:
        model: The model, on a mesh with one data-parallel rank, in evaluation mode.
        prompts: Token ids, at least one each.
        choose: Chooses a token.
        ending: The end of a prompt; the token that ends it is given too.
        together: The number of prompts that are computed at a time.
    """
    for first in range(0, len(prompts), together):
        numbers = range(first, min(first + together, len(prompts)))
        yield from _batch(model, {number: prompts[number] for number in numbers}, choose, ending)


def _batch(model: Model, prompts: Mapping[int, Sequence[int]], choose: Choice, ending: Ending) -> Iterator[list[New]]:
    alive = [_Sequence(number, len(ids), len(ids) + ending.limit(ids), ids[-1]) for number, ids in prompts.items()]
    parameters, mesh = model.parameters, model.parameters.mesh
    attentions = [m for chunk in model.chunks for m in chunk.modules() if isinstance(m, Attention)]
    # The last token of a sequence is not looked at any more.
    cache = Cache.of(attentions, len(alive), max(s.longest for s in alive) - 1, parameters.dtype, mesh.device)
    step = _beginning(model, cache, list(prompts.values()))
    while alive:
        tokens = _chosen(mesh, model.logits(step), choose, [(s.prompt, s.new) for s in alive])
        for sequence, token in zip(alive, tokens, strict=True):
            sequence.last, sequence.length, sequence.new = token, sequence.length + 1, sequence.new + 1
        left = [row for row, s in enumerate(alive) if s.last not in ending.stops and s.length < s.longest]
        yield [New(s.prompt, s.last, row not in left) for row, s in enumerate(alive)]
        cache.keep(left)
        alive = [alive[row] for row in left]
        if alive:
            step = _going_on(model, cache, alive)


def _chosen(mesh: Mesh, logits: Tensor | None, choose: Choice, which: Sequence[tuple[int, int]]) -> list[int]:
    """Return the tokens that the first rank of the last stage chooses, on all ranks."""
    source = mesh.shape.rank(Coordinates(mesh.shape.pp - 1, 0, 0, 0, 0))
    tokens = torch.empty(len(which), dtype=torch.int64, device=mesh.device)
    if mesh.rank == source:
        assert logits is not None  # it is of the last stage
        tokens = choose(logits, which)
    chosen: list[int] = broadcast_(tokens, mesh.world, source).tolist()
    return chosen


# -- a step's tokens


def _beginning(model: Model, cache: Cache, prompts: Sequence[Sequence[int]]) -> Microbatch:
    """Return all tokens of some prompts, of whose last ones the logits are wanted."""
    mesh = model.parameters.mesh
    device, lengths = mesh.device, [len(ids) for ids in prompts]
    tokens = [token for ids in prompts for token in ids]
    at = [position for length in lengths for position in range(length)]
    rows = torch.arange(len(prompts), device=device).repeat_interleave(
        torch.tensor(lengths, device=device), output_size=len(tokens)
    )
    documents = _padded(lengths, len(tokens), mesh.shape.tp)
    attention = Prefill(cache, rows, torch.tensor(at, device=device), Documents.of(documents, device))
    last = torch.tensor([stop - 1 for stop in accumulate(lengths)], device=device)
    return _microbatch(model, tokens, at, documents, documents, attention, last)


def _going_on(model: Model, cache: Cache, alive: Sequence[_Sequence]) -> Microbatch:
    """Return the last token of each sequence."""
    mesh = model.parameters.mesh
    at = [sequence.length - 1 for sequence in alive]
    documents = _padded([1] * len(alive), len(alive), mesh.shape.tp)
    lengths = [sequence.length for sequence in alive] + documents[len(alive) :]
    attention = Decode.of(cache, at, mesh.device)
    return _microbatch(model, [s.last for s in alive], at, documents, lengths, attention, attention.rows)


def _padded(documents: list[int], tokens: int, tp: int) -> list[int]:
    """Add one more document where the tokens alone would not divide over tp: the one place where there is padding."""
    rest = -tokens % tp
    return documents + [rest] * (rest > 0)


def _microbatch(
    model: Model,
    tokens: list[int],
    positions: list[int],
    documents: list[int],
    lengths: list[int],
    attention: Prefill | Decode,
    wanted: Tensor,
) -> Microbatch:
    mesh, total = model.parameters.mesh, sum(documents)
    zeros = [0] * (total - len(tokens))
    ids = torch.tensor(tokens + zeros, device=mesh.device)
    return Microbatch(
        ids,
        ids,
        torch.tensor(positions + zeros, device=mesh.device),
        1,
        (total // mesh.shape.tp, model.config.sizes["embed"]),
        tuple(documents),
        lengths=tuple(lengths),
        attention=attention,
        wanted=wanted,
    )
