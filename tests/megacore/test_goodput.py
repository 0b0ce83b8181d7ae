"""What is lost with a node, against every set of nodes; the formula of goodput, against simulated runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from megacore.devices import DEVICES
from megacore.plan.goodput import (
    DAY_S,
    LEVELS,
    LLAMA_3,
    RUNS,
    FaultCosts,
    FaultRates,
    _FaultyRun,
    best_interval,
    curves,
    daly,
    goodput,
    per_device,
    poisson,
    protections,
    simulate,
    speed,
    with_best_spares,
    young,
)
from megacore.plan.of_config import setting_of
from megacore.plan.setting import Setting
from megacore.plan.state import Shares, state
from megacore.plan.step_time import Cluster
from megacore.plan.survival import PeerCopies, Survival, image_bytes, piece_holders
from megacore.recipe import load
from models.registry import configure
from parallel.copies import holders, identical

COSTS = FaultCosts(notice=1800, detect=3, restart=150, rebuild=25, stall=2, publish=20, step=5)


def setting(*overrides: str) -> Setting:
    config = load(
        "launch/recipes/quickstart.yaml",
        [*(f"mesh.{dim}=1" for dim in ("pp", "dp", "ep", "cp", "tp")), "batch.global_size=48", *overrides],
    )
    return setting_of(config, configure(config.model), config.mesh.model_ranks * (config.mesh.dp or 1), "cuda")


LAYOUTS = (
    ("mesh.dp=8",),
    ("mesh.dp=8", "zero.shard=optimizer"),
    ("mesh.dp=8", "zero.shard=parameters", "zero.replicas=2"),
    ("mesh.dp=2", "mesh.tp=2", "mesh.pp=2"),
    ("mesh.dp=6", "mesh.tp=2", "zero.shard=gradients"),
    ("mesh.tp=2", "mesh.pp=4"),
)


@pytest.mark.quick
@pytest.mark.parametrize("overrides", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("per_node", [2, 3, 4])
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_lost_with_nodes(overrides: tuple[str, ...], per_node: int, copies: bool) -> None:
    """Looked at for every set of nodes: an image is lost where all that have it, and keep it, are."""
    s = setting(*overrides)
    where, alike = Survival.of(s, per_node, copies), identical(s.layout, s.shard, s.replicas)
    kept = holders(alike, per_node) if copies else {}
    having = {same: {*same, *(kept[rank] for rank in same if rank in kept)} for same in set(alike.values())}
    nodes = -(-s.layout.mesh.world // per_node)
    assert where.nodes == nodes
    for count in range(nodes + 1):
        lost = [
            ended
            for ended in combinations(range(nodes), count)
            if any(all(rank // per_node in ended for rank in ranks) for ranks in having.values())
        ]
        assert [ended for ended in combinations(range(nodes), count) if where.loses(ended)] == lost
        assert where.fatal_share(count) == pytest.approx(len(lost) / len(list(combinations(range(nodes), count))))
        assert bool(lost) == (count > where.any_at_once)
    for node in range(nodes):
        alone = {same for same in having if {rank // per_node for rank in same} == {node}}
        assert set(where.one_node[node]) == alone


@pytest.mark.quick
@pytest.mark.parametrize("overrides", LAYOUTS, ids="-".join)
def test_an_image_is_all_that_a_rank_updates(overrides: tuple[str, ...]) -> None:
    """It is the state without gradients, of which each rank has a slice where some of it is split."""
    s = setting(*overrides)
    shares = Shares.of(s)
    split = s if s.shard == "none" else replace(s, shard="parameters")
    for size, stage in zip(image_bytes(s, shares), shares.stages, strict=True):
        all_of_it = state(stage, split)
        assert size == all_of_it.total - all_of_it.gradients
    distinct = len(set(identical(s.layout, s.shard, s.replicas).values()))
    pieces = list(piece_holders(s, shares))
    assert {each.state for each in pieces if "norm" not in each.name} == {s.layout.mesh.world // distinct}
    assert all(each.values >= each.state for each in pieces)


@pytest.mark.quick
def test_copies_take_no_more_than_their_share() -> None:
    s, cluster = setting("mesh.dp=8", "zero.shard=optimizer"), Cluster(DEVICES["h100-80"], 989.4)
    shares, where = Shares.of(s), Survival.of(s, 2)
    for step_s in (1e-4, 1e-2, 10.0):
        cost = PeerCopies.of(s, shares, where, cluster, step_s, 0.01)
        assert cost is not None and cost.ranks == 8
        assert cost.seconds <= 0.01 * step_s * cost.every
        assert cost.every == 1 or cost.seconds > 0.01 * step_s * (cost.every - 1)
    assert PeerCopies.of(s, shares, Survival.of(s, 8), cluster, 1.0, 0.01) is None


@pytest.mark.quick
@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("stall", [0.5, 30.0])
def test_no_other_interval_has_more_goodput(rate: float, stall: float) -> None:
    faults, costs = FaultRates(1 / rate, 1.0, 0.0), replace(COSTS, stall=stall, publish=0.0, step=1e-3)
    disk = protections(costs, *(Survival(1, {0: (0,)}, {}),) * 2, None, 1)[1]
    best = best_interval(rate, stall)
    most = goodput(disk, 1, faults, costs)
    assert most.interval == best
    for other in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert goodput(disk, 1, faults, costs, best * other).share < most.share
    assert abs(daly(rate, stall) / best - 1) < max(abs(young(rate, stall) / best - 1), 1e-6)


@pytest.mark.quick
def test_published_rates() -> None:
    """1,000 GPUs of which 0.01 % fail in a day are faulty every 10 days, not every 10 hours."""
    assert round(54 * DAY_S / (LLAMA_3 / 2048)) == 419
    assert round(per_device(0.01, 8) / (1000 / 8) / DAY_S, 6) == 10


RATES = {
    "rare": FaultRates(100 * DAY_S, 0.78, 600),
    "often": FaultRates(0.5 * DAY_S, 0.78, 1200),
    "long away": FaultRates(40 * DAY_S, 0.78, DAY_S),
    "mostly processes": FaultRates(2 * DAY_S, 0.1, 600),
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize(
    "overrides", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[2], ("mesh.dp=24", "mesh.tp=2", "zero.shard=optimizer")], ids="-".join
)
def test_the_formula_is_within_the_error_of_simulated_runs(rates: str, overrides: tuple[str, ...]) -> None:
    s, faults = setting(*overrides), RATES[rates]
    bare, copied = Survival.of(s, 2, copies=False), Survival.of(s, 2)
    cost = PeerCopies((0,), 1, 0.5, 10) if copied.copies else None
    for level in protections(COSTS, bare, copied, cost, replica=1):
        best = with_best_spares if level.name == LEVELS[-1] else goodput
        expected = best(level, bare.nodes, faults, COSTS)
        seen = simulate(expected.protection, bare.nodes, faults, COSTS, expected.interval)
        assert abs(seen.share - expected.share) < 4 * seen.error + 0.001, (level.name, expected.share, seen)


@pytest.mark.quick
@pytest.mark.parametrize("node_s", [3.0, 30.0, 1e-3])
@pytest.mark.parametrize("away", [1.0, DAY_S])
def test_faults_that_come_faster_than_a_level_recovers_leave_nothing(
    node_s: float, away: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the simulation ends: 400 faults of each run, and ten times as many where they break into recoveries."""
    s, faults, struck = setting("mesh.dp=8"), FaultRates(node_s, 0.5, away), list[int]()
    strike = _FaultyRun._strike

    def counted(run: _FaultyRun) -> tuple[int, bool]:
        struck.append(1)
        return strike(run)

    monkeypatch.setattr(_FaultyRun, "_strike", counted)
    where = Survival.of(s, 1, copies=False)
    for level in protections(COSTS, where, Survival.of(s, 1), None, replica=1):
        struck.clear()
        expected = goodput(level, 8, faults, COSTS)
        seen = simulate(level, 8, faults, COSTS, expected.interval)
        assert abs(seen.share - expected.share) < 4 * seen.error + 0.01 and expected.share < 0.1
        assert RUNS * 400 <= len(struck) <= RUNS * (10 * 400 + 2)


