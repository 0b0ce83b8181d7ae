"""The collectives that a rank has entered, asked for by its agent where no step is done. No torch is imported.

A thread of the rank sleeps at a socket in the agent's folder, and answers with a file from torch's flight recorder. It
counts the collectives of each group, on gloo as on NCCL, and on NCCL has the messages between two. Its main thread may
wait for others meanwhile. A rank that is stopped, or whose interpreter is held, does not answer.

On NCCL the host is ahead: it has entered collectives that its device has yet to come to. Whether the device has begun
one is known where each has an event before it (``TORCH_NCCL_ENABLE_TIMING=1``, which torch leaves out by default).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from megacore.outcome import rank_file
from megacore.recovery.beats import Place
from megacore.store.io.files import replacing

_PENDING = 4
"""The pending collectives of a group that are told: the first ones, for the others come after them."""
_ALIKE = ("all_reduce", "broadcast", "reduce")
"""The kinds that all ranks of a group call with as many numbers of one type."""
_FILES: Final = ("ask", "answer")
_MESSAGE = re.compile(r"nccl:(send|recv) (\d+)(?:->|<-)(\d+)")
SEND, RECEIVE = "send", "recv"
"""The kinds of messages from one rank to another."""

Call = tuple[str, str]
"""A collective as a rank has called it: ("all_reduce", "2 Double"); of a kind that ranks may call with more or fewer
numbers no size."""


class GroupLog(NamedTuple):
    """The collectives of one group that a rank has entered, or the messages from one rank to another.

    Args:
        ranks: The ranks of the group; of messages the sender and the receiver, whose kinds are :data:`SEND` and
            :data:`RECEIVE`.
        last: The number of the newest one; the first is 1. Messages are numbered anew from the first that has not
            ended, and kept until then.
        kind: That of the newest.
        pending: {number: call} of those that have not ended, the first few.
        entered: The place of the first of these among all that the host has entered for its GPU; -1 where there is
            none.
        begun: Whether the device has begun it; None where that is not known.
    """

    ranks: tuple[int, ...]
    last: int
    kind: str
    pending: Mapping[int, Call]
    entered: int = -1
    begun: bool | None = None


def answer(folder: Path, device: Callable[[], Place | None] = lambda: None) -> None:
    """Start the thread of this rank that answers its agent, also with the place that the device has come to, where that
    is known; none where one runs, or the path is too long for a socket."""
    with suppress(OSError):
        asked, answered = (rank_file(folder, kind, os.getpid()) for kind in _FILES)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(asked))
        threading.Thread(
            target=_answer, args=(listening, answered, device), name="flight-recorder", daemon=True
        ).start()


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


def read(folder: Path, pid: int) -> tuple[dict[str, GroupLog], Place | None] | None:
    """Read what the process of a rank has answered to :func:`ask`, {group: its collectives} and the place of its
    device; None where it has not yet."""
    try:
        told = json.loads(rank_file(folder, "answer", pid).read_bytes())
    except (OSError, ValueError):
        return None
    groups = {
        name: GroupLog(tuple(ranks), last, kind, {int(number): tuple(call) for number, call in pending.items()}, *first)
        for name, (ranks, last, kind, pending, *first) in told["groups"].items()
    }
    return groups, None if told["device"] is None else tuple(told["device"])


def _answer(listening: socket.socket, answered: Path, device: Callable[[], Place | None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while listening.recv(1):
        with suppress(Exception), replacing(answered, durable=False) as file:  # it is not what a run may end by
            file.write(json.dumps({"device": device(), "groups": groups()}).encode())


def groups() -> dict[str, GroupLog]:
    """Return {group: its log} of this process as the flight recorder has it; messages from one rank to another have a
    name of their own."""
    torch, made = map(sys.modules.get, ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d"))
    if torch is None or made is None:
        return {}
    world = made._world
    ranks = {world.pg_names[group]: sorted(found) for group, found in [*world.pg_group_ranks.items()]}
    found = dict[str, GroupLog]()
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(torch, dump):
            found |= logs(json.loads(getattr(torch, dump)()).get("entries", ()), ranks)
    return found


def logs(entries: Sequence[Mapping[str, Any]], ranks: Mapping[str, Sequence[int]]) -> dict[str, GroupLog]:
    """Return {group: its log} of what the flight recorder has of a backend; ``ranks``: those of each group.

    Of messages that have gone in a batch the recorder notes no end: they are left out.
    """
    timed = any(entry.get("time_discovered_started_ns") for entry in entries)
    batched = {entry["process_group"][0] for entry in entries if entry["is_p2p"] and "coalesced" in _kind(entry)}
    calls: dict[tuple[str, tuple[int, ...]], dict[int, tuple[Call, Mapping[str, Any]]]] = {}
    messages = dict[str, str]()
    for entry in entries:
        name = entry["process_group"][0]
        if not entry["is_p2p"]:
            group = name, tuple(ranks.get(name, ()))
            calls.setdefault(group, {})[entry["collective_seq_id"]] = _call(entry), entry
        elif (found := _MESSAGE.fullmatch(entry["profiling_name"])) and name in ranks and name not in batched:
            own, other = (ranks[name][int(place)] for place in found.group(2, 3))
            kind, way = found.group(1), (own, other) if found.group(1) == SEND else (other, own)
            of_pair = calls.setdefault((f"{name} {way[0]}>{way[1]}", way), {})
            messages[f"{name} {way[0]}>{way[1]}"] = kind
            if not _has_ended(entry):
                of_pair[len(of_pair) + 1] = (kind, ""), entry
    told = dict[str, GroupLog]()
    for (name, members), entered in calls.items():
        pending = {number: each for number, each in sorted(entered.items()) if not _has_ended(each[1])}
        _, first = next(iter(pending.values()), ((), {}))
        begun = first["state"] == "started" if first and timed else None
        last = max(entered, default=0)
        kind = messages.get(name) or entered[last][0][0]
        shown = {number: call for number, (call, _) in [*pending.items()][:_PENDING]}
        on_gpu = first and first["profiling_name"].startswith("nccl:")
        told[name] = GroupLog(members, last, kind, shown, first["record_id"] if on_gpu else -1, begun)
    return told


def _has_ended(entry: Mapping[str, Any]) -> bool:
    """On NCCL a thread retires what it finds ended, later."""
    return bool(entry["retired"]) or entry["state"] == "completed"


def _kind(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _call(entry: Mapping[str, Any]) -> Call:
    """Return ("all_reduce", "2 Double") of an entry of "gloo:all_reduce"."""
    kind = _kind(entry)
    tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=True) if kind in _ALIKE else ()
    return kind, ", ".join(f"{math.prod(sizes)} {of}" for sizes, of in tensors)
