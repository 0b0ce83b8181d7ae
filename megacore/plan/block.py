"""What autograd keeps of a block, and what its backward adds, by what of the block is trained.

A norm keeps its input. A product keeps its input if its weight is trained, and what reads its output keeps that;
between blocks tokens are split over tp, inside of them features are. A product with adapters keeps what they read, what
lies between A and B, and B spread out. What no gradient reaches keeps nothing. This follows the autograd functions of
`parallel.linear`, `parallel.lora`, `parallel.norm`, `models.rope` and `models.blocks`, and a test measures that it
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megacore.plan.setting import Setting
from models.choose import in_block
from models.lora import WEIGHT, A
from parallel.layout import Shard
from parallel.pattern import Pattern
from parallel.schema import SPLIT

_QUERIES = 128
"""Queries in a block of the attention's backward on CPUs (`parallel.cpu`)."""
_SHORT = 768
"""Up to this length it is used, for types narrower than fp32 (`parallel.kernels`)."""


@dataclass(frozen=True)
class Linear:
    """A product of a block on one rank, by features.

    Args:
        name: Of its weight, within a block.
        column: Whether its outputs are split over tp; else its inputs are.
        inputs, outputs: Of this rank.
        fused: How many products it is in one.
        trained: Whether its weight is.
        biased: Whether its bias is.
        rank: Of its adapters together, 0 if it has none; they are trained.
    """

    name: str
    column: bool
    inputs: int
    outputs: int
    fused: int
    trained: bool = True
    biased: bool = False
    rank: int = 0

    @property
    def numel(self) -> int:
        return self.inputs * self.outputs

    @property
    def reads(self) -> bool:
        """Whether a gradient needs its input."""
        return self.trained or self.rank > 0

    @property
    def learns(self) -> bool:
        """Whether a gradient starts from its output, even if its input has none."""
        return self.reads or self.biased


@dataclass(frozen=True)
class Branch:
    """A norm, a column-parallel product, what is computed of it, and a row-parallel product.

    Args:
        norms: For each norm, whether it is trained.
        column, row: The products.
        mixes: Whether it is the attention between them, which keeps its output too; else an activation function.
        entered: Whether what comes in has a gradient.
    """

    norms: tuple[bool, ...]
    column: Linear
    row: Linear
    mixes: bool
    entered: bool

    @property
    def normed(self) -> bool:
        """Whether what the norm gives has a gradient."""
        return self.entered or any(self.norms)

    @property
    def crossed(self) -> bool:
        """Whether what is between the products has one."""
        return self.normed or self.column.learns

    @property
    def left(self) -> bool:
        """Whether what comes out has one."""
        return self.crossed or self.row.learns

    def reached(self, x: Linear) -> bool:
        """Whether what a product reads has one."""
        return self.normed if x is self.column else self.crossed


