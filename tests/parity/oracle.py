"""The oracle: what a layout computes, as numbers that can be compared with those of one process.

``measure`` runs in each rank. It trains a tiny model for a few steps in float64 through the real step and returns
everything that a rank knows; ``expected`` cuts the one-process numbers for any rank by a transfer plan, so every
replica is compared, and padding must be zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from drawn_orders import drawn_order
from extended_family import extended
from pool import Pool
from torch import Tensor

from megacore.data.batches import Batches
from megacore.data.samples import Sample
from megacore.models.assemble import Model
from megacore.models.config import ModelConfig
from megacore.models.decoder import FurtherTokens, Losses, Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.balance import NONE, Coefficients, Loads
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import SPLIT_BACKWARD, ContextBalance, ContextExchange, ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.kernels import indexed
from megacore.parallel.labels import IGNORE, with_labels
from megacore.parallel.layers.router import Router, scores_of
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.pipeline.schedules import Schedule
from megacore.parallel.routing import Routing
from megacore.parallel.virtual_stages import of_stage, placement_of
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, SPLIT
from megacore.parallel.weights.transfer import execute, native, plan
from megacore.training.states.muon import Muon
from megacore.training.states.offload import Offload
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep, evaluate

TOLERANCE = 1e-9
"""Relative, in float64."""
GAP = 1e-9
"""Between the scores of the last expert or token that is chosen and the first that is left out: rounding changes no
choice."""
INDEX = 0.3
"""The coefficient of what indexers learn from, where there are some."""
STEPS = 2
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
        coefficients: Of the balance of experts.
        padded: Whether sequences end in padding.
        starved: Whether the last expert of each layer gets no token, where routers have corrections.
        length: Of each sequence.
        fp8: Whether linears between the ends multiply in fp8; what is scaled as a whole is a microbatch.
        muon: The rule of matrices, if not AdamW.
        mtp: Weight of the loss of further tokens, where the model has layers that predict them.
    """

    name: str
    model: Mapping[str, Any]
    sequences: int = 4
    ignored: float = 0.0
    documents: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    tuning: Tuning = EVERYTHING
    coefficients: Coefficients = NONE
    padded: bool = False
    starved: bool = False
    length: int = LENGTH
    fp8: bool = False
    muon: Muon | None = None
    mtp: float = 0.0

    @property
    def config(self) -> ModelConfig:
        return configure(self.model)

    def with_layers(self, layers: int) -> Case:
        """The same case with another number of layers."""
        field = self.config.axes["layer"]
        field = self.config.saved.get(field, field)
        before = self.model[field]
        # What a config lists for each layer is cut, or repeated; factors are not of layers, but by name.
        listed = {name: each for name, each in self.model.items() if isinstance(each, list) and len(each) == before}
        lists = {
            name: each
            for name, each in listed.items()
            if name.startswith(("layer_", "activation_")) or not any(isinstance(one, float) for one in each)
        }
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
        activations: What is kept of the blocks, or of those of each stage.
        loss_chunk: Tokens whose logits are there at a time.
        shard: What replicas share out.
        replicas: Groups of data parallel ranks that do not share with each other.
        offload: Where the optimizer's states live, if not on the device.
        offload_parameters: Whether slices of parameters live in host memory.
        etp: Whether tp splits the features of experts, not the experts.
        exchange, balance, heads: Of :class:`~parallel.context_split.ContextParallel`.
        group: The most microbatches of a group of the schedule; None: its own.
        drawn: The seed of costs that another order of the schedule's actions is searched for; None: it has its own.
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    chunks: int = 1
    schedule: str = "1f1b"
    layers: tuple[int, ...] | None = None
    micro: int = 1
    activations: Activations | tuple[Activations, ...] = field(default_factory=Activations)
    loss_chunk: int | None = None
    shard: ZeroShard = "none"
    replicas: int = 1
    offload: Offload | None = None
    offload_parameters: bool = False
    etp: bool = False
    exchange: ContextExchange = "ring"
    balance: ContextBalance = "documents"
    heads: int = 1
    drawn: int | None = None
    group: int | None = None

    @property
    def context(self) -> ContextParallel:
        return ContextParallel(self.mesh.cp, self.exchange, self.balance, self.heads)

    def layout(self, case: Case) -> Layout:
        split = EXPERT_TENSOR_PARALLEL if self.etp else SPLIT
        placement = placement_of(self.schedule)
        return layout_of(case.config, self.mesh, self.chunks, self.layers, case.tuning, split, placement)

    def kept(self, mesh: Mesh) -> Activations:
        return of_stage(self.activations, mesh.place.pp)

    def order(self, microbatches: int) -> Schedule | None:
        if self.drawn is None:
            return None
        return drawn_order(self.drawn, self.schedule, self.mesh.pp, self.chunks, microbatches)

    def __str__(self) -> str:
        m = self.mesh
        sizes = "-".join(f"{dim}{m[dim]}" for dim in ("tp", "cp", "pp", "dp", "ep") if m[dim] > 1) or "one"
        chunks = f"-v{self.chunks}" if self.chunks > 1 else ""
        return (
            sizes
            + "-etp" * self.etp
            + (f"-{self.exchange}-{self.balance}-{self.heads}" if m.cp > 1 else "")
            + chunks
            + (f"-{self.schedule}" if self.schedule not in ("1f1b", "interleaved") else "")
            + (f"-groups{self.group}" if self.group else "")
            + (f"-drawn{self.drawn}" if self.drawn is not None else "")
            + (("-uneven" if all(self.layers) else "-bare") if self.layers else "")
            + "-then".join(map(told, self.activations if isinstance(self.activations, tuple) else [self.activations]))
            + (f"-loss{self.loss_chunk}" if self.loss_chunk else "")
            + (f"-{self.shard}" if self.shard != "none" else "")
            + (f"-x{self.replicas}" if self.replicas > 1 else "")
            + (("-file" if self.offload.folder else "-host") if self.offload else "")
            + "-slices" * self.offload_parameters
            + (f"-micro{self.micro}" if self.micro > 1 else "")
        )


