"""What benchmarks tell: tables in Markdown, whether bars are met, and a file of all that was measured."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Measured = TypeVar("Measured")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring as it stands, with the option that :func:`write` takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="where the results are written")
    return made


def write(results: object, path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; a column whose name ends with a colon is flush right."""
    names = [name.removesuffix(":") for name in head]
    rule = ["---:" if name.endswith(":") else "---" for name in head]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, rule, *rows))


def in_turns(ways: Mapping[T, Callable[[], Measured]], rounds: int, warm_up: int = 1) -> dict[T, list[Measured]]:
    """Return {way: what it tells of each round, such as seconds}, but for the first ones. All ways take turns: a drift
    of the machine meets all alike."""
    found: dict[T, list[Measured]] = {way: [] for way in ways}
    for turn in range(warm_up + rounds):
        for way, run in ways.items():
            measured = run()
            if turn >= warm_up:
                found[way].append(measured)
    return found


def over(times: Iterable[float], others: Iterable[float]) -> float:
    """Return the median of the ratios of the rounds that both have."""
    return statistics.median(a / b for a, b in zip(times, others, strict=False))


@dataclass(frozen=True)
class Bar:
    """The fastest of ``ours`` shall be ``ratio`` times as fast as the fastest of ``peers``."""

    ours: tuple[str, ...]
    peers: tuple[str, ...]
    ratio: float


def judged(bars: Iterable[Bar], speeds: Mapping[str, float]) -> str:
    """Return one line for each bar, by the speeds of those that were measured."""
    lines = []
    for bar in bars:
        ours, peers = ([name for name in names if name in speeds] for names in (bar.ours, bar.peers))
        if not ours or not peers:
            lines.append(f"- not judged: {' or '.join(bar.ours)} against {', '.join(bar.peers)}")
            continue
        best, rival = (max(names, key=speeds.__getitem__) for names in (ours, peers))
        ratio = speeds[best] / speeds[rival]
        verdict = "met" if ratio >= bar.ratio else "MISSED"
        lines.append(f"- {verdict}: {best} is {ratio:.2f} times as fast as {rival} (bar: {bar.ratio:.3g})")
    return "\n".join(lines)
