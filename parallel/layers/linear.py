"""Linear layers split over tensor parallel ranks (Shoeybi et al. 2019, arXiv 1909.08053), with tokens split between
them (sequence parallelism, Korthikanti et al. 2022, arXiv 2205.05198).

Between layers each rank of a tensor parallel group holds a part of the tokens. A column-parallel linear gathers the
tokens and computes some of the features; a row-parallel one sums the partial results and scatters the tokens again. The
gathered input is not kept for the backward but gathered once more, while the GEMM of the input gradient runs; the
scatter of the input gradient runs beside the GEMM of the weight gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import gather, split, start_all_reduce
from megacore.parallel.enum_errors import check_choice
from megacore.parallel.layers.product import DENSE, Operand, Product, gathered, start_gather
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.parameters import WeightGradient

Between = Literal["sequence", "replicated"]
"""The ranks hold between layers each a part of the tokens, or all of them the same."""
ColumnOutput = Literal["split", "gathered"]
"""A column-parallel linear leaves each rank its features, or all of them the same on every rank."""
RowInput = Literal["split", "replicated"]
"""A row-parallel linear is given on each rank its features, or all of them the same on every rank."""


class Column(torch.autograd.Function):
    """y = x W' + b, with the rows of W split over the n ranks of a group.

    x   [t/n, in]   this rank's tokens; without ``sequence`` [t, in], the same on every rank
    W   [out/n, in]
    b   [out/n]
    y   [t, out/n]

    forward   y  = gather(x) W' + b       without ``sequence`` x W' + b
    dgrad     dx = scatter(dy W)          without ``sequence`` all-reduce(dy W)
    wgrad     dW = dy' gather(x)          without ``sequence`` dy' x
    dbias     db = sum of dy over tokens

    The gathered x is not kept, it would be n times what this rank has: it is gathered again while dgrad multiplies, or
    with a wgrad that comes later. And dgrad comes first, so that its scatter runs while wgrad multiplies; the layer
    before waits for dx, nobody for dW.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool, product: Product
    ) -> Tensor:
        need_dw = ctx.needs_input_grad[1]
        ctx.group, ctx.sequence, ctx.product = group, sequence and group.size > 1, product
        own, matrix = product.operands(x, weight, group, need_dw and not ctx.sequence)
        # Only the weight's gradient needs x.
        ctx.save_for_backward(own.kept if need_dw else None, own.scale, weight, matrix.scale)
        return product.gather_forward(own, matrix, bias, group) if ctx.sequence else product.forward(own, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, weight, weight_scale = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        group, product, x, matrix = ctx.group, ctx.product, Operand(values, scale), Operand(weight, weight_scale)
        late = product.late and not torch.compiler.is_compiling()
        again = start_gather(x, group, after=dy) if ctx.sequence and need_dw and not late else None
        given = product.gradient(dy, group, need_dw)
        dx = None
        if need_dx and ctx.sequence:
            dx = product.input_gradient_scatter(given, matrix, group, alone=not need_dw or late)
        elif need_dx:
            dx = start_all_reduce(product.input_gradient(given, matrix), group)
        full = Operand(again.wait(), scale) if again else x
        afterwards = group if ctx.sequence and late else None
        dw = product.give_weight_gradient(given, full, weight, afterwards) if need_dw else None
        db = dy.flatten(0, -2).sum(0) if need_db else None
        return dx.wait() if dx else None, dw, db, None, None, None


class Row(torch.autograd.Function):
    """y = x W', with the columns of W split over the n ranks of a group.

    x   [t, in/n]
    W   [out, in/n]
    y   [t/n, out]   this rank's tokens; without ``sequence`` [t, out], the same on every rank

    forward   y  = scatter(x W')          without ``sequence`` all-reduce(x W')
    dgrad     dx = gather(dy) W           without ``sequence`` dy W
    wgrad     dW = gather(dy)' x          without ``sequence`` dy' x
    dbias     none: who adds a bias does so after the sum, once

    Both gradients need all of dy: it is gathered once, before them, and nothing of the backward is left to send. So
    wgrad may be held until the next dy is gathered, by the row-parallel linear before this one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, sequence: bool, product: Product) -> Tensor:
        need_dw = ctx.needs_input_grad[1]
        ctx.group, ctx.sequence, ctx.product = group, sequence and group.size > 1, product
        own, matrix = product.operands(x, weight, group, need_dw)
        # Only the weight's gradient needs x.
        ctx.save_for_backward(own.kept if need_dw else None, own.scale, weight, matrix.scale)
        if ctx.sequence:
            return product.forward_scatter(own, matrix, group)
        return start_all_reduce(product.forward(own, matrix), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, weight, weight_scale = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        group, product, matrix = ctx.group, ctx.product, Operand(weight, weight_scale)
        full, dx = product.gradient(dy, group, need_dw and not ctx.sequence), None
        if ctx.sequence and need_dx:
            full, dx = product.gather_input_gradient(full, matrix, group)
        elif ctx.sequence:
            full = gathered(full, group)
        elif need_dx:
            dx = product.input_gradient(full, matrix)
        x = Operand(values, scale)
        dw = product.give_weight_gradient(full, x, weight, held=ctx.sequence) if need_dw else None
        return dx, dw, None, None, None


class Replicated(torch.autograd.Function):
    """y = x W' + b, with all of W on each of the n ranks of a group, and nothing sent.

    x   [t/n, in]    this rank's tokens
    W   [out, in]
    b   [out]
    y   [t/n, out]   of the same tokens

    wgrad     dW = dy' x, of this rank's tokens: the sum over the group is the whole
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, product: Product) -> Tensor:
        need_dw = ctx.needs_input_grad[1]
        ctx.group, ctx.product = group, product
        own, matrix = product.operands(x, weight, group, need_dw)
        # Only the weight's gradient needs x.
        ctx.save_for_backward(own.kept if need_dw else None, own.scale, weight, matrix.scale)
        return product.forward(own, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, weight, weight_scale = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        product, given = ctx.product, ctx.product.gradient(dy, ctx.group, need_dw)
        dx = product.input_gradient(given, Operand(weight, weight_scale)) if need_dx else None
        dw = product.give_weight_gradient(given, Operand(values, scale), weight) if need_dw else None
        db = dy.flatten(0, -2).sum(0) if need_db else None
        return dx, dw, db, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = True, product: Product = DENSE
) -> Tensor:
    """x: [t/tp, in], or [t, in] on every rank without ``sequence`` -> y: [t, out/tp]."""
    if group.size == 1 and product is DENSE:
        return kernels.linear(x, weight, bias)  # autograd's own, which can be differentiated twice
    return Column.apply(x, weight, bias, group, sequence, product)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = True, product: Product = DENSE
) -> Tensor:
    """x: [t, in/tp] -> y: [t/tp, out], or [t, out] on every rank without ``sequence``; the bias is added once."""
    if group.size == 1 and product is DENSE:
        return kernels.linear(x, weight, bias)
    y: Tensor = Row.apply(x, weight, group, sequence, product)
    return y if bias is None else y + bias


