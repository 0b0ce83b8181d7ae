"""AdamW with moments that are narrower than what they update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Elements that are computed with at a time: what stays in cache on a CPU, what fills a GPU.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 26}


@dataclass(frozen=True)
class Step:
    """The numbers of a step, as in the paper.

    Args:
        count: Number of updates, this one included, by which the bias of the moments is corrected.
        divisor: The factor that gradients come with.
    """

    count: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    divisor: float = 1.0


def update(
    step: Step, values: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor]
) -> None:
    """Update host tensors in place, bit for bit that of the optimizers of :mod:`parallel.kernels`.

    Args:
        values: [n] each, and of one dtype.
        gradients: Those of them, alike; they are divided in place.
        means, squares: Moments of them; of one dtype, which may be narrower.
    """
    if not values:
        return
    divisor = None if step.divisor == 1 else torch.tensor(step.divisor, dtype=torch.float32)
    if means[0].dtype != values[0].dtype:
        count, go = torch.tensor(float(step.count)), torch.tensor(True)
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        for value, gradient, mean, square in zip(values, gradients, means, squares, strict=True):
            _update(value, gradient, mean, square, count, step.lr, step.betas, step.eps, step.weight_decay, go)
        return
    adamw(
        values,
        gradients,
        means,
        squares,
        [],
        [torch.tensor(float(step.count - 1)) for _ in values],
        fused=True,
        amsgrad=False,
        beta1=step.betas[0],
        beta2=step.betas[1],
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=step.eps,
        maximize=False,
        grad_scale=divisor,
    )


class NarrowAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): torch's fused one, state and all, but for the dtype of the
    moments.

    A step widens them to the parameter's dtype, moves them, updates by what that gives, and rounds them to nearest as
    it puts them back. The rounding of a step is half a place, 2^-9 to 2^-8 of a number in bf16: moments whose betas
    leave less than that of them behind would stand still.
    """

    found_inf: Tensor
    grad_scale: Tensor | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update by gradients over ``grad_scale``, where ``found_inf`` is 0; the host is not asked for either."""
        go = self.found_inf == 0
        if self.grad_scale is not None:
            torch._foreach_div_([p.grad for group in self.param_groups for p in group["params"]], self.grad_scale)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                # Where it does not go nothing moves, so that what is computed of zeros does not count.
                count = state["step"].add_(go).clamp(min=1)
                moments = state["exp_avg"], state["exp_avg_sq"]
                rule = group["lr"], group["betas"], group["eps"], group["weight_decay"]
                _update(parameter, parameter.grad.contiguous(), *moments, count, *rule, go)


def _update(
    value: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    go: Tensor,
) -> None:
    """``count`` and ``go`` (whether anything moves) are scalars on the device."""
    beta1, beta2 = betas
    rate = go * lr
    size, root = rate / (1 - beta1**count), (1 - beta2**count).sqrt()
    for p, all_g, narrow_m, narrow_v in _chunks(value, gradient, mean, square):
        g = torch.where(go, all_g, 0)
        m = narrow_m.to(p.dtype, copy=True).lerp_(g, go * (1 - beta1))
        v = narrow_v.to(p.dtype, copy=True).lerp_(g.square_(), go * (1 - beta2))
        narrow_m.copy_(m)
        narrow_v.copy_(v)
        p.mul_(1 - rate * weight_decay).sub_(m.div_(v.sqrt_().div_(root).add_(eps)).mul_(size))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield slices of tensors of one contiguous shape."""
    flat = [tensor.view(-1) for tensor in tensors]
    step = _CHUNK.get(tensors[0].device.type, _CHUNK["cuda"])
    for start in range(0, len(flat[0]), step):
        yield tuple(each[start : start + step] for each in flat)
