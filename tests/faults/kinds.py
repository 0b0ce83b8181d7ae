"""The kinds of faults that a campaign strikes runs with: how each is done, and what must be said of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from live_run import LiveRun, patient

RESUME = "checkpoint.resume=auto"
LATE = 30
"""A disk that goes bad after this step may be bad at the end, and what is saved last is lost."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        strike: Does it to a rank of a run, and returns when that is done.
        named: The kinds of incident that name it; none where no process is left to write one, or nothing is amiss.
        says: A part of what must be said of it.
        layouts: The beginnings of the names of the layouts that it is for; all.
        weight: How often it is drawn.
    """

    strike: Callable[[LiveRun, int, random.Random], None]
    named: frozenset[str] = frozenset()
    says: str = ""
    layouts: tuple[str, ...] = ("",)
    weight: int = 1


def sent(number: signal.Signals, kind: str) -> Callable[[LiveRun, int, random.Random], None]:
    """Return the strike by a signal."""

    def strike(run: LiveRun, rank: int, random_: random.Random) -> None:
        if (pid := run.ranks().get(rank)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                run.struck(kind, rank)

    return strike


def ordered(kind: str, spared: bool = False) -> Callable[[LiveRun, int, random.Random], None]:
    """Return the strike that a process does to itself (hooks/sitecustomize.py)."""

    def strike(run: LiveRun, rank: int, random_: random.Random) -> None:
        pid = run.ranks().get(rank)
        if pid is not None and (at := run.order(pid, kind)) is not None:
            run.struck(kind, rank, at, spared)

    return strike


def two_at_once(run: LiveRun, rank: int, random_: random.Random) -> None:
    ranks = run.ranks()
    others = [each for each in ranks if each != rank]
    if rank not in ranks or not others:
        return
    for each, number in (
        (rank, signal.SIGKILL),
        (random_.choice(others), random_.choice((signal.SIGKILL, signal.SIGSTOP))),
    ):
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[each], number)
    run.struck("two at once", rank)


def in_recovery(kind: str, number: signal.Signals) -> Callable[[LiveRun, int, random.Random], None]:
    """Return the strike that hits another rank while the place of a killed one is filled."""

    def strike(run: LiveRun, rank: int, random_: random.Random) -> None:
        ranks = run.ranks()
        other = random_.choice([each for each in range(run.layout.world) if each != rank])
        if rank not in ranks:
            return
        os.kill(ranks[rank], signal.SIGKILL)
        run.struck("kill", rank)
        if run.wait(lambda: (seen := run.beat(other)) is None or seen.phase == "recover", 20):
            time.sleep(random_.choice((0.0, 0.05, 0.2)))
            if (pid := run.ranks().get(other)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    run.struck(kind, other)

    return strike


def ordered_in_recovery(kind: str) -> Callable[[LiveRun, int, random.Random], None]:
    """Return the strike that a rank does to itself as it recovers from the end of another."""

    def strike(run: LiveRun, rank: int, random_: random.Random) -> None:
        ranks = run.ranks()
        other = random_.choice([each for each in range(run.layout.world) if each != rank])
        if rank in ranks and other in ranks:
            run.arm(ranks[other], kind)
            run.wait(lambda: not (run.orders / str(ranks[other])).exists(), 5)
            os.kill(ranks[rank], signal.SIGKILL)
            run.struck("kill", rank)
            if (at := run.done(ranks[other], 20)) is not None:
                run.struck(kind, other, at)

    return strike


def stop_after_a_recovery(run: LiveRun, rank: int, random_: random.Random) -> None:
    ranks = run.ranks()
    other = random_.choice([each for each in range(run.layout.world) if each != rank])
    if rank not in ranks:
        return
    os.kill(ranks[rank], signal.SIGKILL)
    run.struck("kill", rank)
    run.wait(lambda: (seen := run.beat(other)) is None or seen.phase == "recover", 20)
    run.wait(lambda: (seen := run.beat(other)) is not None and seen.phase not in ("start", "recover"), 20)
    if (pid := run.ranks().get(other)) is not None:
        os.kill(pid, signal.SIGSTOP)
        run.struck("stop right after a recovery", other)


# -- the launcher


def again(run: LiveRun) -> None:
    run.ended()
    run.launch(RESUME)


def kill_the_launcher(run: LiveRun, rank: int, random_: random.Random) -> None:
    run.process.kill()
    run.struck("kill the launcher", rank)
    again(run)


def preemption(run: LiveRun, rank: int, random_: random.Random) -> None:
    """A notice, and time enough."""
    run.process.send_signal(signal.SIGTERM)
    run.struck("preemption", rank)
    again(run)


def preemption_in_recovery(run: LiveRun, rank: int, random_: random.Random) -> None:
    """A notice of 2 s while a rank is replaced, and then the end of all."""
    ranks = run.ranks()
    if rank not in ranks:
        return
    os.kill(ranks[rank], signal.SIGKILL)
    run.struck("kill", rank)
    others = [each for each in range(run.layout.world) if each != rank]
    run.wait(lambda: (seen := run.beat(others[0])) is None or seen.phase == "recover", 20)
    run.process.send_signal(signal.SIGTERM)
    run.struck("preemption in a recovery, 2 s", rank)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(2)
    run.process.kill()
    again(run)


def second_launch(run: LiveRun, rank: int, random_: random.Random) -> None:
    at = time.monotonic()
    second = run.start(RESUME)
    try:
        said = second.communicate(timeout=patient(60))[0].decode()
    except subprocess.TimeoutExpired:
        second.kill()
        said = second.communicate()[0].decode()
    if run.ends:  # it may have come too late: nobody holds the run any more
        return
    run.struck("second launch", rank, at, spared=True)
    run.tell(f"the second launch: status {second.returncode}, {said.strip()[-300:]}")


def flip_twice(run: LiveRun, rank: int, random_: random.Random) -> None:
    """The second time the node is to be left out; it is the only one, so the run ends, and is started again."""
    for times, kind in enumerate(("flip a weight", "flip twice"), start=1):
        run.wait(lambda: run.step >= 0 and rank in run.ranks(), 20)
        if (at := run.order(run.ranks()[rank], "flip a weight")) is None:
            return
        run.struck(kind, rank, at, spared=True)
        run.hears("corrupted", times, 20)
    again(run)


def agents_clock(run: LiveRun, rank: int, random_: random.Random) -> None:
    kind = random_.choice(("clock +1 h", "clock -1 h"))
    if (at := run.order(run.process.pid, kind)) is not None:
        run.struck("clock of the agent", rank, at, spared=True)


# -- checkpoints


def newest(run: LiveRun) -> Path | None:
    """Return the newest checkpoint, where there is an older one to fall back on: a run with none refuses to go on."""
    found = sorted(path for path in (run.out / "checkpoints").glob("step-*") if (path / "index.json").exists())
    return found[-1] if len(found) > 1 else None


def cut(path: Path, random_: random.Random) -> None:
    file = random_.choice(sorted(path.glob("**/*.safetensors")))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def flip_in_a_file(path: Path, random_: random.Random) -> None:
    file = random_.choice(sorted(path.glob("**/*.safetensors")))
    data = bytearray(file.read_bytes())
    data[random_.randrange(len(data) // 2, len(data))] ^= 1 << random_.randrange(8)
    file.write_bytes(data)


def without_index(path: Path, random_: random.Random) -> None:
    (path / "index.json").unlink()


def foreign(path: Path, random_: random.Random) -> None:
    """A checkpoint of a later version, or another run's."""
    for file in sorted(path.glob("**/*.safetensors")):
        file.write_bytes(b"PK\x03\x04" + bytes(200))
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({"format": "another", "was": sorted(index)}))


