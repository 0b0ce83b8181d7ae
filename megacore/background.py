"""Functions in threads of their own, which the end of the process does not wait for. No torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
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
