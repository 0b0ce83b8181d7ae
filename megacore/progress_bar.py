"""Progress for people: a bar where stderr is a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megacore.say import err, harmless

EVERY_S = 30.0
"""The seconds from one line to the next where there is no terminal."""


@contextmanager
def progress_bar(total: int | None, name: str, unit: str = "bytes", done: int = 0) -> Iterator[Callable[[int], object]]:
    """Show the progress of something in this block -> a function that is told how much more is done. ``total``: all
    that is to be done; None if that is not known; ``done``: what was done before."""
    if sys.stderr.isatty():
        from tqdm import tqdm  # imported where it draws alone

        with tqdm(
            total=total, initial=done, desc=harmless(name), unit=f" {unit}", unit_scale=True, dynamic_ncols=True
        ) as bar:
            yield bar.update
        return
    began = said = time.monotonic()
    before, now = done, done
    of_all = "" if total is None else f" of {total:,}"

    def update(more: int) -> None:
        nonlocal said, now
        now, at = now + more, time.monotonic()
        if at - said >= EVERY_S:
            said = at
            err(f"{name}: {now:,}{of_all} {unit}, {(now - before) / (at - began):,.0f} a second")

    yield update
