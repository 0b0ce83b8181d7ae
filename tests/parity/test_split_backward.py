"""Input and weight gradients by themselves: the numbers of the same layout whose backward is whole, to rounding."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from extended_family import extended
from layouts import ALL, RUNGS, STARVED, TIED, UNTIED
from oracle import Case, Run, deep, measured
from pool import Pool

from megacore.parallel.memory.recompute import Activations
from megacore.parallel.weights.layout import MeshShape

WHOLE = {"zb-h1": "1f1b", "zb-interleaved": "interleaved"}
SCHEDULES = [("zb-h1", 1), ("zb-interleaved", 2), ("zb-interleaved", 3)]
MESHES = [MeshShape(pp=2, **others) for others in ({"dp": 2}, {"tp": 2}, {"tp": 2, "dp": 2}, {"ep": 2, "tp": 2})]
MESHES += [MeshShape(pp=3, dp=2), MeshShape(pp=4, tp=2)]
KEPT = [Activations(), Activations("selective"), Activations("full"), Activations("selective", offload=True)]


def cases() -> list[Any]:
    """Every schedule on every mesh, of all cases, rungs and recomputations."""
    found = []
    for (schedule, chunks), mesh, shard, kept in product(SCHEDULES, MESHES, RUNGS, KEPT):
        for case in (UNTIED, TIED, ALL, STARVED):
            run = Run(mesh, chunks, schedule, activations=kept, shard=shard)
            if case.sequences % mesh.data == 0:
                found.append(pytest.param(case, run, id=f"{case.name}-{run}", marks=pytest.mark.in_turn(500)))
    return found


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-300))


def computed(case: Case, run: Run) -> tuple[Any, Any]:
    """What a rank has of the run, and of the same with whole backwards."""
    with extended():
        case = deep(case, run.mesh.pp * run.chunks + 1)
    split = measured(case, run)
    return split, measured(case, Run(**(vars(run) | {"schedule": WHOLE[run.schedule]})))


@pytest.mark.parametrize(("case", "run"), cases())
def test_a_split_backward_has_the_numbers_of_a_whole_one(pool: Pool, case: Case, run: Run) -> None:
    for split, whole in pool.run(run.mesh.world, computed, case, run):
        np.testing.assert_allclose(split.losses + split.norms, whole.losses + whole.norms, rtol=1e-12, atol=0)
        assert split.gradients.keys() == whole.gradients.keys()
        for name, gradient in whole.gradients.items():
            assert relative(split.gradients[name], gradient) < 1e-12, name
