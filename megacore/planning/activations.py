"""The memory that a microbatch leaves on a rank, and that each backward adds: the parts of the model as they were
measured, put together as a run has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Literal, TypeVar

from megacore.parallel.budgets import BLOCK
from megacore.parallel.enum_errors import Placement, Recompute
from megacore.parallel.virtual_stages import of_stage, stage_of, virtual_stage
from megacore.planning.costs import LayerCost
from megacore.planning.setting import Packing, RankModel, Setting

if TYPE_CHECKING:
    from megacore.planning.trace.measure import FakeModel

T = TypeVar("T")


@dataclass(frozen=True)
class Visit:
    """A backward comes to a block: its place in its chunk, the bytes that those after it have kept and have waiting,
    and the elements of it and of those after it that are trained."""

    block: LayerCost
    which: Literal["last", "lower", "first"]
    freed: int
    waiting: int
    learned: int


def _visits(blocks: Sequence[LayerCost]) -> Iterator[Visit]:
    seen, freed, waiting, learned = set[LayerCost](), 0, 0, 0
    reached = [block for block in reversed(blocks) if block.left]
    for number, block in enumerate(reached, 1):
        learned += block.learning
        if block not in seen:
            yield Visit(block, "lower" if seen else "last", freed, waiting, learned)
        if number == len(reached) > 1:
            yield Visit(block, "first", freed, waiting, learned)
        seen.add(block)
        freed += block.kept
        waiting += block.waiting


@dataclass(frozen=True)
class ActivationMemory:
    """The activations of one rank for one microbatch, in bytes; made by :meth:`of`. The fields are all that they depend
    on.

    Args:
        stages, layers, placement: The stages of the pipeline, the layers of each virtual one, and how these are placed.
        loss_chunk, mlp_chunk: Tokens whose logits, or feed-forward activations, exist at a time; None for all.
        recompute, offload: What of a block each stage computes again, and whether what it keeps goes to the host.
        imbalance: The rows of the fullest rank's experts over the mean of all ranks.
    """

    rank: RankModel
    stages: int
    layers: tuple[int, ...]
    placement: Placement
    packing: Packing
    recompute: tuple[Recompute, ...]
    offload: tuple[bool, ...]
    loss_chunk: int | None
    mlp_chunk: int | None
    imbalance: float

    @classmethod
    def of(cls, setting: Setting) -> ActivationMemory:
        """Return the activations of a run; ModuleNotFoundError without torch, which they are measured with."""
        s, layout, pp = setting, setting.layout, setting.layout.mesh.pp
        recompute = tuple(of_stage(s.recompute, stage) for stage in range(pp))
        offload = tuple(of_stage(s.offload_activations, stage) for stage in range(pp))
        placed, chunks = (pp, layout.layers, layout.placement), (s.loss_chunk, s.mlp_chunk)
        return _activations(s.of_rank, *placed, s.packing, recompute, offload, *chunks, s.imbalance)

    @cached_property
    def without_recomputation(self) -> ActivationMemory:
        nothing: Recompute = "none"
        return replace(self, recompute=(nothing,) * self.stages)

    @cached_property
    def wide(self) -> ActivationMemory:
        """The same without recomputation and fp8."""
        plain = self.without_recomputation
        return replace(plain, rank=replace(self.rank, fp8=False)) if self.rank.fp8 else plain

    @cached_property
    def uncompressed(self) -> ActivationMemory:
        return replace(self, rank=replace(self.rank, compress=False))

    @cached_property
    def _fake(self) -> FakeModel:
        from megacore.planning.trace.measure import fake_model  # torch

        return fake_model(self.rank)

    @cached_property
    def chunks(self) -> tuple[tuple[LayerCost, ...], ...]:
        """The blocks of each virtual stage; those that are alike are one object."""
        measured = cache(partial(self._fake.block, self.mlp_chunk, self.imbalance, self.packing))
        found, kinds = [], iter(self._fake.kinds)
        for virtual, count in enumerate(self.layers):
            recompute = self._recomputed(virtual)
            # What another stage sends asks for a gradient, whatever is trained there.
            entered, blocks = virtual > 0 or self.embeds, list[LayerCost]()
            for kind in islice(kinds, count):
                blocks.append(measured(recompute, kind, entered))
                entered = blocks[-1].left
            found.append(tuple(blocks))
        return tuple(found)

    @cached_property
    def embeds(self) -> bool:
        """Whether a gradient goes to what embeds the tokens."""
        return self._fake.embeds

    @cached_property
    def embedding(self) -> LayerCost:
        return self._fake.embedding(self.packing.tokens)

    @cached_property
    def head(self) -> LayerCost:
        """The final norm, the product to the vocabulary, and the loss."""
        entered = not self.chunks[-1] or self.chunks[-1][-1].left
        recompute = self._recomputed(len(self.layers) - 1)
        return self._fake.head(recompute, self.imbalance, self.packing, entered, self.loss_chunk)

    def _recomputed(self, virtual: int) -> Recompute:
        return self.recompute[stage_of(virtual, self.stages, self.placement)]

    @cached_property
    def tied(self) -> int:
        """The gradient of what the embedding and the head share, where one waits for the other's."""
        return self._fake.tied * self.rank.width if len(self.layers) == 1 else 0

    def units(self, virtual: int) -> Counter[LayerCost]:
        """Return the number of each kind that a virtual stage has: blocks, and an end of the model."""
        counts = Counter(self.chunks[virtual])
        counts.update([self.embedding] * (virtual == 0) + [self.head] * (virtual == len(self.layers) - 1))
        return counts

    def stage(self, stage: int) -> Counter[LayerCost]:
        """Return the number of each kind that a stage has."""
        return sum(self.of_stage(stage, [*map(self.units, range(len(self.layers)))]), Counter[LayerCost]())

    def of_stage(self, stage: int, each: Sequence[T]) -> list[T]:
        """Return what belongs to the chunks of a stage, of one for each virtual stage."""
        chunks = range(len(self.layers) // self.stages)
        return [each[virtual_stage(stage, chunk, self.stages, self.placement)] for chunk in chunks]

    @cached_property
    def blocks(self) -> tuple[Counter[LayerCost], ...]:
        """The number of blocks of each kind that each stage has."""
        return tuple(Counter(chain(*self.of_stage(stage, self.chunks))) for stage in range(self.stages))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each stage the first that is like it: which has the same blocks and the same end of the model, and so the
        same parameters, messages and times, and keeps them in the same place."""
        ends, groups = {0, self.stages - 1}, dict[object, int]()
        keys = [
            (*self.of_stage(stage, self.chunks), self.offload[stage], stage if stage in ends else None)
            for stage in range(self.stages)
        ]
        return tuple(groups.setdefault(key, stage) for stage, key in enumerate(keys))

    @cached_property
    def unlike(self) -> tuple[int, ...]:
        """The first of the stages that are alike, of each such group."""
        return tuple(dict.fromkeys(self.alike))

    def layers_of(self, stage: int) -> Mapping[int, LayerCost]:
        """Return {the last layer of each kind that a stage has: its block}."""
        starts = accumulate(self.layers, initial=0)
        numbered = [dict(enumerate(blocks, start)) for start, blocks in zip(starts, self.chunks, strict=False)]
        kinds = {block: layer for blocks in self.of_stage(stage, numbered) for layer, block in blocks.items()}
        return {layer: block for block, layer in kinds.items()}

    @cached_property
    def visits(self) -> tuple[tuple[Visit, ...], ...]:
        """The last block of each kind and the first block of each virtual stage, in the order of a backward."""
        return tuple(tuple(_visits(blocks)) for blocks in self.chunks)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The bytes that each virtual stage keeps, on the device or, offloaded, on the host: of its blocks, with cos
        and sin, and of the embedding."""
        blocks = [sum(block.kept for block in own) + _tables(own) for own in self.chunks]
        rank, model = self.rank, self.rank.config
        tokens = self.packing.length * self.packing.sequences // rank.mesh.size(("cp", "tp"))
        told = tokens * (model.boundary_width - model.width) * rank.width  # it came with the activations
        # What another stage sends, who runs the chunk holds as it is.
        entered = tokens * model.width
        exact = (entered * (rank.width - 1) - -(-entered // min(BLOCK, model.width)) * rank.width) * rank.compress
        return blocks[0] + self.embedding.kept, *(each + told + exact for each in blocks[1:])

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """The bytes that the blocks of each virtual stage have waiting for weight gradients that come later."""
        return tuple(sum(block.waiting for block in own) for own in self.chunks)


def _tables(blocks: Iterable[LayerCost]) -> int:
    """Return the bytes of the cos and sin of all ropes that some of the blocks keep."""
    kept = {(rope, size) for block in blocks for rope, size in block.tables.items() if size}
    return sum(size for _, size in kept)


_activations = lru_cache(maxsize=4096)(ActivationMemory)
