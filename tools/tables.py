"""Tables for people."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Return a table whose columns are as wide as they need; those of numbers are flush right."""
    columns = list(zip(head, *rows, strict=True))
    right = [all(re.fullmatch(r"[\d.,e+-]+%?", cell) for cell in cells) for _, *cells in columns]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        for row in (head, *rows)
    )
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)
