"""How many bytes of tensors are alive: what an allocator would say, where there is none to ask."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tracked(TorchDispatchMode):
    """Counts the storages of all tensors that are made while it is active, and of those that it is given.

    ``live``: bytes now. ``peak``: the most at the end of any operation; what a kernel takes and gives back is not seen,
    but of our own operators, which are Python, it is.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}
        self._add(given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(function._schema.name)
        if own is not None:
            with self:
                return own._init_fn(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    @contextmanager
    def in_threads(self) -> Iterator[None]:
        """Also count, in this block, in threads that begin: modes are each thread's own."""
        run = threading.Thread.run

        def tracked(thread: threading.Thread) -> None:
            with self:
                run(thread)

        with self, pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "run", tracked)
            yield

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known and not tensor.is_meta:
                size = storage.nbytes()
                self._known[key] = weakref.finalize(storage, self._drop, key, size)
                self.live += size
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int, size: int) -> None:
        self.live -= size
        del self._known[key]
