"""What runs beside a process: functions in threads, which its end does not wait for, and other processes. No torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from types import ModuleType
from typing import TypeVar

Result = TypeVar("Result")


def in_background(function: Callable[[], Result], name: str) -> Future[Result]:
    """Call a function in a thread of this name -> what is to come of it. The threads of an executor would be waited for
    when the process ends."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


@contextmanager
def unnamed_main() -> Iterator[None]:
    """Let processes that are started in this block not import the main module of this one: it may be any script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
