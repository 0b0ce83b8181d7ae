"""Whatever is kept of a forward for its backward, the same numbers."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from layouts import BIASES, DROPOUT, GPT2, KEPT, LLAMA, OF_MEMORY, OF_STAGES, RUNGS, interleaved
from oracle import Case, Measured, Run, deep, measure
from pool import Pool

from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.weights.layout import MeshShape

CASES = [
    Case("llama", LLAMA | BIASES | {"tie_word_embeddings": True}, ignored=0.3, label_smoothing=0.1, z_loss=1e-2),
    Case("gpt2", GPT2 | DROPOUT, documents=True),
]


@cache
def _measured(pool: Pool, case: Case, run: Run) -> list[Measured]:
    return pool.run(run.mesh.world, measure, case, run)


@pytest.mark.in_turn(25)
@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: f"{kept.recompute}{'-offload' * kept.offload}")
@pytest.mark.parametrize("run", OF_MEMORY, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_kept_changes_no_bit(pool: Pool, case: Case, run: Run, kept: Activations) -> None:
    """Dropout's masks included: no other test would see that a mask is not the one of the forward."""
    check_no_bit_changes(pool, case, replace(run, activations=kept))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("run", [Run(MeshShape(pp=4)), interleaved(MeshShape(pp=2))], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_each_stage_keeps_changes_no_bit(pool: Pool, case: Case, run: Run) -> None:
    check_no_bit_changes(pool, case, replace(run, activations=OF_STAGES[: run.mesh.pp]))


def check_no_bit_changes(pool: Pool, case: Case, run: Run) -> None:
    """Each rank has the numbers of the same run that keeps everything."""
    case = deep(case, max(3, run.mesh.pp * run.chunks))
    plain = _measured(pool, case, replace(run, activations=Activations()))
    for rank, (got, want) in enumerate(zip(_measured(pool, case, run), plain, strict=True)):
        assert (got.losses, got.norms, got.evaluated) == (want.losses, want.norms, want.evaluated)
        for what, mine, theirs in (("gradient", got.gradients, want.gradients), ("weight", got.final, want.final)):
            for name, array in theirs.items():
                assert np.array_equal(mine[name], array), f"rank {rank}: {what} of {name} differs"


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("shard", RUNGS)
def test_dropout_repeats_where_ranks_have_blank_rows(pool: Pool, shard: ZeroShard) -> None:
    """Which draw masks, too."""
    case, run = Case("dropping", GPT2 | DROPOUT), Run(MeshShape(dp=3), shard=shard)
    first, again = (pool.run(3, measure, case, run) for _ in range(2))
    for want, got in zip(first, again, strict=True):
        assert (got.losses, got.norms) == (want.losses, want.norms)
        assert all(np.array_equal(got.final[name], each) for name, each in want.final.items())
