"""A context over many ranks: the numbers of one process, whatever the exchange and the balance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from extended_family import extended
from families import ROTATION, drawn
from oracle import Case, Measured, Run, check, deep, measure, measured, microbatches, model_of, tokens
from pool import Pool
from test_layouts import GPT2, LLAMA, NO_DROPOUT, PARTS
from test_mixtures import BATCH, FILE, GROUPS, HOST, SEQUENCE
from test_mixtures import PARTS as EXPERTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.lora import Lora
from models.registry import FAMILIES, configure
from models.tuning import Tuning
from parallel import kernels
from parallel.kernels import partial_attention
from parallel.kernels.documents import Documents
from parallel.kernels.scoring import Scoring
from parallel.memory.recompute import Activations
from parallel.mesh import Mesh
from parallel.weights.layout import MeshShape

MESHES = [
    MeshShape(cp=2),
    MeshShape(cp=4),
    MeshShape(cp=2, tp=2),
    MeshShape(cp=4, tp=2),
    MeshShape(cp=2, pp=2),
    MeshShape(cp=2, dp=2),
    MeshShape(cp=2, tp=2, pp=2),
    MeshShape(cp=2, tp=4),
    MeshShape(cp=4, dp=2),
    MeshShape(cp=2, pp=2, dp=2),
    MeshShape(cp=4, pp=2),
    MeshShape(cp=2, tp=2, dp=2),
]
OF_EXPERTS = [
    (MeshShape(cp=2, ep=2), False),
    (MeshShape(cp=4, ep=2), False),
    (MeshShape(cp=2, ep=2, tp=2), False),
    (MeshShape(cp=2, ep=2, tp=2), True),
    (MeshShape(cp=2, tp=2), True),
    (MeshShape(cp=2, ep=2, pp=2), False),
    (MeshShape(cp=2, ep=2, dp=2), False),
]
LORA, FROZEN = Tuning(Lora(4, 8.0, ("*",))), Tuning(freeze=("embed", "layers.0", "layers.1.mlp"))

OF_PARTS = (
    Case("few-labels", LLAMA | {"tie_word_embeddings": True, "intermediate_size": 27}, ignored=0.85),
    Case("odd-rows", LLAMA, 16, ignored=0.3, documents=True, length=11),
    Case("parts", LLAMA | {"family": "extended"} | PARTS, ignored=0.3, documents=True),
    Case("parts-rows", LLAMA | {"family": "extended"} | PARTS, ignored=0.3, label_smoothing=0.1, z_loss=1e-2),
    Case("positions", GPT2 | NO_DROPOUT, documents=True, tuning=Tuning(freeze=("layers.1",))),
    Case("lora", LLAMA, ignored=0.3, documents=True, tuning=LORA),
    Case("padded", LLAMA, ignored=0.3, documents=True, padded=True, tuning=FROZEN),
    Case("nothing-counts", LLAMA, ignored=1.0),
)
# Features whose products are of all magnitudes: only what is tiny beside the largest depends on the scale.
FP8 = Case("fp8", LLAMA | {"intermediate_size": 320}, ignored=0.3, documents=True, fp8=True)
MIXED = (
    Case("starved", EXPERTS, ignored=0.3, padded=True, coefficients=SEQUENCE, starved=True),
    Case("groups", EXPERTS | {"routing": GROUPS}, ignored=0.3, documents=True, coefficients=BATCH),
    Case("experts-lora", EXPERTS, documents=True, coefficients=SEQUENCE, tuning=LORA, padded=True),
)


def families(name: str, seed: int) -> tuple[Case, Case]:
    """A family, with rows and with documents in them."""
    section = drawn(name, seed, vocab=101)
    mixed = configure(section).anatomy.routing is not None
    rows = Case(f"{name}-rows", section, ignored=0.3)
    packed = Case(f"{name}-documents", section, ignored=0.3, documents=True, padded=True)
    if not mixed:
        return rows, packed
    return replace(rows, coefficients=BATCH), replace(packed, coefficients=SEQUENCE)


def run_of(case: Case, mesh: MeshShape, etp: bool, rng: Random) -> Run:
    """A run on the mesh, drawn."""
    sizes = case.config.sizes
    heads, kv = (max(1, n // mesh.tp) for n in (sizes["heads"], sizes.get("kv", sizes["heads"])))
    inner = [n for n in (1, 2, 4) if mesh.cp % n == 0 == heads % n and (kv % n == 0 or n % kv == 0)]
    within = rng.choice(inner)
    of_rank = case.sequences // mesh.data
    micro = rng.choice([n for n in (1, 2, 4, 8) if of_rank % n == 0 == n * case.length % (mesh.cp * mesh.tp)])
    schedule = rng.choice(("1f1b", "gpipe", "interleaved") if mesh.pp > 1 else ("1f1b", "gpipe"))
    if case.coefficients.batch and micro < of_rank:
        schedule = "gpipe"  # the others begin the backward before all tokens are routed
    shard: Any = rng.choice(("none", "optimizer", "gradients", "parameters"))
    return Run(
        mesh,
        2 if schedule == "interleaved" else 1,
        schedule,
        micro=micro,
        activations=Activations(rng.choice(("none", "selective", "full")), rng.random() < 0.2, rng.choice((None, 5))),
        loss_chunk=rng.choice((None, 5)),
        shard=shard,
        replicas=rng.choice((1, mesh.dp)),
        offload=rng.choice((None, None, HOST, FILE)),
        offload_parameters=shard == "parameters" and rng.random() < 0.2,
        etp=etp,
        exchange="heads" if within == mesh.cp else rng.choice(("ring", "gather")),
        balance=rng.choice(("rows", "documents", "auto")),
        heads=within,
    )


def grid(name: str, cases: tuple[Case, ...], seed: int, few: int, rounds: int = 1) -> list[Any]:
    """Runs on meshes in turn, of which one in so many is of the suite."""
    made = []
    experts = cases[0].config.anatomy.routing is not None
    meshes = OF_EXPERTS if experts else [(mesh, False) for mesh in MESHES]
    turns = [(mesh, each) for each in range(rounds) for mesh in meshes]
    for at, ((mesh, etp), turn) in enumerate(turns):
        case = cases[(at + turn) % len(cases)]
        run = run_of(case, mesh, etp, Random(f"{name} {at}"))
        mark = [] if (at + seed + ROTATION) % few == 0 else [pytest.mark.grid]
        made.append(pytest.param(case, run, id=f"{case.name}-{run}-{run.micro}-{at}", marks=mark))
    return made


# Those that faults.yaml names.
FEW, ODD, EVERY, *_, NOTHING = OF_PARTS
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}
ALWAYS = [
    (FEW, Run(MeshShape(cp=4), balance="rows", micro=2, shard="gradients")),
    (ODD, Run(MeshShape(cp=4), exchange="gather", micro=4)),
    (EVERY, Run(MeshShape(cp=4), micro=2)),
    (EVERY, Run(MeshShape(cp=8), balance="auto", micro=4)),
    (EVERY, Run(MeshShape(cp=4), exchange="heads", heads=4)),
    (NOTHING, Run(MeshShape(cp=2))),
    (
        Case("dynamic", LLAMA | DYNAMIC | {"max_position_embeddings": 8}, ignored=0.3, length=16),
        Run(MeshShape(cp=2, tp=2), balance="rows"),
    ),
    (FP8, Run(MeshShape(cp=4), micro=2)),
    (FP8, Run(MeshShape(cp=2, tp=2), exchange="heads", heads=2, balance="rows", activations=Activations("full"))),
    (MIXED[0], Run(MeshShape(cp=2, tp=2), micro=2, activations=Activations("full"))),
]
EIGHT = [
    (
        OF_PARTS[2],
        Run(MeshShape(cp=8), exchange="gather", heads=2, micro=4, activations=Activations("full"), loss_chunk=5),
    ),
    (MIXED[0], Run(MeshShape(cp=8), balance="rows", micro=4, shard="parameters")),
]
with extended():
    PAIRS = [
        *(pytest.param(case, run, id=f"{case.name}-{run}") for case, run in ALWAYS),
        *(pytest.param(case, run, id=f"{case.name}-{run}", marks=pytest.mark.grid) for case, run in EIGHT),
        *grid("parts", OF_PARTS, 0, 13, len(OF_PARTS)),
        *grid("experts", MIXED, 0, 8, 3),
        *(pair for seed, name in enumerate(FAMILIES) for pair in grid(name, families(name, seed), 5 * seed, 36)),
    ]


@cache
def one(pool: Pool, case: Case, micro: int) -> Measured:
    return pool.run(1, measured, case, Run(micro=micro))[0]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("case", "run"), PAIRS)
def test_context_is_that_of_one_process(pool: Pool, case: Case, run: Run) -> None:
    with extended():
        case = deep(case, max(3, run.mesh.pp * run.chunks + 1))
        # A tensor that is scaled as a whole is that of a microbatch.
        found = one(pool, case, run.micro if case.fp8 else case.sequences)
        check(case, run, found, pool.run(run.mesh.world, measured, case, run))


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


class Products(TorchDispatchMode):
    """It counts the multiplications of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        y = function(*arguments, **(named or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.found += y.numel() * arguments[-2].shape[-1]
        return y


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
    done, kept = Done(), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with extended():
        mesh = Mesh.create(run.mesh)
        model = model_of(case, run, mesh)
        first = replace(microbatches(case, run, 0, mesh)[0], wanted=None)  # documents end without a label
        done.tokens = len(first.tokens)
        with counting(done), Products() as products:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model.chunks[0](None, first)
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
    (Case("windows", LLAMA | {"family": "extended"} | PARTS, documents=True), Run(MeshShape(cp=2), micro=2)),
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


DROPPING = Case("gpt2", GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}, documents=True)


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
        lengths = {length for case in OF_PARTS for row in tokens(case, 0)[2] for length in row if case.documents}
    assert {1, 2, 3, 5} <= lengths
