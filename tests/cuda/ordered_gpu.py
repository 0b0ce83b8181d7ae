"""A simulated GPU that keeps account of memory as torch's caching allocator does: it belongs to the stream that was
current when it was given, which is given it again as soon as nobody has it; pinned memory is not given out again before
the copies that use it are made."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megacore.planning.trace.fake_cuda import place
from megacore.planning.trace.log import HOST, Launch, NcclMessage, RecordEvent, StepStart, Wait
from megacore.planning.trace.simulated_gpu import SimulatedGpu, SimulatedStream, touched, where

_HERE = frozenset({"tests/cuda/ordered_gpu.py"})


class MemorySpan(NamedTuple):
    """Bytes of a memory; all of it by default."""

    memory: int
    start: int = 0
    stop: int = 1 << 62


@dataclass(frozen=True)
class MemoryLaunch(Launch):
    """A launch, and the memory that it uses."""

    reads: Sequence[MemorySpan] = ()
    writes: Sequence[MemorySpan] = ()


@dataclass(frozen=True)
class Allocate:
    """A stream is given memory, which what was launched there before may have used until now."""

    memory: int
    stream: str


@dataclass(frozen=True)
class RecordStream:
    """The memory is not given to anybody before what a stream has to do by then is done: ``record_stream``."""

    memory: int
    stream: str
    place: str = ""


@dataclass(frozen=True)
class Free:
    """Nobody has the memory any more, and its stream may be given it again."""

    memory: int


Entry = MemoryLaunch | RecordEvent | Wait | Allocate | RecordStream | Free | StepStart


class OrderedGpu(SimulatedGpu):
    """The log has launches with their memory, and when memory is given and let go."""

    fuses = False

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        # What is weakly held keeps its address, so that no other storage has it.
        self._known: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._abroad: dict[int, int] = {}
        self._memories = 0

    def wait(self, stream: str, event: int, place: str = "") -> None:
        self.let_go()
        super().wait(stream, event, place)

    def memory(self, tensor: Tensor) -> None:
        super().memory(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._allocate(storage, HOST if tensor.device.type == "cpu" else self.current_stream().name)

    def _allocate(self, storage: torch.UntypedStorage, owner: str) -> None:
        self._memories += 1
        self.log.append(Allocate(self._memories, owner))
        self._known[storage._cdata] = StorageWeakRef(storage), self._memories, owner

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        super().resized(storage, size)
        if storage._cdata in self._known:
            self._abroad.pop(storage._cdata, None)
            self.log.append(Free(self._known.pop(storage._cdata)[1]))
        if size:
            self._allocate(storage, self.current_stream().name)

    def keep(self, tensor: Tensor, stream: SimulatedStream) -> None:
        self.memory(tensor)
        self.log.append(RecordStream(self._known[tensor.untyped_storage()._cdata][1], stream.name, where()))

    def let_go(self) -> None:
        """Note which memory that other streams have used nobody has any more. What its own stream alone has used may be
        given to that again at any time."""
        for address in [each for each in self._abroad if self._known[each][0].expired()]:
            self.log.append(Free(self._abroad.pop(address)))
            del self._known[address]
        if len(self._known) > 10_000:
            for address in [each for each, (weak, _, _) in self._known.items() if weak.expired()]:
                del self._known[address]

    def launch(
        self,
        stream: str,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        message: NcclMessage | None = None,
        work: int | None = None,
        **costs: Any,
    ) -> None:
        read, written = (tuple(dict.fromkeys(map(self._span, each))) for each in (reads, writes))
        if name == "_allgather_base_":  # NCCL leaves a rank's own part of a gather in place where it lies
            written = tuple(part for span in written for part in _without(span, read[0]))
        for tensor in (*reads, *writes):
            address = tensor.untyped_storage()._cdata
            _, number, owner = self._known[address]
            if owner not in (stream, HOST):
                self._abroad[address] = number
        self.log.append(MemoryLaunch(stream, name, place(_HERE), message, work, **costs, reads=read, writes=written))

    def _span(self, tensor: Tensor) -> MemorySpan:
        """The bytes of a tensor, and those between them."""
        self.memory(tensor)
        start, size = tensor.storage_offset(), tensor.itemsize
        stop = start + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        memory = self._known[tensor.untyped_storage()._cdata][1]
        return MemorySpan(memory, int(start) * size, int(stop if tensor.numel() else start) * size)

    def kernel(self, kernel: Any, arguments: Sequence[Any]) -> None:
        tensors = dict(zip(inspect.signature(kernel.fn).parameters, arguments, strict=False))
        tensors = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
        writes = [x for name, x in tensors.items() if name in stored(kernel)]
        assert writes, f"it does not show where {kernel.fn.__name__} stores"
        given = list(tensors.values())
        self.launch(self.current_stream().name, kernel.fn.__name__, given, writes, moved=sum(map(touched, given)))


def _without(span: MemorySpan, own: MemorySpan) -> Iterator[MemorySpan]:
    """Yield the parts of a span beside another one."""
    if own.memory != span.memory:
        yield span
        return
    yield from (
        MemorySpan(span.memory, start, stop)
        for start, stop in ((span.start, own.start), (own.stop, span.stop))
        if start < stop
    )


@cache
def stored(kernel: Any) -> frozenset[str]:
    """The arguments of a Triton kernel that it writes to: those that an address may come of to which it stores."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    made: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node.targets[0], node.value):
                made.setdefault(target, set()).update(_summands(value))
    addresses = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.match(r"tl\.(store$|atomic_)", ast.unparse(node.func)):
            addresses |= _summands(node.args[0])
    while more := {each for name in addresses for each in made.get(name, ())} - addresses:
        addresses |= more
    return frozenset(addresses)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that an assignment gives values to, and these."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _assigned(one, its)


def _summands(node: ast.expr) -> set[str]:
    """The names that an address may be made of by adding and choosing."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.BinOp):
        return _summands(node.left) | _summands(node.right)
    if isinstance(node, ast.IfExp):
        return _summands(node.body) | _summands(node.orelse)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.where":
        return set().union(*map(_summands, node.args[1:]))
    return set()