def told(kept: Activations) -> str:
    recompute = f"-{kept.recompute}" if kept.recompute != "none" else ""
    moved = "-offload" * kept.offload + "-8bits" * kept.compress
    return recompute + moved + (f"-mlp{kept.mlp_chunk}" if kept.mlp_chunk else "")


@dataclass
class Measured:
    """Per step: loss, with that of further tokens, and norm; what experts were sent, after it the buffers, and how far
    indexers are from their attention. Of the first step: the initial weights and the gradients. After the last: the
    weights. Of all: the smallest gap of a router or an indexer."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    initial: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    loads: list[Loads]
    buffers: list[dict[str, np.ndarray]]
    apart: list[Tensor]
    gap: float


def lively(layout: Layout) -> Layout:
    """The same layout with every parameter drawn at random: a bias of zeros would hide mistakes. What moves choices is
    smaller than what makes them."""
    params = tuple(p if p.log else replace(p, std=0.02 if p.buffer else p.std * 5 or 0.2) for p in layout.schema.params)
    return replace(layout, schema=replace(layout.schema, params=params))


def tokens(case: Case, step: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """(tokens, labels: [sequences, length], the lengths of each sequence's documents) of a global batch."""
    rng = np.random.default_rng(step)
    drawn = rng.integers(0, case.config.sizes["vocab"], (case.sequences, case.length + 1))
    labels = drawn[:, 1:].copy()
    labels[rng.random(labels.shape) < case.ignored] = IGNORE
    if case.ignored:
        labels[0] = IGNORE  # whole microbatches may have nothing to predict
    ends = rng.random(labels.shape) < 0.2
    ends[:, -1] = True
    if case.padded:
        rest = padding(case)
        drawn[:, :-1][rest], labels[rest] = 0, IGNORE
        ends[:, :-1] &= ~rest[:, 1:]
        ends[:, :-1] |= rest[:, 1:] & ~rest[:, :-1]
    documents = [np.diff(np.flatnonzero(row), prepend=-1).tolist() for row in ends]
    return drawn[:, :-1], labels, documents


def padding(case: Case) -> np.ndarray:
    """[sequences, length], where a row is not filled: none is empty, and some are full."""
    return np.arange(case.length) >= case.length - np.arange(case.sequences)[:, None] * 5 % 9


@dataclass(frozen=True)
class Drawn:
    """The sequences of a case, one step's after the other's."""

    case: Case

    @property
    def length(self) -> int:
        return self.case.length

    def sample(self, index: int) -> Sample:
        step, row = divmod(index, self.case.sequences)
        inputs, labels, documents = (each[row] for each in tokens(self.case, step))
        numbers = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
        return Sample(
            np.append(inputs, max(labels[-1], 0)),
            np.append(numbers, numbers[-1]),
            np.append(False, labels != IGNORE),
            int((~padding(self.case)[row]).sum()) if self.case.padded else None,
        )


def microbatches(case: Case, run: Run, step: int, mesh: Mesh) -> list[Microbatch]:
    cut = case.sequences, run.micro, mesh.data_rank, run.mesh.data, case.documents
    ahead = case.config.mtp_layers if case.mtp else 0
    batches = Batches(Drawn(case), *cut, context=run.context, context_rank=mesh.place.cp, ahead=ahead)
    made, tokens = [], run.micro * case.length // (run.mesh.tp * run.mesh.cp)
    for batch in batches.microbatches(step):
        inputs, labels, positions = map(flat, (batch.tokens, batch.labels, batch.positions))
        made.append(
            Microbatch(
                inputs,
                labels,
                positions,
                run.micro,
                (tokens, case.config.boundary_width),
                batch.documents,
                seed=step,
                wanted=wanted(batch.labels, run),
                padding=None if batch.padding is None else torch.from_numpy(batch.padding.ravel()),
                split=batch.split,
                rows=None if batch.rows is None else torch.from_numpy(batch.rows),
                blank=batch.blank,
                ahead=tuple(FurtherTokens(flat(x.tokens), flat(x.labels), wanted(x.labels, run)) for x in batch.ahead),
            )
        )
    return made


def wanted(labels: np.ndarray, run: Run) -> Tensor | None:
    """One process takes all tokens, so that leaving out those without a label is compared with it too."""
    chosen = with_labels(labels.ravel(), run.mesh.tp) if run.mesh.world > 1 else None
    return None if chosen is None else torch.from_numpy(chosen)


def flat(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.ravel())


class Recorded(Optimizer):
    """It keeps the gradients of the first step."""

    first: dict[str, np.ndarray] | None = None

    def update(self, *arguments: Any) -> None:
        self.first = self.first or gradient_arrays(self._gradients)
        super().update(*arguments)


def model_of(case: Case, run: Run, mesh: Mesh) -> Model:
    """What this rank has of the model at the start."""
    objective = Losses(case.label_smoothing, case.z_loss, run.loss_chunk, mtp=case.mtp)
    model = Model.create(
        case.config,
        lively(run.layout(case)),
        mesh,
        torch.float64,
        objective,
        run.kept(mesh),
        tuning=case.tuning,
        coefficients=case.coefficients,
        context=run.context,
        index=INDEX,
    )
    if case.fp8:
        model.use_fp8()
    model.parameters.initialise(seed=1)
    if case.starved:
        starve(model.parameters)
    return model


def measure(case: Case, run: Run) -> Measured:
    """Train the case on this rank of ``run``."""
    mesh = Mesh.create(run.mesh)
    model = model_of(case, run, mesh)
    # Small buckets, so that there are several.
    shared = run.shard, run.replicas, 20_000, run.offload_parameters, case.muon is not None
    gradients = Gradients(model.parameters, model.chunks, torch.float64, *shared)
    if run.schedule in SPLIT_BACKWARD:
        model.hand_weight_gradients(gradients.receive, late=True)
    optimizer = Recorded(gradients, lr=1e-2, clip=0.5, muon=case.muon, offload=run.offload)
    order = run.order(len(microbatches(case, run, 0, mesh)))
    loss = (2,) if case.mtp else ()
    pipeline = Pipeline(mesh, model.chunks, torch.float64, run.schedule, gradients, loss, order, run.group)
    step = TrainStep(mesh, pipeline, gradients, optimizer, balance=model.balance, alignment=model.alignment)
    initial = snapshot(gradients)
    losses, norms, loads, buffers, apart = [], [], list[Loads](), [], list[Tensor]()
    with gaps() as found:
        evaluated = evaluate(mesh, pipeline, microbatches(case, run, 0, mesh))[0].flatten()[0].item()
        for i in range(STEPS):
            stats = step(microbatches(case, run, i, mesh), 1e-2)
            losses += [stats.loss.item(), *stats.told.tolist()]
            norms.append(stats.grad_norm.item())
            if model.balance is not None:
                loads.append(model.balance.read(len(case.config.anatomy.layers)))
            if model.alignment is not None:
                apart.append(model.alignment.read(len(case.config.anatomy.layers)))
            buffers.append(buffers_of(model.parameters))
    gap = min(found, default=float("inf"))
    first = optimizer.first or {}
    return Measured(losses, norms, evaluated, initial, first, snapshot(gradients), loads, buffers, apart, gap)


def measured(case: Case, run: Run) -> Measured:
    """:func:`measure`, of a family that is invented here too."""
    with extended():
        return measure(case, run)


@cache
def one_process(pool: Pool, case: Case, micro: int | None = None) -> Measured:
    """:func:`measured` by one process, which has all tokens at once unless ``micro`` says how many sequences."""
    (found,) = pool.run(1, measured, case, Run(micro=micro or case.sequences))
    assert isinstance(found, Measured)
    return found


@cache
def deep(case: Case, layers: int) -> Case:
    """The case with another number of layers, the same one for the same case."""
    return case.with_layers(layers)


def starve(parameters: Parameters) -> None:
    """Let corrections keep the last expert of each layer from being chosen."""
    for name, parameter in parameters.items():
        if name.endswith("router.correction"):
            parameter.detach()[-1] = -10


@contextmanager
def gaps() -> Iterator[list[float]]:
    """The smallest gap of each call of a router or an indexer, as long as this lasts."""
    found, choose, best_of = list[float](), Router.choose, indexed.best_of

    def watched(router: Router, logits: Tensor) -> Tensor:
        found.append(gap(logits, router.routing, router.correction))
        return choose(router, logits)

    def watched_best(scores: Tensor, seen: Tensor, top: int) -> Tensor:
        if top < scores.shape[1]:
            best = scores.masked_fill(~seen, -torch.inf).sort(-1, descending=True).values
            apart = best[:, top - 1] - best[:, top]
            # Those that all heads leave out are equal to the bit, and the earlier comes first.
            found.extend(apart[(seen.sum(-1) > top) & (apart != 0)].tolist())
        return best_of(scores, seen, top)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "choose", watched)
        patch.setattr(indexed, "best_of", watched_best)
        yield found


