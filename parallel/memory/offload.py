"""Stores of the tensors that autograd saves for the backward.

Autograd hands each of them to a :data:`Keep`, which answers with the way back to it: :func:`keep` holds on to the
tensor, :class:`HostMemory` moves it to the host (``recompute`` knows a third: to have it made again).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.parallel.budgets import OFFLOAD_AHEAD

Back = Callable[[], Tensor]
"""Gives a tensor that was kept."""
Keep = Callable[[Tensor], Back]


def keeping(kept: Keep) -> saved_tensors_hooks:
    """Return a context: what is saved in it is kept so."""
    return saved_tensors_hooks(kept, lambda back: back())


def keep(tensor: Tensor) -> Back:
    """Keep a tensor as autograd does, which keeps an eye on writes in place too."""
    # Detached: a node that held its own output would never be freed.
    detached, version = tensor.detach(), tensor._version

    def back() -> Tensor:
        if detached._version != version:
            raise RuntimeError(f"a tensor {tuple(detached.shape)} that the backward needs was written to in place")
        return detached

    return back


@dataclass(frozen=True)
class View:
    """The view of a storage that a tensor is."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, tensor: Tensor) -> Tensor:
        """Return the same view of another storage, a tensor's."""
        empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)


Key = tuple[int, int]


def key(tensor: Tensor) -> Key:
    """Return a key of what a tensor's storage holds at this time; it stays unique while a StorageWeakRef is held."""
    return tensor.untyped_storage()._cdata, tensor._version


# Bytes below which moving a tensor takes longer than it is worth.
_TINY = 1 << 10


class HostMemory:
    """Keeps tensors in host memory: they leave on one stream beside the forward, and come back on another, before the
    backward asks for them, in the reverse of the order in which they left.

    A storage is copied once, however many views of it are saved; parameters stay where they are. Host memory is pinned
    for a GPU. For a CPU it is the same program: a copy.

    Args:
        device: The device of the tensors.
        ahead: Bytes that may be on their way in each direction.
    """

    def __init__(self, device: torch.device, ahead: int = OFFLOAD_AHEAD) -> None:
        self.device, self.ahead = device, ahead
        self.on: Any = torch.get_device_module(device)
        self.out, self.store = self.on.Stream(), self.on.Stream()
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def start(self) -> Keep:
        """Return the Keep of one forward."""
        return _Forward(self)

    def send(self, flat: Tensor) -> tuple[Tensor, Any]:
        """flat: bytes on the device -> their copy, and the event after which it is complete."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=self.device.type != "cpu")
        self.out.wait_stream(self.on.current_stream())
        with self.on.stream(self.out):
            host.copy_(flat, non_blocking=True)
        left = self.on.Event()
        left.record(self.out)
        self._leaving.append((left, flat))
        self.settle()
        return host, left

    def settle(self) -> None:
        """Let go of what has left, and wait for the oldest where too much is on its way."""
        under_way = sum(flat.nbytes for _, flat in self._leaving)
        while self._leaving and (under_way > self.ahead or self._leaving[0][0].query()):
            left, flat = self._leaving.popleft()
            # Its memory may be used again by this stream, so by nobody before the copy is made.
            self.on.current_stream().wait_event(left)
            under_way -= flat.nbytes

    def fetch(self, host: Tensor, left: Any) -> tuple[Tensor, Any]:
        """Fetch the bytes to the device -> them, and the event after which they are there."""
        flat = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self.store.wait_stream(self.on.current_stream())  # whose memory this was
        self.store.wait_event(left)
        with self.on.stream(self.store):
            flat.copy_(host, non_blocking=True)
        there = self.on.Event()
        there.record(self.store)
        return flat, there


class _Parcel:
    """A storage in host memory.

    Args:
        forward: The forward that it was kept in.
        number: Its number in the order of leaving.
        flat: The bytes of the storage.
    """

    def __init__(self, forward: _Forward, number: int, flat: Tensor) -> None:
        self.forward, self.number, self.nbytes = forward, number, flat.nbytes
        self._host, self._left = forward.memory.send(flat)
        self._fetched: tuple[Tensor, Any] | None = None

    def fetch(self) -> tuple[Tensor, Any]:
        if self._fetched is None:
            self._fetched = self.forward.memory.fetch(self._host, self._left)
        return self._fetched

    def open(self, view: View) -> Tensor:
        memory = self.forward.memory
        memory.settle()
        flat, there = self.fetch()
        self.forward.fetch_before(self.number)
        memory.on.current_stream().wait_event(there)
        return view.on(flat)


class _Forward:
    """The Keep of one forward: its parcels live for as long as the graph needs one of their views."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._parcels: list[weakref.ref[_Parcel]] = []
        self._of: dict[Key, tuple[StorageWeakRef, weakref.ref[_Parcel]]] = {}

    def __call__(self, tensor: Tensor) -> Back:
        if self._stays(tensor):
            return keep(tensor)
        return partial(self._parcel(tensor).open, View.of(tensor))

    def _stays(self, tensor: Tensor) -> bool:
        owner = tensor if tensor._base is None else tensor._base
        return isinstance(owner, nn.Parameter) or tensor.device != self.memory.device or tensor.nbytes < _TINY

    def _parcel(self, tensor: Tensor) -> _Parcel:
        found, storage = key(tensor), tensor.untyped_storage()
        parcel = self._of[found][1]() if found in self._of else None
        if parcel is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parcel = _Parcel(self, len(self._parcels), flat)
            self._parcels.append(weakref.ref(parcel))
            self._of[found] = StorageWeakRef(storage), weakref.ref(parcel)
        return parcel

    def fetch_before(self, number: int) -> None:
        """Fetch what was kept before a parcel and is still needed, as far as it may be ahead."""
        ahead = 0
        for at in range(number - 1, -1, -1):
            if ahead >= self.memory.ahead:
                break
            parcel = self._parcels[at]()
            if parcel is not None:
                parcel.fetch()
                ahead += parcel.nbytes
