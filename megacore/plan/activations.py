"""What autograd keeps of a microbatch, read off the sentences of a block's parameters, and what a backward adds.

A norm keeps its input; a column-parallel product keeps its input, and what reads its output keeps that; a row-parallel
product keeps its input. Between blocks tokens are split over tp, inside of them features are. This follows the autograd
functions of `parallel.linear`, `parallel.norm`, `parallel.loss`, `models.rope` and `models.blocks`, and a test measures
that it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megacore.plan.setting import Setting
from parallel.layout import Place, Shard
from parallel.pattern import Pattern
from parallel.schema import SPLIT

_LOSS_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements of the logits that the loss holds in fp32 at a time (`parallel.loss`)."""
_QUERIES = 128
"""Queries in a block of the attention's backward on CPUs (`parallel.cpu`)."""
_SHORT = 768
"""Up to this length it is used, for types narrower than fp32 (`parallel.kernels`)."""


@dataclass(frozen=True)
class Linear:
    """A product of a block on one rank, by features; ``column``: its outputs are split over tp, else its inputs."""

    name: str
    column: bool
    inputs: int
    outputs: int
    fused: int

    @property
    def numel(self) -> int:
        return self.inputs * self.outputs


def linear(shard: Shard) -> Linear | None:
    """The product of a parameter of a block; None for norms and biases."""
    dims = shard.param.sentence.dims
    if len(dims) != 2:
        return None
    outputs, inputs = shard.shape
    column = any(SPLIT.get(axis) == "tp" for axis in Pattern(dims[:1]).axes)
    return Linear(shard.param.name, column, inputs, outputs, len(shard.param.sentence.labels))


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank for one microbatch; every property is of one block, or of an end of the model.

    Args:
        setting: The run.
        block: What a rank holds of one block.
    """

    setting: Setting
    block: tuple[Shard, ...]

    # -- a block

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(found for shard in self.block if (found := linear(shard)))

    @cached_property
    def block_elements(self) -> int:
        return sum(shard.numel for shard in self.block)

    @cached_property
    def saved(self) -> int:
        """What a block keeps without recomputation."""
        split = sum(x.inputs for x in self.linears if x.column) * self._local
        whole = sum(x.outputs if x.column else x.inputs for x in self.linears) * self._whole
        return split + whole + self._norms * (self.setting.activation + 4 * self.setting.local_tokens) + self._log_sums

    @cached_property
    def kept(self) -> int:
        """What a block keeps from its forward to its backward, on the device or, offloaded, on the host."""
        match self.setting.recompute:
            case "none":
                return self.saved
            case "full":
                return self.setting.activation
            case "selective":
                # What products and attention give is kept; norms and activation functions are computed again.
                column_inputs = sum(x.inputs for x in self.linears if x.column) * self._local
                return self.saved - column_inputs - self._activated.inputs * self._whole

    @cached_property
    def backward(self) -> int:
        """The most that the backward of a block needs beside what the block keeps."""
        once = {"none": 0, "selective": self._activated.inputs * self._whole, "full": self.saved - self.kept}
        again = once[self.setting.recompute]
        return again + self.setting.activation + max(self._mlp_backward, self._attention_backward)

    @property
    def _mlp_backward(self) -> int:
        """Gradients of the feed-forward network, when what its second product keeps has been freed."""
        up, down = self._activation, self._activated
        gated = down.inputs * self._whole if up.fused > 1 else 0
        in_activation = up.outputs * self._whole + gated
        after = self._products_backward(up) - down.inputs * self._whole
        return max(in_activation, after, self._products_backward(down))

    def _products_backward(self, x: Linear) -> int:
        """Gradients that come out of a product, gathered tokens and, under tp, partial sums."""
        gathered = self._gathered * x.inputs if x.column else 0
        weight = x.numel * self.setting.widths.parameter
        if not x.column:
            tokens = self._whole * x.outputs if self.setting.layout.mesh.tp > 1 else 0
            return tokens + x.inputs * self._whole + weight
        return max(gathered, x.inputs * self._local) + weight

    @property
    def _attention_backward(self) -> int:
        """Relative to a block whose feed-forward part has been freed."""
        qkv, out = self._qkv, self._out
        t, width = self.setting.tokens, self.setting.widths.parameter
        freed = sum(x.outputs if x.column else x.inputs for x in (self._activation, self._activated)) * self._whole
        freed += 2 * self.setting.activation
        grads = (out.inputs + 2 * qkv.outputs) * self._whole
        if self._blocked_attention:
            head = self.setting.layout.schema.sizes["head"]
            padded = (head + 3 + 31) // 32 * 32 / head
            kv = (qkv.outputs - out.inputs) // 2
            copies = int(padded * 2 * (out.inputs + kv)) * self._whole + out.inputs * self._whole + 2 * kv * t * 4
            queries = min(_QUERIES, self.setting.sequence_length)
            grads = out.inputs * self._whole + copies + 3 * queries * t * (out.inputs // head) * width
        return grads - freed

    # -- the ends

    @cached_property
    def tables(self) -> int:
        """cos and sin of a chunk, for families that rotate."""
        sizes = self.setting.layout.schema.sizes
        return 0 if "position" in sizes else self.setting.tokens * sizes["head"] * self.setting.widths.parameter

    @cached_property
    def head(self) -> int:
        """What the last norm and the product to the vocabulary keep: their inputs."""
        return 2 * self.setting.activation + 4 * self.setting.local_tokens

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
    def table(self) -> int:
        """The gradient of an embedding or a head as autograd gives it."""
        return self.columns * self.setting.layout.schema.sizes["embed"] * self.setting.widths.parameter

    @cached_property
    def loss(self) -> int:
        """Temporaries of the loss and of the head's backward, beside the logits.

        In chunks the gradients are made in the forward: that of the table is added up in fp32, and nothing is gathered
        twice.
        """
        s = self.setting
        embed = s.layout.schema.sizes["embed"]
        wide = max(4, s.widths.parameter)
        if s.loss_chunk is not None:
            tokens = 2 * self._whole * embed if s.layout.mesh.tp > 1 else 0
            return tokens + self.table * wide // s.widths.parameter + self.table
        # Those of a chunk are let go when the next one's are there.
        exponentials = min(2 * _LOSS_CHUNK[s.device], s.tokens * self.columns) * wide
        products = max(self._gathered * embed, s.activation) + self.table
        return max(exponentials, products)

    @cached_property
    def embedding(self) -> int:
        """The gradient of the table at the end of a backward, with the gathered tokens' gradients."""
        return self.table + (self._whole * self.setting.layout.schema.sizes["embed"])

    @cached_property
    def batch(self) -> int:
        """Tokens, labels and positions of all microbatches of a step, 8 bytes each."""
        return 24 * self.setting.tokens * self.setting.microbatches

    # -- the products by what they are for

    @property
    def _qkv(self) -> Linear:
        return next(x for x in self.linears if x.column)

    @property
    def _out(self) -> Linear:
        return next(x for x in self.linears if not x.column)

    @property
    def _activation(self) -> Linear:
        """The product whose outputs the activation function reads."""
        return [x for x in self.linears if x.column][-1]

    @property
    def _activated(self) -> Linear:
        """The product that reads what the activation function gives."""
        return [x for x in self.linears if not x.column][-1]

    @property
    def _norms(self) -> int:
        return sum(len(s.shape) == 1 and "norm" in s.name and s.name.endswith("weight") for s in self.block)

    @property
    def _log_sums(self) -> int:
        """Of the attention's exponentials: fp32, for each query and head."""
        return 4 * self.setting.tokens * (self._out.inputs // self.setting.layout.schema.sizes["head"])

    @property
    def _local(self) -> int:
        """Bytes of a feature of the tokens between blocks."""
        return self.setting.local_tokens * self.setting.widths.parameter

    @property
    def _whole(self) -> int:
        """Bytes of a feature of all tokens of the microbatch."""
        return self.setting.tokens * self.setting.widths.parameter

    @property
    def _gathered(self) -> int:
        """Bytes of a feature in the backward of a column-parallel product under tp: the gathered input, the partial
        sums and, where we exchange ourselves (gloo), what is received of them."""
        if self.setting.layout.mesh.tp == 1:
            return 0
        return (3 if self.setting.device == "cpu" else 2) * self._whole

    @property
    def _blocked_attention(self) -> bool:
        s = self.setting
        return s.device == "cpu" and s.widths.parameter < 4 and s.sequence_length < _SHORT
