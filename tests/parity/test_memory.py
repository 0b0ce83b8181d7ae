"""Whatever is kept of a forward for its backward, the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from families import drawn
from oracle import Case, Measured, Run, check, deep, measure
from pool import Pool
from test_layouts import BIASES, GPT2, LLAMA

from models.lora import Lora
from models.tuning import Tuning
from parallel.memory.recompute import Activations
from parallel.weights.layout import MeshShape

TIED = Case("llama", LLAMA | BIASES | {"tie_word_embeddings": True}, ignored=0.3, label_smoothing=0.1, z_loss=1e-2)
UNTIED = Case("untied", LLAMA, ignored=0.3)
DROPPING = Case("gpt2", GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}, documents=True)
RUNS = [
    Run(),
    Run(MeshShape(tp=2)),
    Run(MeshShape(dp=2)),
    Run(MeshShape(pp=2), chunks=2, schedule="interleaved"),
    Run(MeshShape(tp=2, pp=2)),
]
KEPT = [
    Activations("selective"),
    Activations("full"),
    Activations("none", offload=True),
    Activations("selective", offload=True),
    Activations("full", offload=True),
]


@cache
def _measured(pool: Pool, case: Case, run: Run) -> list[Measured]:
    return pool.run(run.mesh.world, measure, case, run)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"{kept.recompute}{'-offload' * kept.offload}")
@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("case", [TIED, DROPPING], ids=lambda case: case.name)
def test_what_is_kept_changes_no_bit(pool: Pool, case: Case, run: Run, kept: Activations) -> None:
    """Dropout's masks included: no other test would see that a mask is not the one of the forward."""
    case = deep(case, max(3, run.mesh.pp * run.chunks))
    plain = _measured(pool, case, run)
    for rank, (got, want) in enumerate(zip(_measured(pool, case, replace(run, activations=kept)), plain, strict=True)):
        assert (got.losses, got.norms, got.evaluated) == (want.losses, want.norms, want.evaluated)
        for what, mine, theirs in (("gradient", got.gradients, want.gradients), ("weight", got.final, want.final)):
            for name, array in theirs.items():
                assert np.array_equal(mine[name], array), f"rank {rank}: {what} of {name} differs"


CHUNKED = [
    replace(run, loss_chunk=chunk, activations=kept)
    for run, chunk, kept in zip(RUNS, (5, 4, 12, 7, 100), [Activations(), *KEPT[:2], *KEPT[3:]], strict=True)
]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("run", CHUNKED, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_chunked_loss_computes_what_one_process_computes(pool: Pool, tied: bool, run: Run) -> None:
    case = deep(TIED if tied else UNTIED, max(3, run.mesh.pp * run.chunks))
    (one,) = _measured(pool, case, Run())
    check(case, run, one, _measured(pool, case, run))


PIECES = [
    Run(activations=Activations(mlp_chunk=5)),
    Run(MeshShape(tp=2), micro=2, activations=Activations("full", mlp_chunk=7)),
    Run(MeshShape(tp=2, dp=2), shard="parameters", activations=Activations("selective", mlp_chunk=4)),
    Run(MeshShape(dp=2), shard="gradients", micro=2, activations=Activations("full", offload=True, mlp_chunk=5)),
    Run(MeshShape(tp=2, pp=2), loss_chunk=5, activations=Activations(mlp_chunk=8)),
    Run(MeshShape(cp=2), micro=2, activations=Activations("full", mlp_chunk=5)),
]
SIDE_BY_SIDE = Case("gptj", drawn("gptj", 3, vocab=101), ignored=0.3, documents=True)
ADAPTED = replace(TIED, name="lora", tuning=Tuning(Lora(3, 2.0, ("*",))))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("run", PIECES, ids=str)
@pytest.mark.parametrize("case", [TIED, SIDE_BY_SIDE, ADAPTED], ids=lambda case: case.name)
def test_a_chunked_feed_forward_computes_what_one_process_computes(pool: Pool, case: Case, run: Run) -> None:
    case = deep(case, max(3, run.mesh.pp * run.chunks))
    (one,) = _measured(pool, case, Run())
    check(case, run, one, _measured(pool, case, run))