@dataclass(frozen=True, eq=False)
class Block:
    """Bytes on one rank for one microbatch.

    Args:
        setting: The run.
        shards: What a rank holds of the block.
        trained: The parameters that are trained, by their declarations' names.
        entered: Whether the activations that come in have a gradient.
    """

    setting: Setting
    shards: tuple[Shard, ...]
    trained: frozenset[str]
    entered: bool

    @cached_property
    def branches(self) -> tuple[Branch, Branch]:
        """The attention and the feed-forward network."""
        columns = [x for x in self.linears if x.column]
        rows = [x for x in self.linears if not x.column]
        # The product before the attention, and the one after it; those before and after the activation function.
        attention = Branch(self._norms(columns[0]), columns[0], rows[0], True, self.entered)
        mlp = Branch(self._norms(columns[-1]), columns[-1], rows[-1], False, self.entered or attention.left)
        return attention, mlp

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        matrices = (name for name, shard in self._held.items() if name.endswith(WEIGHT) and len(shard.shape) == 2)
        return tuple(self._linear(name) for name in matrices)

    @cached_property
    def elements(self) -> int:
        return sum(shard.numel for shard in self.shards)

    @cached_property
    def learning(self) -> int:
        """Of the elements, those that are trained."""
        return sum(shard.numel for shard in self.shards if shard.param.name in self.trained)

    @cached_property
    def left(self) -> bool:
        """Whether the activations that go out have a gradient: whether there is a backward."""
        return self.branches[-1].left

    # -- what is kept

    @cached_property
    def saved(self) -> int:
        """Without recomputation."""
        return sum(self._saved(branch) for branch in self.branches)

    @cached_property
    def kept(self) -> int:
        """From its forward to its backward, on the device or, offloaded, on the host."""
        match self.setting.recompute:
            case "none":
                return self.saved
            case "full":
                return self.setting.activation if self.left else 0
            case "selective":
                # What products and attention give is kept; norms and activation functions are computed again.
                return self.saved - sum(self._norm_output(each) for each in self.branches) - self._activated_again

    def _saved(self, branch: Branch) -> int:
        column, row = branch.column, branch.row
        norms = len(branch.norms) * (self.setting.activation + 4 * self.setting.local_tokens) if branch.normed else 0
        between = column.outputs * self._whole + (self._mixed(row) if branch.mixes else 0) if branch.crossed else 0
        inputs = self._input(column) + (0 if branch.mixes and branch.crossed else self._input(row))
        return norms + inputs + between + self._adapters(column) + self._adapters(row) + self._masks(branch)

    def _input(self, x: Linear) -> int:
        """What a product keeps of what it reads."""
        return x.inputs * self._tokens(x) if x.reads else 0

    def _mixed(self, out: Linear) -> int:
        """What the attention gives, and of its exponentials the sums' logarithms: fp32, for each query and head."""
        heads = out.inputs // self.setting.layout.schema.sizes["head"]
        return out.inputs * self._whole + 4 * self.setting.tokens * heads

    def _adapters(self, x: Linear) -> int:
        """What lies between A and B, and B spread out."""
        return x.rank * self._local + self._spread(x)

    def _spread(self, x: Linear) -> int:
        return x.rank * x.outputs * self.setting.widths.parameter

    def _masks(self, branch: Branch) -> int:
        """Of the adapters' dropout; what it gives is kept instead of what it is given, or, of the attention, too."""
        if not self._drops:
            return 0
        wide = self.setting.widths.parameter
        masks = [x.inputs * self._tokens(x) for x in (branch.column, branch.row) if x.rank]
        again = self._input(branch.row) if branch.row.rank and branch.mixes and branch.crossed else 0
        return sum(masks) // (1 if self.setting.device == "cpu" else wide) + again

    def _norm_output(self, branch: Branch) -> int:
        """Of what a norm gives, what selective recomputation need not keep."""
        again = branch.normed and not self._masked(branch.column)
        return self._input(branch.column) if again else 0

    @property
    def _activated_again(self) -> int:
        """Of what the activation function gives, what selective recomputation need not keep."""
        mlp = self.branches[-1]
        again = mlp.crossed and not self._masked(mlp.row)
        return self._input(mlp.row) if again else 0

    # -- what its backward adds

    @cached_property
    def backward(self) -> int:
        """The most that it needs beside what the block keeps."""
        if not self.left:
            return 0
        once = {"none": 0, "selective": self._activated_again, "full": self.saved - self.kept}
        again = once[self.setting.recompute]
        return again + self.setting.activation + max(self._mlp_backward, self._attention_backward)

    @cached_property
    def forward(self) -> int:
        """The most that its forward needs where nothing is kept: what is between two products, and beside that what the
        first block was given, what this one was, what its branch was, and what its norm gives."""
        between = ((branch.column.outputs + branch.row.inputs) * self._whole for branch in self.branches)
        return 4 * self.setting.activation + max(between)

    @property
    def _mlp_backward(self) -> int:
        """Gradients of the feed-forward network, when what its second product keeps has been freed."""
        mlp = self.branches[-1]
        up, down, freed = mlp.column, mlp.row, self._input(mlp.row)
        ends = self._products_backward(up, mlp) - freed, self._products_backward(down, mlp)
        if not mlp.crossed:
            return max(ends)
        gradient = down.inputs * self._whole
        gated = gradient if up.fused > 1 else 0
        return max(up.outputs * self._whole + gated + gradient - freed, *ends)

    def _products_backward(self, x: Linear, branch: Branch) -> int:
        """Gradients that come out of a product, gathered tokens and, under tp, partial sums."""
        reached = branch.reached(x)
        weight = x.numel * self.setting.widths.parameter if x.trained else 0
        inputs = x.inputs * self._tokens(x) if reached else 0
        # That of the adapters' input joins that of the product's, through the mask.
        joined = inputs * (3 if self._masked(x) else 2) if x.rank else 0
        if x.column:
            return max(gathered(self.setting, x.trained, reached) * x.inputs, inputs, joined) + weight
        tokens = self._whole * x.outputs if self.setting.layout.mesh.tp > 1 else 0
        return max(tokens + inputs, joined) + weight

    @property
    def _attention_backward(self) -> int:
        """Relative to a block whose feed-forward part has been freed."""
        attention, mlp = self.branches
        qkv, out = attention.column, attention.row
        t, width = self.setting.tokens, self.setting.widths.parameter
        freed = mlp.column.outputs * self._whole if mlp.crossed else 0
        freed += self._input(mlp.row) + self._input(mlp.column) + (self.setting.activation if mlp.normed else 0)
        if not attention.crossed:
            return self._products_backward(out, attention) - freed if attention.left else 0
        grads = (out.inputs + 2 * qkv.outputs) * self._whole
        if self._blocked_attention:
            head = self.setting.layout.schema.sizes["head"]
            padded = (head + 3 + 31) // 32 * 32 / head
            kv = (qkv.outputs - out.inputs) // 2
            copies = int(padded * 2 * (out.inputs + kv)) * self._whole + out.inputs * self._whole + 2 * kv * t * 4
            queries = min(_QUERIES, self.setting.sequence_length)
            grads = out.inputs * self._whole + copies + 3 * queries * t * (out.inputs // head) * width
        return grads - freed

    # -- of what it is made

    @cached_property
    def _held(self) -> Mapping[str, Shard]:
        """By their names within a block."""
        return {in_block(shard.param.name): shard for shard in self.shards}

    def _learns(self, *names: str) -> bool:
        return any(name in self._held and self._held[name].param.name in self.trained for name in names)

    def _linear(self, name: str) -> Linear:
        shard, stem = self._held[name], name.removesuffix(WEIGHT)
        outputs, inputs = shard.shape
        sentence, adapters = shard.param.sentence, self._held.get(f"{stem}.{A}")
        return Linear(
            name,
            any("tp" in SPLIT.get(axis, ()) for axis in Pattern(sentence.dims[:1]).axes),
            inputs,
            outputs,
            len(sentence.labels),
            self._learns(name),
            self._learns(f"{stem}.bias"),
            adapters.shape[0] if adapters else 0,
        )

    def _norms(self, column: Linear) -> tuple[bool, ...]:
        """Of the branch of a product: whether each is trained."""
        branch = column.name.partition(".")[0]
        stems = [
            name.removesuffix(WEIGHT)
            for name, shard in self._held.items()
            if len(shard.shape) == 1 and name.startswith(branch) and "norm" in name and name.endswith(WEIGHT)
        ]
        return tuple(self._learns(f"{stem}{WEIGHT}", f"{stem}.bias") for stem in stems)

    # -- bytes of a feature

    def _tokens(self, x: Linear) -> int:
        """Of what a product reads."""
        return self._local if x.column else self._whole

    @property
    def _local(self) -> int:
        """Of the tokens between blocks."""
        return self.setting.local_tokens * self.setting.widths.parameter

    @property
    def _whole(self) -> int:
        """Of all tokens of the microbatch."""
        return self.setting.tokens * self.setting.widths.parameter

    @property
    def _drops(self) -> bool:
        lora = self.setting.tuning.lora
        return lora is not None and lora.dropout > 0

    def _masked(self, x: Linear) -> bool:
        return x.rank > 0 and self._drops

    @property
    def _blocked_attention(self) -> bool:
        s = self.setting
        return s.device == "cpu" and s.widths.parameter < 4 and s.sequence_length < _SHORT


def gathered(setting: Setting, trained: bool, reached: bool) -> int:
    """Bytes of a feature in the backward of a column-parallel product under tp: the gathered input if its weight is
    trained; if its input is reached, the partial sums and, where we exchange ourselves (gloo), what is received of
    them."""
    if setting.layout.mesh.tp == 1:
        return 0
    sums = (2 if setting.device == "cpu" else 1) if reached else 0
    return (trained + sums) * setting.tokens * setting.widths.parameter