def gap(logits: Tensor, routing: Routing, correction: Tensor | None) -> float:
    """How far the last expert that is chosen is from the first that is left out, and the last group from the first."""
    scores, found = logits if routing.weigh == "chosen" else scores_of(logits, routing), float("inf")
    if correction is not None:
        scores = scores + correction
    if routing.kept_groups < routing.groups:
        grouped = scores.unflatten(-1, (routing.groups, -1))
        of_groups = grouped.topk(2 if routing.group_score == "top2" else 1).values.sum(-1)
        best, order = of_groups.sort(descending=True)
        found = float((best[:, routing.kept_groups - 1] - best[:, routing.kept_groups]).min())
        kept = order[:, : routing.kept_groups, None].expand(-1, -1, grouped.shape[-1])
        scores = grouped.gather(1, kept).flatten(1)
    if routing.top_k < scores.shape[1]:
        best = scores.sort(descending=True).values
        found = min(found, float((best[:, routing.top_k - 1] - best[:, routing.top_k]).min()))
    return found


@torch.no_grad()
def snapshot(gradients: Gradients) -> dict[str, np.ndarray]:
    """What is quantised is compared as the numbers that it stands for."""
    whole = {name: torch.empty_like(parameter) for name, parameter in trained(gradients.parameters).items()}
    for name, tensor in whole.items():
        gradients.read_weight(name, tensor)
    for name, blocks in gradients.parameters.blocks.items():
        whole[name] = blocks.dequantise(whole[name], torch.float64)
    return {name: tensor.numpy() for name, tensor in whole.items()}


