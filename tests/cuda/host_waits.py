"""A GPU whose streams nobody looks at: what a step launches there is counted, and it is refused what makes the host
wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megacore.planning.trace import fake_cuda
from megacore.planning.trace.fake_cuda import _FREE, DeviceWatch, TraceFault, _graphs, _on_device

aten = torch.ops.aten
place = partial(fake_cuda.place, frozenset({"tests/cuda/host_waits.py"}))


class Everywhere(Container[str]):
    """All places."""

    def __contains__(self, place: object) -> bool:
        return True


class _Anything:
    """A stream, an event: takes any call."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: True


PLAYED = (
    (torch.cuda, "Stream", _Anything),
    (torch.cuda, "Event", _Anything),
    (torch.cuda, "current_stream", _Anything),
    (torch.cuda, "stream", lambda stream: nullcontext()),
)
"""What stands in for streams and events."""


class HostWaits(DeviceWatch):
    """Counts what reaches the device, and refuses what makes the host wait for it.

    Args:
        reads: Places of host reads that may be.
        downloads: Places of copies to the host that may be; they must be asynchronous all the same.
        waits: Places of copies to the device that need not.

    Attributes:
        launches: {operator: how often} of those that do something on the device, and of Triton's kernels. Operators of
            torch, not its kernels: some are several.
        messages: The same of those that other ranks take part in.
        uploads, downloaded: {place: how often} of copies from and to the host.
    """

    def __init__(self, reads: Container[str], downloads: Container[str], waits: Container[str] = frozenset()) -> None:
        super().__init__()
        self._reads, self._downloads, self._waits = reads, downloads, waits
        self.launches, self.messages = Counter[str](), Counter[str]()
        self.uploads, self.downloaded = Counter[str](), Counter[str]()

    def __enter__(self) -> Self:
        _graphs.calls = 0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if _graphs.calls:
            self.launches["compiled"] = _graphs.calls

    def kernel(self, kernel: Any, arguments: Sequence[Any]) -> None:
        name = kernel.fn.__name__
        if any(isinstance(x, Tensor) and not _on_device(x) for x in arguments):
            raise TraceFault(f"{place()} gives {name} a tensor of the host")
        self.launches[name] += 1

    def message(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        name = op._schema.name.partition("::")[2]
        if name != "wait_tensor":
            self.messages[name] += 1

    def _run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if _graphs.running:
            return op(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            raise TraceFault(f"{place()} has a tensor that does not know its device any more")
        if op is aten._local_scalar_dense.default and _on_device(args[0]) and place() not in self._reads:
            raise TraceFault(f"{place()} asks the device for a number, and the host waits for it")
        return super()._run(op, args, kwargs)

    def operator(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if _graphs.running:
            return
        name = op._schema.name.partition("::")[2]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if op in (aten.copy_.default, aten._to_copy.default):
            self._copy(name, *((args[1], args[0]) if op is aten.copy_.default else (args[0], out)), kwargs, args)
        elif name == "_local_scalar_dense":
            pass
        elif any(map(_on_device, given)) and any(x.device.type == "cpu" and x.dim() for x in given):
            raise TraceFault(f"{place()} gives {name} a tensor of the host beside one of the device")
        elif name not in _FREE and not op.is_view and op.namespace != "prim":
            self.launches[name] += any(_on_device(x) and x.numel() for x in tree_leaves(out))

    def _copy(self, name: str, source: Tensor, target: Tensor, kwargs: Mapping[str, Any], args: Sequence[Any]) -> None:
        devices = source.device.type, target.device.type
        if devices == ("cuda", "cuda"):
            self.launches[name] += bool(target.numel())
        if devices not in (("cpu", "cuda"), ("cuda", "cpu")):
            return
        where = place()
        host = source if devices[0] == "cpu" else target
        if devices[0] == "cuda" and where not in self._downloads:
            raise TraceFault(f"{where} copies a tensor {tuple(source.shape)} to the host")
        asynchronous = kwargs.get("non_blocking", False) or (name == "copy_" and args[2:] == (True,))
        pinned = getattr(host.untyped_storage(), "pinned", False)
        if not (asynchronous and pinned) and where not in self._waits:
            how = "from memory that is not pinned" if asynchronous else "without non_blocking"
            raise TraceFault(f"{where} copies a tensor {tuple(source.shape)} {how}: the host waits")
        (self.uploads if devices[0] == "cpu" else self.downloaded)[where] += 1


class WatchedGpu:
    """Steps whose waits may be at some places: copies from memory that is not pinned in the first step alone.
    ``watches``: what each step has launched."""

    def __init__(self, reads: Container[str], downloads: Container[str], first: Container[str]) -> None:
        self._allowed, self._first, self.watches = (reads, downloads), first, list[HostWaits]()

    def stubs(self) -> Sequence[tuple[Any, str, Any]]:
        return PLAYED

    def step(self) -> HostWaits:
        self.watches.append(HostWaits(*self._allowed, frozenset() if self.watches else self._first))
        return self.watches[-1]
