"""Printing for people. Names, texts and values of files are in much of it, and none may do something to a terminal.

Nothing else prints. What prints a result ends with whoever reads it; a run outlives its readers (:func:`outlive`).
"""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata
from typing import Any, TextIO

from megacore.store.io.strict_json import short

_JOINERS = "\u200c\u200d"  # between the letters of some scripts, and in emoji
_BRIEF = 100  # characters of a value that is told in a line


def say(text: object, to: TextIO | None = None) -> None:
    """Print a text, on stdout by default, and at once; control characters in it are spelled out."""
    _print(f"{harmless(str(text))}\n", to or sys.stdout)


def err(text: object) -> None:
    """Say it on stderr."""
    say(text, sys.stderr)


def say_data(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON, all of whose characters can be printed."""
    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    made = json.dumps(value, indent=indent, ensure_ascii=not unicode)
    # What cannot be printed is within strings, but for the line ends between them.
    _print(re.sub(r"[^\n -~]", _escaped, made) + "\n", sys.stdout)


def write_out(text: str) -> None:
    """Print a part of a text that is wanted as it is: a terminal gets it without control characters."""
    _print(harmless(text) if sys.stdout.isatty() else text, sys.stdout)


class _Outlived(io.FileIO):
    """Output that may be lost: its reader may go, its terminal be closed, its disk be full."""

    lost = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not self.lost and self.fileno() == 1:
                self.lost = True
                err(f"what is said on stdout is lost ({error.strerror}): the run goes on, `megacore status` tells how")
            return memoryview(data).nbytes


def outlive() -> None:
    """Let this process go on, rather than raise, where what it prints cannot be written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            buffer = io.BufferedWriter(_Outlived(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, lasting)


def harmless(text: str) -> str:
    """Return a text without what may do something to a terminal; lines stay lines."""
    return "".join(char if _is_plain(char) or char in "\n\t" else repr(char)[1:-1] for char in text)


def brief(value: object) -> str:
    """Return a value of a file, to be told in a line: as it stands if short and plain, else its beginning, quoted."""
    text = value if isinstance(value, str) else short(value)
    return text if 0 < len(text) <= _BRIEF and all(map(_is_plain, text)) else short(value)


def _is_plain(char: str) -> bool:
    return char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"


def _escaped(match: re.Match[str]) -> str:
    return match[0] if _is_plain(match[0]) else json.dumps(match[0])[1:-1]


def _print(text: str, to: TextIO | None) -> None:
    if to is None:  # a process without it
        return
    encoding = to.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=to, flush=True)