@torch.no_grad()
def gradient_arrays(gradients: Gradients) -> dict[str, np.ndarray]:
    shards = gradients.parameters.shards
    whole = {name: torch.zeros(shards[name].shape, dtype=torch.float64) for name in trained(gradients.parameters)}
    for name in dict.fromkeys(span.name for span in gradients.spans):
        gradients.read(name, lambda part: part.gradient, whole[name])
    return {name: tensor.numpy() for name, tensor in whole.items()}


def trained(parameters: Parameters) -> dict[str, Tensor]:
    """All but buffers."""
    return {name: each.detach() for name, each in parameters.items() if not parameters.shards[name].param.buffer}


def buffers_of(parameters: Parameters) -> dict[str, np.ndarray]:
    kept = trained(parameters)
    return {name: each.detach().numpy().copy() for name, each in parameters.items() if name not in kept}


def expected(case: Case, run: Run, rank: int, one: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a rank must hold if one process holds ``one``."""
    source = native(Run().layout(case), [0])
    layout = run.layout(case)
    arrays = {}
    for stored, copies in plan(layout.schema, source, native(layout, [rank])):
        if all(copy.source.name in one for copy in copies):  # buffers are held apart
            arrays[stored.name] = np.zeros(stored.shape)
            for copy in copies:
                execute(copy, one[copy.source.name], arrays[stored.name])
    return arrays


def check(case: Case, run: Run, one: Measured, ranks: Iterable[Measured]) -> None:
    """Every rank of a run has computed what one process has computed, and has started bitwise the same."""
    assert one.gradients.keys() == one.final.keys() - {name for name in one.final if "correction" in name}, "vacuous"
    for rank, got in enumerate(ranks):
        assert min(got.gap, one.gap) > GAP, "a choice is a matter of rounding: draw another case"
        np.testing.assert_allclose(got.losses, one.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(got.norms, one.norms, rtol=TOLERANCE)
        np.testing.assert_allclose(got.evaluated, one.losses[0], rtol=TOLERANCE)
        initial = expected(case, run, rank, one.initial)
        assert got.initial.keys() == initial.keys()
        for name, want in initial.items():
            assert np.array_equal(got.initial[name], want), f"rank {rank}: {name} does not start bitwise the same"
        for what, own, ones in (("gradient", got.gradients, one.gradients), ("weight", got.final, one.final)):
            for name, want in expected(case, run, rank, ones).items():
                error = relative(own[name], want)
                assert error <= TOLERANCE, f"rank {rank}: {what} of {name} is off by {error:.1e}"
        for step, buffers in enumerate(got.buffers):
            for name, value in buffers.items():
                assert value.tobytes() == one.buffers[step][name].tobytes(), f"rank {rank}: {name} in step {step}"
        for here, there in zip(got.apart, one.apart, strict=True):
            assert here.any()
            np.testing.assert_allclose(here, there, rtol=TOLERANCE)
        for step, (mine, alone) in enumerate(zip(got.loads, one.loads, strict=True)):
            assert mine.layers == alone.layers and torch.equal(mine.counts, alone.counts), f"rank {rank}: step {step}"
            for values, theirs in ((mine.balance, alone.balance), (mine.z_loss, alone.z_loss)):
                np.testing.assert_allclose(values, theirs, rtol=TOLERANCE)
            if alone.biases is not None:
                assert mine.biases is not None and torch.equal(mine.biases, alone.biases)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape} instead of {want.shape}")
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / norm if norm else float(np.abs(got).max(initial=0.0))
