"""Parallel linears with low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W x + scale B A x.

A column-parallel linear has its B split like W, and every rank the whole A: each computes A x of its own tokens, and
what is gathered is no wider than the adapter. A row-parallel one has its A split like W, and every rank the whole B:
A x is summed over the ranks, and each goes on with its own tokens. A replicated one has both whole. The halves that all
ranks hold see other tokens on each: their gradients belong summed over tp (law 4 of ``docs/meshes.md``).

Each expert has an A and a B of its own, through which the rows of its tokens go beside its weight. Where the features
of experts are split, up's A and down's B are whole, and what they are given or give is summed with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import Pending
from megacore.parallel.kernels.grouped import GroupedProducts
from megacore.parallel.layers.experts import Dispatch, Experts, start_weights_gradient
from megacore.parallel.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    column_linear,
    row_linear,
)
from megacore.parallel.layers.router import Router, wide_linear
from megacore.parallel.mesh import Group

Rows = Sequence[tuple[int, bool]]
"""The outputs of a linear in turn: how many belong together, and whether they have an adapter."""


class _Adapted(nn.Module):
    """A linear and its adapters.

    Args:
        base: The linear, as it would be without.
        a: [adapters rank, in]: the As of the adapters, one below the other.
        b: [rows of those that have one, rank]: their Bs likewise.
        rows: Those of the linear's outputs on this rank.
        scale: Factor of the product.
        dropout: Probability of dropping an element of what A is multiplied with, in training.
    """

    def __init__(
        self, base: nn.Module, a: nn.Parameter, b: nn.Parameter, rows: Rows, scale: float, dropout: float
    ) -> None:
        super().__init__()
        self.base, self.a, self.b, self.dropout = base, a, b, nn.Dropout(dropout)
        self.group = cast(Group, base.group)
        self._rows, self._scale = tuple(rows), scale

    def spread(self) -> Tensor:
        """Return the Bs as one: [out, adapters rank], each beside the others' columns; zero where there is no
        adapter."""
        held = iter(self.b.split([rows for rows, adapted in self._rows if adapted]))
        return torch.block_diag(*(next(held) if adapted else self.b.new_zeros(rows, 0) for rows, adapted in self._rows))

    def extra_repr(self) -> str:
        return f"rank {self.b.shape[1]}, scale {self._scale:g}"


class ColumnAdapted(_Adapted):
    """x: [tokens/tp, in] -> y: [tokens, out/tp], of a column-parallel linear; a whole, b split over tp."""

    base: ColumnParallelLinear

    def forward(self, x: Tensor) -> Tensor:
        narrow = kernels.linear(self.dropout(x), self.a) * self._scale
        y: Tensor = self.base(x)
        return y + column_linear(narrow, self.spread(), None, self.group)


class RowAdapted(_Adapted):
    """x: [tokens, in/tp] -> y: [tokens/tp, out], of a row-parallel linear; a split over tp, b whole."""

    base: RowParallelLinear

    def forward(self, x: Tensor) -> Tensor:
        narrow = row_linear(self.dropout(x), self.a, None, self.group) * self._scale
        y: Tensor = self.base(x)
        return y + kernels.linear(narrow, self.spread())


class ReplicatedAdapted(_Adapted):
    """x: [tokens/tp, in] -> y: [tokens/tp, out], of a replicated linear; a and b whole."""

    base: ReplicatedLinear

    def forward(self, x: Tensor) -> Tensor:
        narrow = kernels.linear(self.dropout(x), self.a) * self._scale
        y: Tensor = self.base(x)
        return y + kernels.linear(narrow, self.spread())


class RouterAdapted(Router):
    """A router and its adapter, held whole by every rank, as the router is.

    Args:
        base: The router, as it would be without.
        a: [rank, embed].
        b: [routes, rank].
        scale: The factor of their product.
    """

    def __init__(self, base: Router, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__(base.weight, base.routing, base.bias, base.correction, base.scale, base.table)
        self.a, self.b, self._scale = a, b, scale

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) + wide_linear(wide_linear(x, self.a) * self._scale, self.b)


Pair = tuple[nn.Parameter, nn.Parameter]
"""A and B of all experts that are here: [experts here, rank, in], [experts here, out, rank]."""


class ExpertsAdapted(Experts):
    """Experts and their adapters; their own weights and biases get no gradients.

    Args:
        base: The experts, as they would be without.
        up, down: The adapters of what goes into the hidden features and of what comes out of them; None: it has none.
        scale: The factor of their products.
    """

    def __init__(self, base: Experts, up: Pair | None, down: Pair | None, scale: float) -> None:
        others = base.up_bias, base.down_bias, base.idle
        super().__init__(base.up, base.down, base.activation, base.experts, base.group, base.features, *others)
        self.up_adapter, self.down_adapter = nn.ParameterList(up or ()), nn.ParameterList(down or ())
        self.products = kernels.grouped_products(self.up, self.down, *self.up_adapter, *self.down_adapter)
        self._scale = scale

    def hidden(self, x: Tensor, dispatch: Dispatch, coming: Pending) -> Tensor:
        if not self.up_adapter:
            return super().hidden(x, dispatch, coming)
        products = self.products, self.weight_products[0]
        return _UpAdapted.apply(x, self.up, self.up_bias, *self.up_adapter, self._scale, dispatch, *products, coming)

    def outputs(self, a: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        if not self.down_adapter:
            return super().outputs(a, weights, dispatch)
        products = self.products, self.weight_products[1]
        return _DownAdapted.apply(
            a, weights, self.down, self.down_bias, *self.down_adapter, self._scale, dispatch, *products
        )


class _UpAdapted(torch.autograd.Function):
    """h = rows(x) (W + s B A)' + b, with the rows of each expert times its own matrices.

    As of experts without adapters, the rows are sent once more for the backward. W and b are frozen.

    x   [n, embed]   this rank's tokens, of which ``coming`` are the rows
    W   [experts here, inner, embed]
    b   [experts here, inner]
    A   [experts here, rank, embed]
    B   [experts here, inner, rank]
    h   [R, inner]
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        dispatch: Dispatch,
        products: GroupedProducts,
        own: GroupedProducts,
        coming: Pending,
    ) -> Tensor:
        dispatch.pass_on()
        groups, rows = dispatch.groups, coming.wait()
        narrow = products.forward(rows, a, groups).mul_(scale)
        h = own.forward(rows, weight, groups).add_(products.forward(narrow, b, groups))
        ctx.dispatch, ctx.products, ctx.own, ctx.scale = dispatch, products, own, scale
        ctx.save_for_backward(x, weight, a, b, narrow)
        return h if bias is None else h.add_(bias.index_select(0, groups.experts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, narrow = ctx.saved_tensors
        dispatch, products, groups = ctx.dispatch, ctx.products, ctx.dispatch.groups
        again, dx = dispatch.start(x), None
        dnarrow = products.input_gradient(dh, b, groups).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            drows = ctx.own.input_gradient(dh, weight, groups).add_(products.input_gradient(dnarrow, a, groups))
            dx = dispatch.start_back(drows)
        dispatch.pass_on()
        db = products.weight_gradient(dh, narrow, groups)
        da = products.weight_gradient(dnarrow, again.wait(), groups)
        return dx.wait() if dx else None, None, None, da, db, None, None, None, None, None


class _DownAdapted(torch.autograd.Function):
    """y = the sums of w (a (W + s B A)' + b) over each token's slots, with the rows of each expert times its own
    matrices.

    a   [R, features]
    w   [N, k]   the weight of each slot
    W   [experts here, embed, features]
    b   [experts here, embed]   of which each rank over which features are split adds its share
    A   [experts here, rank, features]
    B   [experts here, embed, rank]
    y   [n, embed]   of this rank's tokens

    W and b are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weights: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        dispatch: Dispatch,
        products: GroupedProducts,
        own: GroupedProducts,
    ) -> Tensor:
        groups = dispatch.groups
        narrow = products.forward(features, a, groups).mul_(scale)
        rows = own.forward(features, weight, groups).add_(products.forward(narrow, b, groups))
        if bias is not None:
            rows.add_(bias.index_select(0, groups.experts), alpha=1 / dispatch.features.size)
        ctx.dispatch, ctx.products, ctx.own, ctx.scale = dispatch, products, own, scale
        ctx.save_for_backward(features, weights, weight, bias, a, b, narrow)
        home = dispatch.start_back(rows, weights)
        dispatch.pass_on()
        return home.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        features, weights, weight, bias, a, b, narrow = ctx.saved_tensors
        dispatch, products, groups = ctx.dispatch, ctx.products, ctx.dispatch.groups
        coming = dispatch.start(dy, weights)
        dispatch.pass_on()
        d = coming.wait()
        dnarrow = products.input_gradient(d, b, groups).mul_(ctx.scale)
        dfeatures = ctx.own.input_gradient(d, weight, groups).add_(products.input_gradient(dnarrow, a, groups))
        need_dweights = ctx.needs_input_grad[1]
        dweights = start_weights_gradient(d, bias, dfeatures, features, weights, dispatch) if need_dweights else None
        db = products.weight_gradient(d, narrow, groups)
        da = products.weight_gradient(dnarrow, features, groups)
        return dfeatures, dweights.wait() if dweights else None, None, None, da, db, None, None, None, None
