"""A rank to which something happens: the module that the launcher of :mod:`live` starts, as it would any rank.

{"slow": {"forward": {"2": 3.0}}, "rank": 1}     3 s in the forward of step 2, on rank 1
{"die": {"7": 1}, "once": "FILE"}                rank 1 kills itself in step 7, unless FILE says that it has
{"flip": {"7": 1}, "seed": 3, "once": "FILE"}    a bit of what rank 1 holds flips before step 7, likewise
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megacore.recovery.memory_checkpoints import MemoryCheckpoints
from megacore.recovery.protection import protection
from megacore.training import build
from megacore.training.callbacks.replicas import held_tensors
from megacore.training.main import main
from megacore.training.step import Phase
from megacore.training.trainer import Callback, Trainer

VARIABLE, MEMORY = "CAMPAIGN", "CAMPAIGN_MEMORY"


class Happens(Callback):
    """Does what the variable says, and tells the process of this rank and its steps."""

    def __init__(self, what: dict[str, Any], pids: Path) -> None:
        self._what, self._pids, self._entered = what, pids, set[tuple[int, str]]()

    def on_start(self, run: Trainer) -> None:
        self._pids.mkdir(parents=True, exist_ok=True)
        with (self._pids / f"rank-{run.mesh.rank}").open("a") as file:
            file.write(f"{os.getpid()} {run.step}\n")

    def on_step_begin(self, run: Trainer) -> None:
        (self._pids / f"step-{run.mesh.rank}").write_text(str(run.step))
        if self._is_due(run, "die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_due(run, "flip"):
            draw = random.Random(self._what["seed"])
            whole = [each for _, _, each in held_tensors(run) if isinstance(each, torch.Tensor) and each.numel()]
            flat = draw.choice([each for each in whole if each.is_contiguous()]).view(torch.uint8).view(-1)
            flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(8)

    def _is_due(self, run: Trainer, what: str) -> bool:
        """Return whether something is to happen to this rank in this step, which has not happened yet."""
        if self._what.get(what, {}).get(str(run.step)) != run.mesh.rank:
            return False
        with open(self._what["once"], "a+") as file:
            file.seek(0)
            if str(run.step) in file.read().split():
                return False
            file.write(f"{run.step} ")
        return True

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        step = run.step + (phase == "data")
        if self._what.get("rank", run.mesh.rank) == run.mesh.rank and (step, phase) not in self._entered:
            self._entered.add((step, phase))
            steps = self._what.get("slow", {}).get(phase, {})
            time.sleep(steps.get(str(step), steps.get("every", 0.0)))


if __name__ == "__main__":
    what = json.loads(os.environ.get(VARIABLE) or "{}")
    out = next(each for each in sys.argv if each.startswith("out=")).removeprefix("out=")
    pids = Path(f"{out}-pids")
    if MEMORY in os.environ:  # on machines of their own they have it at the same path
        build._agree = lambda *_: None
    guards = [each for each in protection() if not isinstance(each, MemoryCheckpoints)]
    memory = MemoryCheckpoints(Path(os.environ[MEMORY])) if MEMORY in os.environ else MemoryCheckpoints()
    status = main(sys.argv[1:], [Happens(what, pids), *guards, memory])
    sys.exit(status)
