"""Functions in threads of their own, which the end of the process does not wait for. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass
class BackgroundTask(Generic[Result]):
    """A function that runs in a thread; what it returns or raises stays until it is asked for."""

    function: Callable[[], Result]
    name: str
    error: BaseException | None = field(default=None, init=False)
    _results: list[Result] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self.function())
        except BaseException as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, for so long at most -> whether it has ended."""
        self._thread.join(seconds)
        return not self.is_running

    @property
    def result(self) -> Result:
        """The value that it has returned, once it has ended; what it has raised is raised."""
        if self.error is not None:
            raise self.error
        return self._results[0]
