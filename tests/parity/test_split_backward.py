"""Input and weight gradients by themselves: the numbers of the same layout whose backward is whole, to rounding."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from extended_family import extended
from layouts import ALL, RUNGS, STARVED, TIED, UNTIED
from operators import Operators
from oracle import Case, Run, deep, gradient_arrays, measured, microbatches, model_of
from pool import Pool
from torch.utils.flop_counter import FlopCounterMode

from megacore.parallel.enum_errors import OVERLAPPED, SPLIT_BACKWARD
from megacore.parallel.gradients.buckets import Bucket
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.gradients.zero import FlatParameters
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.weights.layout import MeshShape

WHOLE = {"zb-h1": "1f1b", "zb-interleaved": "interleaved", "zb-v": "interleaved", "dualpipe-v": "interleaved"}
SCHEDULES = [("zb-h1", 1), ("zb-interleaved", 2), ("zb-interleaved", 3), ("zb-v", 2), ("dualpipe-v", 2)]
DRAWN = (None, 1, 2)
"""Seeds of orders that are searched for; None: the schedule's own."""
MESHES = [MeshShape(pp=2, **others) for others in ({"dp": 2}, {"tp": 2}, {"tp": 2, "dp": 2}, {"ep": 2, "tp": 2})]
MESHES += [MeshShape(pp=3, dp=2), MeshShape(pp=4, tp=2)]
KEPT = [Activations(), Activations("selective"), Activations("full"), Activations("selective", offload=True)]


def cases() -> list[Any]:
    """Every schedule in every order on every mesh, of all cases, rungs and recomputations."""
    found = []
    for (schedule, chunks), mesh, shard, kept, drawn in product(SCHEDULES, MESHES, RUNGS, KEPT, DRAWN):
        if drawn is not None and schedule in OVERLAPPED:
            continue
        for case in (UNTIED, TIED, ALL, STARVED):
            run = Run(mesh, chunks, schedule, activations=kept, shard=shard, drawn=drawn)
            if case.sequences % mesh.data == 0:
                found.append(pytest.param(case, run, id=f"{case.name}-{run}", marks=pytest.mark.in_turn(3400)))
    return found


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-300))


def whole_of(run: Run) -> Run:
    return replace(run, schedule=WHOLE[run.schedule], drawn=None)


def computed(case: Case, run: Run) -> tuple[Any, Any]:
    """What a rank has of the run, and of the same with whole backwards."""
    with extended():
        case = deep(case, run.mesh.pp * run.chunks + 1)
    return measured(case, run), measured(case, whole_of(run))


@pytest.mark.parametrize(("case", "run"), cases())
def test_a_split_backward_has_the_numbers_of_a_whole_one(pool: Pool, case: Case, run: Run) -> None:
    found = pool.run(run.mesh.world, computed, case, run)
    held: tuple[dict[Any, np.ndarray], dict[Any, np.ndarray]] = {}, {}
    for rank, each in enumerate(found):
        np.testing.assert_allclose(each[0].losses + each[0].norms, each[1].losses + each[1].norms, rtol=1e-12, atol=0)
        place = replace(run.mesh.place(rank), pp=0)  # a V has its blocks on other stages
        for gradients, of_rank in zip(held, each, strict=True):
            gradients.update({(place, name): gradient for name, gradient in of_rank.gradients.items()})
    assert held[0].keys() == held[1].keys()
    for at, gradient in held[1].items():
        assert relative(held[0][at], gradient) < 1e-12, at


# -- gradients that are held for a message


def summed(case: Case, run: Run) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """The gradients of a step that holds some and of one that holds none, and how often one was multiplied beside a
    message."""
    beside = 0

    def count(gradients: Gradients) -> None:
        nonlocal beside
        beside += gradients._held is not None
        gradients.add_held()

    found = []
    for each in (count, None):
        gradients, step = backwards(case, run, each)
        step()
        found.append(gradient_arrays(gradients))
    return found[0], found[1], beside


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("shard", "recompute"), [("none", "none"), ("parameters", "full")], ids=["none", "parameters-full"]
)
def test_gradients_held_for_a_message_are_the_same(pool: Pool, shard: Any, recompute: Any) -> None:
    """Bit for bit; in each microbatch but one is left for the end of the backward."""
    run = Run(MeshShape(tp=2), micro=2, activations=Activations(recompute), shard=shard)
    layers, microbatches = UNTIED.config.sizes["layer"], UNTIED.sequences // run.micro
    for held, plain, beside in pool.run(2, summed, UNTIED, run):
        assert held.keys() == plain.keys()
        assert [name for name in plain if not np.array_equal(held[name], plain[name])] == []
        assert beside == (2 * layers - 1) * microbatches


