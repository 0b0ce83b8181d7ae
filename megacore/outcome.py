"""The word of a rank about its end, which its agent takes rather than its exit status. No torch.

A library may abort a process that has done all that it was to do, and then the status says nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore import exits
from megacore.incidents import KINDS, Kind
from megacore.store.files import replacing

AGENT = "MEGACORE_AGENT"
"""The variable that names the folder of the agent of this rank."""
PAUSE = "pause"
"""The file in the agent's folder that asks the ranks to end after their step, to be started again on other nodes."""


@dataclass(frozen=True)
class RankOutcome:
    """The end of a rank, in its own words.

    Args:
        status: The status that the run is to end with.
        stopped: Whether a signal has ended it, or None where it has not said.
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


def tell(status: int, stopped: bool = False, paused: bool = False) -> None:
    """Tell the agent of this rank, if there is one, how it ends; called just before it leaves its groups.

    A later word replaces an earlier one.

    Args:
        status: The status that the run is to end with; :data:`~megacore.exits.RETRY` asks for another start.
        stopped: Whether a signal has ended the run, with steps left to do.
        paused: Whether the ranks are to be started again.
    """
    write(RankOutcome(status, stopped, paused))


def write(outcome: RankOutcome) -> None:
    """Write the word of this process, where it has an agent; a disk that is full takes none."""
    if folder := os.environ.get(AGENT):
        with suppress(OSError), replacing(outcome_of(Path(folder), os.getpid()), durable=False) as file:
            file.write(json.dumps(asdict(outcome)).encode())


def outcome_of(folder: Path, pid: int) -> Path:
    """Return the file in the agent's folder that holds the word of a process."""
    return folder / f"outcome-{pid}"


def read(folder: Path, pid: int) -> RankOutcome | None:
    """Return the word of a process; None where it has not said any."""
    try:
        known: Mapping[str, Any] = json.loads(outcome_of(folder, pid).read_text())
    except (OSError, ValueError):
        return None
    outcome = RankOutcome(**known)
    return outcome if outcome.kind is None or outcome.kind in KINDS else None
