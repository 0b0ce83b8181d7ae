"""Tables for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def gb(size: float) -> str:
    """Return a number of bytes in GB of 10^9."""
    return f"{size / 1e9:,.2f}"


def table(head: Sequence[str] | Mapping[str, str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Return a table whose columns are as wide as they need; those of numbers are flush right. ``head``: the names of
    the columns, or {name: how its numbers are written, as :func:`format` has it}; texts stay as they are."""
    how = [*head.values()] if isinstance(head, Mapping) else [""] * len(head)
    shown = [[x if isinstance(x, str) else format(x, how[at]) for at, x in enumerate(row)] for row in rows]
    columns = list(zip(head, *shown, strict=True))
    right = [all(re.fullmatch(r"[\d.,e+-]+%?", cell) for cell in cells) for _, *cells in columns]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        for row in (head, *shown)
    )
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)