def replicated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, product: Product = DENSE) -> Tensor:
    """x: [t/tp, in] -> y: [t/tp, out]; every rank of the group has all of the weight."""
    if product is DENSE:
        return kernels.linear(x, weight, bias)
    return Replicated.apply(x, weight, bias, group, product)


def _drawn(
    out_features: int, in_features: int, dim: int, bias: bool, mesh: Mesh, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the initial weight, [out, in], split along a dimension, from torch's generator, and a bias of zeros.

    It is drawn in full and then cut: ranks that are seeded alike hold parts of one weight, never the same part twice.
    """
    tp, size = mesh.shape.tp, (out_features, in_features)[dim]
    if size % tp:
        name = ("out_features", "in_features")[dim]
        raise ValueError(f"cannot split {name} ({size}) over tp={tp}: choose a multiple of {tp}")
    bound = 1 / math.sqrt(in_features)
    whole = torch.empty(out_features, in_features, dtype=dtype, device=mesh.device).uniform_(-bound, bound)
    weight = whole.chunk(tp, dim)[mesh.tp.index].clone(memory_format=torch.contiguous_format)
    zeros = torch.zeros(len(weight), dtype=dtype, device=mesh.device)
    return nn.Parameter(weight), nn.Parameter(zeros) if bias else None


class _ParallelLinear(nn.Module):
    """All of these linears are a weight, perhaps a bias, a group, how tokens and features come in and go out, and
    what multiplies."""

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]]

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh, input: str, output: str) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, mesh.tp
        self.input, self.output = input, output
        self.product: Product = DENSE

    @classmethod
    def of(cls, weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh) -> Self:
        """Return the layer of parameters that a layout has cut, with tokens split over tp between layers."""
        layer = cls.__new__(cls)
        _ParallelLinear.__init__(layer, weight, bias, mesh, *cls.BETWEEN_BLOCKS)
        return layer

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features} -> {out_features} on each of tp={self.group.size}, {self.input} -> {self.output}"


class ColumnParallelLinear(_ParallelLinear):
    """Linear whose output features are split over tp.

    x: [tokens/tp, in] -> y: [tokens, out/tp]. By itself it reads like ``nn.Linear``:
    ``ColumnParallelLinear(1024, 4096, mesh=mesh)``.

    Args:
        in_features: Size of the input.
        out_features: Size of the output over all ranks; a multiple of tp.
        bias: Whether to add a learned bias, split like the output.
        input: ``"sequence"``: tokens (dimension 0) are split over tp, and gathered here. ``"replicated"``: every rank
            holds the same x: [tokens, in] (Megatron's layer without sequence parallelism).
        output: ``"split"``: y: [tokens, out/tp]. ``"gathered"``: y: [tokens, out], the same on every rank, to be used
            by a computation that every rank repeats.
        dtype: That of the parameters.

    Raises:
        ValueError: ``out_features`` does not divide over tp, or ``input`` or ``output`` is another word.
    """

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]] = ("sequence", "split")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        bias: bool = True,
        input: Between = "sequence",
        output: ColumnOutput = "split",
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("input", input, get_args(Between))
        check_choice("output", output, get_args(ColumnOutput))
        super().__init__(*_drawn(out_features, in_features, 0, bias, mesh, dtype), mesh, input, output)

    def forward(self, x: Tensor) -> Tensor:
        y = column_linear(x, self.weight, self.bias, self.group, self.input == "sequence", self.product)
        return y if self.output == "split" else gather(y, self.group)


class RowParallelLinear(_ParallelLinear):
    """Linear whose input features are split over tp.

    x: [tokens, in/tp] -> y: [tokens/tp, out].

    Args:
        in_features: Size of the input over all ranks; a multiple of tp.
        out_features: Size of the output.
        bias: Whether to add a learned bias; it is held by every rank, whose gradients belong summed over tp (each rank
            sees only its own tokens) when the output is ``"sequence"``.
        input: ``"split"``: x: [tokens, in/tp], as a column-parallel layer leaves it. ``"replicated"``: x: [tokens, in],
            the same on every rank.
        output: ``"sequence"``: y: [tokens/tp, out]. ``"replicated"``: y: [tokens, out], the same on every rank.
        dtype: That of the parameters.

    Raises:
        ValueError: ``in_features`` does not divide over tp, or ``input`` or ``output`` is another word.
    """

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]] = ("split", "sequence")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        bias: bool = True,
        input: RowInput = "split",
        output: Between = "sequence",
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("input", input, get_args(RowInput))
        check_choice("output", output, get_args(Between))
        super().__init__(*_drawn(out_features, in_features, 1, bias, mesh, dtype), mesh, input, output)

    def forward(self, x: Tensor) -> Tensor:
        if self.input == "replicated":
            x = split(x, self.group)
        return row_linear(x, self.weight, self.bias, self.group, self.output == "sequence", self.product)


class ReplicatedLinear(_ParallelLinear):
    """Linear that every rank has whole, of the tokens that the rank has: nothing is sent.

    x: [tokens/tp, in] -> y: [tokens/tp, out]. It is for outputs that are narrow, such as latents: the ranks that split
    the next linear are better sent these than x. Its gradients belong summed over tp, as those of norms do. :meth:`of`
    makes it.
    """

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]] = ("sequence", "sequence")

    def forward(self, x: Tensor) -> Tensor:
        return replicated_linear(x, self.weight, self.bias, self.group, self.product)


def hand_to(
    accept: Callable[[nn.Parameter, WeightGradient | Tensor], None],
    modules: Iterable[nn.Module],
    late: bool = False,
    beside: Callable[[], None] | None = None,
) -> None:
    """Have all parallel linears among these modules hand their weights' gradients to somebody who sums them, at once or
    later, or, of those that may be held, once ``beside`` is called.

    A weight that several of them share is left to autograd, which hands in one gradient for all its uses.
    """
    linears = [module for module in modules if isinstance(module, _ParallelLinear) and module.weight.requires_grad]
    uses = Counter(module.weight for module in linears)
    for module in linears:
        if uses[module.weight] == 1:
            module.product = module.product.handing(partial(accept, module.weight), late, beside)
            module.product.found_by(module.weight)


def multiply_by(product: Product, modules: Iterable[nn.Module]) -> list[_ParallelLinear]:
    """Have all parallel linears among these modules multiply in another way -> them."""
    linears = [module for module in modules if isinstance(module, _ParallelLinear)]
    for module in linears:
        module.product = product
    return linears
