"""Launchers of others: what a run does when they start it again, and what their scripts and manifests say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import engine
import pytest
from engine import train, write_recipe
from pool import Pool

import megacore
from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.exits import MISUSED
from megacore.rank import restarts
from megacore.recovery.memory_checkpoints import MemoryCheckpoints
from megacore.recovery.protection import Beats, Pause
from megacore.store.weight_folders.index import INDEX
from megacore.training import metrics
from megacore.training.main import main
from megacore.training.resume import overrides_of_restart
from megacore.training.trainer import Callback, Trainer

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def tensors(out: Path) -> dict[str, bytes]:
    """Return the files of the weights and of the optimizer's state of a run's newest checkpoint."""
    folder = checkpoints.newest_of(out)
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


# -- torchrun


def torchrun(root: Path, *arguments: str) -> str:
    """What two ranks of the code in ``root`` say, which end well."""
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        cwd=root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.in_turn(12, 2)
@pytest.mark.slow
def test_torchrun_starts_a_run_again_and_it_ends_as_if_nothing_had_happened(pool: Pool, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    settings = ["mesh.tp=2", "train.steps=8", "evaluate.every=0", "checkpoint.every=4", "checkpoint.at_end=true"]
    settings += ["checkpoint.background=false"]
    said = torchrun(ROOT, "--max-restarts=1", str(HERE / "dies_once.py"), recipe, f"out={out}", *settings)
    assert "Resuming after step 4" in said, said
    undisturbed = tmp_path / "undisturbed"
    pool.run(2, train, recipe, [f"out={undisturbed}", *settings])
    assert tensors(out) and tensors(out) == tensors(undisturbed)


@pytest.mark.in_turn(12, 5)
@pytest.mark.slow
def test_without_the_room_of_recovery_a_run_trains_to_the_same_bytes(pool: Pool, tmp_path: Path) -> None:
    """Its folder is deleted, and torchrun starts the ranks."""
    for package in ("megacore", "models", "parallel"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "megacore" / "recovery")
    # Else an editable install would find that room where it has been installed from.
    site = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each).lower()]"
    (tmp_path / "sitecustomize.py").write_text(site)
    recipe, settings = write_recipe(tmp_path), ["zero.shard=optimizer", "checkpoint.at_end=true", "checkpoint.every=2"]
    torchrun(tmp_path, "-m", "megacore.training", recipe, f"out={tmp_path / 'without'}", *settings)
    pool.run(2, protected, recipe, [f"out={tmp_path / 'with'}", *settings], tmp_path)
    assert tensors(tmp_path / "without") == tensors(tmp_path / "with")
    losses = [metrics.curve(metrics.read(tmp_path / each / metrics.METRICS), "loss") for each in ("without", "with")]
    assert losses[0] and losses[0] == losses[1]


class Names(Callback):
    """Keeps the names of all callbacks of a run."""

    def on_start(self, run: Trainer) -> None:
        self.all = [type(each).__name__ for each in run.callbacks]


@pytest.mark.in_turn(2, 1)
def test_from_python_a_run_is_protected_too(tmp_path: Path) -> None:
    names = Names()
    assert megacore.train(write_recipe(tmp_path), [f"out={tmp_path / 'run'}", "train.steps=3"], [names]).step == 3
    kept = ["Pause", "MemoryCheckpoints", "Names"]
    assert [each for each in names.all if each in kept] == kept


def protected(recipe: str, overrides: list[str], root: Path) -> int:
    return engine.fit(recipe, overrides, [Beats(), Pause(), MemoryCheckpoints(root)])


@pytest.mark.parametrize(
    ("variables", "may"),
    [
        ({}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        # The count is of one node: the others, which restart as well, keep theirs.
        ({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "0"}, True),
        ({"RESTART_COUNT": "3"}, True),
        ({"RESTART_COUNT": ""}, False),
    ],
)
def test_a_rank_knows_that_its_run_may_have_been_started_before(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], may: bool
) -> None:
    for name in ("TORCHELASTIC_MAX_RESTARTS", "RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert restarts() == may


def test_a_run_that_is_started_again_goes_on_from_its_own_checkpoint_else_begins_as_before(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    first, other = [f"out={out}"], [f"out={out}", "checkpoint.resume=elsewhere/step-00000005"]
    assert overrides_of_restart(recipe, first) == [*first, f"checkpoint.resume={AUTO}"]
    assert overrides_of_restart(recipe, other) == other
    (checkpoint := checkpoints.path_of(checkpoints.folder_of(out), 3)).mkdir(parents=True)
    assert overrides_of_restart(recipe, other) == other  # it was not written to its end
    (checkpoint / INDEX).touch()
    assert overrides_of_restart(recipe, other) == [*other, f"checkpoint.resume={AUTO}"]


# -- Slurm

FAKES = {
    "srun": """
node=0
while [[ $1 == -* ]]; do echo "$1" >>options; shift; done
for name in $NODES; do
    SLURM_NODEID=$node SLURMD_NODENAME=$name "$@" & node=$((node + 1))
