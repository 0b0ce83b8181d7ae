"""Two computations of a rank that take turns: where one would wait for messages of experts, the other goes on.

Each has a thread, and one of them runs at a time, from one such place to its next. So the order of all that they launch
is that of the model alone, and that of messages on each communicator the same on all ranks that hold the same layers.
On a GPU both launch on one stream: what one launches before the other waits runs while the messages travel.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from megacore.parallel.recorder import Recorder


class Baton:
    """What of a rank's two computations the one that runs holds.

    Args:
        device: The device of the rank.
        recorder: Is told of each turn by itself.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self._device, self._recorder = device, recorder
        self._pair: _TwoRuns | None = None

    def run(self, first: Callable[[], object], second: Callable[[], object] | None = None) -> None:
        """Run a computation, or two in turns, of which the second one, a backward, has a thread of its own.

        Raises:
            BaseException: that of the one which has failed first; the other one ends where it would go on.
        """
        if second is None:
            first()
            return
        on: Any = torch.get_device_module(self._device)
        pair, stream = _TwoRuns(), on.current_stream()

        def beside() -> None:
            with on.stream(stream):
                second()

        self._pair, thread = pair, Thread(target=pair.run, args=(1, beside), name="beside")
        thread.start()
        pair.start(0)
        pair.run(0, first)
        try:
            thread.join()
        except BaseException as error:  # of a signal: the other one ends, too, before anybody hears of it
            pair.error = pair.error or error
            thread.join()
        self._pair = None
        if pair.error is not None:
            raise pair.error

    def pass_on(self) -> None:
        """Let the other computation have its turn, if there is another."""
        if self._pair is not None:
            under_way = self._recorder.leave()
            try:
                self._pair.pass_on()
            finally:
                self._recorder.enter(under_way)


class _TwoRuns:
    def __init__(self) -> None:
        self._gates: tuple[SimpleQueue[None], SimpleQueue[None]] = SimpleQueue(), SimpleQueue()
        self._now, self._alone = 0, False
        self.error: BaseException | None = None

    def start(self, which: int) -> None:
        """Let one of the two have its turn."""
        self._now = which
        self._gates[which].put(None)

    def run(self, which: int, compute: Callable[[], object]) -> None:
        """Run one of the two once it has its first turn."""
        self._gates[which].get()
        try:
            if self.error is None:
                compute()
        except BaseException as error:
            self.error = self.error or error
        self._alone = True
        self.start(1 - which)

    def pass_on(self) -> None:
        """End the turn of the one that calls this, and wait for its next. Raises OtherFailed: there is none."""
        own = self._now
        if not self._alone:
            self.start(1 - own)
            self._gates[own].get()
        if self.error is not None:
            raise OtherFailed


class OtherFailed(RuntimeError):
    """What runs in turns with this has failed, and its error says why."""
