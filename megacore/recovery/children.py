"""The processes of a run on this machine, which its agent has started: ranks, and one that stands by. No torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacore.rank import report_of, stacks_of
from megacore.recovery.channel import CHANNEL, STANDBY, Channel
from megacore.recovery.ends import Exit
from megacore.recovery.phases import BEAT, beat_of
from megacore.recovery.template import Forked, RankTemplate
from megacore.recovery.watch import HangWatch
from megacore.say import err

BLOCKED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ranks block from their first instruction on; a rank unblocks those that it wants, and none is
lost. Who takes the place of another blocks the one that asks for the end, too."""
STACKS_S = 2.0


@dataclass
class Child:
    """A process of this machine.

    Args:
        process: The process.
        channel: The agent's end of the channel to it.
        life: Its number, unique in the run; 0 while it stands by.
        rank: The rank that it has, or is to have.
        hung: Whether it stood still, and was killed.
        dismissed: Whether the run goes on without it.
    """

    process: subprocess.Popen[bytes] | Forked
    channel: Channel
    life: int = 0
    rank: int = 0
    hung: bool = False
    dismissed: bool = False


@dataclass
class Children:
    """The processes of this machine.

    Args:
        folder: A folder that only this user can enter.
        module: The module that they run.
        arguments: The arguments of each.
        environment: More variables for them.
        talks: Whether the module talks to its agent.
        hangs: The watch over ranks that tell where they are.
        template: Makes processes in milliseconds, once it has imported what they need; it is not ended with them.
        on_world: Is told the variables of each rank that takes its place in a new world.
    """

    folder: Path
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    talks: bool = False
    hangs: HangWatch | None = None
    on_world: Callable[[Mapping[str, str]], object] = lambda variables: None
    template: RankTemplate | None = None
    living: dict[int, Child] = field(default_factory=dict)
    """{life: process} of those that have not been seen to have ended."""
    wanted: Mapping[str, str] | None = None
    """The variables of a process that is to stand by."""
    standby: Child | None = None
    """A process that has imported all that a rank needs, and waits for a place."""

    @property
    def ranks(self) -> dict[int, Child]:
        """{rank: process} of those that live."""
        return {child.rank: child for child in self.living.values()}

    def start(self, life: int, rank: int, variables: Mapping[str, str], late: bool = False) -> None:
        """Start a process, or take the one that stands by.

        Args:
            life: Its number.
            rank: The rank that it is to have.
            variables: Its variables.
            late: Whether there were ranks before.
        """
        if self.standby is not None and self.standby.process.poll() is not None:
            self.standby = None
        if self.template is not None and not late:
            self.template.wait()
        beat = {BEAT: str(beat_of(self.folder, life))}
        child = self.standby or self._process({**variables, **beat}, late)
        self.wanted, self.standby, child.life, child.rank = None, None, life, rank
        self.living[life] = child

    def stand_by(self, variables: Mapping[str, str]) -> None:
        """Have a process stand by, as soon as it costs nothing."""
        self.wanted = variables
        self.prepare()

    def prepare(self) -> None:
        """Start what is wanted to stand by, once the template can make it: who imports by itself takes seconds."""
        if self.wanted is None or self.standby is not None:
            return
        if self.template is None or self.template.imported or self.template.gone:
            self.standby = self._process(self.wanted, True)

    def _process(self, variables: Mapping[str, str], stands_by: bool) -> Child:
        """Start a process with its end of a channel."""
        ours, theirs = socket.socketpair()
        arguments = [str(self.folder), str(os.getpid()), self.module, *self.arguments]
        own = {**variables, "PYTHONSAFEPATH": "1"}
        if self.talks:
            own |= {CHANNEL: str(theirs.fileno()), **({STANDBY: "1"} if stands_by else {})}
        # The mask is inherited. What arrives here meanwhile is not lost.
        blocked = {*BLOCKED, *({signal.SIGTERM} if stands_by else ())}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            environment = {**os.environ, **self.environment, **own}
            given = arguments, environment, theirs.fileno(), blocked
            forked = self.template.fork(*given) if self.template else None
            process = forked or subprocess.Popen(
                [sys.executable, "-m", "megacore.rank", *arguments], env=environment, pass_fds=[theirs.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        return Child(process, Channel(ours))

    def do(self, what: str, life: int, more: Mapping[str, Any]) -> None:
        """Do what the agent that leads has ordered about one process; nothing where that is gone."""
        if what == "spawn":
            self.start(life, **more)
        elif (child := self.living.get(life)) is None:
            return
        elif what == "kill":
            child.process.kill()
        elif what == "go":
            child.rank = more["rank"]
            self._name(child)
            self.on_world(more["variables"])
            variables = {**more["variables"], BEAT: str(beat_of(self.folder, life))}
            child.channel.say("go", variables=variables, generation=more["generation"], begun=more["begun"])
        else:
            child.dismissed = what == "dismiss"
            child.channel.say(what, **more)

    def _name(self, child: Child) -> None:
        """Let ``rank-N`` in the folder name the beat of a rank, for whoever looks in from outside."""
        link = self.folder / f"rank-{child.rank}"
        with suppress(FileNotFoundError):
            link.unlink()
        link.symlink_to(beat_of(self.folder, child.life))

    def send(self, number: int) -> None:
        """Send all ranks a signal."""
        for child in self.living.values():
            child.process.send_signal(number)

    def kill(self) -> None:
        """Kill all, and wait for their end."""
        children = [*self.living.values(), *([self.standby] if self.standby else [])]
        for child in children:
            child.process.kill()
        for child in children:
            child.process.wait()
            child.channel.end.close()
        self.living, self.wanted, self.standby = {}, None, None

    def forget(self) -> None:
        """Remove what earlier processes have left under their lives, which are numbered anew."""
        for pattern in ("beat-*", "ask-*", "rank-*"):
            for file in self.folder.glob(pattern):
                file.unlink()

    def reap(self) -> list[Exit]:
        """Return the ends of those that have ended since the last time; of who was dismissed, none."""
        found = list[Exit]()
        for life, child in list(self.living.items()):
            if (status := child.process.poll()) is None:
                continue
            del self.living[life]
            child.channel.end.close()
            if not child.dismissed:
                file = report_of(self.folder, child.process.pid)
                report = json.loads(file.read_text()) if file.exists() else None
                found.append(Exit(life, child.rank, child.process.pid, status, report, child.hung))
        return found

    def end_hangs(self) -> None:
        """Kill who stands still, and say it."""
        if self.hangs is None:
            return
        ranks = self.ranks
        beats = {rank: beat_of(self.folder, child.life) for rank, child in ranks.items()}
        if (found := self.hangs.poll(self.folder, beats, self.stacks)) is not None:
            where = f" {found.report} has the stacks of all." if found.report else ""
            err(f"\n{found.text[0].upper()}{found.text[1:]}: killed.{where}")
            for rank in found.stands:
                ranks[rank].hung = True
                ranks[rank].process.kill()

    def stacks(self) -> dict[int, str]:
        """Ask every rank where it stands -> {rank: its stacks}; of those that do not answer, nothing."""
        files = {rank: stacks_of(self.folder, child.process.pid) for rank, child in self.ranks.items()}
        before = {rank: _size(file) for rank, file in files.items()}
        self.send(signal.SIGUSR2)
        sizes, deadline = before, time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            earlier, sizes = sizes, {rank: _size(file) for rank, file in files.items()}
            if sizes == earlier and all(sizes[rank] > before[rank] for rank in files):
                break
        return {rank: file.read_text()[before[rank] :] for rank, file in files.items() if sizes[rank]}

    def show(self) -> dict[int, str]:
        """Write where every rank stands to stderr -> what :meth:`stacks` does."""
        stacks = self.stacks()
        for rank, child in self.ranks.items():
            shown = stacks.get(rank) or "  it does not answer"
            err(f"\nRank {rank} (process {child.process.pid}) stands here:\n{shown}")
        return stacks


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