done
for ((; node; node--)); do wait -n || { ended=$?; ((ended > ${status:-0})) && status=$ended; }; done
echo over >>saved
exit ${status:-0}
""",
    "scontrol": 'if [[ $1 == show ]]; then printf "%s\\n" $NODES; else echo "$@" >>asked; fi',
}
"""Those of a cluster: srun runs its command once for each node and ends with the highest status, as Slurm's does."""
TRAINER = """#!/usr/bin/env bash
echo "$RESTART_COUNT $NODE_RANK/$NNODES $MASTER_ADDR $*" >>started
read -ra statuses <<<"$STATUSES"
# Slurm's notice reaches all processes of a step, and a trainer has its step to end and a checkpoint to write.
if ((statuses[NODE_RANK] == 143)); then kill -TERM $PPID; sleep 0.2; echo $NODE_RANK >>saved; fi
exit "${statuses[$NODE_RANK]}"
"""


class Cluster:
    """The script on two nodes, a and b, whose trainers end with given statuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "launch", folder / "launch")
        (folder / "bin").mkdir()
        for name, text in FAKES.items():
            _script(folder / "bin" / name, f"#!/usr/bin/env bash\n{text}")
        _script(folder / "launch" / "pretrain.sh", TRAINER)

    def run(self, statuses: str, life: int = 0, most: int = 10, least: str = "") -> tuple[int, list[str]]:
        """Return the status of the script, and what it has asked of Slurm."""
        (self.folder / "asked").unlink(missing_ok=True)
        variables = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "NODES": "a b",
            "STATUSES": statuses,
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "[a-b]",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_RESTART_COUNT": str(life) if life else "",
            "MAX_REQUEUES": str(most),
            "LEAST_NODES": least,
        }
        command = ["bash", str(self.folder / "launch" / "slurm.sbatch"), "recipe", "a b"]
        ended = subprocess.run(command, env=os.environ | variables, capture_output=True, check=False)
        asked = self.folder / "asked"
        return ended.returncode, asked.read_text().splitlines() if asked.exists() else []


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


WITHOUT_B = ["requeuehold 7", "update JobId=7 ExcNodeList=b", "release 7"]


@pytest.mark.parametrize(
    ("least", "statuses", "status", "asked"),
    [
        ("", "0 0", 0, []),
        ("", "1 1", 1, []),
        ("", "75 2", 75, []),  # who has said why it is, is believed, whatever that has done to the others
        ("", "130 130", 130, []),
        ("", "143 143", 143, ["requeue 7"]),
        ("", "75 75", 75, ["requeue 7"]),
        ("", "75 137", 137, ["requeue 7"]),
        ("", "75 76", 76, WITHOUT_B),
        ("", "143 76", 143, WITHOUT_B),
        # The node that leads others is believed.
        ("1", "0 0", 0, []),
        ("1", "0 143", 0, []),  # the second has left, or was lost, and the run has come to its end
        ("1", "0 137", 0, []),
        ("1", "143 143", 143, ["requeue 7"]),
        ("1", "143 2", 143, ["requeue 7"]),  # one that came did not fit
        ("1", "2 2", 2, []),
        ("1", "75 76", 75, WITHOUT_B),
    ],
)
def test_slurm_queues_again_what_a_retry_mends(
    tmp_path: Path, least: str, statuses: str, status: int, asked: list[str]
) -> None:
    assert Cluster(tmp_path).run(statuses, least=least) == (status, asked)
    if least:
        assert (tmp_path / "options").read_text().split()[:2] == ["--kill-on-bad-exit=0", "--no-kill"]
        assert all(" 0/1:2 " in line or " 1/1:2 " in line for line in (tmp_path / "started").read_text().splitlines())


def test_slurm_queues_again_so_often_for_a_fault_and_always_after_its_notice(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    assert cluster.run("75 76", 0, most=2)[1] == WITHOUT_B
    for life in (1, 2, 3):
        assert cluster.run("143 143", life, most=2)[1] == WITHOUT_B  # it stays out
        *_, first, second, over = (tmp_path / "saved").read_text().split()
        assert {first, second} == {"0", "1"} and over == "over"
    assert cluster.run("75 75", 4, most=2)[1] == WITHOUT_B
    assert cluster.run("75 75", 5, most=2) == (75, [])
    lives = [line.split()[0] for line in (tmp_path / "started").read_text().splitlines()]
    assert lives == [str(life) for life in range(6) for _ in range(2)]
    assert (tmp_path / "started").read_text().splitlines()[-1].endswith("/2 a recipe a b")


# -- accelerate launch


def test_one_process_of_several_that_accelerate_was_asked_for_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPUs it starts one, and hands --num_processes to nobody."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main([write_recipe(tmp_path), f"out={tmp_path / 'run'}", "mesh.tp=2"]) == MISUSED
    told = capsys.readouterr()
    assert "accelerate launch starts one process on CPUs" in told.out
    assert "cannot divide 1 ranks by pp x cp x ep x tp = 1 x 1 x 1 x 2 = 2: start 2 processes" in told.err
