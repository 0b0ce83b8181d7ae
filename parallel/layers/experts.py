"""Experts that are spread over ranks: every token is sent to those that were chosen for it, and none is dropped.

Rows are sorted by (expert, source rank, token), so that an expert multiplies the same rows in the same order however
many ranks there are, and a token's slots are summed in their order: outputs and the experts' gradients are bitwise the
same for any number of ranks.

A token is k rows at the experts. Those are not kept for the backward: they are sent once more while the input gradient
is multiplied, as a column-parallel linear gathers once more. Nor is what the experts give, though the gradients of a
token's weights need it: with y = W a of a slot of weight w, dw = <dy, W a> = <W' (w dy), a> / w, and W' (w dy) is the
gradient of a. So the weights never travel: slots are weighed where they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from megacore.parallel.kernels import grouped
from megacore.parallel.kernels.grouped import GroupedProducts, Groups, HostCounts
from megacore.parallel.mesh import Group
from megacore.parallel.parameters import WeightGradient


class Experts(nn.Module):
    """The feed-forward networks of all experts, of which this rank holds some, or some features of some.

    x: [n, embed], chosen: [n, k], weights: [n, k] -> [n, embed].

    Where rows travel the host waits once for the device, for how many there are, and the device copies rows meanwhile;
    where they do not and a kernel takes the products, never; but where some experts do nothing it does, for the device
    alone knows how many rows are left, and to multiply as many as there could be would cost more.

    Args:
        up: [experts here, inner, embed], the inner features of gate and up one after the other where they are gated.
        down: [experts here, embed, features].
        activation: [rows, inner] -> [rows, features].
        experts: The number of experts in all; what is sent to those of higher numbers is not sent, and counts as 0.
        group: The ranks over which experts are spread, in the order of their experts.
        features: The ranks over which the features of each expert are split; a group of one where they are whole.
        up_bias: [experts here, inner].
        down_bias: [experts here, embed], held by every rank of ``features``.
        idle: The experts of higher numbers that there are.
    """

    def __init__(
        self,
        up: nn.Parameter,
        down: nn.Parameter,
        activation: nn.Module,
        experts: int,
        group: Group,
        features: Group,
        up_bias: nn.Parameter | None = None,
        down_bias: nn.Parameter | None = None,
        idle: int = 0,
    ) -> None:
        super().__init__()
        self.up, self.down, self.activation, self.experts, self.idle = up, down, activation, experts, idle
        self.up_bias, self.down_bias = up_bias, down_bias
        self.group, self.features = group, features
        self.products = kernels.grouped_products(up, down)
        self.own_products: tuple[GroupedProducts, GroupedProducts] | None = None
        """What multiplies by ``up`` and by ``down`` where :attr:`products` does not."""
        self.hand: Callable[[nn.Parameter, WeightGradient], None] | None = None
        """The function that is given weight gradients instead of autograd, if any."""
        self.late = False
        """Whether it lets them wait, and the messages that they need."""

    def forward(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        beside: Callable[[], Tensor] | None = None,
        known: MutableMapping[nn.Module, Counts] | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor:
        """Send, multiply and sum.

        Args:
            x, chosen, weights: The tokens, their experts and the weights of these.
            beside: Computed while rows travel, [n, embed], and added to what comes out.
            known: The counts of rows of these tokens, which are kept there: where tokens are computed again, nobody
                asks for them again.
            norm: The norm of what the experts give, before anything is added.
        """
        known = {} if known is None else known
        dispatch = Dispatch.of(
            chosen, self.experts, self.group, self.features, self.products.needs_host, known.get(self), self.idle
        )
        known[self] = dispatch.counts
        weights = all_gather(weights, self.features)
        with torch.no_grad():
            coming = dispatch.start(x)
        other = None if beside is None else beside()
        y = self.outputs(self.activation(self.hidden(x, dispatch, coming)), weights, dispatch)
        y = y if norm is None else norm(y)
        return y if other is None else y + other

    @property
    def weight_products(self) -> tuple[GroupedProducts, GroupedProducts]:
        """What multiplies by ``up`` and by ``down``."""
        return self.own_products or (self.products, self.products)

    def _handing(self, weight: nn.Parameter) -> Hand | None:
        return None if self.hand is None else Hand(partial(self.hand, weight), self.late)

    def hidden(self, x: Tensor, dispatch: Dispatch, coming: Pending) -> Tensor:
        """x: [n, embed], of which ``coming`` are the R rows -> [R, inner]."""
        products, _ = self.weight_products
        return _Up.apply(x, self.up, self.up_bias, dispatch, products, coming, self._handing(self.up))

    def outputs(self, a: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        """a: [R, features], weights: [N, k], of the tokens of all ranks of ``features`` -> [n, embed]."""
        _, products = self.weight_products
        return _Down.apply(a, weights, self.down, self.down_bias, dispatch, products, self._handing(self.down))


@dataclass(frozen=True)
class Hand:
    """What is given a weight's gradient in place of autograd. ``late``: whether it lets it wait."""

    give: Callable[[WeightGradient], None]
    late: bool


