"""The tokens of a step of generation, as microbatches: whole prompts, and then some more tokens of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.models.assemble import Model
from megacore.models.attention import Attention
from megacore.models.cached_steps import Cache, prefill_step
from megacore.models.decoder import Microbatch
from megacore.parallel.collectives import all_reduce_, broadcast_
from megacore.parallel.context_split import ContextParallel


@dataclass
class Growing:
    """A sequence that has not ended: the number of its prompt, its tokens, how many it may come to, and how many are
    new."""

    prompt: int
    ids: list[int]
    longest: int
    new: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)


def on_all_ranks(model: Model, count: int, made: Callable[[], Tensor]) -> list[int]:
    """Return so many integers that the first rank of the last stage makes, on all ranks."""
    mesh = model.parameters.mesh
    numbers = made() if mesh.rank == model.end else torch.empty(count, dtype=torch.int64, device=mesh.device)
    return broadcast_(numbers, mesh.world, model.end).tolist()


def prefill(
    model: Model,
    prompts: Sequence[Sequence[int]],
    longest: Sequence[int],
    take: Callable[[Tensor | None], Any] | None = None,
) -> tuple[Cache, Tensor | None]:
    """Compute some prompts -> the cache, and the logits of their last tokens on all ranks of the last stage; longest:
    the tokens that each may come to, the last of which is not looked at any more. ``take``: takes the hidden states of
    all tokens, of a mesh without cp, as :meth:`Model.hidden` gives them."""
    parameters, mesh = model.parameters, model.parameters.mesh
    lengths, cp = [len(ids) for ids in prompts], mesh.shape.cp
    tokens = [token for ids in prompts for token in ids]
    at = [position for length in lengths for position in range(length)]
    documents = _padded(lengths, mesh.shape.tp * cp)
    whole = _microbatch(model, tokens, at, documents, documents)
    # Of each prompt every rank has as many tokens: the cache has as much room for a sequence as the fullest one needs.
    context = ContextParallel(cp, balance="documents")
    split = context.split(documents, sum(documents))
    shares = [split.indices(rank) for rank in range(cp)]
    rooms = [length - 1 for length in longest]
    attentions = [m for chunk in model.chunks for m in chunk.layers.modules() if isinstance(m, Attention)]
    cache = Cache.of(attentions, _held(lengths, shares), rooms, parameters.dtype, mesh.device, mesh.cp)
    share, last = shares[mesh.place.cp], np.cumsum(lengths) - 1
    where = np.searchsorted(share, last).clip(max=len(share) - 1)
    own, wanted, here = (torch.from_numpy(each).to(mesh.device) for each in (share, where, share[where] == last))
    step = replace(
        whole,
        tokens=whole.tokens[own],
        positions=whole.positions[own],
        activation=(len(own) // mesh.shape.tp, whole.activation[1]),
        wanted=wanted if take is None else own,
        split=split if cp > 1 else None,
    )
    decoder = model.chunks[0]
    step = prefill_step(step, cache, decoder, context)
    hidden = model.hidden(step)
    if take is not None:
        take(None if hidden is None else hidden[: len(tokens)])
        hidden = None if hidden is None else hidden[wanted]
    if hidden is None:
        return cache, None
    # A rank that does not hold the last token of a prompt has computed the logits of another one.
    return cache, all_reduce_(model.logits_of(hidden).masked_fill(~here[:, None], 0.0), mesh.cp)


def _held(lengths: Sequence[int], shares: Sequence[npt.NDArray[np.int64]]) -> list[list[list[int]]]:
    """Return the positions of each prompt that each rank of cp holds; its share of all tokens is in ascending order."""
    starts = np.cumsum([0, *lengths])
    cuts = [np.searchsorted(share, starts) for share in shares]
    return [
        [(share[cut[row] : cut[row + 1]] - starts[row]).tolist() for share, cut in zip(shares, cuts, strict=True)]
        for row in range(len(lengths))
    ]


def tokens_at(model: Model, tokens: list[int], at: list[int]) -> Microbatch:
    """Return tokens at these positions of their sequences, each by itself: no frequency goes by what is behind it. All
    are wanted."""
    documents = _padded([1] * len(tokens), model.parameters.mesh.shape.tp)
    lengths = [position + 1 for position in at] + documents[len(at) :]
    wanted = torch.arange(len(tokens), device=model.parameters.mesh.device)
    return replace(_microbatch(model, tokens, at, documents, lengths), wanted=wanted)


def _padded(documents: list[int], ranks: int) -> list[int]:
    """Add one more document where the tokens alone would not divide over the ranks that share them out: the one place
    where there is padding."""
    rest = -sum(documents) % ranks
    return documents + [rest] * (rest > 0)


def _microbatch(
    model: Model, tokens: list[int], positions: list[int], documents: list[int], lengths: list[int]
) -> Microbatch:
    """Return tokens, and the padding that the documents have beyond them."""
    mesh, total = model.parameters.mesh, sum(documents)
    zeros = [0] * (total - len(tokens))
    ids, at = (torch.tensor(each + zeros, device=mesh.device) for each in (tokens, positions))
    activation = (total // mesh.shape.tp, model.config.boundary_width)
    return Microbatch(ids, ids, at, 1, activation, tuple(documents), lengths=tuple(lengths))
