"""Reports of who stands where while no step is done. They end nobody: the end of a hang is a collective's timeout.

The agent looks at the beats of its ranks several times a second. Where none of them has moved for long, it asks for
stacks and collectives, in a thread of its own, and says in one line who stands and who waits for it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megacore.background import Result, in_background
from megacore.gpus import gpu_in_words
from megacore.incidents import Incident
from megacore.outcome import rank_file
from megacore.parallel.weights.layout import MeshShape
from megacore.places import along, listed, place
from megacore.recovery import flight_recorder
from megacore.recovery.beats import UNBORN, UPDATED, Place, Reading, done_at, read
from megacore.recovery.flight_recorder import RECEIVE, SEND, GroupLog
from megacore.recovery.standing import Witness, doing, judge, where
from megacore.recovery.stragglers import Stragglers
from megacore.say import err
from megacore.store.io.files import replacing
from megacore.store.io.strict_json import StoreError, read_json

LEAST_S = 60.0
"""The seconds without a step after which it is said, at least."""
START_S = 600.0
"""The same before the first step is done: it loads, connects and compiles."""
STEPS = 10
"""The slowest steps that the ranks may stand for, at least."""
ASIDE = 2
"""The longest saves, or batches of an evaluation, that they may."""
SHARE = 0.75
"""The share of a collective's timeout after which it is said at the latest: the timeout ends what stacks would show."""
AWAKE_S = 0.5
"""The most seconds that count between two looks: the agent may have slept, and the ranks with it."""
NAMED = 2
"""The most ranks whose GPUs are described."""
STACKS_S = 2.0
"""The seconds that ranks have for stacks and answers, and drivers for the state of a GPU."""
WRITE_S = 5.0
"""The seconds that are waited for a file: the disk may be what the ranks wait for."""

Answer = tuple[Mapping[str, GroupLog], Place | None]
"""The collectives of each group of a rank, and the place that its device has come to; None where that is not known."""


def now_of(out: Path, node: str = "") -> Path:
    """Return the file of a run's folder that says who stands on a node; it is there while somebody does."""
    return out / "hangs" / (f"now-{node}.json" if node else "now.json")


def standing(out: Path) -> list[tuple[float, str]]:
    """Return (when it was said, what) of each node of a run on which ranks stand.

    A launcher that was killed leaves its file behind: what is older than the newest step is not so any more.
    """
    found = list[tuple[float, str]]()
    for path in sorted((out / "hangs").glob("now*.json")):
        with suppress(StoreError, KeyError, TypeError, ValueError):
            now = read_json(path, out)
            found.append((float(now["at"]), " ".join(str(now["text"]).split())))
    return found


def bound_s(readings: Collection[Reading], timeout_s: float = math.inf) -> float:
    """Return the seconds for which ranks may stand before that is said, by the beats of all ranks here; a collective
    may take ``timeout_s``."""
    slowest = max((each.slowest for each in readings), default=0.0)
    longest = max((each.longest for each in readings), default=0.0)
    started = all(each.slowest for each in readings)
    found = max(LEAST_S, STEPS * slowest, ASIDE * longest) if started else max(LEAST_S, START_S)
    return min(found, SHARE * timeout_s)


