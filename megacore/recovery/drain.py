"""Files that ask a node to leave a run: ``touch OUT/drain-NAME``, by its host name. No torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

LOOK_S = 1.0
"""The time between two looks at them."""


def file_of(out: Path, name: str) -> Path:
    """Return the file in the folder of a run that asks the node of a name to leave."""
    return out / f"drain-{name}"


def asked(out: Path, name: str) -> bool:
    """Return whether a node is asked to leave; a folder that does not answer asks nobody."""
    try:
        return file_of(out, name).exists()
    except OSError:
        return False


def done(out: Path, name: str) -> None:
    """Remove what has asked a node to leave, once it has: it may come again."""
    with suppress(OSError):
        file_of(out, name).unlink(missing_ok=True)
