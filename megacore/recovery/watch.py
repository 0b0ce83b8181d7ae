"""The agent's eye on its ranks: their beats several times a second, and all the rest where one of them is late."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megacore.recovery.collectives import ask
from megacore.recovery.hangs import FACTOR, Witness, along, doing, judge, limits, listed, place, sentence
from megacore.recovery.phases import Phase, Reading, read
from megacore.recovery.straggler import Stragglers
from parallel.weights.layout import MeshShape

POLL_S = 0.25
"""Seconds between two looks at the beats."""
WRITE_S = 5.0
"""The seconds that a report may take: the disk may be what the ranks wait for."""


@dataclass(frozen=True)
class Hang:
    """A verdict, in words.

    Args:
        stands: The ranks that stand still.
        text: Who stands, and who waits for it.
        report: The file that says more, or None where it could not be written.
    """

    stands: tuple[int, ...]
    text: str
    report: Path | None


@dataclass
class HangWatch:
    """Looks at the ranks of one agent; :meth:`poll` is called from its loop.

    Seconds count in which this process was awake as well: what stops the whole machine, or starves it, is no hang.

    Args:
        out: The run's folder; reports go to ``hangs`` in it.
        shape: The mesh of the run.
        timeout_s: ``train.timeout``, in seconds.
        node: The name of this machine, where there are several.
        factor: ``recovery.hang_factor``.
        slow: Looks at the same beats for ranks that are slow.
    """

    out: Path
    shape: MeshShape
    timeout_s: float
    node: str = ""
    factor: float = FACTOR
    slow: Stragglers | None = None
    _stood: dict[int, tuple[Reading, float]] = field(default_factory=dict, init=False)
    """{rank: where it was seen, and for how many seconds}"""
    _again: dict[int, float] = field(default_factory=dict, init=False)
    """{rank: the seconds after which it is looked at again}, once a look has found nothing wrong."""
    _before: dict[Phase, float] = field(default_factory=dict, init=False)
    """{phase: the most seconds in it until the last recovery}; empty where there was none."""
    _at: float = field(default_factory=time.monotonic, init=False)

    @property
    def step(self) -> int:
        """The step that the ranks were at when they were last looked at; 0 where none was seen."""
        return max((reading.step for reading, _ in self._stood.values()), default=0)

    def poll(self, folder: Path, beats: Mapping[int, Path], stacks: Callable[[], Mapping[int, str]]) -> Hang | None:
        """Look at the ranks -> who stands still, if somebody does; then a report is written.

        Args:
            folder: The agent's.
            beats: {rank: the file of its beat} of those that live.
            stacks: Asks all of them for their stacks.
        """
        self._see(beats)
        if self.slow is not None:
            self.slow.see({rank: reading for rank, (reading, _) in self._stood.items()})
        allowed = limits([reading for reading, _ in self._stood.values()], self.timeout_s, self.factor, self._before)
        late = {
            rank: stood
            for rank, (reading, stood) in self._stood.items()
            if stood > max(allowed[reading.phase], self._again.get(rank, 0.0))
        }
        if not late:
            return None
        self._again |= {rank: 2 * stood for rank, stood in late.items()}
        groups, shown = ask(folder, beats), stacks()
        self._see(beats)  # who has gone on meanwhile is none
        seen = {
            rank: Witness(reading, stood, *doing(shown.get(rank, "")), groups=groups.get(rank, {}))
            for rank, (reading, stood) in self._stood.items()
        }
        verdict = judge(seen, self.timeout_s, len(seen) == self.shape.world, self.factor, self._before)
        if verdict is None:
            return None
        text = sentence(verdict, self.shape, self.node)
        path = self.out / "hangs" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-rank-{verdict.stands[0]}.txt"
        return Hang(verdict.stands, text, path if self._writes(path, self._report(text, verdict.seen, shown)) else None)

    def _report(self, text: str, seen: Mapping[int, Witness], stacks: Mapping[int, str]) -> str:
        lines = [text, "", "rank                                step  phase     seconds  does", ""]
        for rank, each in sorted(seen.items()):
            at = f"{each.reading.step:>8}  {each.reading.phase:<8}  {each.stood:>7.1f}"
            lines.append(f"{place(rank, self.shape, self.node):<32}{at}  {each.doing} {each.call}".rstrip())
        lines += ["", "The last collective of each group, as torch's flight recorder has it:", ""]
        for rank, each in sorted(seen.items()):
            for name, log in each.groups.items():
                calls = (
                    f"{call.kind} {number} {call.size and f'of {call.size}'}" for number, call in log.pending.items()
                )
                pending = ", ".join(map(str.rstrip, calls))
                group = along(log.ranks, self.shape) or name
                members = f" ({listed(log.ranks)})" if log.ranks else ""
                state = f"; not ended: {pending}" if pending else ""
                lines.append(f"rank {rank}, {group}{members}: {log.kind} {log.last}{state}")
            if not each.groups:
                lines.append(f"rank {rank} does not answer")
        for rank in sorted(seen):
            lines += ["", f"The stacks of rank {rank}:", stacks.get(rank) or "  it does not answer"]
        return "\n".join(lines) + "\n"

    def _writes(self, path: Path, text: str) -> bool:
        """Write a report, in a thread that is left behind where the disk does not answer -> whether it is written."""
        written = list[Path]()

        def write() -> None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("x") as file:
                    file.write(text)
                written.append(path)

        writing = threading.Thread(target=write, name="report", daemon=True)
        writing.start()
        writing.join(WRITE_S)
        return bool(written)

    def _see(self, beats: Mapping[int, Path]) -> None:
        """Read all beats. Who has not moved has stood for as long as nobody can have slept meanwhile."""
        now = time.monotonic()
        awake, self._at = min(now - self._at, 2 * POLL_S), now
        earlier, self._stood = self._stood, {}
        for rank, beat in beats.items():
            reading = read(beat) or Reading(0, "start", 0.0, {}, {})
            if reading.phase == "recover":
                for phase, seconds in reading.longest.items():
                    self._before[phase] = max(seconds, self._before.get(phase, 0.0))
            last, stood = earlier.get(rank, (None, 0.0))
            if last is not None and (last.since, last.phase, last.step) == (reading.since, reading.phase, reading.step):
                self._stood[rank] = reading, stood + awake
            else:
                self._stood[rank] = reading, 0.0
                self._again.pop(rank, None)
