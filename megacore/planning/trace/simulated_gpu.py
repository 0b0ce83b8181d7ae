"""A GPU that is simulated as far as order goes: streams, events, NCCL's streams.

What a step on :mod:`megacore.planning.trace.fake_cuda` asks of it becomes a log (:mod:`megacore.planning.trace.log`),
in which nothing has a duration: a host that is far ahead of a device that may be anywhere. As torch does it, an
asynchronous message runs on a stream of its communicator, after what its caller's stream has to do by then; its
``Work`` holds on to the tensors until it is waited for. A message to one rank alone has a communicator for the pair.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megacore.planning.costs import SEND
from megacore.planning.trace.fake_cuda import _FREE, DeviceWatch, _on_device, place
from megacore.planning.trace.log import HOST, Entry, Launch, NcclMessage, RecordEvent, StepStart, Wait
from megacore.planning.trace.measure import kind_of, product

aten = torch.ops.aten

MAIN = "main"
"""The stream that is current where nobody says otherwise."""
PASSING_ON = frozenset({"parallel/collectives.py"})
"""Files whose callers are meant by the place of a wait."""


class SimulatedStream:
    """torch.cuda.Stream, of one simulated GPU."""

    gpu: SimulatedGpu

    def __init__(self, *arguments: object, name: str = "", **options: object) -> None:
        self.name = name or self.gpu.next_name("stream")

    def wait_stream(self, other: SimulatedStream) -> None:
        self.gpu.wait(self.name, self.gpu.record(other.name), where())

    def wait_event(self, event: SimulatedEvent) -> None:
        self.gpu.wait(self.name, event.number, where())


class SimulatedEvent:
    """torch.cuda.Event, of one simulated GPU: it never says that it has happened."""

    gpu: SimulatedGpu

    def __init__(self, *arguments: object, **options: object) -> None:
        self.number = self.gpu.next_event()

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.gpu.record((stream or self.gpu.current_stream()).name, self.number, where())

    def wait(self, stream: SimulatedStream | None = None) -> None:
        self.gpu.wait((stream or self.gpu.current_stream()).name, self.number, where())

    def synchronize(self) -> None:
        self.gpu.wait(HOST, self.number, where())

    def query(self) -> bool:
        return False


class SimulatedGpu(DeviceWatch):
    """Streams, events, memory and messages of a rank, which it writes down. ``log``: what the rank has asked for, one
    thing after the other; ``live, peak``: bytes of the device that somebody has now, and the most since the last step
    began."""

    fuses = True
    """Whether operators of compiled code become the kernels that a compiler makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []
        self.live = self.peak = 0
        self.Stream = type("Stream", (SimulatedStream,), {"gpu": self})
        self.Event = type("Event", (SimulatedEvent,), {"gpu": self})
        self._names, self._events = Counter[str](), 0
        self._current: list[SimulatedStream] = [self.Stream(name=MAIN)]
        self._sizes: dict[int, tuple[int, object]] = {}
        self._works: dict[int, tuple[Any, int, Sequence[Tensor]]] = {}
        self._started: dict[int, tuple[int, Sequence[Tensor]]] = {}
        self._sent = Counter[str]()
        self._batch: list[tuple[str, Any, Sequence[Tensor], Sequence[Tensor], int, int]] | None = None
        self._fused: FusedKernel | None = None

    def next_name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind} {self._names[kind]}"

    def next_event(self) -> int:
        self._events += 1
        return self._events

    def current_stream(self, device: object = None) -> SimulatedStream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: SimulatedStream | None) -> Iterator[None]:
        self._current.append(stream or self._current[-1])
        try:
            yield
        finally:
            self._current.pop()

    def record(self, stream: str, event: int | None = None, place: str = "") -> int:
        """Record an event, a new one by default -> its number."""
        self.end_kernel()
        event = self.next_event() if event is None else event
        self.log.append(RecordEvent(event, stream, place))
        return event

    def wait(self, stream: str, event: int, place: str = "") -> None:
        """Have a stream, or the host, wait for an event."""
        self.end_kernel()
        self.log.append(Wait(stream, event, place))

    def stubs(self) -> Sequence[tuple[Any, str, Any]]:
        """(where, name, what stands in for it) of what it takes part in."""
        works = [each for each in (dist.Work, torch._C._distributed_c10d.FakeWork) if "wait" in vars(each)]
        return (
            (torch.cuda, "Stream", self.Stream),
            (torch.cuda, "Event", self.Event),
            (torch.cuda, "current_stream", self.current_stream),
            (torch.cuda, "stream", self.stream),
            *((each, "wait", lambda work, *timeout: self._wait_for(work)) for each in works),
            (dist, "batch_isend_irecv", self._batched(dist.batch_isend_irecv)),
            (torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)),
            (torch.Tensor, "record_stream", self.keep),
        )

    def step(self) -> Self:
        """Begin a step, during which it is to be entered."""
        self.log.append(StepStart())
        self.peak = self.live
        return self

    # -- memory

    def memory(self, tensor: Tensor) -> None:
        """Know a tensor's memory; what is new has been given to the current stream."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes and tensor.device.type != "cpu":
            self._count(storage, storage.nbytes())

    def keep(self, tensor: Tensor, stream: SimulatedStream) -> None:
        """Do nothing: no memory here is given to others."""

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count the bytes of a storage from now on until nobody has it."""
        key = storage._cdata
        self._forget(key)
        self._sizes[key] = size, weakref.KeyedRef(storage, lambda gone: self._forget(gone.key), key)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, (0, None))[0]

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
        """Note that something is launched, which reads and writes some memory."""
        self.end_kernel()
        for tensor in (*reads, *writes):
            self.memory(tensor)
        self.log.append(Launch(stream, name, place(), message, work, **costs))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Note that memory is given back, and so much taken in its place."""
        self._forget(storage._cdata)
        if size:
            self._count(storage, size)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device.type != "cpu":
                self.resized(storage, size)
            return resize(storage, size)

        return resized

    # -- operators

    def end_kernel(self) -> None:
        """Launch the kernel that the compiler has made of some operators, if there is one."""
        kernel, self._fused = self._fused, None
        if kernel is not None:
            self.launch(kernel.stream, "compiled", [], [], moved=kernel.moved)

    def end_graph(self) -> None:
        self.end_kernel()

    def operator(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note what an operator does with memory; of compiled ones, successive ones that only move memory are a
        kernel."""
        if op.namespace == "prim" or op.is_view:
            return
        name, given = op._schema.name.partition("::")[2], _bound(op, args, kwargs)
        if op is aten._local_scalar_dense.default:
            if _on_device(args[0]):
                self.wait(HOST, self.record(self.current_stream().name))
            return
        ins, outs = ([x for x in tree_leaves(each) if _is_watched(x)] for each in (tuple(given.values()), out))
        if name in _FREE:
            for x in outs:
                self.memory(x)
            return
        if not any(x.numel() for x in (*ins, *outs)):
            return
        stream = self.current_stream().name if any(map(_on_device, (*ins, *outs))) else HOST
        old = {x.untyped_storage()._cdata for x in ins}
        changed = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        writes = [x for x in tree_leaves([given[each] for each in changed if each in given]) if _is_watched(x)]
        writes += [x for x in outs if x.untyped_storage()._cdata not in old]
        for x in outs:
            self.memory(x)
        crosses = len({x.device.type for x in tree_leaves((args, out)) if isinstance(x, Tensor)}) > 1
        moved = outs[0].nbytes if crosses else _moved(name, ins, writes)
        multiplied = product(op, args, kwargs)
        if self.in_graph and not crosses and multiplied is None and stream != HOST and self.fuses:
            if self._fused is not None and not self._fused.takes(stream, ins):
                self.end_kernel()
            self._fused = self._fused or FusedKernel(stream)
            self._fused.add(ins if name not in _OVER else ins[1:], writes)
            return
        self.launch(
            stream,
            name,
            ins,
            writes,
            self._symmetric(op, given, outs),
            moved=moved,
            product=multiplied,
            crosses=crosses,
        )

    def _symmetric(self, op: Any, given: Mapping[str, Any], outs: Sequence[Tensor]) -> NcclMessage | None:
        """What ranks do with memory of each other, in the stream of the caller."""
        if op.namespace != "symm_mem":
            return None
        name, group = op._schema.name, _group(given["group_name"])
        communicator, part = f"symmetric {group.group_name}", given["A"] if "Bs" in given else outs[0]
        parts = self._all_ranks(communicator, group)
        return NcclMessage(communicator, parts, name, kind_of(name) or SEND, part.nbytes * group.size())

    def kernel(self, kernel: Any, arguments: Sequence[Any]) -> None:
        """Note what a kernel of Triton's does with memory."""
        given = [x for x in arguments if isinstance(x, Tensor)]
        each = {_place_of(x): x for x in given}.values()  # what is not wanted has the place of what is
        self.launch(self.current_stream().name, kernel.fn.__name__, given, [], moved=sum(map(touched, each)))

    # -- messages

    def message(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note a message, once its operator has said what comes of it."""
        name, given = op._schema.name.partition("::")[2], _bound(op, args, kwargs)
        if op.namespace == "_c10d_functional":
            self._functional(name, given, out)
            return
        group = dist.ProcessGroup.unbox(given["process_group"])
        tensors = given.get("tensors", [])
        reads, writes = {
            "allreduce_": lambda: (tensors, tensors),
            "broadcast_": lambda: (tensors, []) if given["root_rank"] == group.rank() else ([], tensors),
            "_allgather_base_": lambda: ([given["input_tensor"]], [given["output_tensor"]]),
            "_reduce_scatter_base_": lambda: ([given["input_tensor"]], [given["output_tensor"]]),
            "alltoall_base_": lambda: ([given["input"]], [given["output"]]),
            "send": lambda: (tensors, []),
            "recv_": lambda: ([], tensors),
        }[name]()
        made = dist.Work.unbox(out[-1] if isinstance(out, tuple | list) else out)
        if name in ("send", "recv_"):
            peer = given["dst" if name == "send" else "src"]
            way = (group.rank(), peer) if name == "send" else (peer, group.rank())
            if self._batch is not None:
                self._batch.append((name, group, reads, writes, *way))
                return
            communicator = f"{group.group_name} {min(way)}-{max(way)}"
            sent = _message(communicator, [self._pair(communicator, group, *way)], name, tensors)
        else:
            parts = self._all_ranks(group.group_name, group)
            sent = _message(group.group_name, parts, name, [*reads, *writes])
        if given.get("async_op", True):
            event, held = self._beside(name, reads, writes, sent)
            self._works[id(made)] = made, event, held
        else:
            self.launch(self.current_stream().name, name, reads, writes, sent)

    def _functional(self, name: str, given: Mapping[str, Any], out: Tensor) -> None:
        if name == "wait_tensor":
            found = self._started.pop(out.untyped_storage()._cdata, None)
            if found:
                self.wait(self.current_stream().name, found[0], where())
            return
        group = _group(given["group_name"])
        parts = self._all_ranks(group.group_name, group)
        sent = _message(group.group_name, parts, name, [given["input"], out])
        self.memory(out)
        self._started[out.untyped_storage()._cdata] = self._beside(name, [given["input"]], [out], sent)

    def _all_ranks(self, communicator: str, group: dist.ProcessGroup) -> list[tuple[str, tuple[int, ...]]]:
        self._sent[communicator] += 1
        return [(f"{communicator} #{self._sent[communicator]}", tuple(dist.get_process_group_ranks(group)))]

    def _pair(self, communicator: str, group: Any, source: int, target: int) -> tuple[str, tuple[int, ...]]:
        key = f"{communicator} {source}>{target}"
        self._sent[key] += 1
        ranks = dist.get_process_group_ranks(group)
        return f"{key} #{self._sent[key]}", (ranks[source], ranks[target])

    def _beside(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], message: NcclMessage
    ) -> tuple[int, Sequence[Tensor]]:
        """Launch a message on its communicator's stream -> the event after which it is done, and what it holds."""
        stream, event = f"nccl {message.communicator}", self.next_event()
        for x in (*reads, *writes):
            self.memory(x)
        self.wait(stream, self.record(self.current_stream().name))
        self.launch(stream, name, reads, writes, message, event)
        self.record(stream, event)
        return event, (*reads, *writes)

    def _wait_for(self, work: Any) -> bool:
        if id(work) in self._works:
            _, event, held = self._works.pop(id(work))
            self.wait(self.current_stream().name, event, where())
            del held  # the caller's stream may be given what nobody else has
        return True

    def _batched(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(messages: Sequence[dist.P2POp]) -> Any:
            self._batch = []
            try:
                works = send(messages)
                batch = self._batch
            finally:
                self._batch = None
            group = batch[0][1]
            name = str(group.group_name)
            parts = [self._pair(name, group, source, target) for _, _, _, _, source, target in batch]
            reads, writes = [x for each in batch for x in each[2]], [x for each in batch for x in each[3]]
            both = max(reads, writes, key=lambda side: sum(x.nbytes for x in side))
            size = sum(x.nbytes for x in both)
            event, held = self._beside("batch", reads, writes, NcclMessage(name, parts, "batch", SEND, size))
            for work in works:
                self._works[id(work)] = work, event, held
            return works

        return sent


class FusedKernel:
    """A kernel that a compiler makes of successive operators which only move memory: it reads what they have of others,
    and writes what is left of them when it ends.

    That is the least it can move. Of a reduction over more than rows the next kernel reads the result.
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._read = dict[object, int]()
        self._written = dict[int, tuple[StorageWeakRef, int]]()
        self._reduced = set[int]()

    def takes(self, stream: str, ins: Sequence[Tensor]) -> bool:
        """Return whether an operator may be part of it."""
        return stream == self.stream and not any(x.untyped_storage()._cdata in self._reduced for x in ins)

    def add(self, ins: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for x in ins:
            if x.untyped_storage()._cdata not in self._written:
                self._read[_place_of(x)] = touched(x)
        largest = max(ins, key=Tensor.numel, default=None)
        for x in writes:
            key = x.untyped_storage()._cdata
            self._written[key] = StorageWeakRef(x.untyped_storage()), touched(x)
            if largest is not None and x.numel() * max(largest.shape[-1:], default=1) < largest.numel():
                self._reduced.add(key)

    @property
    def moved(self) -> int:
        left = sum(size for storage, size in self._written.values() if not storage.expired())
        return sum(self._read.values()) + left


def where() -> str:
    """Who waits, where that is known: autograd calls adjoints in a thread of its own."""
    caller = place(PASSING_ON)
    return place() if caller == "autograd" else caller


def _is_watched(x: object) -> bool:
    """Whether it is memory that streams use."""
    return isinstance(x, Tensor) and (_on_device(x) or getattr(x.untyped_storage(), "pinned", False))


_ROWS = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators that read of a table what they give alone."""
_INTO_ROWS = frozenset({"index_add_", "index_copy_", "index_put_", "scatter_add_"})
"""Operators that change of a table the rows of what they are given alone."""


_OVER = frozenset({"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"})
"""Operators that do not read what they write over."""


def _moved(name: str, ins: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    if name in _ROWS:
        return 2 * sum(map(touched, writes))
    if name in _INTO_ROWS:
        return 3 * sum(map(touched, ins[1:]))
    read = [x for x in ins if name not in _OVER or not any(x is each for each in writes)]
    by_place = ({_place_of(x): x for x in some} for some in (read, writes))
    return sum(touched(x) for each in by_place for x in each.values())


def _place_of(x: Tensor) -> object:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def touched(tensor: Tensor) -> int:
    """Return the bytes of a tensor; those that it has several times count once."""
    return tensor.itemsize * math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)


def _bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}


def _group(name: Any) -> Any:
    find: Any = dist.distributed_c10d._resolve_process_group
    if isinstance(name, str):
        return find(name)
    return name if isinstance(name, dist.ProcessGroup) else dist.ProcessGroup.unbox(name)


def _message(
    communicator: str, parts: Sequence[tuple[str, tuple[int, ...]]], name: str, tensors: Sequence[Tensor]
) -> NcclMessage:
    """Return the message of an operator. Its ranks must have in common what tensors it has, but where each rank has
    parts of its own size for the others; of a pair, the size alone."""
    kind = "pair" if name in ("send", "recv_") else name
    alike = () if name in ("alltoall_base_", "all_to_all_single") else tensors
    what = " ".join([kind, *(f"{str(x.dtype).removeprefix('torch.')}[{x.numel()}]" for x in alike)])
    return NcclMessage(communicator, parts, what, kind_of(name) or SEND, max(x.nbytes for x in tensors))
