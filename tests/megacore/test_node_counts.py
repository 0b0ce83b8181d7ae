"""A run whose number of nodes may change has a layout for each, known before it starts."""

from collections.abc import Mapping
from pathlib import Path

import engine
import numpy as np
import pytest
from engine import RECIPE, write_recipe
from pool import Pool

from megacore.checks.rules import problems
from megacore.config import Config
from megacore.models.registry import configure
from megacore.parallel.pipeline.schedules import SCHEDULES
from megacore.planning import capacity
from megacore.planning.layout_choice import overrides_of_nodes
from megacore.planning.pipeline_order import order_text
from megacore.recipe import ConfigError, changed, load


def found(recipe: str, overrides: list[str], *counts: int) -> tuple[Config, Mapping[int, list[str]]]:
    config = load(recipe, overrides)
    return config, overrides_of_nodes(config, configure(config.model), *counts)


@pytest.mark.parametrize(
    ("overrides", "least", "most", "processes", "followed"),
    [
        ([], 1, 4, 1, {}),
        (["mesh.dp=4"], 1, 4, 1, {1: {"dp": 1}, 2: {"dp": 2}, 3: {"dp": 3}, 4: {"dp": 4}}),
        (["mesh.pp=2", "mesh.tp=2", "mesh.dp=2"], 1, 4, 2, {2: {"dp": 1}, 4: {"dp": 2}, 1: {"tp": 1}, 3: {"tp": 1}}),
        (["mesh.cp=2"], 1, 4, 2, {3: {"cp": 2, "dp": None}}),
    ],
    ids=["free", "dp", "the plan's", "cp"],
)
def test_each_number_of_nodes_has_a_layout(
    recipe: str, overrides: list[str], least: int, most: int, processes: int, followed: dict[int, dict[str, int | None]]
) -> None:
    config, by_nodes = found(recipe, overrides, least, most, processes)
    model, before = configure(config.model), config
    assert set(by_nodes) == {*range(least, most + 1)}
    for nodes, own in sorted(by_nodes.items(), reverse=True):
        world = nodes * processes
        there = changed(config, own)
        assert not problems(there, world, model, local_ranks=processes)
        assert there.mesh.shape(world).world == world
        assert {dim: getattr(there.mesh, dim) for dim in followed.get(nodes, {})} == followed.get(nodes, {})
        assert (there.batch.global_size, there.optimizer, there.schedule, there.data) == (
            config.batch.global_size,
            config.optimizer,
            config.schedule,
            config.data,
        )
        before = changed(before, own)  # from any other one, too
        assert before == there


def test_replicas_of_what_is_shared_out_follow(recipe: str) -> None:
    """First by groups of as many ranks, each of a node say, else by as many groups as divide."""
    sharded = ["mesh.dp=8", "zero.shard=optimizer", "zero.replicas=2"]
    _, by_nodes = found(recipe, sharded, 1, 3, 4)
    assert by_nodes == {n: [f"mesh.dp={4 * n}", f"zero.replicas={n}"] for n in (1, 2, 3)}
    _, by_nodes = found(recipe, sharded, 5, 6, 1)
    assert by_nodes == {5: ["mesh.dp=5", "zero.replicas=1"], 6: ["mesh.dp=6", "zero.replicas=2"]}


def test_numbers_that_nothing_fits_are_named_with_the_way_out(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that holds a half of the state, and less where its processes are more."""
    config = load(recipe, ["mesh.tp=4"])
    model = configure(config.model)
    needed = 9776 * 32  # parameters in fp64: weights, gradients, two moments
    monkeypatch.setattr(capacity, "host_memory", lambda: needed // 2)
    with pytest.raises(ConfigError) as error:
        overrides_of_nodes(config, model, 1, 4, 1)
    first, *others = error.value.problems
    assert first.startswith("NNODES=1:4 may leave 1 node, 1 process, and no layout fits: cannot divide 1 ranks by ")
    assert first.endswith("or start with NNODES=4:4")
    assert [each.split(",")[0] for each in others] == ["NNODES=1:4 may leave 2 nodes", "NNODES=1:4 may leave 3 nodes"]


def test_what_is_wrong_on_any_number_is_said_as_ever(recipe: str) -> None:
    with pytest.raises(ConfigError) as error:
        found(recipe, ["optimizer.lr=0", "mesh.pp=2"], 1, 4, 1)
    assert [each.split(" ")[0] for each in error.value.problems] == ["optimizer.lr"]


@pytest.mark.grid
def test_a_run_that_shrinks_and_grows_is_the_one_that_did_not(pool: Pool, tmp_path: Path) -> None:
    """8 sequences a step, on 4, 3, 2 and 4 replicas in turn, each from a checkpoint."""
    recipe = write_recipe(tmp_path, RECIPE | {"train": {"steps": 8, "precision": "fp64", "device": "cpu"}})
    common = ["mesh.dp=4", "evaluate.every=0", "checkpoint.every=100", "checkpoint.at_end=true"]
    plain = pool.run(4, engine.train, recipe, [*common, f"out={tmp_path / 'plain'}"])[0]
    _, by_nodes = found(recipe, common, 2, 4, 1)
    moved = [*common, f"out={tmp_path / 'moved'}", "checkpoint.resume=auto"]
    for nodes, last in ((4, 2), (3, 4), (2, 6), (4, 8)):
        end = pool.run(nodes, engine.stopped, recipe, [*moved, *by_nodes[nodes]], last)[0]
        assert end.last == last
    for key in ("loss", "grad_norm", "lr", "tokens"):
        np.testing.assert_allclose(end.values(key), plain.values(key), rtol=1e-9)
    engine.assert_near(end.weights, plain.weights, 1e-9)
    assert not engine.same(end.weights, plain.weights)


def test_an_order_of_a_pipeline_goes_where_it_does_not_fit(recipe: str, tmp_path: Path) -> None:
    """It is for one number of microbatches: on other nodes the schedule has its own."""
    file = tmp_path / "order.json"
    file.write_bytes(order_text("1f1b", SCHEDULES["1f1b"](2, 1, 4)))
    _, overrides = found(recipe, ["mesh.pp=2", "mesh.dp=2", "batch.micro_size=1", f"pipeline.order={file}"], 1, 2, 2)
    assert overrides == {1: ["mesh.dp=1", "pipeline.order=null"], 2: ["mesh.dp=2", f"pipeline.order={file}"]}
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.json"):
        found(recipe, ["mesh.pp=2", "mesh.dp=2", "pipeline.order=nowhere.json"], 1, 2, 2)
