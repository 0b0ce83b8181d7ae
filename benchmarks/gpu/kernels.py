"""Kernels of our own beside torch's operators, at a model's shapes: how far apart they are, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.rows import Machine, Row, failed, number, skipped
from benchmarks.gpu.work import SHAPES, Shape
from megacore.parallel import kernels as chosen
from megacore.parallel.kernels import choice, norm, rotation
from megacore.parallel.kernels.scoring import Scoring, attend
from megacore.parallel.layers.loss import Objective
from megacore.parallel.mesh import ALONE

APART = 2.0**-7
"""Between two roundings to bf16 of the same numbers, at most."""


@dataclass(frozen=True)
class Case:
    """Something that has a kernel.

    Args:
        make: Chooses what computes it.
        inputs: What it is given; those that need a gradient get one.
        passes: Bytes that must be read and written, forward and backward.
        plain: The formula, which is given the same inputs in fp32; None for what is chosen without kernels of our own.
    """

    make: Callable[[], Callable[..., Any]]
    inputs: tuple[Any, ...]
    passes: float
    plain: Callable[..., Any] | None = None


def kernels(machine: Machine) -> Iterator[Row]:
    if machine.gpu and chosen.cross_entropy(machine.device) is None:
        yield skipped("kernels", "there is no triton that runs")
        return
    for name in ("tiny",) if machine.tiny else ("1b", "8b"):
        for what, case in _cases(machine, SHAPES[name]).items():
            try:
                yield from _beside(machine, f"{name} {what}", case)
            except Exception as error:
                yield failed(f"{name} {what}", error)


def _cases(machine: Machine, shape: Shape) -> Mapping[str, Case]:
    sizes, device = shape.config.sizes, machine.device
    embed, heads, kv, head = sizes["embed"], sizes["heads"], sizes["kv"], sizes["head"]

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, device=device).bfloat16().requires_grad_()

    x, weight, bias = drawn(shape.tokens, embed), drawn(embed), drawn(embed)
    gate_up = drawn(shape.tokens, 2 * sizes["mlp"])
    qkv, table = drawn(shape.tokens, (heads + 2 * kv) * head), drawn(shape.tokens, head // 2).detach()
    logits, labels = drawn(shape.tokens, sizes["vocab"]), torch.randint(sizes["vocab"], (shape.tokens,), device=device)
    objective = Objective(ALONE, sizes["vocab"])
    part = table[:, : max(1, head // 8)]

    def loss(z: Tensor) -> Tensor:
        return objective(z * 1, labels)  # whose memory takes the gradient

    return {
        "RMSNorm": Case(lambda: chosen.rms_norm(device), (x, weight, 1e-5), 5 * x.nbytes),
        "LayerNorm": Case(lambda: chosen.layer_norm(device), (x, weight, bias, 1e-5), 5 * x.nbytes),
        "SwiGLU": Case(lambda: chosen.gated("silu", device), (gate_up,), 4 * gate_up.nbytes),
        "rotation": Case(lambda: chosen.split_and_rotate(device), (qkv, table, table, heads, kv), 4 * qkv.nbytes),
        "RMSNorm, offset": Case(
            lambda: chosen.rms_norm(device, 1.0), (x, weight, 1e-5), 5 * x.nbytes, partial(norm.rms_norm, offset=1.0)
        ),
        "LayerNorm, offset": Case(
            lambda: chosen.layer_norm(device, 1.0),
            (x, weight, bias, 1e-5),
            5 * x.nbytes,
            partial(norm.layer_norm, offset=1.0),
        ),
        "rotation of a part": Case(
            lambda: chosen.split_and_rotate(device),
            (qkv, part, part, heads, kv),
            4 * qkv.nbytes,
            rotation.split_and_apply,
        ),
        **_attentions(shape, drawn),
        # With the copy.
        "cross entropy": Case(lambda: loss, (logits,), 7 * logits.nbytes),
    }


def _attentions(shape: Shape, drawn: Callable[..., Tensor]) -> Mapping[str, Case]:
    """What attention makes of a sequence, where torch's operator for all of it does not serve."""
    sizes, length = shape.config.sizes, shape.sequence_length
    q, k, v = (drawn(1, sizes[heads], length, sizes["head"]) for heads in ("heads", "kv", "kv"))
    sinks, window = drawn(sizes["heads"]), length // 4

    def case(*others: Tensor, **scored: Any) -> Case:
        def scoring(given: Sequence[Tensor]) -> Scoring:
            return Scoring(**scored, sinks=given[0] if given else None)

        def plain(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
            at = torch.arange(length, device=q.device)
            before = at[:, None] - at
            seen = (before >= 0) & (before < scored.get("window", length))
            return attend(q, k, v, seen[None], scoring(given))

        def ours(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
            return chosen.causal_attention(q, k, v, scoring(given))

        return Case(lambda: ours, (q, k, v, *others), 4 * (q.nbytes + k.nbytes), plain)

    return {
        "attention, window": case(window=window),
        "attention, softcap": case(softcap=30.0),
        "attention, sinks": case(sinks),
        "attention, all of these": case(sinks, window=window, softcap=30.0),
    }


def _beside(machine: Machine, what: str, case: Case) -> Iterator[Row]:
    """Ours first, then torch's or the formula in fp32, and how far ours is from it."""
    results = []
    without = patch.object(choice, "_fused", lambda name, device: None)
    other = "torch's" if case.plain is None else "formula in fp32"
    for way, choosing in (("ours", nullcontext()), (other, without)):
        given = case.inputs if way != "formula in fp32" else tuple(map(_wide, case.inputs))
        inputs = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        with choosing:
            function = case.plain if way == "formula in fp32" and case.plain else case.make()

            def call(
                function: Callable[..., Any] = function,
                given: tuple[Any, ...] = given,
                inputs: list[Tensor] = inputs,
            ) -> list[Tensor]:
                made = function(*given)
                outputs = made if isinstance(made, tuple) else (made,)
                gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])
                return [*outputs, *gradients]

            results.append([x.detach().clone() for x in call()])
            seconds = machine.seconds(call, 2 if machine.tiny else 20)
        yield Row(f"{what}, {way}", seconds * 1e3, case.passes / machine.known.bandwidth * 1e3, "ms")
    apart = max(number((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*results, strict=True))
    yield Row(f"{what}: apart", apart, APART, "relative error", apart <= APART)


def _wide(x: Any) -> Any:
    """Return an input in fp32, if it has numbers."""
    numbers = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().float().requires_grad_(x.requires_grad) if numbers else x
