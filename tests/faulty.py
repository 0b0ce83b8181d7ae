"""An object store that refuses, cuts and counts, in front of the one that fsspec has."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from megacore.store.io import objects
from megacore.store.io.objects import ObjectPath

ASKED = ("info", "find", "cat_ranges", "pipe_file", "open", "rm")


class Faulty:
    """What a store is to do with the next calls.

    Attributes:
        calls: How often each has been called since something of it was to fail.
        keys: The keys that each was called for.
        read: The bytes that were read.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.keys: defaultdict[str, list[str]] = defaultdict(list)
        self.read = 0
        self._errors: dict[str, tuple[Exception, int, str]] = {}
        self._cuts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def put_in(cls, monkeypatch: pytest.MonkeyPatch) -> Faulty:
        """In front of all stores; nobody waits between two tries."""
        made, plain = cls(), ObjectPath.store
        monkeypatch.setattr(objects, "WAITS_S", (0.0,) * len(objects.WAITS_S))

        def store(path: ObjectPath) -> tuple[Any, str]:
            system, key = plain(path)
            return _Front(made, system), key

        monkeypatch.setattr(ObjectPath, "store", store)
        return made

    def fail(self, call: str, error: Exception, times: int, key: str = "") -> None:
        """Let the next calls fail, of keys that contain this one."""
        self._errors[call], self.calls[call] = (error, times, key), 0

    def cut(self, call: str, times: int) -> None:
        self._cuts[call] = times

    def asked(self, call: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            self.calls[call] += 1
            self.keys[call].append(str(arguments[0]))
            error, left, key = self._errors.get(call, (None, 0, ""))
            if error is not None and left and key in str(arguments[0]):
                self._errors[call] = error, left - 1, key
                raise error
        found = function(*arguments, **options)
        if call != "cat_ranges":
            return found
        with self._lock:
            self.read += sum(map(len, found))
            if self._cuts[call]:
                self._cuts[call] -= 1
                return [data[:-1] for data in found]
        return found


class _Front:
    def __init__(self, faulty: Faulty, system: Any) -> None:
        self._faulty, self._system = faulty, system

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._system, name)
        if name not in ASKED:
            return found
        return lambda *arguments, **options: self._faulty.asked(name, found, *arguments, **options)
