"""Computations that take turns."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from megacore.parallel.baton import Baton, OtherFailed
from megacore.parallel.recorder import Recorder

CPU = torch.device("cpu")


def computing(baton: Baton, said: list[str], name: str, ends: int, fails: bool = False) -> Callable[[], None]:
    """What says its name and a number in each of its turns."""

    def compute() -> None:
        for number in range(ends):
            said.append(f"{name}{number}")
            if fails and number == ends - 1:
                raise ValueError(name)
            baton.pass_on()
        said.append(f"{name} ends")

    return compute


def test_each_goes_on_where_the_other_passes_on() -> None:
    recorder = Recorder(CPU)
    baton, said = Baton(CPU, recorder), list[str]()
    baton.pass_on()  # to nobody
    baton.run(computing(baton, said, "a", 1))
    assert said == ["a0", "a ends"]
    said.clear()
    baton.run(computing(baton, said, "a", 3), computing(baton, said, "b", 1))
    assert said == ["a0", "b0", "a1", "b ends", "a2", "a ends"]
    said.clear()
    recorder.begin()

    def noted(name: str, ends: int) -> Callable[[], None]:
        def compute() -> None:
            with recorder.over(name), recorder.over(f"{name} within"):
                computing(baton, said, name, ends)()

        return compute

    baton.run(noted("a", 1), noted("b", 2))
    assert said == ["a0", "b0", "a ends", "b1", "b ends"]
    found = recorder.end()
    assert [each.kind for each in found if "within" not in each.kind] == ["a", "b", "a", "b", "b"]
    ends = [each for each in found if "within" not in each.kind]
    assert all(one.until.host <= other.since.host for one, other in pairwise(ends))


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_an_error_of_either_ends_both(first: bool, after: int) -> None:
    """Before the other one has begun, while it waits for its turn, and once it has ended."""
    baton, said, threads = Baton(CPU, Recorder(CPU)), list[str](), threading.active_count()
    own, other = computing(baton, said, "own", after, fails=True), computing(baton, said, "other", 2)
    with pytest.raises(ValueError, match="own"):
        baton.run(*((own, other) if first else (other, own)))
    assert threading.active_count() == threads
    assert ("other ends" in said) == (after == 4), said
    baton.run(computing(baton, said, "a", 1))  # and what comes next is alone


def test_a_signal_while_the_other_computes_ends_both() -> None:
    """In the thread that waits for the end of the other one."""
    baton, turns = Baton(CPU, Recorder(CPU)), list[int]()

    def stop(*given: object) -> None:
        raise InterruptedError("the signal")

    def long() -> None:
        for turn in range(2000):
            turns.append(turn)
            time.sleep(0.005)
            baton.pass_on()

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError, match="the signal"):
            baton.run(lambda: None, long)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 0 < len(turns) < 2000


def test_an_error_comes_through_a_backward() -> None:
    baton, waited = Baton(CPU, Recorder(CPU)), list[BaseException]()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
            try:
                baton.pass_on()
            except OtherFailed as error:
                waited.append(error)
                raise
            return dy

    def fails() -> None:
        baton.pass_on()
        raise ValueError("the forward")

    y = Waits.apply(torch.zeros(1, requires_grad=True))
    with pytest.raises(ValueError, match="the forward"):
        baton.run(fails, y.backward)
    assert len(waited) == 1
