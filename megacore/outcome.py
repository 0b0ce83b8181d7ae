"""The outcome of a rank, in its own words, which its agent takes rather than its exit status. No torch.

A library may abort a process that has done all that it was to do, and then the status says nothing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megacore import exits
from megacore.incidents import KINDS, Kind
from megacore.store.io.files import replacing

AGENT = "MEGACORE_AGENT"
"""The variable that names the folder of the agent of this rank."""
PAUSE = "pause"
"""The file in the agent's folder that asks the ranks to end after their step, to be started again on other nodes."""


def rank_file(folder: Path, kind: Literal["beat", "outcome", "stacks", "ask", "answer"], process: int) -> Path:
    """Return a file of an agent's folder by which it hears of the process of a rank: where that is in its step, how it
    has ended, the stacks that it writes on SIGUSR2; the socket that asks for its collectives, and the answer."""
    return folder / f"{kind}-{process}"


@dataclass(frozen=True)
class RankOutcome:
    """The end of a rank.

    Args:
        status: The status that the run is to end with; :data:`~megacore.exits.RETRY` asks for another start.
        stopped: Whether a signal has ended it, with steps left to do, or None where it has not said.
        paused: Whether the ranks are to be started again, on other nodes say; that is no fault.
        kind: The kind of fault that it has ended by, if it is one.
        detail: A few words about that fault.
        rank: The rank at fault, if it is another one.
    """

    status: int
    stopped: bool | None = False
    paused: bool = False
    kind: Kind | None = None
    detail: str = ""
    rank: int | None = None

    @property
    def final(self) -> bool:
        """Whether nothing is to be started again after it."""
        return not self.paused and self.kind is None and self.status != exits.RETRY

    def write(self) -> None:
        """Tell the agent of this rank, if there is one, just before the rank leaves its groups; a later outcome
        replaces an earlier one, and a disk that is full takes none."""
        if folder := os.environ.get(AGENT):
            path = rank_file(Path(folder), "outcome", os.getpid())
            with suppress(OSError), replacing(path, durable=False) as file:
                file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, folder: Path, process: int) -> RankOutcome | None:
        """Return the outcome of a process; None where it has not said any."""
        try:
            outcome = cls(**json.loads(rank_file(folder, "outcome", process).read_text()))
        except (OSError, ValueError):
            return None
        return outcome if outcome.kind is None or outcome.kind in KINDS else None