# -- where rows go


@dataclass(frozen=True, eq=False)
class Counts:
    """The numbers of rows, which the host waits for when it first asks.

    Args:
        got: [ranks, experts here], the rows that come from each rank.
        ask: As of :func:`parallel.kernels.grouped.start_counts`.
    """

    got: Tensor
    ask: Callable[[], HostCounts]

    @cached_property
    def on_host(self) -> HostCounts:
        return self.ask()

    @classmethod
    def of(cls, sent: Tensor, group: Group, rows: int, needs_host: bool) -> Counts:
        """sent: [ranks, experts of each], the rows that go there, ``rows`` in all; start to count what comes."""
        if group.size == 1 and not needs_host:
            return cls(sent, lambda: HostCounts([rows], [rows], None))
        got = start_all_to_all(sent, group, [1] * group.size, [1] * group.size).wait()
        return cls(got, grouped.start_counts(sent, got, rows))


@dataclass(frozen=True, eq=False)
class Dispatch:
    """The way of n tokens of this rank to the experts, R rows of all ranks at those that are here, and the way back.

    Args:
        group: The ranks over which experts are spread.
        features: The ranks over which the features of each expert are split: they send the tokens of all of them, N.
        order: [N k], the slots (token k + number) as they are sent: by expert, then by token; without those that are
            not sent.
        slots: [N, k], the place of each slot in that order; of those that are not sent the one behind it.
        counts: The numbers of rows.
    """

    group: Group
    features: Group
    order: Tensor
    slots: Tensor
    counts: Counts

    @classmethod
    def of(
        cls,
        chosen: Tensor,
        experts: int,
        group: Group,
        features: Group,
        needs_host: bool,
        counts: Counts | None = None,
        idle: int = 0,
    ) -> Dispatch:
        """chosen: [n, k], the experts of each token.

        ``needs_host``: whether the host must know how many rows each expert has, even where they do not travel;
        ``counts``: those of the same tokens, if they are known; ``idle``: the experts behind them that no row goes to.
        """
        chosen = start_all_gather(chosen, features).wait()
        slots = chosen.numel()
        rows = slots * experts // (experts + idle)  # of those that do nothing, where a plan asks, their share
        by_expert, order = chosen.flatten().sort(stable=True)
        if counts is None:
            ends = torch.searchsorted(by_expert, torch.arange(experts, device=chosen.device), right=True)
            sent = ends.diff(prepend=ends.new_zeros(1)).view(group.size, -1)
            counts = Counts.of(sent, group, rows, needs_host or idle > 0)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(slots, device=order.device))
        if idle:  # their slots are the last ones: all have one place, that of zeros
            rows = sum(counts.on_host.sent)
            order, places = order[:rows], places.clamp(max=rows)
        return cls(group, features, order, places.view(chosen.shape), counts)

    @cached_property
    def groups(self) -> Groups:
        """The rows of each expert here."""
        told, got = self.counts.on_host, self.counts.got
        return Groups(sum(told.got), got[0] if len(got) == 1 else got.sum(0), told.here)

    @cached_property
    def sorting(self) -> tuple[Tensor, Tensor] | None:
        """[R], the place at which each row came, of those sorted by (expert, source rank, token), and the place that
        each that came has of those; None where they come so."""
        return None if self.group.size == 1 else _sorting(self.counts.got, self.groups.rows)

    def pass_on(self) -> None:
        """Let what runs beside this compute: rows are on their way."""
        if self.group.baton is not None:
            self.group.baton.pass_on()

    def start(self, x: Tensor, weights: Tensor | None = None) -> Pending:
        """x: [n, f], weights: [N, k] -> [R, f], the rows of each expert together. Adjoint of :meth:`start_back`."""
        whole = start_all_gather(x, self.features).wait()
        rows = whole.index_select(0, self.order // self.slots.shape[1])
        if weights is not None:
            for own, factor in _in_cache(rows, self._in_order(weights)):
                own.mul_(factor)
        told = self.counts.on_host
        pending = start_all_to_all(rows, self.group, told.sent, told.got)
        if self.sorting is None:
            return pending
        places = self.sorting[0]
        return pending.then(lambda: pending.finish().index_select(0, places))

    def start_back(self, rows: Tensor, weights: Tensor | None = None) -> Pending:
        """rows: [R, f], weights: [N, k] -> [n, f], the sum of each token's slots and over ``features``."""
        pending = self._start_home(rows)

        def finish() -> Tensor:
            return start_reduce_scatter(self._sum(pending.finish(), weights), self.features).wait()

        return pending.then(finish)

    def start_numbers_back(self, numbers: Tensor) -> Pending:
        """numbers: [R], one of each row -> [N, k]."""
        pending = self._start_home(numbers)
        return pending.then(lambda: self._with_zeros(pending.finish()).take(self.slots))

    def _start_home(self, rows: Tensor) -> Pending:
        """rows: [R, ...] -> [N k, ...], as they were sent."""
        if self.sorting is not None:
            rows = rows.index_select(0, self.sorting[1])
        told = self.counts.on_host
        return start_all_to_all(rows, self.group, told.got, told.sent)

    def _with_zeros(self, rows: Tensor) -> Tensor:
        """rows: [N k, ...], as they were sent -> the same and, where some were not, one of zeros for these."""
        return rows if len(rows) == self.slots.numel() else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))

    def _sum(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """rows: [N k, f], as they were sent -> [N, f], each token's rows summed in the order of its slots."""
        if rows.device.type == "cpu":  # whose kernel would round halves of narrow numbers up
            wide = self._with_zeros(rows.to(torch.promote_types(rows.dtype, torch.float32)))
            return F.embedding_bag(self.slots, wide, mode="sum", per_sample_weights=weights).to(rows.dtype)
        if weights is not None:
            rows.mul_(self._in_order(weights))  # in fp32, where its kernel would have them narrow
        return F.embedding_bag(self.slots, self._with_zeros(rows), mode="sum")

    def _in_order(self, weights: Tensor) -> Tensor:
        """weights: [N, k] -> [N k, 1], as their rows are sent."""
        return weights.flatten().index_select(0, self.order)[:, None]


def _sorting(got: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """got: [ranks, experts here], how many rows come, by source and then by expert -> as of :class:`Dispatch`."""
    turned = got.t().flatten()
    come = (got.flatten().cumsum(0) - got.flatten()).view(got.shape)
    belong = (turned.cumsum(0) - turned).view(got.t().shape).t()
    shift, at = come - belong, torch.arange(rows, device=got.device)
    return (
        at + shift.t().flatten().repeat_interleave(turned, output_size=rows),
        at - shift.flatten().repeat_interleave(got.flatten(), output_size=rows),
    )


# -- the two products


class _Up(torch.autograd.Function):
    """h = rows(x) W' + b, with the rows of each expert times its own matrix.

    x   [n, embed]   this rank's tokens, of which ``coming`` are the rows
    W   [experts here, inner, embed]
    b   [experts here, inner]
    h   [R, inner]

    The rows are not kept, they would be k times what this rank has: they are sent once more while dgrad multiplies, or
    with a wgrad that comes later. And dgrad comes first, so that it travels while wgrad multiplies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dispatch: Dispatch,
        products: GroupedProducts,
        coming: Pending,
        hand: Hand | None,
    ) -> Tensor:
        ctx.dispatch, ctx.products, ctx.hand = dispatch, products, hand
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        dispatch.pass_on()
        h = products.forward(coming.wait(), weight, dispatch.groups)
        return h if bias is None else h.add_(bias.index_select(0, dispatch.groups.experts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dispatch, products, groups = ctx.dispatch, ctx.products, ctx.dispatch.groups
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        again = cache(partial(dispatch.start, x))
        if need_dw and not (ctx.hand and ctx.hand.late):
            again()
        dx = dispatch.start_back(products.input_gradient(dh, weight, groups)) if need_dx else None
        dispatch.pass_on()
        dw = None
        if need_dw:
            dw = _given(ctx.hand, products, dh, lambda: again().wait(), groups, again)
        db = products.sums(dh, groups) if need_db else None
        return dx.wait() if dx else None, dw, db, None, None, None, None


class _Down(torch.autograd.Function):
    """y = the sums of w (rows(a) W' + b) over each token's slots, with the rows of each expert times its own matrix.

    a   [R, features]
    w   [N, k]   the weight of each slot
    W   [experts here, embed, features]
    b   [experts here, embed]   of which each rank over which features are split adds its share
    y   [n, embed]   of this rank's tokens
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weights: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dispatch: Dispatch,
        products: GroupedProducts,
        hand: Hand | None,
    ) -> Tensor:
        ctx.dispatch, ctx.products, ctx.hand = dispatch, products, hand
        ctx.save_for_backward(a, weights, weight, bias)
        rows = products.forward(a, weight, dispatch.groups)
        if bias is not None:
            rows.add_(bias.index_select(0, dispatch.groups.experts), alpha=1 / dispatch.features.size)
        home = dispatch.start_back(rows, weights)
        dispatch.pass_on()
        return home.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, weights, weight, bias = ctx.saved_tensors
        dispatch, products, groups = ctx.dispatch, ctx.products, ctx.dispatch.groups
        _, need_dweights, need_dw, need_db = ctx.needs_input_grad[:4]
        coming = dispatch.start(dy, weights)
        dispatch.pass_on()
        d = coming.wait()
        da = products.input_gradient(d, weight, groups)
        dweights = start_weights_gradient(d, bias, da, a, weights, dispatch) if need_dweights else None
        dw = _given(ctx.hand, products, d, lambda: a, groups) if need_dw else None
        db = products.sums(d, groups).div_(dispatch.features.size) if need_db else None
        return da, dweights.wait() if dweights else None, dw, db, None, None, None


def _given(
    hand: Hand | None,
    products: GroupedProducts,
    dy: Tensor,
    rows: Callable[[], Tensor],
    groups: Groups,
    start: Callable[[], object] = lambda: None,
) -> Tensor | None:
    """Return a weight's gradient, or None where it has been handed on. ``start``: starts the messages of the rows."""
    if hand is None:
        return products.weight_gradient(dy, rows(), groups)
    hand.give(
        WeightGradient(
            lambda: products.weight_gradient(dy, rows(), groups),
            lambda total, first: products.add_weight_gradient(dy, rows(), groups, total, first),
            start,
        )
    )
    return None


def start_weights_gradient(
    d: Tensor, bias: Tensor | None, da: Tensor, a: Tensor, weights: Tensor, dispatch: Dispatch
) -> Pending:
    """Start the gradient of the weights of slots.

    Args:
        d: [R, embed], the gradient of what the experts give, times the weights.
        bias: [experts here, embed], of which each rank over which features are split has added its share.
        da: [R, features], the gradient of what they are given, made of d.
        a: [R, features], what they are given.
        weights: [N, k].
        dispatch: The way of the rows.

    Returns:
        [N, k].
    """
    along = _along(da, a, weights.dtype)
    if bias is not None:
        along += _along(d, bias.index_select(0, dispatch.groups.experts), weights.dtype) / dispatch.features.size
    home = dispatch.start_numbers_back(along)
    # 0 for a weight of 0, which no score has that still moves.
    return home.then(lambda: torch.where(weights == 0, 0, home.finish() / weights))


def _along(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x, y: [R, f] -> [R], the products of their rows."""
    sums = [(own * other).sum(-1, dtype=dtype) for own, other in _in_cache(x, y)]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


_CACHED = 1 << 17
"""Elements of a block of rows of which a core's cache holds wide copies."""


def _in_cache(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """x: [R, f], y: [R, ...] -> successive rows of both, on a CPU as many at a time as stay in its cache."""
    step = max(1, _CACHED // x.shape[1] if x.device.type == "cpu" else len(x))
    return zip(x.split(step), y.split(step), strict=True)
