"""The forkserver that ranks are forked from: it has imported what they need. No torch in this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from megacore.background import unnamed_main
from megacore.launcher.signals import ASKS, ENDS
from megacore.rank import LAUNCHER


def prepare(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the process that ranks are forked from, unless it lives; it imports modules, which no rank imports again,
    while others do other things. What libraries read of its environment when they are loaded holds for all ranks."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["megacore.launcher.forked", *modules])
    with _with({**environment, LAUNCHER: str(os.getpid())}), unnamed_main():
        resource_tracker.ensure_running()
        # What the terminal, or a scheduler, sends to all is not for it; ranks have a mask of their own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDS, *ASKS))
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _with(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
