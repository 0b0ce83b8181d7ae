"""CUDA without a GPU: fake tensors that say they are on one, and a watch over what is done with them.

A fake tensor has a shape, a dtype and a device, and no numbers. A CPU build of torch needs little to run a whole
training step on them, backward included; streams, events, pinned memory and messages are played. What it cannot see:
the order of streams, NCCL, which attention kernel runs in the end, numbers.

It is for a process of its own, as torch believes in the GPU from then on; on Linux, with libraries of torch for CPUs.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from megacore.parallel import baton
from megacore.parallel.kernels.choice import has_triton
from megacore.planning.trace.torch_attention import attention

TOP = Path(__file__).parents[3]
"""Where our packages lie: a checkout, or where they are installed."""
OURS = frozenset({"megacore", "parallel", "models", "tools", "launch", "benchmarks", "tests"})
DEVICE = torch.device("cuda", 0)

aten = torch.ops.aten

_KEPT: list[object] = []
"""What C++ holds pointers to."""


def pretend() -> None:
    """Have torch believe that there is CUDA, until the process ends.

    Autograd and the dispatcher ask two C++ objects that a build without CUDA lacks. For the first, a device's guard,
    torch has a stand-in for fake tensors, which it puts where a guard counts no devices: so there must be a guard. The
    second, the hooks, says whether there is CUDA. Both get a table of methods that return 0; of the hooks, the one that
    says so, which is found by trying, returns 1. Raises RuntimeError: there is a GPU, or this torch is made in another
    way.
    """
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: fake ones are for machines without")
    folder = Path(torch.__file__).parent / "lib"
    core, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    # Functions in C, as autograd calls them without Python's lock.
    no, yes = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (ctypes.CDLL(None).sched_yield, ctypes.pythonapi.Py_IsInitialized)
    )
    methods = (ctypes.c_void_p * 128)(*[no] * 128)
    thing = ctypes.c_void_p(ctypes.addressof(methods))
    _KEPT.extend((methods, thing, _as_built_for_cuda()))
    guards = (ctypes.c_void_p * 2).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = ctypes.addressof(thing)
    torch._C._ensureCUDADeviceGuardSet()
    hooks = cpu._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    ctypes.c_void_p.from_address(hooks()).value = ctypes.addressof(methods)
    for number in range(2, len(methods)):  # the first two are destructors
        methods[number] = yes
        if torch._C._accelerator_getAccelerator().type == "cuda":
            return
        methods[number] = no
    raise RuntimeError(f"torch {torch.__version__} asks in another way whether there is CUDA")


def _as_built_for_cuda() -> torch.library.Library:
    """Operators that a build for CUDA has kernels of, and others take apart: they are not taken apart here."""
    library = torch.library.Library("aten", "IMPL")

    def fused(*arguments: object) -> None:
        raise AssertionError("fake tensors need no kernel")

    library.impl("_fused_rms_norm", fused, "CUDA")
    library.impl("_scaled_mm.out", lambda *arguments, out, **named: out, "Meta")  # torch has none
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", attention, key)
    return library


def _pin(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def _pinning(make: Any) -> Any:
    def made(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> Tensor:
        tensor: Tensor = make(*arguments, **keywords)
        return _pin(tensor) if pin_memory else tensor

    return made


class _Graphs:
    """A backend of torch.compile that runs the operators of each graph, forward and backward apart. ``calls, running``:
    the graphs that it has begun, and those that are under way."""

    def __init__(self) -> None:
        self.calls = self.running = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: object) -> Any:
        from torch._dynamo.backends.common import aot_autograd  # a second of imports
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        # As Inductor parts forward and backward: what is cheap is computed again rather than kept.
        parts = {"fw_compiler": self._part, "bw_compiler": self._part}
        return aot_autograd(**parts, partition_fn=min_cut_rematerialization_partition)(graph, inputs)

    def _part(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        def run(*arguments: Any) -> Any:
            self.calls += 1
            self.running += 1
            try:
                return graph.forward(*arguments)
            finally:
                self.running -= 1
                for watch in _watching:
                    watch.end_graph()

        return make_boxed_func(run)


_graphs = _Graphs()


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """A Triton kernel is launched: noted, as operators are, but there is nothing that it could run on."""
    for watch in _watching if programs else ():
        watch.kernel(kernel, arguments)


class _FakeThread(Thread):
    """A thread in which tensors are fake and watched as where it is made."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._modes = _get_current_dispatch_mode_stack()

    def run(self) -> None:
        with ExitStack() as on:
            for mode in self._modes:
                # The watch is on already, and sees the messages and kernels of every thread.
                known: Any = super(DeviceWatch, mode) if isinstance(mode, DeviceWatch) else mode
                known.__enter__()
                on.push(known.__exit__)
            super().run()


