"""Whatever is kept of a forward for its backward, the same numbers."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from extended_family import extended
from families import drawn, one_in
from layouts import BIASES, DROPOUT, FP8_EXPERTS, GPT2, KEPT, LLAMA, MIXTRAL, OF_MEMORY, OF_STAGES, RUNGS, interleaved
from oracle import GAP, TOLERANCE, Case, Measured, Run, deep, expected, measure, measured, one_process, relative
from pool import Pool
from turns import ROTATION

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


MIXTURE = Case("mixtral", MIXTRAL, ignored=0.3)
COMPRESSED, LOST = Activations(compress=True), 0.04
"""The most that a gradient of the cases below may lose of its norm; it is about 1 %. Twice that in fp8, whose rounding
turns over where a gradient is a little off."""
IN_8_BITS = [
    (CASES[0], Run(MeshShape(tp=2, dp=2), shard="optimizer", activations=COMPRESSED)),
    (CASES[0], Run(MeshShape(pp=2, dp=2), shard="gradients", activations=replace(COMPRESSED, recompute="selective"))),
    (CASES[0], Run(MeshShape(tp=2, pp=2), schedule="zb-h1", activations=COMPRESSED)),
    (CASES[0], Run(MeshShape(cp=2), micro=2, activations=replace(COMPRESSED, mlp_chunk=5))),
    (MIXTURE, Run(MeshShape(tp=2, ep=2), shard="parameters", activations=COMPRESSED)),
    (MIXTURE, Run(MeshShape(ep=2, pp=2), schedule="zb-h1", activations=COMPRESSED)),
    (FP8_EXPERTS, Run(MeshShape(tp=2, dp=2), micro=2, shard="parameters", activations=COMPRESSED)),
    (FP8_EXPERTS, Run(MeshShape(ep=2, pp=2), micro=2, schedule="zb-h1", activations=COMPRESSED)),
]


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("case", "run"), IN_8_BITS, ids=lambda each: each.name if isinstance(each, Case) else str(each)
)
@extended()
def test_in_8_bits_forwards_are_exact_and_gradients_about_right(pool: Pool, case: Case, run: Run) -> None:
    """Before an update. It repeats bitwise, and each layout rounds: its gradients are not those without."""
    case = deep(case, 3)
    exact = one_process(pool, case, run.micro if case.fp8 else case.sequences)
    first, again = (pool.run(run.mesh.world, measured, case, run) for _ in range(2))
    for rank, (got, same) in enumerate(zip(first, again, strict=True)):
        assert min(got.gap, exact.gap) > GAP
        assert got.losses[0] == pytest.approx(exact.losses[0], rel=TOLERANCE) and got.losses == same.losses
        lost = {}
        for name, want in expected(case, run, rank, exact.gradients).items():
            lost[name] = relative(got.gradients[name], want)
            assert np.array_equal(got.final[name], same.final[name]), f"rank {rank}: {name} differs the second time"
        assert 1e-4 < max(lost.values()) < LOST * (1 + case.fp8), f"rank {rank}: {lost}"


@pytest.mark.parametrize("name", one_in(8))
def test_in_8_bits_each_family_runs_forward_bit_for_bit(pool: Pool, name: str) -> None:
    case = Case(name, drawn(name, ROTATION), ignored=0.3)
    exact = one_process(pool, case)
    (got,) = pool.run(1, measure, case, Run(micro=case.sequences, activations=COMPRESSED))
    assert got.losses[0] == exact.losses[0] and got.losses[1] != exact.losses[1]
    lost = {each: relative(got.gradients[each], want) for each, want in exact.gradients.items()}
    whole = relative(*(np.concatenate([*map(np.ravel, each.gradients.values())]) for each in (got, exact)))
    assert whole < 0.03 and max(lost.values()) < 0.12, (whole, lost)


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("shard", RUNGS)
def test_dropout_repeats_where_ranks_have_blank_rows(pool: Pool, shard: ZeroShard) -> None:
    """Which draw masks, too."""
    case, run = Case("dropping", GPT2 | DROPOUT), Run(MeshShape(dp=3), shard=shard)
    first, again = (pool.run(3, measure, case, run) for _ in range(2))
    for want, got in zip(first, again, strict=True):
        assert (got.losses, got.norms) == (want.losses, want.norms)
        assert all(np.array_equal(got.final[name], each) for name, each in want.final.items())
