"""Modules that treat each token by itself, run on some tokens at a time, forward and backward.

Only their input is kept. The backward computes each piece again, right before its gradient, so that the activations of
one piece are there at a time, and sums the weights' gradients over the pieces before anybody is told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel.parameters import WeightGradient

Function = Callable[[Tensor], Tensor]


def in_chunks(function: Function, modules: Sequence[nn.Module], x: Tensor, tokens: int) -> Tensor:
    """x: [t, ...] -> function(x): [t, ...], some rows at a time.

    Recomputation of the block around it ends here: nothing behind x is needed for the backward, so that it computes
    what is in the function once again, not twice.

    Args:
        function: It treats each row by itself, and is made of the modules.
        modules: Those whose parameters it uses.
        x: The rows.
        tokens: The number of rows that are computed at a time.
    """
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return _forward(function, x, tokens)
    kept = _Keep.apply(x)
    # No node stands behind what nobody differentiates, such as what a frozen embedding gives.
    keeper = kept.grad_fn or SimpleNamespace(saved_tensors=(x,))
    return _Chunked.apply(kept, keeper, function, modules, tokens, *trained)


def _forward(function: Function, x: Tensor, tokens: int) -> Tensor:
    return torch.cat([function(rows) for rows in x.split(tokens)])


class _Keep(torch.autograd.Function):
    """x -> x, which is kept. It is saved here, before anything is computed: a recomputation that has come to the last
    thing that was saved stops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        keeper: Any,
        function: Function,
        modules: Sequence[nn.Module],
        tokens: int,
        *trained: nn.Parameter,
    ) -> Tensor:
        ctx.keeper, ctx.function, ctx.modules, ctx.tokens, ctx.trained = keeper, function, modules, tokens, trained
        drops = any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for each in modules for m in each.modules())
        ctx.random = _random(x.device) if drops else None
        return _forward(function, x, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), need_dx = ctx.keeper.saved_tensors, ctx.needs_input_grad[0]
        dx = torch.empty_like(x) if need_dx else None
        sums = dict[Tensor, Tensor]()
        with _same_masks(x.device, ctx.random), _summing(ctx.modules, sums) as handed, torch.enable_grad():
            for rows, given, at in zip(x.split(ctx.tokens), dy.split(ctx.tokens), _starts(x, ctx.tokens), strict=True):
                own = rows.detach().requires_grad_(need_dx)
                wanted = (*ctx.trained, own) if need_dx else ctx.trained
                *found, last = torch.autograd.grad(ctx.function(own), wanted, given, allow_unused=True)
                if dx is None:
                    found.append(last)
                else:
                    dx[at : at + len(rows)] = last
                for parameter, gradient in zip(ctx.trained, found, strict=True):
                    if gradient is not None:
                        _add(sums, parameter, gradient)
        for parameter, hand in handed.items():
            hand(sums.pop(parameter))
        summed = (sums.get(each) for each in ctx.trained)
        gradients = (None if total is None else total.to(p.dtype) for p, total in zip(ctx.trained, summed, strict=True))
        return dx, None, None, None, None, *gradients


def _starts(x: Tensor, tokens: int) -> range:
    return range(0, len(x), tokens)


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor | WeightGradient) -> None:
    """Add a piece's gradient of a parameter, in fp32 at least."""
    first = parameter not in sums
    if first:
        sums[parameter] = torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    total = sums[parameter]
    if isinstance(gradient, WeightGradient):
        gradient.add_to(total, first)
    elif first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


Hand = Callable[[Tensor], None]


@contextmanager
def _summing(modules: Iterable[nn.Module], sums: dict[Tensor, Tensor]) -> Iterator[dict[Tensor, Hand]]:
    """Have linears that hand on their weights' gradients hand them to these sums -> {weight: who is to be given it}."""
    linears: list[Any] = [m for each in modules for m in each.modules() if getattr(m, "product", None) is not None]
    linears = [linear for linear in linears if linear.product.hand is not None]
    before = [linear.product for linear in linears]
    for linear in linears:
        linear.product = linear.product.handing(partial(_add, sums, linear.weight))
    try:
        yield {linear.weight: product.hand for linear, product in zip(linears, before, strict=True)}
    finally:
        for linear, product in zip(linears, before, strict=True):
            linear.product = product


def _random(device: torch.device) -> Tensor:
    """Return the state of the generator of a device."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


@contextmanager
def _same_masks(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Draw what was drawn from a state on, and go on afterwards as if nothing had been."""
    if state is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
