"""Makes a rank of a live run fault when a file appears: ``FAULTS/PID`` with the kind of it. Python imports this at the
start of each process whose PYTHONPATH has this folder; nothing in the product knows of it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("FAULTS")


def _raises(*given: Any) -> Any:
    raise ValueError(f"injected into process {os.getpid()} at {time.time()}")


def _sleeps(*given: Any) -> Any:
    time.sleep(3600)


def _own_alone(own: Any, mesh: Any) -> Any:
    return own.clone()


def _fault_once(module: str, owner: str, name: str, fault: Callable[..., Any]) -> None:
    """Have the next call of a function do something else, and those after it what they did."""
    where: Any = sys.modules[module]
    where = getattr(where, owner) if owner else where
    call = getattr(where, name)

    def once(*given: Any, **more: Any) -> Any:
        setattr(where, name, call)
        return fault(*given)

    setattr(where, name, once)


def _inject(kind: str) -> None:
    step, trainer = "megacore.run.step", "megacore.run.trainer"
    match kind:
        case "raise":
            _fault_once(step, "TrainStep", "backward", _raises)
        case "raise in the update":
            _fault_once(step, "TrainStep", "update", _raises)
        case "raise in a save":
            _fault_once(trainer, "Trainer", "_save", _raises)
        case "abort":
            _fault_once(step, "TrainStep", "backward", lambda *given: os.abort())
        case "leave out":
            _fault_once(step, "", "total_loss", _own_alone)
        case "sleep in the loader":
            _fault_once("megacore.data.batches", "Batches", "microbatches_from", _sleeps)


def _listen(order: Path) -> None:
    while True:
        time.sleep(0.02)
        if order.exists():
            kind = order.read_text()
            order.unlink()
            _inject(kind)


if FOLDER and "MEGACORE_BEAT" in os.environ:
    threading.Thread(target=_listen, args=(Path(FOLDER) / str(os.getpid()),), name="faults", daemon=True).start()
