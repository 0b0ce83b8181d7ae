"""What autograd keeps of a microbatch and what a backward adds: the blocks of each chunk, and the ends of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

from megacore.plan.block import Block, gathered
from megacore.plan.setting import Setting
from megacore.plan.state import Held
from parallel.layout import Place
from parallel.schema import Param

_LOSS_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of the logits that the loss holds in fp32 at a time (`parallel.loss`)."""


@dataclass(frozen=True)
class Visit:
    """A backward comes to a block.

    Args:
        block: The block.
        which: Of its chunk.
        freed: What those after it have kept.
        learned: Elements of it and of those after it that are trained.
    """

    block: Block
    which: Literal["last", "lower", "first"]
    freed: int
    learned: int


def _visits(blocks: Sequence[Block]) -> Iterator[Visit]:
    seen, freed, learned = set[Block](), 0, 0
    reached = [block for block in reversed(blocks) if block.left]
    for number, block in enumerate(reached, 1):
        learned += block.learning
        if block not in seen:
            yield Visit(block, "lower" if seen else "last", freed, learned)
        if number == len(reached) > 1:
            yield Visit(block, "first", freed, learned)
        seen.add(block)
        freed += block.kept


@dataclass(frozen=True)
class Activations:
    """Of one rank for one microbatch, in bytes.

    Args:
        setting: The run.
        held: What its ranks hold.
    """

    setting: Setting
    held: Held

    # -- the blocks

    @cached_property
    def chunks(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each virtual stage; those that are alike are one object."""
        layout = self.setting.layout
        made: dict[tuple[frozenset[str], bool], Block] = {}
        layers = iter(self.held.trained)
        found = []
        for virtual, count in enumerate(layout.layers):
            # What another stage sends asks for a gradient, whatever is trained there.
            entered, blocks = virtual > 0 or self.embeds, list[Block]()
            for trained in islice(layers, count):
                key = trained, entered
                if key not in made:
                    made[key] = Block(self.setting, self.held.block, trained, entered)
                blocks.append(made[key])
                entered = made[key].left
            found.append(tuple(blocks))
        return tuple(found)

    def stage(self, stage: int) -> Counter[Block]:
        """How many of each kind a stage has."""
        return Counter(block for chunk in self.chunks[stage :: self.setting.layout.mesh.pp] for block in chunk)

    @cached_property
    def visits(self) -> tuple[tuple[Visit, ...], ...]:
        """Of each virtual stage, in the order of a backward: the last block of each kind, and the first block."""
        return tuple(tuple(_visits(blocks)) for blocks in self.chunks)

    def kept(self, virtual: int) -> int:
        """What a virtual stage keeps, on the device or, offloaded, on the host: of its blocks, and cos and sin."""
        blocks = self.chunks[virtual]
        rotates = any(attention.crossed for attention, _ in (block.branches for block in blocks))
        return sum(block.kept for block in blocks) + (self.tables if rotates else 0)

    def forward(self, virtual: int) -> int:
        """What the forward of a virtual stage needs where nothing is kept."""
        return max(block.forward for block in self.chunks[virtual]) + self.tables

    @cached_property
    def tables(self) -> int:
        """cos and sin of a chunk, for families that rotate."""
        sizes = self.setting.layout.schema.sizes
        return 0 if "position" in sizes else self.setting.tokens * sizes["head"] * self.setting.widths.parameter

    # -- the embedding

    @cached_property
    def embeds(self) -> bool:
        """Whether a gradient goes to what embeds the tokens."""
        return any("first" in param.at.split() for param in self._ends)

    @cached_property
    def embedding_table(self) -> int:
        """The gradient of the embedding as autograd gives it."""
        return self._table("first")

    @cached_property
    def embedding(self) -> int:
        """That at the end of a backward, with the gathered tokens' gradients."""
        return self.embedding_table + (self._whole * self.setting.layout.schema.sizes["embed"])

    # -- the head

    @cached_property
    def normed(self) -> bool:
        """Whether what the head's product reads has a gradient."""
        norm = any(param.at == "last" and "vocab" not in param.sentence.axes for param in self._ends)
        return norm or self.chunks[-1][-1].left

    @cached_property
    def head_table(self) -> int:
        """The gradient of the head's table as autograd gives it."""
        return self._table("last")

    @cached_property
    def head(self) -> int:
        """What the last norm and the product to the vocabulary keep: their inputs.

        In chunks the gradient of the product's input is there instead of it.
        """
        s = self.setting
        product = self.head_table > 0 if s.loss_chunk is None else self.normed
        norm = s.activation + 4 * s.local_tokens if self.normed else 0
        return norm + (s.activation if product else 0)

    @cached_property
    def logits(self) -> int:
        """In the parameters' type; their gradient takes the same memory. With the labels' masks."""
        s = self.setting
        rows = min(s.tokens, s.loss_chunk or s.tokens)
        return rows * self.columns * s.widths.parameter + 14 * s.tokens

    @cached_property
    def columns(self) -> int:
        """Of the vocabulary on one rank, padding included."""
        layout = self.setting.layout
        start, stop = layout.box("vocab", Place())
        return stop - start

    @cached_property
    def rows(self) -> int:
        """Elements of an embedding or a head on one rank."""
        return self.columns * self.setting.layout.schema.sizes["embed"]

    @cached_property
    def loss(self) -> int:
        """Temporaries of the loss and of the head's backward, beside the logits.

        In chunks the gradients are made in the forward: that of the table is added up in fp32, and nothing is gathered
        twice.
        """
        s = self.setting
        embed = s.layout.schema.sizes["embed"]
        wide, rows = max(4, s.widths.parameter), min(s.tokens, s.loss_chunk or s.tokens)
        # Those of a chunk are let go when the next one's are there.
        exponentials = min(2 * _LOSS_CHUNK[s.device], rows * self.columns) * wide
        # In the forward the norm's output still is there, whether it is kept or not.
        exponentials += 0 if self.head_table else s.activation
        if s.loss_chunk is not None:
            tokens = 2 * self._whole * embed if s.layout.mesh.tp > 1 else 0
            sums = self.head_table * wide // s.widths.parameter
            # The logits of a chunk are let go when the next one's are there.
            again = self.head_table or rows * self.columns * s.widths.parameter + exponentials
            return tokens + sums + again
        inputs = s.activation if self.normed else 0
        products = max(gathered(s, self.head_table > 0, self.normed) * embed, inputs) + self.head_table
        return max(exponentials, products)

    @cached_property
    def batch(self) -> int:
        """Tokens, labels and positions of all microbatches of a step, 8 bytes each."""
        return 24 * self.setting.tokens * self.setting.microbatches

    @property
    def _ends(self) -> Iterator[Param]:
        """What is trained of them."""
        return (param for param in self.setting.layout.schema.params if param.name in self.held.ends)

    def _table(self, end: str) -> int:
        """Of the one with the vocabulary at an end, if it is trained."""
        trained = any("vocab" in param.sentence.axes and end in param.at.split() for param in self._ends)
        return self.rows * self.setting.widths.parameter if trained else 0

    @property
    def _whole(self) -> int:
        """Bytes of a feature of all tokens of the microbatch."""
        return self.setting.tokens * self.setting.widths.parameter
