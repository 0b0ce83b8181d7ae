"""The collectives that a rank has entered, asked for by its agent where no step is done. No torch is imported.

A thread of the rank sleeps at a socket in the agent's folder, and answers with a file from torch's flight recorder. It
counts the collectives of each group, on gloo (but for messages between two) as on NCCL. Its main thread may wait for
others meanwhile. A rank that is stopped, or whose interpreter is held, does not answer.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megacore.outcome import rank_file
from megacore.store.io.files import replacing

_PENDING = 4
"""The pending collectives of a group that are told: the first ones, for the others come after them."""
_ALIKE = ("all_reduce", "broadcast", "reduce")
"""The kinds that all ranks of a group call with as many numbers of one type."""
_FILES: Final = ("ask", "answer")

Call = tuple[str, str]
"""A collective as a rank has called it: ("all_reduce", "2 Double"); of a kind that ranks may call with more or fewer
numbers no size."""


@dataclass(frozen=True)
class GroupLog:
    """The collectives of one group that a rank has entered.

    Args:
        last: The number of the newest one; the first is 1.
        pending: {number: call} of those that have not ended, the first few.
    """

    ranks: tuple[int, ...]
    last: int
    kind: str
    pending: Mapping[int, Call]


def answer(folder: Path, device_step: Callable[[], int] = lambda: -1) -> None:
    """Start the thread of this rank that answers its agent; none where one runs, or the path is too long for a socket.

    Args:
        device_step: Returns the last step that the device has done of those that it was late with; -1 where there is
            none. It is a part of the answer.
    """
    with suppress(OSError):
        asked, answered = (rank_file(folder, kind, os.getpid()) for kind in _FILES)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(asked))
        arguments = listening, answered, device_step
        threading.Thread(target=_answer, args=arguments, name="flight-recorder", daemon=True).start()


def ask(folder: Path, pid: int) -> bool:
    """Ask the process of a rank -> whether it may answer."""
    asked, answered = (rank_file(folder, kind, pid) for kind in _FILES)
    try:
        answered.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.sendto(b"?", socket.MSG_DONTWAIT, str(asked))
    except OSError:  # it does not listen yet, or not any more
        return False
    return True


def read(folder: Path, pid: int) -> tuple[dict[str, GroupLog], int] | None:
    """Read what the process of a rank has answered to :func:`ask`, {group: its collectives} and the step of its device;
    None where it has not yet."""
    try:
        told = json.loads(rank_file(folder, "answer", pid).read_bytes())
    except (OSError, ValueError):
        return None
    groups = {
        name: GroupLog(tuple(ranks), last, kind, {number: (called, size) for number, called, size in pending})
        for name, (ranks, last, kind, pending) in told["groups"].items()
    }
    return groups, told["device"]


def _answer(listening: socket.socket, answered: Path, device_step: Callable[[], int]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while listening.recv(1):
        with suppress(Exception), replacing(answered, durable=False) as file:  # it is not what a run may end by
            file.write(json.dumps({"device": device_step(), "groups": groups()}).encode())


def groups() -> dict[str, tuple[list[int], int, str, list[tuple[int, str, str]]]]:
    """Return {group: (ranks, last, kind, pending)} of this process as the flight recorder has it, for JSON."""
    torch, made = map(sys.modules.get, ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d"))
    if torch is None or made is None:
        return {}
    world = made._world
    ranks = {world.pg_names[group]: sorted(found) for group, found in [*world.pg_group_ranks.items()]}
    calls: dict[str, dict[int, tuple[Call, bool]]] = {}
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        trace = json.loads(getattr(torch, dump)()) if hasattr(torch, dump) else {}
        for entry in trace.get("entries", ()):
            if not entry["is_p2p"]:
                of_group = calls.setdefault(entry["process_group"][0], {})
                of_group[entry["collective_seq_id"]] = _call(entry), entry["retired"]
    found = {}
    for name, entered in calls.items():
        pending = [(number, *call) for number, (call, ended) in sorted(entered.items()) if not ended]
        found[name] = ranks.get(name, []), max(entered), entered[max(entered)][0][0], pending[:_PENDING]
    return found


def _call(entry: Mapping[str, Any]) -> Call:
    """Return ("all_reduce", "2 Double") of an entry of "gloo:all_reduce"."""
    kind = str(entry["profiling_name"]).rpartition(":")[2]
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=True) if kind in _ALIKE else ()
    return kind, ", ".join(f"{math.prod(sizes)} {of}" for sizes, of in tensors)
