"""Tensors of a source that are computed when they are asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

_KEPT = 1 << 29
"""Bytes that are kept while the blocks of their tensors are written."""


@dataclass(frozen=True)
class TensorCache:
    """Keeps what was made last for a while, as blocks of a tensor are asked for one by one, by several threads."""

    _made: OrderedDict[Hashable, np.ndarray] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _locks: dict[Hashable, threading.Lock] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array of a key, which is made if it is not kept any more."""
        with self._lock:
            own = self._locks.setdefault(key, threading.Lock())
        with own:
            with self._lock:
                made = self._made.get(key)
            if made is None:
                made = make()
                with self._lock:
                    self._made[key] = made
                    while len(self._made) > 1 and sum(each.nbytes for each in self._made.values()) > _KEPT:
                        self._made.popitem(last=False)
        return made
