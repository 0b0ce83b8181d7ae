"""A context over many ranks: the numbers of one process, whatever the exchange and the balance."""

from __future__ import annotations

from functools import cache

import pytest
from extended_family import extended
from oracle import Case, Measured, Run, check, measure
from pool import Pool
from test_layouts import LLAMA, PARTS

from parallel.memory.recompute import Activations
from parallel.weights.layout import MeshShape

CASES = [
    Case("rows", LLAMA, ignored=0.3),
    Case("documents", LLAMA, ignored=0.3, documents=True),
    Case("parts", LLAMA | {"family": "extended"} | PARTS, ignored=0.3, documents=True),
    Case("parts-rows", LLAMA | {"family": "extended"} | PARTS, ignored=0.3),
]
RUNS = [
    Run(MeshShape(cp=2), exchange="ring", balance="documents", micro=2),
    Run(MeshShape(cp=4), exchange="ring", balance="rows"),
    Run(MeshShape(cp=4), exchange="heads", heads=4),
    Run(MeshShape(cp=4), exchange="ring", balance="documents", heads=2),
    Run(MeshShape(cp=2, tp=2), exchange="heads", heads=2),
    Run(MeshShape(cp=2, tp=2, pp=2), 2, "interleaved", shard="gradients", micro=2),
    Run(MeshShape(cp=2, dp=2), shard="parameters", activations=Activations("full"), loss_chunk=5),
]


@cache
def _one(pool: Pool, case: Case) -> Measured:
    return pool.run(1, _measure, case, Run())[0]


def _measure(case: Case, run: Run) -> Measured:
    with extended():
        return measure(case, run)


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_context_is_that_of_one_process(pool: Pool, case: Case, run: Run) -> None:
    with extended():
        case = _deep(case, max(3, run.mesh.pp * run.chunks + 1))
        one = _one(pool, case)
        check(case, run, one, pool.run(run.mesh.world, _measure, case, run))


@cache
def _deep(case: Case, layers: int) -> Case:
    return case.with_layers(layers)