@dataclass
class HangReport:
    """Looks at the ranks of one agent; :meth:`poll` is called from its loop, and never waits.

    Seconds count in which this process was awake as well: what stops the whole machine, or starves it, is no hang.
    Reports go to ``hangs`` in the run's folder, and :meth:`poll` gives incidents to ``report``.
    """

    out: Path
    folder: Path
    shape: MeshShape | None
    node: str
    report: Callable[[Incident], object]
    timeout_s: float = math.inf
    _ranks: Mapping[int, int] = field(default_factory=dict, init=False)
    _seen: dict[int, Witness] = field(default_factory=dict, init=False)
    _looks: int = field(default=0, init=False)
    """The looks that were taken since a rank has moved: each has twice the time of the one before."""
    _told: bool = field(default=False, init=False)
    _devices: Mapping[int, Place] = field(default_factory=dict, init=False)
    """{rank: the place that its device had come to when it was last asked}"""
    _found: deque[Incident] = field(default_factory=deque, init=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False)
    _looking: threading.Thread | None = field(default=None, init=False)
    _slow: Stragglers | None = field(default=None, init=False)
    _at: float = field(default_factory=time.monotonic, init=False)

    def poll(self, ranks: Mapping[int, int]) -> None:
        """Look at the ranks that live, {rank: process}, and say who stands, if somebody does."""
        if ranks != self._ranks:
            self._ranks, self._seen, self._devices = dict(ranks), {}, {}
            self._slow = Stragglers(self.shape, self.report) if self.shape is not None else None
        while self._found:
            self.report(self._found.popleft())
        moved = self._look()
        readings = {rank: each.reading for rank, each in self._seen.items()}
        if self._slow is not None:
            self._slow.see(readings)
        if moved:
            self._looks = 0
            if self._told:
                self._told = False
                self._in_background(lambda: _in_time(now_of(self.out, self.node).unlink, WRITE_S))
        still = min((each.stood for each in self._seen.values()), default=0.0)
        bound = bound_s(readings.values(), self.timeout_s)
        if still >= bound * 2**self._looks and not (self._looking is not None and self._looking.is_alive()):
            self._looks += 1
            self._looking = self._in_background(self._tell)

    def brief(self) -> str:
        """Return where the ranks are, in one line."""
        if not (seen := self._seen):
            return "no rank runs here"
        done = min(each.reading.done for each in seen.values())
        told = f"step {done} is done" if done >= 0 else "no step is done yet"
        return f"{told}; {where(seen, sorted(seen), self.shape, self.node)}"

    def show(self) -> None:
        """Say where every rank is, with its stacks, in a thread: ranks that are stopped are waited for."""
        ranks = self._ranks

        def tell() -> None:
            stacks, _ = self._asked(ranks)
            err(self.brief())
            for rank, pid in sorted(ranks.items()):
                stands = stacks.get(rank) or "  it does not answer"
                err(f"\n{place(rank, self.shape, self.node)} (process {pid}) stands here:\n{stands}")

        self._in_background(tell)

    def _in_background(self, do: Callable[[], object]) -> threading.Thread:
        def in_turn() -> None:
            with self._turn, suppress(OSError):  # the agent's folder may be gone
                do()

        made = threading.Thread(target=in_turn, name="hang-report", daemon=True)
        made.start()
        return made

    def _read(self, pid: int) -> Reading:
        return read(rank_file(self.folder, "beat", pid)) or UNBORN

    def _look(self) -> bool:
        """Read all beats -> whether a rank has moved. Who has not has stood for as long as nobody slept meanwhile."""
        now = time.monotonic()
        awake, self._at = min(now - self._at, AWAKE_S), now
        seen = dict[int, Witness]()
        for rank, pid in self._ranks.items():
            reading, last = self._read(pid), self._seen.get(rank)
            stands = last is not None and _place(last.reading) == _place(reading)
            seen[rank] = Witness(reading, last.stood + awake if last is not None and stands else 0.0)
        self._seen = seen  # whole: other threads read it
        return any(not each.stood for each in seen.values())

    def _tell(self) -> None:
        """Ask the ranks, and say who stands, unless one has moved meanwhile, or may well take its time."""
        ranks, before, looks = self._ranks, self._seen, self._looks
        stacks, answers = self._asked(ranks)
        if self._ranks is not ranks or any(
            _place(self._read(pid)) != _place(before[rank].reading) for rank, pid in ranks.items()
        ):
            return
        seen, earlier = dict[int, Witness](), self._devices
        for rank, each in before.items():
            groups, device = answers.get(rank, ({}, None))
            does, call = ("is stopped", "") if _is_stopped(ranks[rank]) else doing(stacks.get(rank, ""))
            seen[rank] = replace(each, doing=does, call=call, groups=groups, device=device)
        self._devices = {rank: each.device for rank, each in seen.items() if each.device is not None}
        if any(device > earlier.get(rank, _told(before[rank].reading)) for rank, device in self._devices.items()):
            return  # a device has gone on, that its host is ahead of
        stands, text = judge(seen, self.shape, self.node)
        if looks > 1 or not any(seen[rank].may_take for rank in stands):
            self._say(stands, text, seen, stacks)

    def _say(self, stands: Sequence[int], text: str, seen: Mapping[int, Witness], stacks: Mapping[int, str]) -> None:
        for rank in (each for each in stands[:NAMED] if seen[each].is_gpu):
            if gpu := _in_time(partial(gpu_in_words, sorted(seen).index(rank)), STACKS_S):
                text = f"{text}; rank {rank} has {gpu}"
        text = f"no step for {min(each.stood for each in seen.values()):.0f} s: {text}"
        now, step = now_of(self.out, self.node), min(each.reading.step for each in seen.values())
        path = now.with_name(f"{time.strftime('%Y-%m-%dT%H-%M-%S')}{now.stem.removeprefix('now')}.txt")
        self._told = True

        def write() -> Path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(now, durable=False) as file:
                file.write(json.dumps({"at": time.time(), "step": step, "text": text}).encode())
            with path.open("x") as report:
                report.write(self._full(text, seen, stacks))
            return path

        more = f"; {path} has the stacks of all" if _in_time(write, WRITE_S) else ""
        one = stands[0] if len(stands) == 1 else None
        self._found.append(Incident("stands_still", detail=text, rank=one, host=self.node, step=step))
        err(f"\n{text[0].upper()}{text[1:]}{more}")

    def _full(self, text: str, seen: Mapping[int, Witness], stacks: Mapping[int, str]) -> str:
        lines = [text, "", f"{'rank':<32}{'step':>8}  phase      done  seconds  does", ""]
        for rank, each in sorted(seen.items()):
            told = each.reading.done if each.reading.device < 0 else each.reading.device
            done = told if each.device is None else done_at(each.device)
            at = f"{each.reading.step:>8}  {each.reading.phase:<8}  {done:>5}  {each.stood:>7.1f}"
            gpu = "" if each.device is None else f"; its GPU is in `{each.device[2]}` of step {each.device[0]}"
            lines.append(f"{place(rank, self.shape, self.node):<32}{at}  {f'{each.doing} {each.call}'.rstrip()}{gpu}")
        lines += ["", "The last collective of each group, as torch's flight recorder has it:", ""]
        for rank, each in sorted(seen.items()):
            for name, log in each.groups.items():
                calls = [f"{kind} {number}{size and f' of {size}'}" for number, (kind, size) in log.pending.items()]
                begun = {True: ", which its GPU has begun", False: ", which its GPU has not begun", None: ""}[log.begun]
                state = f"; not ended: {', '.join([calls[0] + begun, *calls[1:]])}" if calls else ""
                members = f"{along(log.ranks, self.shape) or name} ({listed(log.ranks)})"
                if log.kind not in (SEND, RECEIVE):
                    lines.append(f"rank {rank}, {members}: {log.kind} {log.last}{state}")
                elif calls:
                    lines.append(f"rank {rank}, rank {log.ranks[0]} to rank {log.ranks[1]}{state}")
            if not each.groups:
                lines.append(f"rank {rank} has told of none")
        for rank in sorted(seen):
            lines += ["", f"The stacks of rank {rank}:", stacks.get(rank) or "  it does not answer"]
        return "\n".join(lines) + "\n"

    def _asked(self, ranks: Mapping[int, int]) -> tuple[dict[int, str], dict[int, Answer]]:
        """Ask the ranks -> {rank: its stacks} and {rank: its answer} of those that answer."""
        files = {rank: rank_file(self.folder, "stacks", pid) for rank, pid in ranks.items()}
        sizes = before = {rank: file.stat().st_size for rank, file in files.items() if file.exists()}
        asked = {rank for rank, pid in ranks.items() if flight_recorder.ask(self.folder, pid)}
        for rank in before:  # others are not ready for the signal yet, and would end by it
            with suppress(ProcessLookupError):
                os.kill(ranks[rank], signal.SIGUSR2)
        answers, deadline = dict[int, Answer](), time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            earlier, sizes = sizes, {rank: files[rank].stat().st_size for rank in before}
            for rank in asked - set(answers):
                if (told := flight_recorder.read(self.folder, ranks[rank])) is not None:
                    answers[rank] = told
            if sizes == earlier and all(sizes[each] > before[each] for each in before) and len(answers) == len(asked):
                break
        return {rank: files[rank].read_text()[before[rank] :] for rank in before if sizes[rank] > before[rank]}, answers


def _in_time(ask: Callable[[], Result], seconds: float) -> Result | None:
    """Return what a function does in a thread that is left behind where a disk or a driver does not answer; None there,
    and where it fails."""
    answer = in_background(ask, "hang-report")
    return answer.result() if wait([answer], seconds).done and answer.exception() is None else None


def _told(reading: Reading) -> Place:
    """Return the place that a device is known to have come to by the beat of its rank."""
    return reading.device, 0, UPDATED


def _place(reading: Reading) -> tuple[object, ...]:
    return reading.since, reading.phase, reading.step, reading.done, reading.device


def _is_stopped(pid: int) -> bool:
    """Return whether a signal, or a debugger, has stopped a process; False where the system does not tell."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
