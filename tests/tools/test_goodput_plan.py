"""`megacore plan --goodput`: what it prints, what it takes from a run, and what it refuses."""

import json
from pathlib import Path

import pytest

from megacore import incidents
from megacore.incidents import Incident
from megacore.planning.goodput import LEVELS
from megacore.tools.main import main
from megacore.tools.plan_goodput import measured_costs

ASKED = ["plan", "launch/recipes/quickstart.yaml", "--gpu", "cpu", "--gpus-per-node", "2", "mesh.tp=1", "mesh.pp=1"]
SPLIT = [*ASKED, "mesh.dp=4", "batch.global_size=32", "zero.shard=optimizer", "--goodput"]

MET = [
    Incident("killed", "restart", rank=1, at=100.0, seconds_lost=2.0),
    Incident("node_lost", "restart", node=1, at=200.0, seconds_lost=6.0),
    Incident("non_finite", "repeat", at=300.0, seconds_lost=500.0),
    Incident("straggler", "tell", at=400.0, seconds_lost=99.0),
    Incident("raised", "end", at=500.0),
]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*SPLIT, *arguments]) == 0
    return capsys.readouterr().out


def test_the_plan_tells_what_is_left(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "goodput.png"
    said = printed(capsys, "--faults", "0.01", "--away", "86400", "--picture", str(picture), "checkpoint.every=50")
    assert "4 devices on 2 nodes; a node is faulty every 5,000.0 days (0.010% of all devices in a day)" in said
    assert "the run every 6.8 years" in said
    assert "Two are kept, and two of another node" in said
    assert all(f"\n  {level}  " in said for level in LEVELS)
    assert "As the recipe has it, with one on disk every " in said
    assert " would be best (Daly): " in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    memory = printed(capsys, "recovery.memory=false", "checkpoint.every=50")
    assert "As the recipe has it, without checkpoints in memory, with one on disk every " in memory
    alone = printed(capsys, "--gpus-per-node", "4", "checkpoint.every=0")
    assert "After 0.78 of all faults the run goes on from disk, for the one node is lost" in alone
    assert "As the recipe" not in alone


def test_what_a_run_has_met_replaces_what_is_assumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, not_durable: None
) -> None:
    for each in MET:
        incidents.write(tmp_path, each)
    given = ("--cost", "load_disk=50", "--together", "0.25", "--overhead", "0.5")
    data = json.loads(printed(capsys, "--json", "--incidents", str(tmp_path), *given))
    costs, sources = data["costs"], data["sources"]
    assert (costs["restart"], costs["load_memory"], costs["load_disk"]) == (4.0, 0.0, 50.0)
    assert (sources["restart"], sources["load_disk"]) == (f"measured in {tmp_path}", "given")
    found = [(each["level"], each["from_disk"]) for each in data["levels"]]
    assert found == list(zip(LEVELS, (1, 1, 0.25), strict=True))
    assert data["checkpoint"]["every"] == 1 and data["checkpoint"]["of_rank"] <= data["checkpoint"]["of_node"]
    assert measured_costs(MET[2:]) == {}
    assert main([*SPLIT, "--incidents", "elsewhere"]) == 2
    assert "--incidents elsewhere: it has no restart after which it went on" in capsys.readouterr().err


def test_options_of_goodput_are_not_passed_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = str(tmp_path / "goodput.png")
    for more in (), ("--fit", "GPU=h100-80"), ("--fit", "GPU=h100-80", "--goodput"):
        assert main([*ASKED, "--overhead", "0.5", "--away", "3", *more]) == 2
        shown = capsys.readouterr()
        assert "--away, --overhead belong to --goodput: give that, and no --fit" in shown.err and not shown.out
    for given in (SPLIT, ASKED):  # of goodput, and of memory
        assert main([*given, "--picture", picture]) == 0
        assert f"{picture}: a picture, " in capsys.readouterr().err
        Path(picture).unlink()
    assert main([*ASKED, "--picture", picture, "--fit", "GPU=h100-80"]) == 2
    assert "leave out --fit and --trace" in capsys.readouterr().err and not Path(picture).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mtbf", "0"), "'0' is not a number above 0"),
        (("--hardware", "78"), "'78' is not a share, above 0 and up to 1"),
        (("--cost", "save=3"), "'save=3' is not NAME=SECONDS with a name of notice, detect, restart, load_memory"),
        (("--cost", "stall=soon"), "'soon' is not a number above 0"),
        (("--mtbf", "10", "--faults", "1"), "not allowed with argument --mtbf"),
    ],
)
def test_what_it_refuses(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SPLIT, *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err
