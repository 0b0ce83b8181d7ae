"""The launch scripts: what they make of their arguments and of the environment, and what is said before ranks start."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from engine import LLAMA, RECIPE, write_recipe
from test_chat_training import write as chats_recipe

from megacore.launcher import Node, threads
from megacore.launcher import command as program
from megacore.models.registry import configure
from megacore.recipe import ConfigError, load
from megacore.resources import gpus
from megacore.store.tensor_files.tensors import TensorFile
from megacore.training import main, resume

ROOT = Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
printf '%q ' "$PYTHONSAFEPATH" "$@" >>"{log}"; echo >>"{log}"
"""
Launched = Callable[..., tuple[int, Any]]
Dry = Callable[..., tuple[int, str]]


def calls(root: Path, script: str, *arguments: str) -> list[list[str]]:
    """How a script of a checkout calls Python, as if Megacore had been installed: one that only writes that down."""
    venv = root / "venv"
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin" / "python").write_text(PYTHON.format(log=venv / "calls"))
    (venv / "bin" / "python").chmod(0o755)
    install = f'source launch/lib.sh && fingerprint >"$venv/.megacore-run" && exec launch/{script}.sh "$@"'
    command = ["bash", "-c", install, "bash", *arguments]
    subprocess.run(command, cwd=root, env=os.environ | {"MEGACORE_VENV": str(venv)}, check=True)
    return [shlex.split(line) for line in (venv / "calls").read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts need of a checkout."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """``launched(argument, ..., VARIABLE=value, ...)`` -> (status, what the launcher was given, if it came to that)."""
    for name in (
        "NNODES",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NPROC_PER_NODE",
        "SHUTDOWN_TIMEOUT",
        "RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, **variables: str) -> tuple[int, program.TrainingJob | None]:
        given = list[program.TrainingJob]()

        def launched(run: program.TrainingJob, arrived: list[int]) -> int:
            given.append(run)
            return 7

        with monkeypatch.context() as patch:
            patch.setattr(program, "_launched", launched)
            patch.setattr(program, "prepare", lambda modules, environment: None)
            for name, value in variables.items():
                patch.setenv(name, value)
            return program.run("train", arguments), given[0] if given else None

    return run


PIP = """#!/usr/bin/env bash
echo 'WARNING: Running pip as root' >&2
echo 'Collecting torch'; echo '  Downloading torch-2.whl.metadata (1 kB)'; echo '  Downloading torch-2.whl (900 MB)'
echo 'Installing collected packages: torch, megacore'
[[ -z "$FAILS" || "$*" != *install* ]] || { echo 'ERROR: No space left' >&2; exit 1; }
"""


@pytest.mark.parametrize("fails", ["", "yes"])
def test_installing_shows_what_comes_and_keeps_the_rest(checkout: Path, fails: str) -> None:
    venv = checkout / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(PIP)
    (venv / "bin" / "python").chmod(0o755)
    command = ["bash", "-c", "set -euo pipefail; source launch/lib.sh; prepare run"]
    environment = os.environ | {"MEGACORE_VENV": str(venv), "FAILS": fails}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    first, *shown = done.stderr.splitlines()
    assert f"Installing into {venv}" in first and "install.log" in first and done.stdout == ""
    assert shown[:2] == ["  Downloading torch-2.whl (900 MB)", "  Installing 2 packages"]
    assert "WARNING: Running pip as root" in (venv / "install.log").read_text()
    assert (done.returncode, len(shown) > 2, "ERROR: No space left" in shown) == (
        (1, True, True) if fails else (0, False, False)
    )
    assert (venv / ".megacore-run").exists() is (not fails)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("script", "command"), [("pretrain", "train"), ("finetune", "finetune")])
def test_scripts_hand_everything_to_the_command(checkout: Path, script: str, command: str) -> None:
    expected = ["1", "-m", "megacore.tools.main", command, "a b", "--init=c"]
    assert calls(checkout, script, "a b", "--init=c") == [expected]


def test_the_quickstart_leaves_runs_that_are_there_alone(checkout: Path) -> None:
    runs = checkout / "elsewhere"
    (checkout / "runs").symlink_to(runs)
    (runs / "quickstart/data").mkdir(parents=True)
    (runs / "quickstart/data/stdlib.idx").touch()
    given = ["1", "-m", "megacore.tools.main", "train", "launch/recipes/quickstart.yaml"]
    assert calls(checkout, "quickstart", "--help")[-1] == [*given, "out=runs/quickstart", "--help"]
    for there, following in {"quickstart": "quickstart-2", "quickstart-2": "quickstart-3"}.items():
        (runs / there / "checkpoints").mkdir(parents=True)
        for name in ("config.yaml", "metrics.jsonl", "loss.png"):
            (runs / there / name).touch()
        before = sorted(runs.rglob("*"))
        assert calls(checkout, "quickstart", "a=b c")[-1] == [*given, f"out=runs/{following}", "a=b c"]
        assert sorted(runs.rglob("*")) == before
    assert calls(checkout, "quickstart", "--resume", "auto")[-1] == [*given, "out=runs/quickstart", "--resume", "auto"]


@pytest.mark.parametrize(
    ("command", "given", "overrides"),
    [
        ("train", ["r.yaml", "train.steps=3"], ["train.steps=3"]),
        ("train", ["r.yaml", "--init", "a b", "train.steps=3"], ["train.steps=3", "checkpoint.init=a b"]),
        ("train", ["--resume=auto", "r.yaml", "--init=x=y"], ["checkpoint.init=x=y", "checkpoint.resume=auto"]),
        (
            "finetune",
            ["r.yaml", "--init", "a", "--export=b c", "a=1"],
            ["a=1", "checkpoint.init=a", "checkpoint.export=b c"],
        ),
    ],
)
def test_options_become_overrides(command: str, given: list[str], overrides: list[str]) -> None:
    assert program.arguments(command, given) == ("r.yaml", overrides, False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "usage: megacore train"),
        (["r.yaml", "--resume"], "argument --resume: expected one argument"),
        (["--resume", "auto"], "required: recipe"),
        (["r.yaml", "--export", "x"], "there is no option --export"),
        (["--resum=auto"], "there is no option --resum: did you mean --resume?"),
        (["r.yaml", "--mesh.tp=2"], "keys of the recipe have no dashes before them (mesh.tp=2)"),
    ],
)
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], given: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as ended:
        program.run("train", given)
    assert ended.value.code == 2 and told in capsys.readouterr().err


# -- nothing is started to see what would be


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Dry:
    """``dry(command, argument, ...)`` -> (status, what is said) of ``--dry-run``, which changes no file."""

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    def run(command: str, *arguments: str) -> tuple[int, str]:
        before, names = files(), sorted(tmp_path.rglob("*"))
        status = program.run(command, [*arguments, "--dry-run"])
        assert files() == before and sorted(tmp_path.rglob("*")) == names
        return status, "".join(capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    for name in ("prepare", "_launched"):
        monkeypatch.setattr(program, name, mock.Mock(side_effect=AssertionError("something was started")))
    return run


def test_a_dry_run_says_what_the_run_then_does(dry: Dry, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path, RECIPE | {"checkpoint": {"at_end": True}}), tmp_path / "run"
    given = [recipe, f"out={out}", "train.steps=3", f"checkpoint.export={tmp_path / 'hf'}"]
    status, said = dry("train", *given)
    assert status == 0 and said.endswith("Nothing of this was started or written.\n")
    assert main.main(given) == 0
    tokens = max(json.loads(line).get("tokens", 0) for line in (out / "metrics.jsonl").read_text().splitlines())
    files = map(TensorFile.open, (out / "checkpoints" / "step-00000003").rglob("*.safetensors"))
    size = sum(entry.stop - entry.start for file in files for entry in file.entries.values())
    kept = f"checkpoints {out / 'checkpoints'}, every 1,000 steps and at the end, {size:,} bytes of tensors each"
    told = ["ranks 1, all here", "steps 1 to 3", f"in a step, {tokens} in all", f"{tmp_path / 'hf'}, when", kept]
    assert [each for each in told if each not in re.sub(" +", " ", said)] == []
    more = ["train.steps=5", "checkpoint.resume=auto", "checkpoint.at_end=false"]
    status, said = dry("train", recipe, f"out={out}", *more)
    assert status == 0 and "Resuming after step 3" in said and re.search("steps +4 to 5\n", said)


def test_a_dry_run_refuses_what_a_run_does(dry: Dry, tmp_path: Path) -> None:
    recipe = chats_recipe(tmp_path)
    assert dry("train", recipe)[0] == 0  # prepared elsewhere
    (tmp_path / "chats.jsonl").write_text('{"no": "messages"}\n')
    status, said = dry("finetune", recipe, "mesh.tp=3")
    assert status == 2 and all(each in said for each in ("starts from a model", "tp=3", "chats.jsonl"))


def test_a_run_is_started_on_as_many_ranks_as_its_mesh_takes(launched: Launched, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    status, given = launched(recipe, f"out={tmp_path / 'run'}", "mesh.tp=2", MALLOC_TRIM_THRESHOLD_="5")
    assert status == 7 and given.node == Node(2) and given.shutdown_s == 600
    assert given.arguments(1, False) == [recipe, f"out={tmp_path / 'run'}", "mesh.tp=2"]
    assert given.environment.items() >= threads(2).items()
    assert given.environment["MALLOC_TRIM_THRESHOLD_"] == "5"
    assert given.environment["MALLOC_MMAP_THRESHOLD_"] == str(1 << 30)
    assert given.environment["CUDA_MODULE_LOADING"] == "EAGER"
    assert given.environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert given.environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_what_torch_compiles_lies_where_no_other_user_writes(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recipe, name = write_recipe(tmp_path), "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.delenv(name, raising=False)  # torch sets it, in a process that has compiled
    arguments = recipe, f"out={tmp_path / 'run'}", "train.compile=true"
    assert name not in launched(*arguments[:2])[1].environment
    assert launched(*arguments)[1].environment[name] == str(tmp_path / f"megacore-{os.getuid()}" / "torchinductor")
    assert launched(*arguments, TORCHINDUCTOR_CACHE_DIR="mine")[1].environment[name] == "mine"
    (tmp_path / f"megacore-{os.getuid()}").chmod(0o777)
    assert launched(*arguments)[1].environment[name] == str(tmp_path / "run" / "torchinductor")


def test_the_environment_says_how_many_and_where(launched: Launched, tmp_path: Path) -> None:
    arguments = [write_recipe(tmp_path), f"out={tmp_path / 'run'}"]
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host", "SHUTDOWN_TIMEOUT": "5"}
    status, given = launched(*arguments, NPROC_PER_NODE="2", **several)
    assert status == 7 and given.node == Node(2, 2, 1, ("host", 29500), 2) and given.shutdown_s == 5
    assert not given.layouts and "GLOO_SOCKET_IFNAME" not in given.environment
    assert launched(*arguments, MASTER_PORT="77", **several)[1].node == Node(1, 2, 1, ("host", 77), 2)
    range_of = {**several, "NNODES": "1:2", "NODE_RANK": ""}
    given = launched(*arguments, "mesh.dp=2", **range_of)[1]
    assert given.node.least == 1 and given.node.index == 2, "whoever has no number is not the first one"
    assert given.arguments(1, False)[-1] == "mesh.dp=1" and given.arguments(2, False)[-1] == "mesh.dp=2"


def test_layouts_of_a_model_that_a_checkpoint_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe names none: its layouts on one and on two nodes are known all the same."""
    recipe, model = write_recipe(tmp_path), configure(LLAMA)
    source = SimpleNamespace(config=model, raw=model.to_hugging_face(), path=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(resume, "find", lambda config, checked: SimpleNamespace(source=source))
        assert [*program._layouts(load(recipe, ["model=null"]), 1, 2, 1)] == [1, 2]
    with pytest.raises(ConfigError, match="model: there is none"):
        program._layouts(load(recipe, ["model=null"]), 1, 2, 1)
    with pytest.raises(ConfigError, match=r"checkpoint: .*nowhere"):
        program._layouts(load(recipe, ["model=null", "checkpoint.init=nowhere"]), 1, 2, 1)


def test_a_run_that_was_started_before_goes_on_from_its_newest_checkpoint(launched: Launched, tmp_path: Path) -> None:
    arguments = [write_recipe(tmp_path), f"out={tmp_path / 'run'}"]
    assert launched(*arguments, RESTART_COUNT="0")[1].given == arguments
    assert launched(*arguments, RESTART_COUNT="1")[1].given == [*arguments, "checkpoint.resume=auto"]


def test_gpus_are_counted_without_torch_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # whoever imports it fails
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("there is a driver")
    assert gpus() == 0


def test_threads_share_the_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads(count)["OMP_NUM_THREADS"] for count in (1, 4, 8)] == ["6", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(4)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("overrides", "variables", "told"),
    [
        (["trian.steps=3"], {}, "trian: unknown key"),
        (["data.train=nowhere", "mesh.tp=3"], {}, "4 problems in the config"),
        (["mesh.tp=2"], {"NPROC_PER_NODE": "3", "NNODES": "1"}, "cannot divide 3 ranks"),
        ([], {"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 also needs MASTER_ADDR, the host of node 0"),
        ([], {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK, 0 to 1 on each"),
        ([], {"NNODES": "two"}, "NNODES (two): must be a whole number from 1 on"),
    ],
)
def test_problems_are_said_once_before_anything_starts(
    launched: Launched,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    variables: dict[str, str],
    told: str,
) -> None:
    status, given = launched(write_recipe(tmp_path), f"out={tmp_path / 'run'}", *overrides, **variables)
    assert status == 2 and not given and not (tmp_path / "run").exists()
    shown = capsys.readouterr()
    assert told in shown.err and not shown.out
