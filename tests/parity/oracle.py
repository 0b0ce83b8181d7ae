"""The oracle: what a layout computes, as numbers that can be compared with those of one process.

``measure`` runs in each rank. It trains a tiny model for a few steps in float64 through the real step and returns
everything that a rank knows; ``expected`` cuts the one-process numbers for any rank by a transfer plan, so every
replica is compared, and padding must be zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megacore.run.optimizer import Optimizer
from megacore.run.states.offload import Offload
from megacore.run.step import TrainStep, evaluate
from models.assemble import Model
from models.config import ModelConfig
from models.decoder import Losses, Microbatch
from models.registry import configure
from models.stages import layout_of
from models.tuning import EVERYTHING, Tuning
from parallel.choices import ZeroShard
from parallel.gradients.reduce import Gradients
from parallel.labels import IGNORE, with_labels
from parallel.memory.recompute import Activations
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.weights.layout import Layout, MeshShape
from parallel.weights.transfer import execute, native, plan

TOLERANCE = 1e-9
"""Relative, in float64."""
STEPS = 3
LENGTH = 12


@dataclass(frozen=True, eq=False)
class Case:
    """A model and a batch; hashed by identity.

    Args:
        name: Of the case.
        model: A recipe's model section.
        sequences: In the global batch.
        ignored: Fraction of the labels that do not count.
        documents: Whether attention is kept within documents.
        tuning: What is trained.
    """

    name: str
    model: Mapping[str, Any]
    sequences: int = 4
    ignored: float = 0.0
    documents: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    tuning: Tuning = EVERYTHING

    @property
    def config(self) -> ModelConfig:
        return configure(self.model)

    def with_layers(self, layers: int) -> Case:
        """The same case with another number of layers."""
        field = self.config.axes["layer"]
        before = self.model[field]
        # What a config lists for each layer is cut, or repeated.
        lists = {name: each for name, each in self.model.items() if isinstance(each, list) and len(each) == before}
        return replace(
            self,
            model={**self.model, **{name: (each * layers)[:layers] for name, each in lists.items()}, field: layers},
        )


@dataclass(frozen=True)
class Run:
    """How a case is spread.

    Args:
        mesh: The mesh.
        chunks: Pipeline chunks of each stage.
        schedule: Of the pipeline.
        layers: Of each virtual stage; None for a balanced split.
        micro: Sequences of a microbatch.
        activations: What is kept of the blocks.
        loss_chunk: Tokens whose logits are there at a time.
        shard: What replicas share out.
        replicas: Groups of data parallel ranks that do not share with each other.
        offload: Where the optimizer's states live, if not on the device.
        offload_parameters: Whether slices of parameters live in host memory.
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    chunks: int = 1
    schedule: str = "1f1b"
    layers: tuple[int, ...] | None = None
    micro: int = 1
    activations: Activations = field(default_factory=Activations)
    loss_chunk: int | None = None
    shard: ZeroShard = "none"
    replicas: int = 1
    offload: Offload | None = None
    offload_parameters: bool = False

    def __str__(self) -> str:
        m = self.mesh
        sizes = "-".join(f"{dim}{m[dim]}" for dim in ("tp", "pp", "dp", "ep") if m[dim] > 1) or "one"
        chunks = f"-v{self.chunks}" if self.chunks > 1 else ""
        return (
            sizes
            + chunks
            + (f"-{self.schedule}" if self.schedule == "gpipe" else "")
            + ("-uneven" if self.layers else "")
            + (f"-{self.activations.recompute}" if self.activations.recompute != "none" else "")
            + ("-offload" if self.activations.offload else "")
            + (f"-loss{self.loss_chunk}" if self.loss_chunk else "")
            + (f"-{self.shard}" if self.shard != "none" else "")
            + (f"-x{self.replicas}" if self.replicas > 1 else "")
            + (("-file" if self.offload.folder else "-host") if self.offload else "")
        )


