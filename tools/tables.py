"""Tables for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

WIDTH = 100
"""The characters of a terminal's line that a table takes at the most."""
_GAP = 2
_READABLE, _LONG = 16, 48
"""No column is made narrower than the former, nor one of longer words than these, up to the latter."""


def gb(size: float) -> str:
    """Return a number of bytes in GB of 10^9."""
    return f"{size / 1e9:,.2f}"


def table(head: Sequence[str] | Mapping[str, str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table whose columns are as wide as they need; those of numbers are flush right. ``head``: the names of
    the columns, or {name: how its numbers are written, as :func:`format` has it}; texts stay as they are. Where it
    would be wider than ``WIDTH`` on a terminal, the longest texts take several lines, and columns for which there is
    still no room stand below the others, beside the first one again; in a file or a pipe a row is a line."""
    how = [*head.values()] if isinstance(head, Mapping) else [""] * len(head)
    shown = [[x if isinstance(x, str) else format(x, how[at]) for at, x in enumerate(row)] for row in rows]
    columns = list(zip(head, *shown, strict=True))
    room = WIDTH - _GAP if sys.stdout.isatty() else sys.maxsize
    return "\n".join(f"{' ' * _GAP}{line}".rstrip() for line in _lines(columns, room))


def _lines(columns: Sequence[Sequence[str]], room: int) -> Iterator[str]:
    widths, least = [max(map(len, column)) for column in columns], [_least(column) for column in columns]
    here = len(columns)
    while here > 2 and _sum(least[:here]) > room:
        here -= 1
    while _sum(widths[:here]) > room:
        widths[max((at for at in range(here) if widths[at] > least[at]), key=widths.__getitem__)] -= 1
    right = [all(re.fullmatch(r"[\d.,e+-]+%?", cell) for cell in cells) for _, *cells in columns]
    for row in zip(*columns[:here], strict=True):
        for line in zip_longest(*map(_folded, row, widths), fillvalue=""):
            cells = zip(line, widths[:here], right[:here], strict=True)
            yield (" " * _GAP).join(cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in cells)
    if columns[here:]:
        yield from ("", *_lines([columns[0], *columns[here:]], room))


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _least(column: Sequence[str]) -> int:
    word = max((len(word) for cell in column for word in cell.split()), default=0)
    return min(max(map(len, column)), max(_READABLE, min(word, _LONG)))


def _folded(cell: str, width: int) -> list[str]:
    """Return the lines of a cell: cut between words, and within one that is too long behind a comma, a dot or a slash,
    if it has some."""
    if len(cell) <= width:
        return [cell]
    cuts = rf".{{1,{width}}}$|.{{0,{width - 1}}}[,./]|.{{1,{width}}}"
    lines = [""]
    for word in re.findall(r"\s*\S+", cell):
        for piece in re.findall(cuts, word) if len(word.lstrip()) > width else [word]:
            if len(lines[-1] + piece) > width:
                lines.append(piece.lstrip())
            else:
                lines[-1] += piece
    return lines