@pytest.mark.quick
def test_faults_that_wait_until_all_nodes_are_there() -> None:
    """Between two of them stand the recovery of the first, its node's absence, and then the time that faults take."""
    s = setting("mesh.dp=8")
    where = Survival.of(s, 1, copies=False)
    level = next(each for each in protections(COSTS, where, Survival.of(s, 1), None, replica=1) if each.survival)
    often = FaultRates(8 * 10.0, 0.0, apart=True)
    seen = simulate(level, 8, often, COSTS, 600.0)
    least, most = ((10 - lost) / (10 + level.in_place_s) for lost in (COSTS.step / 2 + 0.2, 0.0))
    assert least < seen.share < most and simulate(level, 8, replace(often, apart=False), COSTS, 600.0).share < least / 2
    seldom = FaultRates(8 * 10.0, 1.0, DAY_S, apart=True)
    assert abs(simulate(level, 8, seldom, COSTS, 600.0).share - 7 / 8) < 0.02


@pytest.mark.quick
def test_each_level_is_worth_more_than_the_one_before() -> None:
    s = setting("mesh.dp=24", "mesh.tp=2", "zero.shard=optimizer")
    levels = protections(
        COSTS, Survival.of(s, 2, copies=False), Survival.of(s, 2), PeerCopies((0,), 1, 0.01, 1), replica=1
    )
    drawn = dict(curves(levels, (24, 96, 384), FaultRates(20 * DAY_S, 0.78, 3600), COSTS))
    assert list(drawn) == list(LEVELS)
    for before, after in pairwise(LEVELS):
        for worse, better in zip(drawn[before], drawn[after], strict=True):
            # Without copies a run whose optimizer is split gets over ends of processes no better than restarts do.
            assert better >= worse - 0.001, (before, after)


@pytest.mark.quick
def test_spares_are_worth_what_they_save() -> None:
    """The best number is the best of all; speed goes by whole replicas of the nodes that are left."""
    s = setting("mesh.dp=8")
    level = protections(COSTS, Survival.of(s, 1, copies=False), Survival.of(s, 1), None, replica=16)[-1]
    assert speed(level, 2048, 1) == speed(level, 2048, 16) == 127 / 128
    assert speed(replace(level, spares=1), 2048, 1) == speed(replace(level, spares=9), 2048, 3) == 1
    assert sum(chance for _, chance in poisson(6.05)) == pytest.approx(1)
    faults = FaultRates(away_s=DAY_S)
    best = with_best_spares(level, 2048, faults, COSTS)
    tried = [goodput(replace(level, spares=spares), 2048, faults, COSTS).share for spares in range(40)]
    assert best.share == max(tried) == tried[best.protection.spares] > tried[0] + 0.002
    assert with_best_spares(level, 2048, replace(faults, away_s=1.0), COSTS).protection.spares == 0
