"""Global batches that the ranks cannot share out evenly: the numbers of one process, though some compute blank rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from extended_family import extended
from oracle import Case, Measured, Run, check, deep, measure, measured
from pool import Pool
from test_ladder import HOST
from test_ladder import run as run_on
from test_layouts import CASES, GPT2
from test_mixtures import OF_PARTS

from parallel.choices import ZeroShard
from parallel.memory.recompute import Activations
from parallel.weights.layout import MeshShape

RUNGS: tuple[ZeroShard, ...] = ("none", "optimizer", "gradients", "parameters")
LLAMA, TIED, _, DOCUMENTS, _ = CASES
BY_SEQUENCE, BY_BATCH = OF_PARTS[:2]


def of(case: Case, sequences: int) -> Case:
    return replace(case, name=f"{case.name}-{sequences}", sequences=sequences)


FOUR, EIGHT, SEVEN, TWO = (of(LLAMA, sequences) for sequences in (4, 8, 7, 2))
ENDS, PACKED = of(TIED, 4), of(replace(DOCUMENTS, padded=True), 5)
BALANCED, TOGETHER = of(BY_SEQUENCE, 8), of(BY_BATCH, 7)
THREE, STAGES = MeshShape(dp=3), MeshShape(pp=2, dp=3)
ALWAYS = [
    (FOUR, Run(THREE)),
    (EIGHT, Run(THREE, shard="parameters")),
    (SEVEN, Run(THREE, micro=2, shard="gradients")),  # one row of the second round, and two ranks without any
    (SEVEN, Run(micro=4)),
    (ENDS, run_on(STAGES, 2, shard="gradients")),
    (PACKED, Run(MeshShape(cp=2, dp=3), shard="optimizer")),
    (BALANCED, Run(MeshShape(ep=2, dp=3), micro=1, shard="gradients")),
    (BALANCED, Run(micro=3)),
    (TOGETHER, Run(THREE, schedule="gpipe", micro=2)),
]
GRID = [
    *((case, Run(THREE, shard=rung)) for case in (FOUR, EIGHT, TWO) for rung in RUNGS),
    *((SEVEN, Run(THREE, micro=2, shard=rung)) for rung in RUNGS),
    *((ENDS, run_on(STAGES, 2, shard=rung)) for rung in RUNGS),
    *((EIGHT, Run(STAGES, shard=rung, schedule="gpipe")) for rung in RUNGS),
    *((PACKED, Run(MeshShape(cp=2, dp=3), micro=2, shard=rung, balance="auto")) for rung in RUNGS),
    *((PACKED, Run(MeshShape(cp=2, dp=3), exchange="heads", heads=2, shard=rung)) for rung in RUNGS),
    *((BALANCED, Run(MeshShape(ep=2, dp=3), micro=1, shard=rung)) for rung in RUNGS),
    *((TOGETHER, Run(MeshShape(ep=2, dp=3), micro=2, shard=rung)) for rung in RUNGS),
    *((BALANCED, Run(MeshShape(tp=2, dp=3), micro=2, shard=rung, etp=True)) for rung in RUNGS),
    *((BALANCED, Run(MeshShape(cp=2, dp=3), micro=1, shard=rung)) for rung in RUNGS),
    *((ENDS, Run(MeshShape(tp=2, dp=3), shard=rung, loss_chunk=5)) for rung in RUNGS),
    (EIGHT, Run(THREE, shard="parameters", replicas=3)),
    (EIGHT, Run(THREE, shard="parameters", offload=HOST, offload_parameters=True)),
    (EIGHT, Run(THREE, shard="gradients", activations=Activations("full", True))),
    (BALANCED, Run(MeshShape(dp=2), micro=3, activations=Activations("selective"))),
    (SEVEN, Run(MeshShape(tp=4, dp=2))),
]
PAIRS = [
    pytest.param(case, run, id=f"{case.name}-{run}-{run.micro}", marks=[pytest.mark.grid] * (at >= len(ALWAYS)))
    for at, (case, run) in enumerate(dict.fromkeys(ALWAYS + GRID))
]


@cache
def one(pool: Pool, case: Case) -> Measured:
    """By one process, that has all tokens at once."""
    return pool.run(1, measured, case, Run(micro=case.sequences))[0]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("case", "run"), PAIRS)
def test_uneven_shares_are_the_batch_of_one_process(pool: Pool, case: Case, run: Run) -> None:
    with extended():
        case = deep(case, max(3, run.mesh.pp * run.chunks + 1))
        check(case, run, one(pool, case), pool.run(run.mesh.world, measured, case, run))


def test_no_case_shares_out_evenly() -> None:
    assert all(case.sequences % (run.mesh.data * run.micro) for case, run in ALWAYS + GRID)


@pytest.mark.grid
@pytest.mark.parametrize("shard", RUNGS)
def test_dropout_repeats(pool: Pool, shard: ZeroShard) -> None:
    """Blank rows draw masks, too."""
    case = Case("dropping", GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2})
    first, again = (pool.run(3, measure, case, Run(THREE, shard=shard)) for _ in range(2))
    for want, got in zip(first, again, strict=True):
        assert (got.losses, got.norms) == (want.losses, want.norms)
        assert all(np.array_equal(got.final[name], each) for name, each in want.final.items())
