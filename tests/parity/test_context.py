"""A context over many ranks: each does its share of the work, and dropout repeats."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from extended_family import extended
from layouts import DROPOUT, GPT2, LLAMA, OVER_CP, PARTS
from operators import Operators, kept_for_backward
from oracle import Case, Measured, Run, measure, microbatches, model_of, tokens
from pool import Pool
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.kernels import partial_attention
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

aten = torch.ops.aten

# -- each rank does its share


@dataclass
class Done:
    """What a rank has done for a microbatch: forward of a head the scores, and forward and backward the bytes that it
    has sent, the products of linears; and the bytes that it has kept for the backward."""

    tokens: int = 0
    scores: int = 0
    sent: int = 0
    products: int = 0
    kept: int = 0


def multiplied(operator: Any, arguments: Any, y: Any) -> int:
    """The multiplications of matrices."""
    return y.numel() * arguments[-2].shape[-1] if operator in (aten.mm.default, aten.addmm.default) else 0


def triangles(lengths: Iterable[int], window: int | None) -> int:
    return sum(min(at + 1, window or length) for length in lengths for at in range(length))


@contextmanager
def counting(done: Done) -> Iterator[None]:
    """Count what attention computes and what is sent, in the processes' own terms."""

    def watch(patch: pytest.MonkeyPatch, place: Any, name: str, count: Callable[..., None]) -> None:
        plain = getattr(place, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            count(*arguments, **named)
            return plain(*arguments, **named)

        patch.setattr(place, name, watched, raising=False)

    def alone(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scoring: Scoring) -> None:
        done.scores += q.shape[1] * triangles(documents.host.diff().tolist(), scoring.window)

    def rectangle(q: Tensor, k: Tensor, v: Tensor, band: int | None, scoring: Scoring) -> None:
        first = np.maximum(np.arange(len(q)) + (band or 0), 0) if band is not None else np.zeros(len(q))
        done.scores += q.shape[1] * int((len(k) - first).sum())

    def rows(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> None:
        done.scores += q.shape[0] * q.shape[1] * triangles([q.shape[2]], scoring.window)

    def packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents, sequences: int, scoring: Scoring) -> None:
        alone(q, k, v, documents, scoring)

    def send(self: Any, tensors: list[Tensor], *others: Any) -> None:
        done.sent += sum(tensor.nbytes for tensor in tensors)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, partial_attention, "alone", alone)
        watch(patch, partial_attention, "rectangle", rectangle)
        watch(patch, kernels, "causal_attention", rows)
        watch(patch, kernels, "documents_attention", packed)
        watch(patch, torch.distributed.ProcessGroup, "send", send)
        yield


def worked(case: Case, run: Run) -> Done:
    """What this rank does for the first microbatch."""
    done = Done()
    with extended():
        mesh = Mesh.create(run.mesh)
        model = model_of(case, run, mesh)
        first = replace(microbatches(case, run, 0, mesh)[0], wanted=None)  # documents end without a label
        done.tokens = len(first.tokens)
        with counting(done), Operators(multiplied) as products:
            with kept_for_backward() as tensors:
                loss = model.chunks[0](None, first)
            storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_floating_point()]
            kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
            loss.backward()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters.values()}
        done.products = products.found
        done.kept = sum(size for place, size in kept.items() if place not in weights)
    return done