# -- what it takes


def backwards(
    case: Case, run: Run, beside: Callable[[Gradients], None] | None = Gradients.add_held
) -> tuple[Gradients, Any]:
    """The gradients of a rank, and what runs all backwards of a step. ``beside``: what runs beside a message."""
    mesh = Mesh.create(run.mesh)
    with extended():
        model = model_of(case, run, mesh)
        batch = microbatches(case, run, 0, mesh)
    gradients = Gradients(model.parameters, model.chunks, torch.float64, run.shard)
    late, held = run.schedule in SPLIT_BACKWARD, None if beside is None else partial(beside, gradients)
    model.hand_weight_gradients(gradients.receive, late, held)
    pipeline = Pipeline(mesh, model.chunks, torch.float64, run.schedule, gradients)

    def step() -> None:
        gradients.begin(len(batch))
        pipeline.train(batch, torch.ones(()))
        gradients.finish()

    return gradients, step


def work(case: Case, run: Run) -> list[tuple[int, int]]:
    """(messages, operations of products) of a step with split backwards and with whole ones."""
    found = []
    for each in (run, whole_of(run)):
        _, step = backwards(case, each)
        products = FlopCounterMode(display=False)
        with Operators(lambda operator, _, __: operator.namespace == "c10d") as messages, products:
            step()
        found.append((messages.found, products.get_total_flops()))
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "mesh", "recompute"),
    [(TIED, MeshShape(tp=2), "none"), (STARVED, MeshShape(ep=2), "full")],
    ids=["tp", "ep-full"],
)
def test_each_message_is_sent_and_each_product_computed_once(
    pool: Pool, case: Case, mesh: MeshShape, recompute: Any
) -> None:
    """What serves weight gradients alone is sent with them, and blocks are computed again once."""
    run = Run(mesh, schedule="zb-h1", micro=2, activations=Activations(recompute), shard="parameters")
    for split, whole in pool.run(2, work, case, run):
        assert split == whole and min(split) > 0


def held(case: Case, run: Run) -> list[tuple[int, int, int]]:
    """Bytes at once of parameters that are gathered and of whole gradients, with split backwards and with whole ones;
    and those of the largest unit."""
    found = []
    for each in (run, whole_of(run)):
        gradients, step = backwards(case, each)
        flats, most = list(gradients.values.values()), [0, 0]

        def look(flats: list[FlatParameters] = flats, most: list[int] = most, of: Gradients = gradients) -> None:
            there = sum(flat.values.untyped_storage().size() for flat in flats)
            most[:] = max(most[0], there), max(most[1], sum(b.full.nbytes for b in of.buckets if b.full is not None))

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((FlatParameters, "gather_anew"), (Bucket, "add")):
                patch.setattr(owner, name, looking(getattr(owner, name), look))
            step()
        found.append((most[0], most[1], max(flat.flat.numel for flat in flats) * 8))
    return found


def looking(method: Any, look: Any) -> Any:
    def looked(*arguments: Any) -> None:
        method(*arguments)
        look()

    return looked


@pytest.mark.quick
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("dualpipe-v", 2)])
def test_peaks_of_zero_3_are_those_of_whole_backwards_and_a_unit(pool: Pool, schedule: str, chunks: int) -> None:
    """Of four microbatches on two stages of four blocks; between I and W nothing is gathered, and nothing summed."""
    case = UNTIED.with_layers(8)
    run = Run(MeshShape(pp=2, dp=2), chunks, schedule, shard="parameters")
    for split, whole in pool.run(4, held, replace(case, sequences=8), run):
        assert split[0] <= whole[0] + whole[2] and split[1] <= whole[1] + whole[2]
        assert max(split[:2]) < 4 * split[2]
