"""All that a run's memory and time depend on: a layout, widths of numbers, a batch, the scores that parts of cp compute
of it and the keys that they send, and the rungs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from megacore.models.config import ModelConfig, looks
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.budgets import BUCKET_BYTES, ROUNDING_BLOCK
from megacore.parallel.context_split import ContextParallel, ContextSplit
from megacore.parallel.enum_errors import (
    SPLIT_BACKWARD,
    BaseDtype,
    Compression,
    Moments,
    OptimizerOffload,
    Precision,
    Recompute,
    ZeroShard,
)
from megacore.parallel.pipeline.schedules import Schedule
from megacore.parallel.weights.block_formats import bytes_of
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param

Counts = npt.NDArray[np.int64]
SHARDS: tuple[ZeroShard, ...] = get_args(ZeroShard)
PARAMETER: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "fp64": 8}
"""Bytes of a parameter and of an activation; fp8 is what matrix products read, not what is kept."""
WHOLE = ContextParallel()
"""The way of a mesh without cp: each microbatch is whole on its rank."""


@dataclass(frozen=True)
class Widths:
    """Bytes of one element of each part of the training state; ``moments`` is that of both together, ``average`` that
    of an average of the weights, and ``outer`` that of the start and the momentum of an outer step, if there are
    some."""

    parameter: int
    gradient: int
    master: int
    moments: int
    average: int = 0
    outer: int = 0

    @classmethod
    def of(
        cls,
        precision: Precision,
        master_weights: bool = True,
        moments: Moments = "fp32",
        averages: bool = False,
        outer: bool = False,
    ) -> Widths:
        """Return the widths that the engine has. Parameters narrower than fp32 have fp32 masters, and gradients are
        then accumulated in fp32: 2 + 4 + 4 + 8 = 18 bytes where the literature counts 2-byte gradients, and 16.
        """
        parameter = PARAMETER[precision]
        mixed = master_weights and parameter < 4
        wide = 4 if mixed else parameter
        of_moments = 2 * (2 if moments == "bf16" else wide)
        return cls(parameter, wide, 4 if mixed else 0, of_moments, wide * averages, 2 * wide * outer)


ADAM_16 = Widths(parameter=2, gradient=2, master=4, moments=8)
"""Mixed precision Adam as the literature counts it: 16 bytes for each parameter."""


@dataclass(frozen=True, eq=False)
class ExchangeWork:
    """The work of all parts in the attention of one layer, of one head.

    A part computes in turns: in the first one the scores of its own tokens by themselves, in each other one those with
    the keys that a hop has brought. In a ring hop d brings those of the part d before; gathered, those of all at once.

    Args:
        pairs: [parts, turns], the scores of each turn.
        taken: [parts, parts - 1], the keys that a part takes of the one that is 1, 2, ... before it.
        rectangle: The queries and the keys of the largest rectangle of what a part takes most keys for.
        gathered: Whether all keys come at once.
    """

    pairs: Counts
    taken: Counts
    rectangle: tuple[int, int]
    gathered: bool

    @cached_property
    def given(self) -> Counts:
        """[parts, parts - 1], the keys that a part gives to the one that is 1, 2, ... behind it."""
        places = np.arange(len(self.taken))
        distances = np.arange(1, len(self.taken))
        return self.taken[(places[:, None] + distances) % len(places), distances - 1]

    @cached_property
    def busiest(self) -> int:
        """The scores of the part that computes most."""
        return int(self.pairs.sum(1).max())

    @cached_property
    def imbalance(self) -> float:
        """The scores of that part over the mean of all."""
        return self.busiest / float(self.pairs.sum(1).mean())

    @cached_property
    def most(self) -> int:
        """The keys of the largest hop; gathered, the most of all that a part takes."""
        return int((self.taken.sum(1) if self.gathered else self.taken).max(initial=0))

    @cached_property
    def several(self) -> bool:
        """Whether some part takes keys of several others."""
        return bool(((self.taken > 0).sum(1) > 1).any())

    @cached_property
    def held(self) -> int:
        """The most keys that a part holds at once: of two hops that follow each other; gathered, of all as they come
        and, if they are of several parts, in their order."""
        if self.gathered:
            return (1 + self.several) * self.most
        return int((self.taken[:, :-1] + self.taken[:, 1:]).max(initial=self.most))

    def messages(self, back: bool) -> tuple[int, ...]:
        """Return the tokens of each message of the part that sends most: keys, or gradients on their way back."""
        sent = self.taken if back else self.given
        busiest = sent[sent.sum(1).argmax()] if len(sent) > 1 else sent[0]
        return tuple(int(tokens) for tokens in busiest if tokens)


@dataclass(frozen=True)
class Packing:
    """The tokens of a microbatch, and the way in which cp shares them out; attention stays within documents of these
    lengths, or each sequence is one."""

    length: int
    sequences: int
    context: ContextParallel = WHOLE
    documents: tuple[int, ...] | None = None

    @property
    def tokens(self) -> Packing:
        """The packing that shares out tokens alone, as many to each rank, whoever looks at whom."""
        return Packing(self.length, self.sequences, ContextParallel(self.context.size))

    @property
    def split(self) -> ContextSplit:
        return self.context.split(self.documents or (self.length,) * self.sequences, self.length)

    def exchange(self, window: int | None, chunk: int | None = None) -> ExchangeWork:
        """Return the work of the parts in the attention of a layer, each of whose tokens looks at a window of them,
        itself included, or at those of its chunk; None: all before it."""
        return _work(self, window, chunk)

    def seen(self, window: int | None, chunk: int | None = None) -> float:
        """Return the scores of the documents over those that there would be if each sequence were one."""
        if self.documents is None:
            return 1.0
        return _scores(self.documents, window, chunk) / _scores((self.length,) * self.sequences, window, chunk)


@lru_cache(maxsize=256)
def _work(packing: Packing, window: int | None, chunk: int | None) -> ExchangeWork:
    split, gathered = packing.split.in_chunks(chunk), packing.context.exchange == "gather"
    pairs, taken, largest = list[Sequence[int]](), list[Sequence[int]](), (0, 0, 0)
    for part in range(split.parts):
        hops = [split.hop(part, (part - distance) % split.parts, window) for distance in range(1, split.parts)]
        found = [sum(rectangle.pairs for rectangle in hop.rectangles) for hop in hops]
        tokens = [hop.tokens for hop in hops]
        together = [split.gathered(part, window)] if gathered and split.parts > 1 else hops
        for each in together:
            for rectangle in each.rectangles:
                (first, last), (start, stop) = rectangle.queries, rectangle.keys
                largest = max(largest, (each.tokens, last - first, stop - start))
        alone = split.pairs(part, window) - sum(found)
        pairs.append([alone, sum(found)] if gathered else [alone, *found])
        taken.append(tokens)
    return ExchangeWork(np.array(pairs, np.int64), np.array(taken, np.int64), largest[1:], gathered)


@dataclass(frozen=True)
class RankModel:
    """The model of a rank, in one chunk: all that the parts of it depend on.

    Args:
        mesh: The mesh that its layers are split over: neither pp nor dp.
        split: A :data:`~parallel.weights.schema.Split` that can be a key.
        width: Bytes of a parameter and of an activation.
        late: Whether weight gradients come later than input gradients.
        fp8: Whether linears and experts multiply in fp8.
        compress: Whether activations wait for the backward in 8 bits.
    """

    config: ModelConfig
    tuning: Tuning
    mesh: MeshShape
    split: tuple[tuple[str, tuple[str, ...]], ...]
    width: int
    device: Literal["cpu", "cuda"]
    late: bool
    fp8: bool
    compress: bool


def _scores(documents: Sequence[int], window: int | None, chunk: int | None) -> int:
    """Return the scores of all tokens of some documents, of one head."""
    return sum(looks(length, window, chunk) for length in documents)


@dataclass(frozen=True)
class Setting:
    """A run on paper: what the keys of a recipe with these names say.

    Args:
        layout: Its parameters and its adapters on its mesh, dp included.
        microbatches: The number of those of one step on each data parallel rank.
        loss_chunk, mlp_chunk: Tokens whose logits, or feed-forward activations, exist at a time; None for all.
        offload_buffer: Bytes of host memory through which offloaded states pass.
        compress_activations: Whether activations wait for the backward in 8 bits.
        device: The kind of device: their kernels keep different things.
        imbalance: The rows that the experts of the fullest rank get over the mean of all ranks, if there are as many.
        context: The way in which cp, as large as that of the layout's mesh, shares out a microbatch.
        documents: The lengths of a microbatch's documents, which attention stays within; None: each row is one.
        blank: Sequences of a step that only fill the microbatches up, on all ranks.
        compiled: Whether blocks are compiled.
        replicas: Groups of dp ranks that do not split with each other, of all replicas that take steps alone.
        compress: The numbers that gradients are rounded to where they are sent.
        fp8: Whether linears multiply in fp8.
        recompute, offload_activations: One of all stages, or of each.
        order: The actions of each stage, where that is not the schedule's own order of them.
        group: The most microbatches of a group of the schedule, where a recipe says how many.
        alone: The replicas that take steps alone, parts of dp.
        round_steps: The steps that these take before they are brought together; 0: there are none.
        muon_steps: Steps of Newton and Schulz that update matrices as wholes; 0: none are.
        tower: Elements of what turns images into embeddings, beside the parameters, on each rank that embeds.
    """

    model: ModelConfig
    layout: Layout
    widths: Widths
    sequence_length: int
    micro_size: int
    microbatches: int
    schedule: str = "1f1b"
    shard: ZeroShard = "none"
    replicas: int = 1
    recompute: Recompute | tuple[Recompute, ...] = "none"
    loss_chunk: int | None = None
    offload_optimizer: OptimizerOffload = "none"
    offload_parameters: bool = False
    offload_buffer: int = 512 << 20
    offload_activations: bool | tuple[bool, ...] = False
    compress_activations: bool = False
    device: Literal["cpu", "cuda"] = "cuda"
    bucket_bytes: int = BUCKET_BYTES
    tuning: Tuning = EVERYTHING
    imbalance: float = 1.0
    context: ContextParallel = WHOLE
    documents: tuple[int, ...] | None = None
    mlp_chunk: int | None = None
    blank: int = 0
    compiled: bool = False
    muon_steps: int = 0
    compress: Compression = "none"
    fp8: bool = False
    order: Schedule | None = None
    group: int | None = None
    alone: int = 1
    round_steps: int = 0
    tower: int = 0

    def tower_bytes(self, stage: int) -> int:
        """Return the bytes of the tower on a rank of a stage."""
        return self.tower * self.widths.parameter * (stage == 0)

    def sent(self, elements: int, model_replicas: int = 1) -> int:
        """Return the bytes of so many elements of a gradient in a message, of which so many ranks of a data parallel
        replica hold copies."""
        if self.feeds_back(model_replicas):
            return elements + elements // ROUNDING_BLOCK
        return elements * (2 if self.compress == "bf16" else self.widths.gradient)

    def feeds_back(self, model_replicas: int) -> bool:
        """Return whether what is left of such gradients is sent later: those that data parallel ranks alone sum."""
        return self.compress == "int8" and model_replicas == 1 and self.layout.mesh.size(("dp", "cp")) > 1

    def widths_of(self, param: Param) -> Widths:
        """Return the widths of a parameter's elements: of matrices that are updated as wholes there is one moment."""
        one = self.muon_steps and param.is_matrix
        return replace(self.widths, moments=self.widths.moments // 2) if one else self.widths

    def bytes_of(self, param: Param, elements: int) -> int:
        """Return the bytes of the values of so many elements of a parameter, as they are held."""
        held = self.quantised.get(param.name)
        return elements * self.widths.parameter if held is None else bytes_of(elements, held)

    @cached_property
    def quantised(self) -> Mapping[str, BaseDtype]:
        """{weight: the format that it is held in} of what is held in fewer bits than the rest."""
        # A schema takes longer to make than all that a search asks of a setting beside it.
        return {} if self.tuning.lora is None else self.tuning.quantised(self.model.schema)

    @property
    def frozen(self) -> frozenset[str]:
        """The tensors that are not trained, by their names."""
        return self.tuning.frozen(self.model.schema)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients come later than input gradients."""
        return self.schedule in SPLIT_BACKWARD

    @property
    def may_split(self) -> bool:
        """Whether a schedule may have them do so (`megacore.checks.rules`)."""
        whole = self.loss_chunk is not None or self.mlp_chunk is not None
        return not self.compiled and not (whole and self.shard in SHARDS[2:])

    @property
    def may_overlap(self) -> bool:
        """Whether a schedule may have actions run beside others' messages of experts (`megacore.checks.rules`)."""
        return self.has_experts and self.layout.mesh.size(self.layout.split["experts"]) > 1

    @property
    def drops(self) -> bool:
        """Whether blocks or adapters drop anything."""
        return self.model.drops or (self.tuning.lora is not None and self.tuning.lora.dropout > 0)

    @property
    def summing(self) -> int:
        """The ranks along dp and cp whose gradients are summed."""
        return self.layout.mesh.dp * self.layout.mesh.cp // self.alone

    @property
    def has_experts(self) -> bool:
        return self.model.anatomy.routing is not None

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch, on a data parallel rank."""
        return self.micro_size * self.sequence_length // self.layout.mesh.cp

    @property
    def of_rank(self) -> RankModel:
        """The model of a rank."""
        mesh, split = replace(self.layout.mesh, pp=1, dp=1), tuple(self.layout.split.items())
        numbers = self.widths.parameter, self.device, self.splits_backward, self.fp8, self.compress_activations
        return RankModel(self.model, self.tuning, mesh, split, *numbers)

    @property
    def packing(self) -> Packing:
        """The tokens of a microbatch, and the way in which cp shares them out."""
        return Packing(self.sequence_length, self.micro_size, self.context, self.documents)

    @property
    def sequences(self) -> int:
        """The sequences of the global batch."""
        return self.micro_size * self.microbatches * self.layout.mesh.data - self.blank

    @property
    def global_tokens(self) -> int:
        """The tokens of a step, on all ranks."""
        return self.sequences * self.sequence_length

    @property
    def activation(self) -> int:
        """Bytes of what travels between blocks and stages: [tokens/tp, embed]."""
        return self.tokens // self.layout.mesh.tp * self.model.boundary_width * self.widths.parameter
