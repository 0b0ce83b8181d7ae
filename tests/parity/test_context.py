"""A context over many ranks: the numbers of one process, whatever the exchange and the balance."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from extended_family import extended
from families import ROTATION, drawn
from oracle import Case, Measured, Run, check, measure, tokens
from pool import Pool
from test_layouts import GPT2, LLAMA, NO_DROPOUT, PARTS
from test_mixtures import BATCH, FILE, GROUPS, HOST, SEQUENCE
from test_mixtures import PARTS as EXPERTS

from models.lora import Lora
from models.registry import FAMILIES, configure
from models.tuning import Tuning
from parallel.memory.recompute import Activations
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
FP8 = Case("fp8", LLAMA, ignored=0.3, documents=True, fp8=True)
MIXED = (
    Case("experts", EXPERTS, ignored=0.3, padded=True, coefficients=SEQUENCE, starved=True),
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
        activations=Activations(rng.choice(("none", "selective", "full")), rng.random() < 0.2),
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


# Those that the faults of sensitivity.py name.
ALWAYS = [
    (FP8, Run(MeshShape(cp=2), micro=2)),
    (FP8, Run(MeshShape(cp=2, tp=2), exchange="heads", heads=2, balance="rows", activations=Activations("full"))),
]
with extended():
    PAIRS = [
        *(pytest.param(case, run, id=f"{case.name}-{run}") for case, run in ALWAYS),
        *grid("parts", OF_PARTS, 0, 7, len(OF_PARTS)),
        *grid("experts", MIXED, 0, 8, 3),
        *(pair for seed, name in enumerate(FAMILIES) for pair in grid(name, families(name, seed), 5 * seed, 36)),
    ]


@cache
def one(pool: Pool, case: Case, micro: int) -> Measured:
    return pool.run(1, measured, case, Run(micro=micro))[0]


def measured(case: Case, run: Run) -> Measured:
    with extended():
        return measure(case, run)


@cache
def deep(case: Case, layers: int) -> Case:
    return case.with_layers(layers)


@pytest.mark.parametrize(("case", "run"), PAIRS)
def test_context_is_that_of_one_process(pool: Pool, case: Case, run: Run) -> None:
    with extended():
        case = deep(case, max(3, run.mesh.pp * run.chunks + 1))
        # A tensor that is scaled as a whole is that of a microbatch.
        found = one(pool, case, run.micro if case.fp8 else case.sequences)
        check(case, run, found, pool.run(run.mesh.world, measured, case, run))


def test_documents_are_short_and_odd() -> None:
    with extended():
        lengths = {length for case in OF_PARTS for row in tokens(case, 0)[2] for length in row if case.documents}
    assert {1, 2, 3, 5} <= lengths