@contextmanager
def fake_cuda(played: Sequence[tuple[Any, str, Any]], world: int = 1, rank: int = 0) -> Iterator[None]:
    """All tensors are fake, and this process is a rank of a process group whose messages say nothing. ``played``:
    (where, name, what stands in for it) of streams, events and what else a GPU takes part in."""
    if world > 1:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    stubs = (
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3"),
        (torch.cuda, "can_device_access_peer", lambda device, peer: True),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "set_sync_debug_mode", lambda mode: None),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch, "compile", partial(torch.compile, backend=_graphs)),
        (baton, "Thread", _FakeThread),
        (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        (torch.Tensor, "pin_memory", _pin),
        (torch, "empty", _pinning(torch.empty)),
        (torch, "zeros", _pinning(torch.zeros)),
        *([(import_module("megacore.parallel.kernels.fused.launching"), "launch", _launch)] if has_triton() else []),
        *played,
    )
    try:
        with ExitStack() as on:
            for where, name, new in stubs:
                on.enter_context(patch.object(where, name, new))
            on.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        if world > 1:
            dist.destroy_process_group()


class TraceFault(AssertionError):
    """What a step must not do, and which function of ours does it."""


_watching: list[DeviceWatch] = []


class DeviceWatch(TorchDispatchMode):
    """Runs operators on fake tensors; a subclass looks at them. What is asked of the device is 1."""

    def __enter__(self) -> Self:
        _watching.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _watching.remove(self)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """It watches what compiled code does, so that torch.compile may go on below it."""
        return True

    supports_higher_order_operators = True
    """It is given what compiled code has run in a certain place."""

    def kernel(self, kernel: Any, arguments: Sequence[Any]) -> None:
        """Look at a kernel of Triton's."""

    def message(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Look at what is said to other ranks, or waited for."""

    def operator(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Look at an operator that is run."""

    @property
    def in_graph(self) -> bool:
        """Whether compiled code runs."""
        return _graphs.running > 0

    def end_graph(self) -> None:
        """Note that a graph of compiled code has run."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.higher_order.with_effects:  # compiled code has an operator run in its place
            token, inner, *given = args
            return token, self.__torch_dispatch__(inner, types, given, kwargs)
        if op.namespace == "megacore":
            return self._taken_apart(op, args, kwargs)
        if op.namespace in ("c10d", "_c10d_functional"):
            out = op(*args, **kwargs)
            self.message(op, args, kwargs, out)
        else:
            out = self._run(op, args, kwargs)
            self.operator(op, args, kwargs, out)
        return out

    def _run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = kwargs.get("device") is not None and kwargs["device"].type == "cuda"
        if given and not any(isinstance(x, FakeTensor) for x in given) and not on_device:
            with unset_fake_temporarily():  # what the host computes from numbers that it has
                return op(*args, **kwargs)
        if op is aten._local_scalar_dense.default:
            return 1.0 if _on_device(args[0]) else 0  # nobody asks what the host has, and zeros are as good as any
        try:
            with _holding_no_storage() if op._schema.name == "aten::set_" else nullcontext():
                # Below an operator of our own a mode takes no tensors with numbers to the device.
                return op(*tree_map_only(Tensor, _fake, args), **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceFault(f"{place()}: the host waits for {error.func}") from error

    def _taken_apart(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of our own, watching what it is made of."""
        super().__enter__()
        try:
            return OPDEFS[op._schema.name]._init_fn(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)


_FREE = frozenset(
    ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_", "_unsafe_view")
)


def _fake(x: Tensor) -> Tensor:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return x if isinstance(x, FakeTensor) else mode.from_tensor(x)


@contextmanager
def _holding_no_storage() -> Iterator[None]:
    """Fake tensors remember operators by their arguments; a storage among them would live for ever."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def _on_device(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


def place(beyond: Container[str] = frozenset()) -> str:
    """The function of ours that is being run, as ``file:function``; ``autograd`` where that runs torch's own.
    ``beyond``: files of which whoever calls them is meant."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = _file(frame.f_code.co_filename)
        if file is not None and file not in beyond:
            return f"{file}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "autograd"


@cache
def _file(path: str) -> str | None:
    """A file of ours, named from the top, where links lead to; None for others, and for those that play."""
    if not path.startswith(f"{TOP}/"):
        return None
    inner = Path(path).relative_to(TOP).parts
    if inner[0] not in OURS or inner[:3] == ("megacore", "planning", "trace"):
        return None
    return "/".join(inner[1:] if inner[0] == "megacore" and inner[1] in OURS else inner)
