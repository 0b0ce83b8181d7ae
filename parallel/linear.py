"""Linear layers split over tensor parallel ranks (Shoeybi et al. 2019, arXiv 1909.08053), with tokens split between
them (sequence parallelism, Korthikanti et al. 2022, arXiv 2205.05198).

Between layers each rank of a tensor parallel group holds a part of the tokens. A column-parallel linear gathers the
tokens and computes some of the features; a row-parallel one sums the partial results and scatters the tokens again. The
gathered input is not kept for the backward but gathered once more, while the GEMM of the input gradient runs; the
scatter of the input gradient runs beside the GEMM of the weight gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.choices import check_choice
from parallel.collectives import (
    gather,
    reduce,
    split,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel.mesh import Group, Mesh

Between = Literal["sequence", "replicated"]
"""What the ranks hold between layers: each a part of the tokens, or all of them the same."""
ColumnOutput = Literal["split", "gathered"]
"""What a column-parallel linear leaves: each rank its features, or all of them the same on every rank."""
RowInput = Literal["split", "replicated"]
"""What a row-parallel linear is given: each rank its features, or all of them the same on every rank."""


class _Column(torch.autograd.Function):
    """x: [t/tp, in] ("sequence") or [t, in] (replicated) -> y: [t, out/tp]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool) -> Tensor:
        # Only the weight's gradient needs x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.sequence = group, sequence
        full = start_all_gather(x, group).wait() if sequence else x
        return F.linear(full, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        again = start_all_gather(x, ctx.group, after=dy) if ctx.sequence and need_dw else None
        dx = None
        if need_dx:
            partial = dy @ weight
            dx = start_reduce_scatter(partial, ctx.group) if ctx.sequence else start_all_reduce(partial, ctx.group)
        dw = _weight_gradient(dy, again.wait() if again else x) if need_dw else None
        db = dy.flatten(0, -2).sum(0) if need_db else None
        return dx.wait() if dx else None, dw, db, None, None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


def _drawn(out_features: int, in_features: int, mesh: Mesh, dtype: torch.dtype | None) -> Tensor:
    """The initial weight of a whole layer, [out, in], from torch's generator.

    It is drawn in full and then cut: ranks that are seeded alike hold parts of one weight, never the same part twice.
    """
    bound = 1 / math.sqrt(in_features)
    return torch.empty(out_features, in_features, dtype=dtype, device=mesh.device).uniform_(-bound, bound)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = True) -> Tensor:
    """x: [t/tp, in], or [t, in] on every rank without ``sequence`` -> y: [t, out/tp]."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    y: Tensor = _Column.apply(x, weight, bias, group, sequence)
    return y


Compute = Callable[[Tensor, Tensor, Tensor | None, Group, bool], Tensor]
"""(x, weight, bias, group, sequence) -> y, as :func:`column_linear` or :func:`row_linear`."""


class _ParallelLinear(nn.Module):
    """What both linears are: a weight, perhaps a bias, a group, and how tokens and features come in and go out."""

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]]
    compute: Compute

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh, input: str, output: str) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, mesh.tp
        self.input, self.output = input, output

    @classmethod
    def of(cls, weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh) -> Self:
        """The layer of parameters that a layout has cut, with tokens split over tp between layers."""
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
        mesh: The live mesh.
        bias: Whether to add a learned bias, split like the output.
        input: ``"sequence"``: tokens (dimension 0) are split over tp, and gathered here. ``"replicated"``: every rank
            holds the same x: [tokens, in] (Megatron's layer without sequence parallelism).
        output: ``"split"``: y: [tokens, out/tp]. ``"gathered"``: y: [tokens, out], the same on every rank, to be used
            by a computation that every rank repeats.
        dtype: Of the parameters.

    Raises:
        ValueError: ``out_features`` does not divide over tp, or ``input`` or ``output`` is another word.
    """

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]] = ("sequence", "split")
    compute: Compute = staticmethod(column_linear)

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
        tp = mesh.shape.tp
        if out_features % tp:
            raise ValueError(f"cannot split out_features ({out_features}) over tp={tp}: choose a multiple of {tp}")
        weight = _drawn(out_features, in_features, mesh, dtype).chunk(tp)[mesh.tp.index].clone()
        zeros = torch.zeros(out_features // tp, dtype=dtype, device=mesh.device) if bias else None
        bias_parameter = nn.Parameter(zeros) if zeros is not None else None
        super().__init__(nn.Parameter(weight), bias_parameter, mesh, input, output)

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(x, self.weight, self.bias, self.group, self.input == "sequence")
        return y if self.output == "split" else gather(y, self.group)


class _Row(torch.autograd.Function):
    """x: [t, in/tp] -> y: [t/tp, out]; the gathered gradient serves both GEMMs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        # Only the weight's gradient needs x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group = group
        return start_reduce_scatter(F.linear(x, weight), group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        full = start_all_gather(dy, ctx.group).wait()
        return full @ weight if need_dx else None, _weight_gradient(full, x) if need_dw else None, None


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = True) -> Tensor:
    """x: [t, in/tp] -> y: [t/tp, out], or [t, out] on every rank without ``sequence``; the bias is added once."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    y: Tensor = _Row.apply(x, weight, group) if sequence else reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias


class RowParallelLinear(_ParallelLinear):
    """Linear whose input features are split over tp.

    x: [tokens, in/tp] -> y: [tokens/tp, out].

    Args:
        in_features: Size of the input over all ranks; a multiple of tp.
        out_features: Size of the output.
        mesh: The live mesh.
        bias: Whether to add a learned bias; it is held by every rank, whose gradients belong summed over tp (each rank
            sees only its own tokens) when the output is ``"sequence"``.
        input: ``"split"``: x: [tokens, in/tp], as a column-parallel layer leaves it. ``"replicated"``: x: [tokens, in],
            the same on every rank.
        output: ``"sequence"``: y: [tokens/tp, out]. ``"replicated"``: y: [tokens, out], the same on every rank.
        dtype: Of the parameters.

    Raises:
        ValueError: ``in_features`` does not divide over tp, or ``input`` or ``output`` is another word.
    """

    BETWEEN_BLOCKS: ClassVar[tuple[str, str]] = ("split", "sequence")
    compute: Compute = staticmethod(row_linear)

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
        tp = mesh.shape.tp
        if in_features % tp:
            raise ValueError(f"cannot split in_features ({in_features}) over tp={tp}: choose a multiple of {tp}")
        weight = _drawn(out_features, in_features, mesh, dtype).chunk(tp, 1)[mesh.tp.index].contiguous()
        zeros = torch.zeros(out_features, dtype=dtype, device=mesh.device) if bias else None
        bias_parameter = nn.Parameter(zeros) if zeros is not None else None
        super().__init__(nn.Parameter(weight), bias_parameter, mesh, input, output)

    def forward(self, x: Tensor) -> Tensor:
        if self.input == "replicated":
            x = split(x, self.group)
        return self.compute(x, self.weight, self.bias, self.group, self.output == "sequence")
