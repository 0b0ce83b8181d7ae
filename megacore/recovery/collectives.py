"""The collectives that a rank has entered, asked for by its agent while the rank stands still. No torch is imported.

A thread of the rank sleeps at a socket in the agent's folder, and answers from torch's flight recorder, which counts
the collectives of each group, on gloo (but for messages between two) as on NCCL. Its main thread may wait for others
meanwhile. A rank that is stopped, or whose interpreter is held, does not answer.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT_S = 0.5
"""The seconds that an agent waits for answers."""
_LARGEST = 1 << 16
_PENDING = 4
"""The pending collectives of a group that are told: the first ones, for the others come after them."""
_ALIKE = ("all_reduce", "broadcast", "reduce")
"""The kinds that all ranks of a group call with as many numbers of one type."""


@dataclass(frozen=True)
class Call:
    """A collective as a rank has called it.

    Args:
        kind: Its kind, "all_reduce" say.
        size: Its numbers and their type, "2 Double", of a kind that all ranks call with as many.
        usual: Whether this rank has called such a one right after the same one before.
    """

    kind: str
    size: str = ""
    usual: bool = True

    def fits(self, other: Call) -> bool:
        """Return whether another rank can have called the same collective so."""
        return (self.kind, self.size) == (other.kind, other.size)


@dataclass(frozen=True)
class GroupLog:
    """The collectives of one group that a rank has entered.

    Args:
        ranks: The group's.
        last: The number of the newest one; the first is 1.
        kind: Its kind, "all_reduce" say.
        pending: {number: call} of those that have not ended, the first few.
    """

    ranks: tuple[int, ...]
    last: int
    kind: str
    pending: Mapping[int, Call]


def answer(beat: Path) -> None:
    """Start the thread of a rank that answers its agent, beside the file of its beat; none where the path is too long
    for a socket."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        listening.bind(str(_ask_at(beat)))
    except OSError:
        listening.close()
        return
    threading.Thread(target=_answer, args=(listening,), name="collectives", daemon=True).start()


def ask(folder: Path, beats: Mapping[int, Path], patience_s: float = WAIT_S) -> dict[int, dict[str, GroupLog]]:
    """Ask ranks for their collectives -> {rank: {group: what it has entered there}} of those that have answered.

    Args:
        folder: The agent's, for the answers.
        beats: {rank: the file of its beat}.
        patience_s: The seconds to wait for answers.
    """
    with tempfile.TemporaryDirectory(dir=folder) as made, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            asking.bind(f"{made}/answers")
        except OSError:
            return {}
        asked = {rank for rank, beat in beats.items() if _asked(asking, _ask_at(beat), rank)}
        found = dict[int, dict[str, GroupLog]]()
        deadline = time.monotonic() + patience_s
        while len(found) < len(asked) and (left := deadline - time.monotonic()) > 0:
            asking.settimeout(left)
            try:
                said = json.loads(asking.recv(_LARGEST))
            except TimeoutError:
                break
            found[said["rank"]] = {
                name: GroupLog(tuple(ranks), last, kind, {number: Call(*call) for number, *call in pending})
                for name, (ranks, last, kind, pending) in said["groups"].items()
            }
    return found


def _ask_at(beat: Path) -> Path:
    return beat.with_name(f"ask-{beat.name}")


def _asked(asking: socket.socket, at: Path, rank: int) -> bool:
    try:
        asking.sendto(str(rank).encode(), socket.MSG_DONTWAIT, str(at))
    except OSError:  # it has not begun to listen, or does not any more
        return False
    return True


def _answer(listening: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    while True:
        asked, agent = listening.recvfrom(_LARGEST)
        said = {"rank": int(asked), "groups": groups()}
        try:
            listening.sendto(json.dumps(said).encode(), agent)
        except OSError:  # the agent has lost its patience
            continue


def groups() -> dict[str, tuple[list[int], int, str, list[tuple[int, str, str, bool]]]]:
    """Return {group: (ranks, last, kind, pending)} of this process as the flight recorder has it, for JSON."""
    torch, made = (
        sys.modules.get(name) for name in ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")
    )
    if torch is None or made is None:
        return {}
    try:
        ranks = {made._world.pg_names[group]: sorted(found) for group, found in [*made._world.pg_group_ranks.items()]}
    except (AttributeError, KeyError):  # another torch, or groups that are being made
        ranks = {}
    entered: dict[str, list[Mapping[str, Any]]] = {}
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (trace := getattr(torch, dump, None)) is not None:
            for entry in _of_this_generation(json.loads(trace()).get("entries", ())):
                entered.setdefault(entry["process_group"][0], []).append(entry)
    found = {}
    for name, entries in entered.items():
        entries.sort(key=lambda entry: entry["collective_seq_id"])
        pending = [(entry["collective_seq_id"], *call) for entry, call in _calls(entries) if not entry["retired"]]
        last = entries[-1]
        found[name] = ranks.get(name, []), last["collective_seq_id"], _kind(last), pending[:_PENDING]
    return found


def _of_this_generation(entries: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Give the collectives of the newest groups: those of earlier ones, of the same names, are never forgotten."""
    newest: dict[str, int] = {}
    for entry in entries:
        for name in entry["process_group"]:
            newest[name] = max(entry["pg_id"], newest.get(name, 0))
    since = newest.get("default_pg", 0)  # the first that is made
    for entry in entries:
        if not entry["is_p2p"] and entry["pg_id"] >= max(since, newest[entry["process_group"][0]]):
            yield entry


def _calls(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], tuple[str, str, bool]]]:
    """Give the collectives of a group, in their order, with the fields of the :class:`Call` of each."""
    seen, before = set[tuple[str, ...]](), ("", "")
    for entry in entries:
        kind = _kind(entry)
        tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=True) if kind in _ALIKE else ()
        call = kind, ", ".join(f"{math.prod(sizes)} {of}" for sizes, of in tensors)
        yield entry, (*call, (*before, *call) in seen)
        seen.add((*before, *call))
        before = call


def _kind(entry: Mapping[str, Any]) -> str:
    """Return "all_reduce" of "gloo:all_reduce"."""
    return str(entry["profiling_name"]).rpartition(":")[2]
