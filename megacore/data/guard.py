"""Computations that files of strangers ask for, in a process that may come to harm: it has little time and memory.

A chat template is a program, and so are a tokenizer's regular expressions and replacements: they may never end, take
all memory, or crash. A signal handler of Python would not end them, for the libraries are not Python.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import re
import resource
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megacore.parallel import limits

_ARRAY = "array"
_ARRAYS = ("int32", "int64", "bool", "float32")
"""The kinds of numbers of the arrays that are passed."""


class GuardError(ValueError):
    """The other process failed; the message says why."""


class Guard:
    """An object in a process of its own, whose methods are called from here. What they take and give is copied.

    What they give is JSON (tuples come as lists) and arrays of numbers, and is read as no more than that: whoever has
    taken over the other process has nothing here.

    The process is a fork, so that what is imported here need not be imported again. It is safe beside other threads
    while what it serves uses none of their locks; it serves tokenizers, and never torch. It ends with this object, and
    with this process. Raises GuardError: it cannot be made within the limits of time and memory. ``make``: makes the
    object there; ``passes``: errors, made of a message alone, that are raised here as they are there; all others become
    a GuardError.
    """

    def __init__(self, make: Callable[[], object], passes: tuple[type[Exception], ...] = ()) -> None:
        self._passes = passes
        self._connection, theirs = Pipe()
        self._process = os.fork()
        if not self._process:
            _child(theirs, make, passes)
        theirs.close()
        self._end = weakref.finalize(self, _end, self._connection, self._process, os.getpid())
        self._answer()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the object, and return its result. Raises GuardError: it fails, or takes too much time or
        memory; or the process has ended before."""
        try:
            self._connection.send((method, arguments))
        except OSError as error:
            raise GuardError("it has ended before") from error
        except RecursionError as error:
            raise GuardError("what it is given is nested too deeply") from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            # The time of computing is limited there, whatever else the machine has to do. This is the last resort.
            if not self._connection.poll(limits.PATIENCE):
                raise self._ended(f"gives no answer within {limits.PATIENCE:,} s")
            passed, value = _received(self._connection)
        except (EOFError, OSError) as error:
            raise self._ended(None) from error
        except (LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise self._ended("gives what is no answer") from error
        if passed is None:
            return value
        raise self._passes[passed](value) if passed in range(len(self._passes)) else GuardError(value)

    def _ended(self, reason: str | None) -> GuardError:
        status = self._end()
        killed = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        if killed == signal.SIGXCPU:
            reason = f"takes more than {limits.SECONDS:,} s of computing"
        return GuardError(reason or f"{_too_much()}, or crashes")


def _end(connection: Connection, process: int, owner: int) -> int | None:
    """End the process -> its status as ``waitpid`` gives it; None in a fork of its owner, which has no such child."""
    connection.close()
    if os.getpid() != owner:
        return None
    with suppress(ChildProcessError):
        # One that has been told by the closed connection, or killed by a limit, ends by itself.
        done, status = os.waitpid(process, os.WNOHANG)
        if not done:
            os.kill(process, signal.SIGKILL)
            status = os.waitpid(process, 0)[1]
        return status
    return None


def _received(connection: Connection) -> tuple[int | None, Any]:
    """Receive what :func:`_parts` made, from a process that is not trusted."""
    passed, value, arrays = json.loads(connection.recv_bytes(limits.MEMORY))
    read = []
    for name, size in arrays:
        data = connection.recv_bytes(limits.MEMORY)
        array = np.frombuffer(bytearray(data), _ARRAYS[_ARRAYS.index(name)])
        if array.shape != (size,):
            raise ValueError(f"{len(data)} bytes are no {size} numbers of {name}")
        read.append(array)
    return passed, _filled(value, read)


def _filled(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Return a JSON value with the arrays in the places of their numbers."""
    if isinstance(value, list):
        return [_filled(each, arrays) for each in value]
    return arrays[value[_ARRAY]] if isinstance(value, dict) else value


def _too_much() -> str:
    return f"takes more than {limits.MEMORY:,} bytes of memory"


# -- in the other process


def _child(connection: Connection, make: Callable[[], object], passes: tuple[type[Exception], ...]) -> NoReturn:
    served: object = None

    def first() -> None:
        nonlocal served
        served = make()

    try:
        gc.freeze()  # collections would copy what is shared
        _shut_off(connection.fileno())
        _limit(resource.RLIMIT_CORE, 0)
        _limit_memory()
        _reply(connection, first, passes)
        while served is not None:
            method, arguments = connection.recv()
            _reply(connection, partial(getattr(served, method), *arguments), passes)
    except BaseException:
        pass  # the other end has gone, or nothing is left to say it with
    finally:
        os._exit(0)  # nothing of what the parent has is to be flushed, closed or removed here


def _reply(connection: Connection, function: Callable[[], object], passes: tuple[type[Exception], ...]) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + limits.SECONDS)
    try:
        reply = _parts(None, function())
    except MemoryError:
        reply = _parts(-1, _too_much())
    except BaseException as error:  # a panic of a library in Rust is no Exception
        known = next((index for index, kind in enumerate(passes) if isinstance(error, kind)), -1)
        reply = _parts(known, limits.cut(str(error) or type(error).__name__))
    for part in reply:
        connection.send_bytes(part)


def _parts(passed: int | None, value: object) -> list[bytes]:
    """Return the messages of a reply: JSON, and the bytes of each array that stands in it by its number."""
    arrays: list[np.ndarray] = []

    def by_number(array: object) -> dict[str, int]:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.name not in _ARRAYS:
            raise TypeError(f"it gives a {type(array).__name__}, which is neither JSON nor an array of numbers")
        arrays.append(array)
        return {_ARRAY: len(arrays) - 1}

    said = json.dumps(value, default=by_number)
    kinds = json.dumps([(array.dtype.name, array.size) for array in arrays])
    return [f"[{json.dumps(passed)}, {said}, {kinds}]".encode(), *(array.tobytes() for array in arrays)]


def _shut_off(kept: int) -> None:
    """Leave the process one connection. Locks on files would live on in it, and what libraries print of a crash is
    said otherwise."""
    with open(os.devnull, "rb") as nothing:
        for each in range(3):
            os.dup2(nothing.fileno(), each)
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 20)
    sys.stdout = sys.stderr = io.StringIO()
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, with which this one ends


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_memory() -> None:
    """Limit the memory that the process has by itself, beside what it shares and what it only reserves."""
    status = Path("/proc/self/status")
    if status.exists() and (own := re.search(r"VmData:\s+(\d+) kB", status.read_text())):
        _limit(resource.RLIMIT_DATA, (int(own[1]) << 10) + limits.MEMORY)
