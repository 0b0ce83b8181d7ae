"""The loss of a model on documents, in windows, through the parallel model.

Tokens i + 1 of a document are predicted from those before: all but its first, each once. A window is the tokens that
the model reads at once, at most ``length``; the first begins with the document, and each further one ``stride`` tokens
after the one before. Of a window only the predictions count that no window before it has made, so each token that a
later window predicts has at least ``length - stride`` tokens of context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from megacore.control import Control
from megacore.data.batches import Batch
from megacore.inference.documents import Document
from models.assemble import Model
from models.decoder import Microbatch
from parallel.labels import IGNORE
from parallel.pipeline.run import Pipeline

Integers = npt.NDArray[np.int64]
Pack = list[tuple[Integers, Integers]]
AT_ONCE = 4  # microbatches of each stage in one pass: then the pipeline is mostly full


@dataclass(frozen=True)
class Windows:
    """The way that documents are cut: see the module."""

    length: int
    stride: int

    def of(self, document: Document) -> Iterator[tuple[Integers, Integers]]:
        """Yield (tokens, labels), int64 [at most length] each, of each window; IGNORE is the label of what does not
        count."""
        tokens, predictions, done = document.tokens, len(document.tokens) - 1, 0
        all_labels = np.where(document.counted, tokens, IGNORE)[1:]
        for start in range(0, max(predictions, 0), self.stride):
            stop = min(start + self.length, predictions)
            labels = all_labels[start:stop].copy()
            labels[: done - start] = IGNORE
            yield tokens[start:stop], labels
            done = stop
            if stop == predictions:
                return


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation.

    Args:
        loss: Sum over all tokens that were predicted, in nats.
        tokens: Their number.
        documents: The number of documents with at least one of them.
        size: Bytes of their text, None where it is not known.
    """

    loss: float
    tokens: int
    documents: int
    size: int | None


def evaluate(model: Model, documents: Iterable[Document], windows: Windows, together: int, pad: int = 0) -> Measured:
    """Return the loss on documents; every rank of the model's mesh calls this with the same ones, and gets the same
    answer.

    Args:
        model: The model, in evaluation mode. Data-parallel ranks share out the microbatches.
        documents: The documents, read once, a few microbatches ahead.
        windows: The way that they are cut.
        together: Tokens of a microbatch: as many windows as fit, or one.
        pad: A token that fills up where tp x cp does not divide a microbatch, and where a rank has none.
    """
    mesh = model.parameters.mesh
    count = _Count()
    pipeline = Pipeline(mesh, model.chunks, model.parameters.dtype)
    one = torch.ones((), device=mesh.device)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    packs = _packs(count.windows(documents, windows), together)
    own = _dealt(packs, mesh.shape.data, mesh.data_rank, pad)
    while group := [_microbatch(model, pack, pad) for pack in islice(own, AT_ONCE * mesh.shape.pp)]:
        total += pipeline.evaluate(group, one).double()
    loss = sum(Control.create(mesh).exchange(float(total)))
    return Measured(loss, count.tokens, count.documents, count.size)


@dataclass
class _Count:
    """The counts of the documents that have gone by."""

    tokens: int = 0
    documents: int = 0
    size: int | None = 0

    def windows(self, documents: Iterable[Document], windows: Windows) -> Iterator[tuple[Integers, Integers]]:
        for document in documents:
            if counted := int(document.counted[1:].sum()):
                self.tokens += counted
                self.documents += 1
                self.size = None if self.size is None or document.size is None else self.size + document.size
                yield from windows.of(document)


def _packs(windows: Iterable[tuple[Integers, Integers]], together: int) -> Iterator[Pack]:
    """Yield successive windows, as many as have no more than so many tokens."""
    pack, size = Pack(), 0
    for window in windows:
        if pack and size + len(window[0]) > together:
            yield pack
            pack, size = [], 0
        pack.append(window)
        size += len(window[0])
    if pack:
        yield pack


def _dealt(packs: Iterator[Pack], ranks: int, rank: int, pad: int) -> Iterator[Pack]:
    """Yield one pack of each round of as many as there are ranks. Where the last round has none for this rank, it is a
    token of padding, for others may wait for this rank's experts."""
    while dealt := list(islice(packs, ranks)):
        yield dealt[rank] if rank < len(dealt) else [(np.full(1, pad), np.full(1, IGNORE))]


def _microbatch(model: Model, pack: Pack, pad: int) -> Microbatch:
    """Return the windows one after the other, none of which sees another."""
    mesh = model.parameters.mesh
    lengths = [len(tokens) for tokens, _ in pack]
    rest = -sum(lengths) % (mesh.shape.tp * mesh.shape.cp)
    if rest:
        pack, lengths = [*pack, (np.full(rest, pad), np.full(rest, IGNORE))], [*lengths, rest]
    tokens, labels = (np.concatenate(parts) for parts in zip(*pack, strict=True))
    positions = np.concatenate([np.arange(length) for length in lengths])
    batch = Batch(tokens[None], labels[None], positions[None], tuple(lengths)).of_rank(model.context, mesh.place.cp)
    ids, targets, at = (
        torch.from_numpy(each.ravel()).to(mesh.device) for each in (batch.tokens, batch.labels, batch.positions)
    )
    activation = len(ids) // mesh.shape.tp, model.config.sizes["embed"]
    return Microbatch(ids, targets, at, 1, activation, batch.documents, lengths=batch.documents, split=batch.split)