@dataclass
class Measured:
    """Per step: loss and norm. Of the first step: the initial weights and the gradients. After the last: the
    weights."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    initial: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    final: dict[str, np.ndarray]


def lively(layout: Layout) -> Layout:
    """The same layout with every parameter drawn at random: a bias of zeros would hide mistakes."""
    params = tuple(replace(param, std=param.std * 5 or 0.2) for param in layout.schema.params)
    return replace(layout, schema=replace(layout.schema, params=params))


def tokens(case: Case, step: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """(tokens, labels: [sequences, LENGTH], the lengths of each sequence's documents) of a global batch."""
    rng = np.random.default_rng(step)
    drawn = rng.integers(0, case.config.sizes["vocab"], (case.sequences, LENGTH + 1))
    labels = drawn[:, 1:].copy()
    labels[rng.random(labels.shape) < case.ignored] = IGNORE
    if case.ignored:
        labels[0] = IGNORE  # whole microbatches may have nothing to predict
    ends = rng.random(labels.shape) < 0.2
    ends[:, -1] = True
    documents = [np.diff(np.flatnonzero(row), prepend=-1).tolist() for row in ends]
    return drawn[:, :-1], labels, documents


def microbatches(case: Case, run: Run, step: int, mesh: Mesh) -> list[Microbatch]:
    drawn, following, documents = tokens(case, step)
    inputs, labels = torch.from_numpy(drawn), torch.from_numpy(following)
    stride, made = run.mesh.data * run.micro, []
    positions = torch.arange(LENGTH).repeat(run.micro)
    for start in range(mesh.data_rank * run.micro, case.sequences, stride):
        rows = slice(start, start + run.micro)
        # One process takes all tokens, so that leaving out those without a label is compared with it too.
        chosen = with_labels(labels[rows].numpy().ravel(), run.mesh.tp) if run.mesh.world > 1 else None
        made.append(
            Microbatch(
                inputs[rows].flatten(),
                labels[rows].flatten(),
                positions,
                run.micro,
                (run.micro * LENGTH // run.mesh.tp, case.config.sizes["embed"]),
                tuple(n for row in documents[rows] for n in row) if case.documents else None,
                seed=step,
                wanted=None if chosen is None else torch.from_numpy(chosen),
            )
        )
    return made


def measure(case: Case, run: Run) -> Measured:
    """Train the case on this rank of ``run``."""
    mesh = Mesh.create(run.mesh)
    layout = lively(layout_of(case.config, run.mesh, run.chunks, run.layers, case.tuning))
    objective = Losses(case.label_smoothing, case.z_loss, run.loss_chunk)
    model = Model.create(case.config, layout, mesh, torch.float64, objective, run.activations, tuning=case.tuning)
    model.parameters.initialise(seed=1)
    # Small buckets, so that there are several.
    gradients = Gradients(
        model.parameters, model.chunks, torch.float64, run.shard, run.replicas, 20_000, run.offload_parameters
    )
    optimizer = Optimizer(gradients, lr=1e-2, clip=0.5, offload=run.offload)
    pipeline = Pipeline(mesh, model.chunks, torch.float64, run.schedule)
    step = TrainStep(mesh, pipeline, gradients, optimizer)
    initial = snapshot(gradients)
    evaluated = evaluate(mesh, pipeline, microbatches(case, run, 0, mesh))[0].item()
    losses, norms, first = [], [], dict[str, np.ndarray]()
    for i in range(STEPS):
        stats = step.backward(microbatches(case, run, i, mesh))
        first = first or gradient_arrays(gradients)
        optimizer.step(1e-2, stats.grad_norm)
        losses.append(stats.loss.item())
        norms.append(stats.grad_norm.item())
    return Measured(losses, norms, evaluated, initial, first, snapshot(gradients))


@torch.no_grad()
def snapshot(gradients: Gradients) -> dict[str, np.ndarray]:
    whole = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in gradients.parameters.items()}
    for name, tensor in whole.items():
        gradients.read_weight(name, tensor)
    return {name: tensor.numpy() for name, tensor in whole.items()}


@torch.no_grad()
def gradient_arrays(gradients: Gradients) -> dict[str, np.ndarray]:
    whole = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in gradients.parameters.items()}
    for name in dict.fromkeys(span.name for span in gradients.spans):
        gradients.read(name, lambda part: part.gradient, whole[name])
    return {name: tensor.numpy() for name, tensor in whole.items()}


def expected(case: Case, run: Run, rank: int, one: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a rank must hold if one process holds ``one``."""
    config = case.config
    source = native(layout_of(config, MeshShape(), tuning=case.tuning), [0])
    layout = layout_of(config, run.mesh, run.chunks, run.layers, case.tuning)
    arrays = {}
    for stored, copies in plan(layout.schema, source, native(layout, [rank])):
        arrays[stored.name] = np.zeros(stored.shape)
        for copy in copies:
            execute(copy, one[copy.source.name], arrays[stored.name])
    return arrays


def check(case: Case, run: Run, one: Measured, ranks: Iterable[Measured]) -> None:
    """Every rank of a run has computed what one process has computed, and has started bitwise the same."""
    for rank, got in enumerate(ranks):
        np.testing.assert_allclose(got.losses, one.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(got.norms, one.norms, rtol=TOLERANCE)
        np.testing.assert_allclose(got.evaluated, one.losses[0], rtol=TOLERANCE)
        initial = expected(case, run, rank, one.initial)
        assert got.initial.keys() == initial.keys()
        for name, want in initial.items():
            assert np.array_equal(got.initial[name], want), f"rank {rank}: {name} does not start bitwise the same"
        for what, mine, ones in (("gradient", got.gradients, one.gradients), ("weight", got.final, one.final)):
            for name, want in expected(case, run, rank, ones).items():
                error = relative(mine[name], want)
                assert error <= TOLERANCE, f"rank {rank}: {what} of {name} is off by {error:.1e}"


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape} instead of {want.shape}")
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / norm if norm else float(np.abs(got).max(initial=0.0))