def planned(case: Case, run: Run, rank: int) -> tuple[int, int]:
    """(scores, bytes that are sent) of a rank, by the split."""
    sizes, context = case.config.sizes, run.context
    length, rows = case.length, run.micro
    lengths = [n for row in tokens(case, 0)[2][:rows] for n in row] if case.documents else [length] * rows
    split = context.split(lengths, length)
    part = rank // context.heads
    heads, kv, head = sizes["heads"] // context.heads, max(1, sizes["kv"] // context.heads), sizes["head"]
    windows = [layer.window for layer in case.config.anatomy.layers] or [None] * sizes["layer"]
    scores = sent = 0
    for window in windows:
        scores += heads * split.pairs(part, window)
        given = sum(split.hop(other, part, window).tokens for other in range(split.parts) if other != part)
        taken = sum(split.hop(part, other, window).tokens for other in range(split.parts) if other != part)
        # Keys and values forward and backward, and the gradients of those that came.
        sent += (2 * given + taken) * 2 * kv * head * 8
        # To each other one that shares the part: queries, keys, values and what comes of them, and their gradients.
        piece_of = sum(stop - start for start, stop in split.spans[part]) // context.heads
        sent += 2 * (context.heads - 1) * piece_of * (2 * heads + 2 * kv) * head * 8
    return scores, sent


SHARED = [
    (Case("rows", LLAMA), Run(MeshShape(cp=4), micro=2, balance="rows")),
    (Case("rows-2", LLAMA), Run(MeshShape(cp=2), micro=2, exchange="gather", balance="auto")),
    (Case("packed", LLAMA, documents=True), Run(MeshShape(cp=4), micro=4, exchange="gather")),
    (Case("windows", LLAMA | PARTS, documents=True), Run(MeshShape(cp=2), micro=2)),
    (Case("by-heads", LLAMA, documents=True), Run(MeshShape(cp=4), micro=2, exchange="heads", heads=4)),
    (Case("both", LLAMA, documents=True), Run(MeshShape(cp=4), micro=4, exchange="ring", heads=2)),
]


@pytest.mark.parametrize(("case", "run"), [pytest.param(*each, id=each[0].name) for each in SHARED])
def test_each_rank_does_its_share(pool: Pool, case: Case, run: Run) -> None:
    """Equal numbers would pass if everybody computed everything."""
    (whole,) = pool.run(1, worked, case, replace(run, mesh=MeshShape(), heads=1))
    ranks, cp = pool.run(run.mesh.cp, worked, case, run), run.mesh.cp
    assert [rank.tokens for rank in ranks] == [whole.tokens // cp] * cp
    assert sum(rank.scores for rank in ranks) == whole.scores
    assert {rank.products * cp for rank in ranks} == {whole.products}
    with extended():
        assert [(rank.scores, rank.sent) for rank in ranks] == [planned(case, run, each) for each in range(cp)]
    assert max(rank.kept for rank in ranks) <= 1.25 * whole.kept / cp


# -- dropout


DROPPING = Case("gpt2", GPT2 | DROPOUT, documents=True)


def dropped(case: Case, run: Run) -> tuple[Measured, np.ndarray]:
    """What a run measures, and the first mask of the embedding's dropout."""
    mesh, found = Mesh.create(run.mesh), list[np.ndarray]()
    (decoder,) = model_of(case, run, mesh).chunks
    assert decoder.embedding is not None
    decoder.embedding.register_forward_hook(lambda _, __, y: found.append((y == 0).numpy()))
    with torch.no_grad():
        decoder(None, microbatches(case, run, 0, mesh)[0])
    return measure(case, run), found[0]


def test_with_heads_dropout_repeats_and_each_rank_has_masks_of_its_own(pool: Pool) -> None:
    run = Run(MeshShape(cp=2), exchange="heads", heads=2)
    plain = pool.run(2, dropped, DROPPING, run)
    one, other = (mask for _, mask in plain)
    assert one.any() and other.any() and not np.array_equal(one, other)
    for kept in (Activations(), Activations("selective"), Activations("full")):
        again = pool.run(2, measure, DROPPING, replace(run, activations=kept))
        for (want, _), got in zip(plain, again, strict=True):
            assert (got.losses, got.norms) == (want.losses, want.norms)
            assert all(np.array_equal(got.final[name], each) for name, each in want.final.items())


def test_documents_are_short_and_odd() -> None:
    with extended():
        lengths = {length for case in OVER_CP for row in tokens(case, 0)[2] for length in row if case.documents}
    assert {1, 2, 3, 5} <= lengths
