"""All that a run's memory and time depend on: a layout, widths of numbers, a batch, and the rungs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from megacore.models.config import ModelConfig
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.budgets import BUCKET_BYTES, ROUNDING_BLOCK
from megacore.parallel.context_split import ContextParallel
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
from megacore.parallel.weights.layout import Layout
from megacore.parallel.weights.schema import Param
from megacore.planning.exchange import WHOLE, Packing

SHARDS: tuple[ZeroShard, ...] = get_args(ZeroShard)
PARAMETER: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "fp64": 8}
"""Bytes of a parameter and of an activation; fp8 is what matrix products read, not what is kept."""


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


@dataclass(frozen=True)
class Setting:
    """A run on paper: what the keys of a recipe with these names say.

    Args:
        layout: Its parameters and its adapters on its mesh, dp included.
        microbatches: The number of those of one step on each data parallel rank.
        loss_chunk, mlp_chunk: Tokens whose logits, or feed-forward activations, exist at a time; None for all.
        offload_buffer: Bytes of host memory through which offloaded states pass.
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
