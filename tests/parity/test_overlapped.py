"""The two of a pair of a schedule's actions: they have turns, and compute what they compute one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from extended_family import extended
from layouts import BIASED_EXPERTS, STARVED
from oracle import Case, Run, deep, gradient_arrays, microbatches, model_of, relative
from pool import Pool

from megacore.parallel.enum_errors import SPLIT_BACKWARD
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.pipeline.schedules import SCHEDULES, steps_of
from megacore.parallel.weights.layout import MeshShape

ACTIONS = "F", "B", "I", "W"
Done = Sequence[tuple[str, tuple[int, ...]]]


def trained(case: Case, run: Run, schedule: str) -> tuple[float, dict[str, np.ndarray], Done]:
    """(this rank's part of the loss, its gradients, what it did in which order) of a step."""
    with extended():
        mesh, run = Mesh.create(run.mesh), replace(run, schedule=schedule)
        model = model_of(case, run, mesh)
        gradients = Gradients(model.parameters, model.chunks, torch.float64, run.shard)
        if schedule in SPLIT_BACKWARD:
            model.hand_weight_gradients(gradients.receive, late=True)
        pipeline = Pipeline(mesh, model.chunks, torch.float64, schedule, gradients)
        made = microbatches(case, run, 0, mesh)
        gradients.begin(len(made))
        mesh.recorder.begin()
        loss = pipeline.train(made, torch.ones((), dtype=torch.float64))
        gradients.finish()
        done = [(each.kind, each.about) for each in mesh.recorder.end()]
    return loss.item(), gradient_arrays(gradients), done


PAIRS = [
    (STARVED, Run(MeshShape(ep=2))),
    (BIASED_EXPERTS, Run(MeshShape(pp=2, ep=2), 2, shard="gradients")),
    (STARVED, Run(MeshShape(pp=2, ep=2), activations=Activations("full"))),
    (STARVED, Run(MeshShape(ep=2, tp=2), shard="parameters")),
    (STARVED, Run(MeshShape(pp=2, ep=2), 2, "dualpipe-v")),
]


@pytest.mark.parametrize(("case", "run"), PAIRS, ids=[str(run) for _, run in PAIRS])
def test_turns_change_no_number_and_no_message(pool: Pool, case: Case, run: Run) -> None:
    """And a forward and a backward do have turns where the schedule says so."""
    with extended():
        case = replace(deep(case, max(3, run.mesh.pp * run.chunks + 1)), sequences=8)
    alone, name = ("interleaved" if run.chunks > 1 else "1f1b"), "overlapped"
    if run.schedule == "dualpipe-v":
        alone, name = "zb-v", run.schedule
    plain, turned = (pool.run(run.mesh.world, trained, case, run, each) for each in (alone, name))
    several = False
    for rank, ((loss, gradients, done), (own, others, did)) in enumerate(zip(plain, turned, strict=True)):
        assert own == pytest.approx(loss, rel=1e-12)
        assert max(relative(others[name], each) for name, each in gradients.items()) <= 1e-12
        messages = [Counter(each for each in what if each[0] not in (*ACTIONS, "recompute")) for what in (done, did)]
        if run.shard == "parameters":  # what both need is gathered once
            gathers = {each for each in messages[1] if each[0] == "all_gather"}
            assert all(messages[1][each] <= messages[0].pop(each) for each in gathers)
            messages[1] = Counter({each: n for each, n in messages[1].items() if each not in gathers})
        assert messages[0] == messages[1]
        several |= turns(did, run, name, rank)
    assert several


def turns(did: Done, run: Run, name: str, rank: int) -> bool:
    """Check that the two of a pair alternate and nothing else is between them -> whether some had several turns."""
    schedule = SCHEDULES[name](run.mesh.pp, run.chunks, 8 // run.mesh.data)
    left = [key for key, _ in groupby(each for each in did if each[0] in ACTIONS)]
    several = False
    for step in steps_of(schedule[run.mesh.place(rank).pp]):
        keys = [(action.kind, (action.chunk, action.microbatch)) for action in step]
        own = list[tuple[str, tuple[int, ...]]]()
        while left and left[0] in keys:
            own.append(left.pop(0))
        assert own == [keys[n % len(keys)] for n in range(len(own))]
        several |= len(own) > 2
    assert not left
    return several