def damaged(kind: str, damage: Callable[[Path, random.Random], None]) -> Callable[[LiveRun, int, random.Random], None]:
    """Return the strike that damages the newest checkpoint of a run that was killed."""

    def strike(run: LiveRun, rank: int, random_: random.Random) -> None:
        run.process.kill()
        at = time.monotonic()
        run.ended()
        path = newest(run)
        if path is not None:
            damage(path, random_)
        run.struck("kill the launcher" if path is None else kind, rank, at)
        run.launch(RESUME)

    return strike


# -- the disk


def for_a_while(
    kind: str, begin: Callable[[LiveRun], object], end: Callable[[LiveRun], object]
) -> Callable[[LiveRun, int, random.Random], None]:
    def strike(run: LiveRun, rank: int, random_: random.Random) -> None:
        if (first := run.step) > LATE:
            return
        begin(run)
        run.struck(kind, rank, spared=True)
        run.wait(lambda: run.step >= first + 10, 15)
        other = max(1, rank)  # records that the disk does not take lie in the memory of rank 0
        if random_.random() < 0.5 and (pid := run.ranks().get(other)) is not None:
            os.kill(pid, signal.SIGKILL)
            run.struck("kill on a bad disk", other)
            run.wait(lambda: run.step < 0, 5)
            run.wait(lambda: run.step >= 0, 20)
        end(run)

    return strike


