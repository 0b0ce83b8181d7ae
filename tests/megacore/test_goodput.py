"""The formula of goodput, against runs that are simulated fault by fault; and what a plan says by it."""

import json
import math
import random
import statistics
from typing import Any

import pytest

from megacore.devices import DEVICES
from megacore.planning.goodput import NODE_S, best_interval, goodput
from megacore.tools.main import main

QUICKSTART = ["plan", "launch/recipes/quickstart.yaml", "mesh.tp=1", "mesh.pp=1"]
SPLIT = [*QUICKSTART, "--gpus-per-node", "2", "mesh.dp=4", "batch.global_size=32", "zero.shard=optimizer"]


def simulated(rate: float, work: float, stall: float, publish: float, restart: float, chance: random.Random) -> float:
    """Return the share of the time that is work of a run of many segments, whose checkpoints become whole beside the
    segments that follow."""
    clock, done, kept, whole_at, fault = 0.0, 0, 0, math.inf, chance.expovariate(rate)
    while kept < 400:
        end = clock + work + stall
        if whole_at <= min(fault, end):
            kept = done
        if fault > end:
            clock, done, whole_at = end, done + 1, end + publish
            continue
        clock, done, whole_at = fault, kept, math.inf
        while (again := chance.expovariate(rate)) < restart:
            clock += again
        clock += restart
        fault = clock + chance.expovariate(rate)
    return kept * work / clock


@pytest.mark.quick
@pytest.mark.parametrize("rate", [1 / 7200, 1 / 1200, 1 / 600])
def test_the_formula_is_within_the_error_of_simulated_runs(rate: float) -> None:
    for work, stall, publish, restart in ((120.0, 1.0, 8.0, 73.0), (900.0, 40.0, 200.0, 960.0)):
        chance = random.Random(f"{rate} {work}")
        shares = [simulated(rate, work, stall, publish, restart, chance) for _ in range(16)]
        error = statistics.stdev(shares) / 4
        expected = goodput(rate, work, stall, publish, restart)
        assert abs(statistics.mean(shares) - expected) < 4 * error + 0.004, (expected, statistics.mean(shares), error)


@pytest.mark.quick
def test_no_other_interval_has_more_goodput() -> None:
    """Daly's is an approximation: it is a thousandth of the goodput away from the best, at the most."""
    for rate in (1e-6, 1e-4, 1e-2):
        for stall in (0.5, 30.0):
            best = best_interval(rate, stall)
            most = goodput(rate, best, stall, 0.0, 0.0)
            for other in (0.2, 0.5, 0.7, 0.9, 1.1, 1.5, 2.0, 5.0):
                assert goodput(rate, best * other, stall, 0.0, 0.0) < most * 1.001, (rate, stall, other)


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*SPLIT, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_says_what_is_left_and_how_often_to_save(capsys: pytest.CaptureFixture[str]) -> None:
    """From memory a copy is no more than its share of the time; from disk a save is whole before the next begins."""
    data = planned(capsys, "checkpoint.every=0", "recovery.overhead=0.001")
    x, beside, rate, step = data["survival"], data["beside"], 2 / (4 * NODE_S), data["time"]["total"]
    restart = 63 + beside["start"]["seconds"] + beside["resume"]["seconds"]
    assert x["in_memory"] and x["node_s"] == 4 * NODE_S  # of 8 devices, and these nodes have 2
    assert x["interval"] - step < x["stall"] / 0.001 <= x["interval"] and x["interval"] > 5 * step
    assert beside["save"]["busiest"] / DEVICES["h100-80"].host < x["stall"]  # replicas send each other what ZeRO splits
    assert x["share"] == pytest.approx(goodput(rate, x["interval"], x["stall"], 0.0, restart), rel=1e-9)
    assert x["best_interval"] == best_interval(rate, x["stall"])
    often = planned(
        capsys, "--mtbf", "0.002", "checkpoint.every=5000", "recovery.memory=false", "checkpoint.background=false"
    )
    y, save, rate = often["survival"], often["beside"]["save"], 2 / 172.8
    assert (y["in_memory"], y["interval"], y["stall"]) == (False, save["interval"], save["seconds"])
    assert y["share"] == pytest.approx(goodput(rate, y["interval"], y["stall"], 0.0, restart), rel=1e-9)
    assert y["share"] < y["best_share"] < 0.6 and y["best_interval"] < y["interval"]


def test_the_table_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    alone = [*QUICKSTART, "--gpu", "cpu", "--mtbf", "5", "checkpoint.every=0"]
    assert main(alone) == 0
    head, best, *others = capsys.readouterr().out.partition("\nGoodput, ")[2].splitlines()
    assert head.endswith("if a node is faulty every 5.0 days (--mtbf)") and others[0] == "" and len(others) == 2
    assert "% from disk alone with one every " in best  # no other node keeps what this one has in memory
    assert main([*SPLIT, "checkpoint.every=0"]) == 0
    assert "% with one checkpoint in memory every " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*alone, "--mtbf", "0"])
    assert "'0' is not a number above 0" in capsys.readouterr().err
