"""`megacore context`: which rank of cp holds which tokens of a microbatch, what it computes, and which keys travel.

The documents are given by their lengths, or they are the first of a corpus. Work is counted in scores of one head.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from megacore.data.indexed import IndexedDataset
from megacore.parallel.context_split import ContextParallel, ContextSplit, Rectangle
from megacore.parallel.enum_errors import ContextBalance
from megacore.pictures import pyplot, save
from megacore.say import err, say
from megacore.tools import folders
from megacore.tools.options import command_parser, count, counts
from megacore.tools.tables import table

_WIDTH = 80
"""Characters of the line that stands for all tokens."""
_LISTED = 40
"""Rectangles that are listed; of more only the number is told."""
_PIXELS = 600


def main(argv: Sequence[str]) -> int:
    parser = command_parser("context", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--documents", type=counts, metavar="N,N,...", help="the lengths of the documents")
    source.add_argument("--corpus", metavar="PREFIX", help="take those of a token file PREFIX.bin, PREFIX.idx")
    parser.add_argument("--length", type=count, metavar="N", help="tokens of a row (all that are given)")
    parser.add_argument("--rows", type=count, default=1, metavar="N", help="rows of --corpus (1)")
    parser.add_argument("--cp", type=count, required=True, metavar="N", help="the ranks")
    parser.add_argument("--heads", type=count, default=1, metavar="N", help="of them share out the heads (1)")
    parser.add_argument("--balance", choices=get_args(ContextBalance), default="auto", help="(auto)")
    parser.add_argument("--window", type=count, metavar="N", help="the keys that each query sees (all)")
    parser.add_argument("--compare", action="store_true", help="show the policies side by side")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it: a PNG")
    given = parser.add_argument_group("for bytes")
    given.add_argument("--kv", type=count, default=8, metavar="N", help="heads of keys and values (8)")
    given.add_argument("--head", type=count, default=128, metavar="N", help="numbers of a head (128)")
    given.add_argument("--bytes", type=count, default=2, metavar="N", help="of a number (2)")
    arguments = parser.parse_args(argv)
    if arguments.corpus and not arguments.length:
        parser.error("--corpus needs --length, the tokens of a row")
    try:
        return _run(arguments)
    except (ValueError, OSError) as error:
        err(error)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    documents = arguments.documents or _of_corpus(arguments.corpus, arguments.length, arguments.rows)
    cp, heads, window = arguments.cp, arguments.heads, arguments.window
    if cp % heads:
        fit = ", ".join(str(n) for n in range(1, cp + 1) if cp % n == 0)
        raise ValueError(f"cannot share out heads over {heads} ranks of cp={cp}: choose from {fit}")
    padding = -sum(documents) % cp
    if padding:
        documents = (*documents, padding)
    length = arguments.length or sum(documents)
    if sum(documents) % length:
        raise ValueError(f"{sum(documents)} tokens are no whole rows of {length}: choose another --length")
    balances: Sequence[ContextBalance] = ["auto", "documents", "rows"] if arguments.compare else [arguments.balance]
    splits = {balance: ContextParallel(cp, "ring", balance, heads).split(documents, length) for balance in balances}
    padded = f", {padding} of them padding at the end" if padding else ""
    say(f"{sum(documents):,} tokens{padded}, in {len(documents):,} documents, over cp={cp}\n")
    size = 2 * max(1, arguments.kv // heads) * arguments.head * arguments.bytes
    if arguments.compare:
        say(_compared(splits, window, size))
    else:
        say(_shown(splits[arguments.balance], window, size))
    if arguments.picture:
        _draw(splits, window, arguments.picture)
        folders.drawn(arguments.picture)
    return 0


def _of_corpus(prefix: str, length: int, rows: int) -> tuple[int, ...]:
    """Return the lengths of the first documents of a corpus, cut where rows end."""
    dataset = IndexedDataset(prefix)
    ends = np.append(0, np.cumsum(dataset.lengths, dtype=np.int64))[dataset.bounds]
    if ends[-1] < length * rows:
        raise ValueError(f"{prefix} has {ends[-1]} tokens, and {rows} rows of {length} are more: choose fewer")
    cuts = np.union1d(ends[ends < length * rows], np.arange(rows + 1) * length)
    return tuple(np.diff(cuts).tolist())


def _shown(split: ContextSplit, window: int | None, size: int) -> str:
    lines = [*_held(split), "", _ranks(split, window, size)]
    rectangles = list(_rectangles(split, window))
    lines += ["", f"{len(rectangles):,} rectangles beside the triangles{':' if 0 < len(rectangles) <= _LISTED else ''}"]
    if 0 < len(rectangles) <= _LISTED:
        head = "part", "keys of", "queries", "keys", "first key of query i"
        lines.append(table(head, [_spelled(*each) for each in rectangles]))
    return "\n".join(lines)


def _held(split: ContextSplit) -> Iterator[str]:
    """Draw the tokens of each part below the documents, whose characters take turns."""
    edges = np.linspace(0, split.tokens, min(_WIDTH, split.tokens) + 1).astype(int)
    yield "documents  " + "".join("=-"[split.document(edge) % 2] for edge in edges[:-1].tolist())
    for part, spans in enumerate(split.spans):
        held = np.zeros(split.tokens + 1, np.int64)
        for start, stop in spans:
            held[start:stop] = 1
        shares = np.add.reduceat(held, edges[:-1]) / np.diff(edges)
        yield f"part {part:<5} " + "".join(" .:#"[min(3, int(np.ceil(share * 3)))] for share in shares.tolist())


def _ranks(split: ContextSplit, window: int | None, size: int) -> str:
    work = [split.pairs(part, window) for part in range(split.parts)]
    counts = dict.fromkeys(("tokens", "pieces", "rectangles", "scores"), ",")
    travel = {"keys taken": ",", "given": ",", "MB taken": ",.2f"}
    rows = list[tuple[object, ...]]()
    for part, pairs in enumerate(work):
        taken, given = (sum(counts) for counts in split.travel(part, window))
        first = part * split.heads
        ranks = str(first) if split.heads == 1 else f"{first}-{first + split.heads - 1}"
        rectangles = sum(len(split.hop(part, other, window).rectangles) for other in range(split.parts))
        held = split.tokens // split.parts, len(split.spans[part]), rectangles, pairs, pairs * split.parts / sum(work)
        rows.append((part, ranks, *held, taken, given, taken * size / 1e6))
    return table({"part": "", "ranks": "", **counts, "of the mean": ".3f", **travel}, rows)


def _rectangles(split: ContextSplit, window: int | None) -> Iterator[tuple[int, int, Rectangle]]:
    for part in range(split.parts):
        for other in range(split.parts):
            for rectangle in split.hop(part, other, window).rectangles:
                yield part, other, rectangle


def _spelled(part: int, other: int, rectangle: Rectangle) -> tuple[str, ...]:
    (first, last), (start, stop) = rectangle.queries, rectangle.keys
    band = "" if rectangle.band is None else f"i{rectangle.band:+}" if rectangle.band else "i"
    return str(part), str(other), f"[{first}, {last})", f"[{start}, {stop})", band


def _compared(splits: dict[ContextBalance, ContextSplit], window: int | None, size: int) -> str:
    head = {"balance": "", "work of the busiest": ".3f", "keys that travel": ",", "most of a part": ",", "MB": ",.2f"}
    rows = list[tuple[object, ...]]()
    for balance, split in splits.items():
        work = [split.pairs(part, window) for part in range(split.parts)]
        taken = [sum(split.travel(part, window)[0]) for part in range(split.parts)]
        pieces, rectangles = sum(map(len, split.spans)), sum(1 for _ in _rectangles(split, window))
        busiest = max(work) * split.parts / sum(work)
        rows.append((balance, busiest, sum(taken), max(taken), max(taken) * size / 1e6, pieces, rectangles))
    return table({**head, "pieces": ",", "rectangles": ","}, rows)


def _draw(splits: dict[ContextBalance, ContextSplit], window: int | None, picture: Path) -> None:
    """Draw who computes which scores: queries over keys, a color for each part."""
    plot = pyplot()
    from matplotlib.colors import ListedColormap

    figure, panels = plot.subplots(
        1, len(splits), figsize=(4.6 * len(splits) + 1, 4.8), layout="constrained", squeeze=False
    )
    for axes, (balance, split) in zip(panels.flat, splits.items(), strict=True):
        t, parts = split.tokens, split.parts
        owner = np.empty(t, np.int64)
        for part, spans in enumerate(split.spans):
            for start, stop in spans:
                owner[start:stop] = part
        at = np.unique(np.linspace(0, t - 1, min(t, _PIXELS)).astype(np.int64))
        first = np.array([split.starts[split.document(token)] for token in at.tolist()])
        seen = (at <= at[:, None]) & (at >= first[:, None])
        if window is not None:
            seen &= at[:, None] - at < window
        scores = np.where(seen, owner[at][:, None].astype(float), np.nan)
        colors = [plot.get_cmap("tab20")(part % 20) for part in range(parts)]
        axes.imshow(
            scores, cmap=ListedColormap(colors), vmin=-0.5, vmax=parts - 0.5, extent=(0, t, t, 0), interpolation="none"
        )
        for part in range(parts if parts <= 16 else 0):
            axes.plot([], [], "s", color=colors[part], label=f"part {part}")
        if parts <= 16:
            axes.legend(fontsize=7, loc="upper right")
        axes.set(xlabel="key", ylabel="query", title=balance)
    save(figure, picture)
