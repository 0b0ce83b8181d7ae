"""A real run in which a rank stands still: it is found within its phase's limit, told and ended."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from engine import write_recipe

from megacore.launcher import Node, launch
from megacore.recovery import watch
from megacore.recovery.phases import Reading
from megacore.recovery.watch import HangWatch
from parallel.weights.layout import MeshShape

ROOT = Path(__file__).parents[2]
TIMEOUT = 600.0

HANG = """
import os, re, signal, sys, time
from pathlib import Path
from megacore.data.batches import Batches
from megacore.training import train
from megacore.training.step import TrainStep
from megacore.training.trainer import Asked, Trainer

kind, *arguments = sys.argv[1:]

def stand(call, given):
    Path(os.environ["SAID"]).write_text(str(time.monotonic()))
    match kind:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "holds the interpreter":
            re.match("(a+)+$", "a" * 50 + "b")  # a loop in C
        case "sleeps in the loader":
            time.sleep(60)
        case "leaves out a collective":
            return Asked(False, False, False)
    return call(*given)

def hangs_in(owner, name, number):
    call, calls = getattr(owner, name), [0]
    def wrapped(*given):
        calls[0] += 1
        return stand(call, given) if calls[0] == number else call(*given)
    setattr(owner, name, wrapped)

if os.environ["RANK"] == "1":
    match kind:
        case "leaves out a collective":
            hangs_in(Trainer, "_listen", 35)
        case "sleeps in the loader":
            hangs_in(Batches, "microbatches_from", 35)
        case _:
            hangs_in(TrainStep, "backward", 35)
sys.exit(train.main(arguments))
"""
MARGIN_S = 15.0
"""The seconds for stacks, the end of the others, and a machine that is busy."""
SAID = {
    "stopped": r"Rank 1 \(dp=1\) has stood in `forward` for \d+ s; rank 0 waits for it in all_reduce \d+ of dp:",
    "holds the interpreter": r"Rank 1 \(dp=1\) has stood in `forward` for \d+ s; rank 0 waits for it in all_reduce",
    "sleeps in the loader": r"Rank 1 \(dp=1\) has stood in `data` for \d+ s; rank 0 waits for it in all_reduce \d+ of",
    "leaves out a collective": r"Rank 1 \(pp=1\) has left out all_reduce \d+ of pp, and waits in `take` \(pipeline/run",
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.in_turn(len(SAID), at)) for at, kind in enumerate(SAID)]
)
def test_a_rank_that_stands_still_is_found_and_ended(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within the limit of its phase and what a look takes; who waits for it and where is said, and kept."""
    (tmp_path / "hanging.py").write_text(HANG)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    dim = "pp" if kind.startswith("leaves") else "dp"
    out = tmp_path / "run"
    settings = [f"out={out}", f"mesh.{dim}=2", "train.steps=2000", "evaluate.every=0", "log.every=50"]
    seen = list[Reading]()
    real = watch.read

    def noted(path: Path) -> Reading | None:
        if (found := real(path)) is not None:
            seen.append(found)
        return found

    monkeypatch.setattr(watch, "read", noted)
    eye = HangWatch(out, MeshShape(**{dim: 2}), TIMEOUT)
    status = launch("hanging", [kind, write_recipe(tmp_path), *settings], Node(2), {"OMP_NUM_THREADS": "1"}, hangs=eye)
    took = time.monotonic() - float((tmp_path / "said").read_text())
    shown = capfd.readouterr().err
    assert status == 137 and re.search(SAID[kind], shown), shown
    slowest = max(max(each.slowest.values(), default=0.0) for each in seen)
    assert took < 5 * slowest + 1 + MARGIN_S, (took, slowest)
    (report,) = (out / "hangs").glob("*-rank-1.txt")
    text = report.read_text()
    assert str(report) in shown and "rank 0, " in text and "not ended: all_reduce" in text
    answers = {"stopped": "The stacks of rank 1:\n  it does not answer", "holds the interpreter": "re/__init__.py"}
    assert answers.get(kind, "trainer.py") in text
