"""`megacore plan --goodput`: what it prints, what it takes from a run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.plan.goodput import LEVELS
from megacore.recovery import incidents
from megacore.recovery.events import Event
from megacore.recovery.policy import Budgets, Decision, Incident, decide
from tools.goodput import measured_costs
from tools.main import main

ASKED = ["plan", "launch/recipes/quickstart.yaml", "--gpu", "cpu", "--gpus-per-node", "2", "mesh.tp=1", "mesh.pp=1"]
SPLIT = [*ASKED, "mesh.dp=4", "batch.global_size=32", "zero.shard=optimizer", "--goodput"]

MET = [
    Incident(Event("killed", 1), Decision("replace", "", 1), seen_after=0.3, seconds_lost=1.0),
    Incident(Event("killed", 1), Decision("replace", "", 1), seen_after=0.5, seconds_lost=2.0),
    Incident(Event("agent_lost", node=1), Decision("evict", "", node=1), seconds_lost=6.0),
    Incident(Event("killed", 1), Decision("restart", ""), seconds_lost=40.0),
    Incident(Event("straggler", 1), Decision("tell", ""), seconds_lost=99.0),
    Incident(Event("raised", 1), Decision("end", "")),
]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*SPLIT, *arguments]) == 0
    return capsys.readouterr().out


def test_the_plan_tells_which_nodes_may_end_and_what_is_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "goodput.png"
    said = printed(capsys, "--faults", "0.01", "--away", "86400", "--picture", str(picture))
    assert "4 devices on 2 nodes; a node is faulty every 5,000.0 days (0.010% of all devices in a day)" in said
    assert "the run every 2,500.0 days" in said
    assert "From replicas alone: 2 of 2 nodes may not end." in said
    assert "With copies on other nodes: any 1 node may end at once; of 2 at once 1 of all sets may not" in said
    assert all(f"\n  {level}  " in said for level in LEVELS)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_a_run_has_met_replaces_what_is_assumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, not_durable: None
) -> None:
    for each in MET:
        written = incidents.write(tmp_path, each.event, each.decision, "life", each.seen_after)
        if each.seconds_lost is not None:
            incidents.recovered(tmp_path, written.number, 9.0, each.steps_lost or 0, each.seconds_lost)
    bad = Event("non_finite", step=7)
    step = incidents.write(tmp_path, bad, decide(bad, (), Budgets()))
    incidents.recovered(tmp_path, step.number, 9.0, 0, 500.0)  # no group is made anew for a step done again
    data = json.loads(printed(capsys, "--json", "--incidents", str(tmp_path), "--cost", "restart=50"))
    assert (data["costs"]["detect"], data["costs"]["rebuild"], data["costs"]["restart"]) == (0.4, 2.0, 50.0)
    assert (data["sources"]["rebuild"], data["sources"]["restart"]) == (f"measured in {tmp_path}", "given")
    assert [each["level"] for each in data["levels"]] == list(LEVELS)
    for each in data["levels"]:
        assert abs(each["goodput"] - each["simulated"]) < 4 * each["error"] + 0.001
    assert data["any_at_once"] == {"replicas": 0, "copies": 1}
    assert measured_costs(MET[:1]) == {"rebuild": 1.0, "detect": 0.3}
    assert main([*SPLIT, "--incidents", "elsewhere"]) == 2
    assert "--incidents elsewhere: it has no fault that was got over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mtbf", "0"), "'0' is not a number above 0"),
        (("--hardware", "78"), "'78' is not a share, above 0 and up to 1"),
        (("--cost", "save=3"), "'save=3' is not NAME=SECONDS with a name of notice, detect, restart"),
        (("--cost", "stall=soon"), "'soon' is not a number above 0"),
        (("--mtbf", "10", "--faults", "1"), "not allowed with argument --mtbf"),
    ],
)
def test_what_it_refuses(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SPLIT, *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err
