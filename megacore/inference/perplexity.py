"""The loss of a model on documents, in windows, through the parallel model, by position if asked for."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.data.batches import Batch
from megacore.data.grouping import fitting
from megacore.inference.evaluation_data import Document, Excerpt, Integers, Windows
from megacore.inference.model_loader import microbatch_of
from megacore.models.assemble import Model
from megacore.models.decoder import Decoder, Microbatch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.enum_errors import Score
from megacore.parallel.labels import IGNORE
from megacore.parallel.pipeline.run import Pipeline

Pack = list[Excerpt]
AT_ONCE = 4  # microbatches of each stage in one pass: then the pipeline is mostly full


@dataclass(frozen=True)
class EvaluationResult:
    """The summed loss of so many predicted tokens, in nats; documents: those with one of them; size: the bytes of their
    text, None where it is not known; buckets: (predicted tokens, their summed loss) of successive positions, up to the
    last one that counts."""

    loss: float
    tokens: int
    documents: int
    size: int | None
    buckets: tuple[tuple[int, float], ...]


def evaluate(model: Model, documents: Iterable[Document], windows: Windows, together: int) -> EvaluationResult:
    """Return the loss on documents, which are read once, a few microbatches ahead.

    Every rank of the model's mesh calls this with the same ones, and gets the same answer; data-parallel ranks share
    out the microbatches, of `together` tokens: as many windows as fit, or one.
    """
    tokens, count = Counter[int](), 0
    size: int | None = 0

    def excerpts() -> Iterator[Excerpt]:
        nonlocal count, size
        for document in documents:
            if counted := windows.buckets(np.flatnonzero(document.counted[1:]) + 1).tolist():
                tokens.update(counted)
                count += 1
                size = None if size is None or document.size is None else size + document.size
                yield from windows.of(document)

    losses = summed(model, excerpts(), "loss", together)
    # Labels that do not count may lie beyond the last one that does.
    buckets = tuple((tokens[number], losses[number]) for number in range(1 + max(tokens, default=-1)))
    return EvaluationResult(math.fsum(losses), tokens.total(), count, size, buckets)


def log_likelihoods(
    model: Model, requests: Sequence[tuple[Sequence[int], Sequence[int]]], together: int
) -> list[tuple[float, bool]]:
    """Return (the log-likelihood in nats of the continuation, whether greedy decoding gives it) of each request, a
    context and its continuation, tokens of which there is one at least.

    Of what has more tokens than the model positions the last ones count. The model is computed twice. Ranks and
    `together` are as of :func:`evaluate`.
    """
    longest = model.config.max_positions or sys.maxsize

    def excerpts() -> Iterator[Excerpt]:
        for number, (context, continuation) in enumerate(requests):
            tokens = np.array([*context, *continuation][-longest - 1 :], dtype=np.int64)
            labels = tokens[1:].copy()
            labels[: max(0, len(labels) - len(continuation))] = IGNORE
            yield Excerpt(tokens[:-1], labels, np.full(len(labels), number))

    losses, found = (summed(model, excerpts(), score, together) for score in ("loss", "most_likely"))
    rows = zip(requests, losses, found, strict=True)
    return [(-loss, right == min(len(continuation), longest)) for (_, continuation), loss, right in rows]


@dataclass(frozen=True)
class PairsResult:
    """What a model makes of pairs of documents, chosen and rejected: [pairs, 2] each. ``rewards``: the scores of a
    reward model; of a language model, the log-probabilities of what counts, in nats; ``counted``: the numbers of tokens
    that count."""

    rewards: npt.NDArray[np.float64]
    counted: Integers


def of_pairs(model: Model, pairs: Iterable[Sequence[Document]], together: int) -> PairsResult:
    """Return what a model makes of pairs, none of which has more tokens than the model positions. Ranks and `together`
    are as of :func:`evaluate`."""
    scores, counted = model.config.labels, list[int]()

    def excerpts() -> Iterator[Excerpt]:
        for number, document in enumerate(document for pair in pairs for document in pair):
            tokens, labels = document.tokens, np.where(document.counted, document.tokens, IGNORE)
            counted.append(int(document.counted.sum()))
            if scores:  # at the last token, of which it is the logit of the one label
                labels = np.full(len(tokens), IGNORE)
                labels[-1] = 0
            else:
                tokens, labels = tokens[:-1], labels[1:]
            yield Excerpt(tokens, labels, np.full(len(tokens), number))

    sums = summed(model, excerpts(), "logit" if scores else "loss", together)
    rewards = np.array(sums[: len(counted)]).reshape(-1, 2)
    return PairsResult(rewards if scores else -rewards, np.array(counted).reshape(-1, 2))


def summed(model: Model, excerpts: Iterable[Excerpt], score: Score, together: int) -> list[float]:
    """Return the sums, over all labels, of what a score says of them. Ranks and `together` are as of
    :func:`evaluate`."""
    mesh, found, size = model.parameters.mesh, list[Tensor](), 0

    def sized() -> Iterator[Excerpt]:
        nonlocal size
        for excerpt in excerpts:
            size = max(size, int(excerpt.sums.max(initial=-1)) + 1)
            yield excerpt

    # Every chunk but the last hands on activations; what the last one gives is kept here, and its sum is of no use.
    pipeline = Pipeline(mesh, [partial(_scored, chunk, score, found) for chunk in model.chunks], model.parameters.dtype)
    pipeline.placement = model.parameters.layout.placement
    one = torch.ones((), device=mesh.device)
    total = torch.zeros(0, dtype=torch.float64, device=mesh.device)
    packs = fitting(sized(), lambda excerpt: len(excerpt.tokens), together)
    own = _dealt(packs, mesh.shape.data, mesh.data_rank)
    while group := [_microbatch(model, pack) for pack in islice(own, AT_ONCE * mesh.shape.pp)]:
        pipeline.evaluate([microbatch for microbatch, _ in group], one)
        ends = max(int(sums.max()) for _, sums in group) + 1
        total = F.pad(total, (0, max(0, ends - len(total))))
        for (_, sums), each in zip(group, found, strict=False):
            total.index_add_(0, torch.from_numpy(sums).to(mesh.device), each.double())
        found.clear()
    return all_reduce_(F.pad(total, (0, size - len(total))), mesh.world).tolist()


def _scored(chunk: Decoder, score: Score, found: list[Tensor], x: Tensor | None, microbatch: Microbatch) -> Tensor:
    y = chunk.scores(x, microbatch, score)
    if chunk.head is None:
        return y
    found.append(y)
    return y.sum()


def _dealt(packs: Iterator[Pack], ranks: int, rank: int) -> Iterator[Pack]:
    """Yield one pack of each round of as many as there are ranks. Where the last round has none for this rank, it is a
    token of padding, for others may wait for this rank's experts."""
    while dealt := list(islice(packs, ranks)):
        yield dealt[rank] if rank < len(dealt) else [Excerpt.padding(1)]


def _microbatch(model: Model, pack: Pack) -> tuple[Microbatch, Integers]:
    """Return the windows one after the other, none of which sees another, and the sums of this rank's share: [t/tp].
    Where tp x cp does not divide their tokens, more fill them up."""
    mesh = model.parameters.mesh
    rest = -sum(len(window.tokens) for window in pack) % (mesh.shape.tp * mesh.shape.cp)
    if rest:
        pack = [*pack, Excerpt.padding(rest)]
    lengths = tuple(len(window.tokens) for window in pack)
    tokens, labels, sums = (np.concatenate(parts) for parts in zip(*pack, strict=True))
    positions = np.concatenate([np.arange(length) for length in lengths])
    microbatch = microbatch_of(model, Batch(tokens[None], labels[None], positions[None], lengths))
    if microbatch.split is not None:
        sums = sums[microbatch.split.indices(mesh.place.cp)]
    return microbatch, np.split(sums, mesh.shape.tp)[mesh.place.tp]
