"""The exit statuses of a run, which tell a scheduler what to do next. No torch."""

from __future__ import annotations

from collections.abc import Mapping

DONE = 0
FAILED = 1
"""The run has said what was wrong, and doing it again would not mend it."""
MISUSED = 2
"""The config or the command line is wrong, which is said."""
RETRY = 75
"""A machine or a network is at fault, and the run's own restarts are spent or not wanted."""
EVICT = 76
"""The hardware of this node is at fault."""

MEANING: Mapping[int, tuple[str, str]] = {
    DONE: ("all steps are done", "nothing"),
    FAILED: ("it failed, and said why: doing it again would not mend it", "do not retry"),
    MISUSED: ("the config or the command line is wrong", "do not retry"),
    RETRY: ("a machine or a network failed, and the run's own restarts are spent", "start again, with --resume auto"),
    EVICT: ("the hardware of this node is at fault", "start again without this node, with --resume auto"),
}
"""{status: (what it means, what a scheduler should do)}."""


def of_signal(number: int) -> int:
    """Return the status of a run that a signal has ended, after a checkpoint: 143 after a preemption's SIGTERM."""
    return 128 + number
