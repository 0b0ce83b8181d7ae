"""Makes a process of a live run fault when a file appears, ``FAULTS/PID`` with the kind of it; ``PID.done`` tells when.
Python imports this at the start of each process whose PYTHONPATH has this folder; nothing in the product knows."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("FAULTS")
STEP, TRAINER, LIFE = "megacore.training.step", "megacore.training.trainer", "megacore.training.life"


def _tell() -> None:
    made = Path(str(FOLDER)) / f"{os.getpid()}.making"
    made.write_text(str(time.monotonic()))
    made.rename(made.with_suffix(".done"))


def _replace(module: str, owner: str, name: str, fault: Callable[..., Any], once: bool = True) -> None:
    """Have a function do something else: ``fault`` is given it, and what it is given."""
    where: Any = sys.modules[module]
    where = getattr(where, owner) if owner else where
    call = getattr(where, name)

    def instead(*given: Any, **more: Any) -> Any:
        if once:
            setattr(where, name, call)
            _tell()
        return fault(call, *given, **more)

    setattr(where, name, instead)
    if not once:
        _tell()


def _raises(call: Any, *given: Any, **more: Any) -> Any:
    raise ValueError(f"injected into process {os.getpid()} at {time.time()}")


def _sleeps(call: Any, *given: Any) -> Any:
    time.sleep(3600)


def _holds(call: Any, *given: Any) -> Any:
    while True:  # whoever asks where it stands interrupts a sleep
        ctypes.PyDLL(None).sleep(3600)


def _aborts(call: Any, *given: Any, **more: Any) -> Any:
    os.abort()


def _own_alone(call: Any, own: Any, mesh: Any) -> Any:
    return own.clone()


def _flip(tensor: Any) -> None:
    """Flip a bit of the fraction, or of its highest byte, of some element in the middle."""
    import torch

    flat = tensor.view(-1)
    at = len(flat) // 2
    one = flat[at : at + 1].clone()
    one.view(torch.uint8)[tensor.element_size() - 2] ^= 1 << 3
    flat[at : at + 1] = one


def _flips_a_weight(call: Any, step: Any, *given: Any) -> Any:
    _flip(step.gradients.parts[0].data)
    return call(step, *given)


def _flips_a_moment(call: Any, step: Any, *given: Any) -> Any:
    from megacore.training.states.store import MOMENTS

    _flip(step.optimizer.store.of(step.gradients.parts[0], MOMENTS[1])[...])
    return call(step, *given)


def _flips_a_gradient(call: Any, step: Any, *given: Any) -> Any:
    _flip(step.gradients.parts[0].gradient)  # it is summed
    return call(step, *given)


def _flips_a_copy(call: Any, copies: Any, step: int) -> Any:
    for rank, versions in copies.images.items():
        if rank != copies._rank:
            for image in versions.values():
                image.bytes[len(image.bytes) // 2] ^= 8
    return call(copies, step)


def _is_no_number(call: Any, *given: Any, **more: Any) -> Any:
    return call(*given, **more) * float("nan")


def _poisoned() -> Callable[..., Any]:
    """Return what gives no number for the first microbatch that it sees, whenever that comes."""
    poison = set[bytes]()

    def train(call: Any, pipeline: Any, microbatches: Any, *given: Any, **more: Any) -> Any:
        seen = [microbatch.tokens.numpy().tobytes() for microbatch in microbatches]
        poison.update(seen[: not poison])
        result = call(pipeline, microbatches, *given, **more)
        return result * float("nan") if poison & set(seen) else result

    return train


def _takes_twice_as_long(call: Any, *given: Any, **more: Any) -> Any:
    before = time.thread_time()
    result = call(*given, **more)
    until = 2 * time.thread_time() - before
    while time.thread_time() < until:
        pass
    return result


def _move_the_clock(seconds: float) -> None:
    clock = time.time
    time.time = lambda: clock() + seconds
    _tell()


FAULTS: dict[str, tuple[str, str, str, Callable[..., Any]]] = {
    "raise": (STEP, "TrainStep", "backward", _raises),
    "raise in the update": (STEP, "TrainStep", "update", _raises),
    "raise in a save": (TRAINER, "Trainer", "_save", _raises),
    "raise in a recovery": (LIFE, "", "recovered", _raises),
    "abort in a recovery": (LIFE, "", "recovered", _aborts),
    "abort": (STEP, "TrainStep", "backward", _aborts),
    "leave out": (STEP, "", "total_loss", _own_alone),
    "sleep in the loader": ("megacore.data.batches", "Batches", "microbatches_from", _sleeps),
    "hold the GIL": (STEP, "TrainStep", "backward", _holds),
    "flip a weight": (STEP, "TrainStep", "backward", _flips_a_weight),
    "flip a moment": (STEP, "TrainStep", "backward", _flips_a_moment),
    "flip a gradient": (STEP, "TrainStep", "update", _flips_a_gradient),
    "flip a copy": ("megacore.training.copies", "Copies", "begin", _flips_a_copy),
    "NaN once": ("parallel.pipeline.run", "Pipeline", "train", _is_no_number),
}
"""{kind: the function that it replaces, once}."""


def _inject(kind: str) -> None:
    match kind:
        case "clock +1 h":
            _move_the_clock(3600)
        case "clock -1 h" | "clock of a rank":
            _move_the_clock(-3600)
        case "poisoned sample":
            _replace("parallel.pipeline.run", "Pipeline", "train", _poisoned(), once=False)
        case "straggler":
            _replace("parallel.pipeline.run", "Pipeline", "train", _takes_twice_as_long, once=False)
        case _:
            _replace(*FAULTS[kind])


def _listen() -> None:
    order = Path(str(FOLDER)) / str(os.getpid())
    while True:
        time.sleep(0.02)
        if order.exists():
            kind = order.read_text()
            order.unlink()
            _inject(kind)


def _start() -> None:
    threading.Thread(target=_listen, name="faults", daemon=True).start()


if FOLDER:
    _start()
    os.register_at_fork(after_in_child=_start)  # threads are not inherited
