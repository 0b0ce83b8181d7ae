"""The numbers of tiny models on the device: how far losses, norms, gradients and weights are from those in fp64 on a
CPU, beside how far the CPU is in the same precision. Also whether the host waits, and whether runs repeat."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.rows import Machine, Row, failed, number, skipped
from megacore.models.assemble import Model
from megacore.models.decoder import Losses, Microbatch
from megacore.models.lora import Lora
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.gradients.buckets import WholeSpan
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.training.scaler import UNSCALED, Scaling
from megacore.training.states.offload import Offload
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep

STEPS, LENGTH, SEQUENCES, LR = 3, 64, 2, 1e-3
DOCUMENTS = (40, 20, 4, 30, 34)
LLAMA: Mapping[str, Any] = {"preset": "llama-tiny", "num_hidden_layers": 3}
GPT2: Mapping[str, Any] = {
    "family": "gpt2",
    "vocab_size": 512,
    "n_positions": LENGTH,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
LORA = Tuning(Lora(8, 16.0, ("*",)))


@dataclass(frozen=True)
class Run:
    """How a tiny model is trained.

    Args:
        dtype: Of the weights.
        model: A recipe's model section.
        fp8: Whether linears multiply in fp8.
        compiled: Whether blocks are compiled.
        documents: Whether attention stays within documents.
        states: Where masters and moments live: nowhere else, on the host or in a file.
    """

    dtype: torch.dtype = torch.bfloat16
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA)
    fp8: bool = False
    compiled: bool = False
    documents: bool = False
    tuning: Tuning = EVERYTHING
    activations: Activations = field(default_factory=Activations)
    loss_chunk: int | None = None
    states: str = ""

    def plain(self, dtype: torch.dtype) -> Run:
        """The same numbers but for their rounding: nothing compiled, computed again or kept elsewhere."""
        fp8 = self.fp8 and dtype == self.dtype
        return Run(dtype, self.model, fp8, documents=self.documents, tuning=self.tuning)


@dataclass(frozen=True)
class Found:
    """Of each step its loss and norm; of the first its gradients, before clipping; the weights after the last."""

    losses: Tensor
    norms: Tensor
    gradients: Tensor
    weights: Tensor


RUNS: Mapping[str, Run] = {
    "fp64": Run(torch.float64),
    "fp64, documents": Run(torch.float64, documents=True),
    "fp64, gpt2": Run(torch.float64, GPT2),
    "fp32": Run(torch.float32),
    "fp32, documents": Run(torch.float32, documents=True),
    "bf16": Run(),
    "bf16, gpt2": Run(model=GPT2),
    "bf16, selective": Run(activations=Activations("selective")),
    "bf16, full": Run(activations=Activations("full")),
    "bf16, activations on host": Run(activations=Activations("none", True)),
    "bf16, selective, activations on host": Run(activations=Activations("selective", True)),
    "bf16, loss chunks": Run(loss_chunk=48),
    "bf16, documents": Run(documents=True),
    "bf16, LoRA": Run(tuning=LORA),
    "bf16, states on host": Run(states="host"),
    "bf16, states in a file": Run(states="file"),
    "fp16": Run(torch.float16),
    "fp8": Run(fp8=True),
    "bf16, compiled": Run(compiled=True),
    "bf16, compiled, documents": Run(compiled=True, documents=True),
    "fp8, compiled": Run(compiled=True, fp8=True),
}

FURTHER, EXACT = 3.0, 1e-9
"""How much further than a CPU in the same precision a device may be from fp64, and what does not count at all, beside a
few roundings: where its errors happen to cancel, the CPU has next to none."""


def correctness(machine: Machine) -> Iterator[Row]:
    cpu = torch.device("cpu")
    known: dict[str, Found] = {}

    def on_cpu(run: Run) -> Found:
        if repr(run) not in known:
            known[repr(run)] = train(run, cpu)
        return known[repr(run)]

    for name, run in RUNS.items():
        if run.compiled and not machine.compiles:
            yield skipped(name, "nothing is compiled in a tiny run on a CPU")
            continue
        truth, plain = on_cpu(run.plain(torch.float64)), on_cpu(run.plain(run.dtype))
        try:
            found = train(run, machine.device)
        except Exception as error:  # one that fails is a row, and the others go on
            yield failed(name, error)
            continue
        for what in ("losses", "norms", "gradients", "weights"):
            here, there = (relative(getattr(each, what), getattr(truth, what)) for each in (found, plain))
            bound = FURTHER * there + 4 * torch.finfo(run.dtype).eps + EXACT
            yield Row(f"{name}: {what}", here, there, "relative error", here <= bound)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def train(run: Run, device: torch.device) -> Found:
    """A few steps from the weights that every run starts from."""
    with tempfile.TemporaryDirectory() as folder:
        model, step = live(run, device, Path(folder))
        norms, losses, gradients = [], [], torch.empty(0)
        for count in range(STEPS):
            stats = step.backward([microbatch(run, count, device)])
            if not count:
                scale = number(stats.scale)
                parts = [part for part in step.gradients.parts if isinstance(part, WholeSpan)]
                flat = {part.span.name: part.gradient.double() / scale for part in parts}
                gradients = flattened(flat)
            # As TrainStep does it, so that what is read in between is what the optimizer is given.
            step.optimizer.update(LR, stats.grad_norm, stats.finite, stats.scale if step.scaling.scales else None)
            step.gradients.updated()
            step.scaler.update(stats.loss, stats.grad_norm)
            losses.append(number(stats.loss))
            norms.append(number(stats.grad_norm))
        weights = flattened({name: p.detach() for name, p in model.parameters.items() if p.requires_grad})
    return Found(torch.tensor(losses).double(), torch.tensor(norms).double(), gradients, weights)


def flattened(tensors: Mapping[str, Tensor]) -> Tensor:
    """All of them in one host tensor."""
    return torch.cat([tensors[name].flatten().double().cpu() for name in sorted(tensors)])


def live(run: Run, device: torch.device, folder: Path) -> tuple[Model, TrainStep]:
    mesh, config = Mesh.single(device), configure(run.model)
    layout = layout_of(config, mesh.shape, tuning=run.tuning)
    losses = Losses(chunk=run.loss_chunk)
    model = Model.create(config, layout, mesh, run.dtype, losses, run.activations, tuning=run.tuning)
    model.parameters.initialise(seed=1)
    if run.fp8:
        model.use_fp8()
    if run.compiled:
        model.compile()
    offload = Offload(folder if run.states == "file" else None, 1 << 20) if run.states else None
    gradients = Gradients(model.parameters, model.chunks, torch.promote_types(run.dtype, torch.float32))
    if gradients.widens:
        model.hand_weight_gradients(gradients.receive)
    optimizer = Optimizer(gradients, lr=LR, clip=0.5, offload=offload)
    scaling = Scaling(2.0**10) if run.dtype == torch.float16 else UNSCALED
    return model, TrainStep(mesh, Pipeline(mesh, model.chunks, run.dtype), gradients, optimizer, scaling)


def microbatch(run: Run, count: int, device: torch.device) -> Microbatch:
    """Uploaded as the trainer does it, which does not wait for the device."""
    config, generator = configure(run.model), torch.Generator().manual_seed(count)
    drawn = torch.randint(config.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    if run.documents:
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS])

    def upload(x: Tensor) -> Tensor:
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

    inputs, labels, places = map(upload, (drawn[:, :-1].flatten(), drawn[:, 1:].flatten(), positions))
    activation = (SEQUENCES * LENGTH, config.boundary_width)
    return Microbatch(inputs, labels, places, SEQUENCES, activation, DOCUMENTS if run.documents else None)


# -- what the host waits for, and whether a run repeats

WAITING = {name: run for name, run in RUNS.items() if not run.states and run.dtype in (torch.bfloat16, torch.float16)}
"""Of states elsewhere the host computes the update, so it must wait."""


def waits(machine: Machine) -> Iterator[Row]:
    """Steps in which the host must not wait for the device: torch raises where it does."""
    for name, run in WAITING.items():
        if run.compiled and not machine.compiles:
            continue
        try:
            _, step = live(run, machine.device, Path())
            step([microbatch(run, 0, machine.device)], LR)  # makes what is made once
            with strict(machine):
                for count in range(1, 3):
                    stats = step([microbatch(run, count, machine.device)], LR)
            yield Row(f"{name}: waits of two steps", 0.0, None, "", number(stats.loss) > 0)
        except RuntimeError as error:
            yield failed(f"{name}: waits of two steps", error)


@contextmanager
def strict(machine: Machine) -> Iterator[None]:
    """A wait of the host for the device is an error in it; a CPU knows none."""
    if not machine.gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def repeats(machine: Machine) -> Iterator[Row]:
    """Two runs from the same start: how many numbers differ afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before its first product, or it may not repeat
    for name in ("fp32", "bf16", "bf16, documents", "bf16, full", "fp8"):
        run = RUNS[name]
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            try:
                one, other = train(run, machine.device), train(run, machine.device)
                differing = float((one.weights != other.weights).sum())
                what = f"{name}{', deterministic' * deterministic}: numbers that differ"
                yield Row(what, differing, 0.0, f"of {one.weights.numel():,}", differing == 0)
            except RuntimeError as error:
                yield failed(name, error)
            finally:
                torch.use_deterministic_algorithms(False)


SANITIZED = ("bf16", "bf16, activations on host", "bf16, selective, activations on host", "bf16, states on host")


def sanitizer(machine: Machine) -> Iterator[Row]:
    """Runs under torch's own sanitizer of streams, which knows nothing of ours: it raises where two streams use a
    tensor without an order between them."""
    if not machine.gpu:
        yield skipped("torch's sanitizer of streams", "there are no streams on a CPU")
        return
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # for the rest of this process
    for name in SANITIZED:
        try:
            train(RUNS[name], machine.device)
            yield Row(f"{name}: races", 0.0, 0.0, "", True)
        except Exception as error:  # its errors are many, in one that has no name
            yield failed(f"{name}: races", error)