def fill(run: LiveRun) -> None:
    with contextlib.suppress(OSError), (run.out / "filler").open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def read_only(run: LiveRun) -> None:
    """A mount above the other, for nobody has a file open in it; what is open can still be written."""
    subprocess.run(["mount", "--bind", run.out, run.out], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", run.out], check=True)


def writable(run: LiveRun) -> None:
    subprocess.run(["umount", "-l", run.out], check=True)


def away(run: LiveRun) -> None:
    (run.folder / "away").mkdir(exist_ok=True)
    subprocess.run(["mount", "--move", run.out, run.folder / "away"], check=True)


def back(run: LiveRun) -> None:
    shutil.rmtree(run.out)
    run.out.mkdir()
    subprocess.run(["mount", "--move", run.folder / "away", run.out], check=True)


HUNG = frozenset({"hung"})
PARTED = frozenset({"hung", "aborted", "lost_contact", "raised"})
RAISED = frozenset({"raised"})
DISK = ("disk",)

KINDS: Mapping[str, Kind] = {
    "kill": Kind(sent(signal.SIGKILL, "kill"), frozenset({"killed"}), weight=4),
    # No incident can be written; it is told.
    "kill on a bad disk": Kind(sent(signal.SIGKILL, "kill on a bad disk"), says="killed rank", weight=0),
    "abort": Kind(ordered("abort"), frozenset({"aborted"}), weight=2),
    "raise": Kind(ordered("raise"), RAISED, weight=2),
    "raise in the update": Kind(ordered("raise in the update"), RAISED, weight=2),
    "raise in a save": Kind(ordered("raise in a save"), RAISED),
    "stop": Kind(sent(signal.SIGSTOP, "stop"), HUNG, weight=2),
    "sleep in the loader": Kind(ordered("sleep in the loader"), HUNG),
    "hold the GIL": Kind(ordered("hold the GIL"), HUNG),
    "leave out": Kind(ordered("leave out"), PARTED),
    "two at once": Kind(two_at_once, frozenset({"killed"})),
    "kill in a recovery": Kind(in_recovery("kill in a recovery", signal.SIGKILL), frozenset({"killed"}), weight=2),
    "raise in a recovery": Kind(ordered_in_recovery("raise in a recovery"), RAISED),
    "abort in a recovery": Kind(ordered_in_recovery("abort in a recovery"), frozenset({"aborted"})),
    "stop in a recovery": Kind(in_recovery("stop in a recovery", signal.SIGSTOP), HUNG),
    "stop right after a recovery": Kind(stop_after_a_recovery, HUNG),
    "kill the launcher": Kind(kill_the_launcher),
    "preemption": Kind(preemption),
    "preemption in a recovery, 2 s": Kind(preemption_in_recovery),
    "second launch": Kind(second_launch, says="is held by"),
    "clock of a rank": Kind(ordered("clock of a rank", spared=True)),
    "clock of the agent": Kind(agents_clock),
    "newest cut": Kind(damaged("newest cut", cut), says="Set aside"),
    "newest without index": Kind(damaged("newest without index", without_index)),
    "newest foreign": Kind(damaged("newest foreign", foreign), says="Set aside"),
    "flip in a file": Kind(damaged("flip in a file", flip_in_a_file), says="Set aside"),
    "flip a weight": Kind(ordered("flip a weight", spared=True), frozenset({"corrupted"}), layouts=("compared",)),
    "flip a moment": Kind(ordered("flip a moment", spared=True), frozenset({"corrupted"}), layouts=("compared",)),
    "flip a gradient": Kind(ordered("flip a gradient", spared=True), frozenset({"corrupted"}), layouts=("compared",)),
    "flip twice": Kind(flip_twice, frozenset({"corrupted"}), "ends with status 76", layouts=("compared",)),
    "flip a copy": Kind(ordered("flip a copy", spared=True), layouts=("protected",)),
    "NaN once": Kind(ordered("NaN once", spared=True), frozenset({"non_finite"})),
    "poisoned sample": Kind(ordered("poisoned sample", spared=True), frozenset({"bad_data"}), layouts=("poisoned",)),
    "straggler": Kind(ordered("straggler", spared=True), frozenset({"straggler"}), layouts=("slow",)),
    "disk full": Kind(for_a_while("disk full", fill, lambda run: (run.out / "filler").unlink()), layouts=DISK),
    "disk read-only": Kind(for_a_while("disk read-only", read_only, writable), layouts=DISK),
    "disk gone": Kind(for_a_while("disk gone", away, back), layouts=DISK),
}
"""{name: kind}."""
