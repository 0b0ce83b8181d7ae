"""AdamW with moments that are narrower than what they update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Elements that are computed with at a time: what stays in cache on a CPU, what fills a GPU.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 26}


class NarrowAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): torch's fused one, state and all, but for the dtype of the
    moments.

    A step widens them to the parameter's dtype, moves them, updates by what that gives, and rounds them to nearest as
    it puts them back. The rounding of a step is half a place, 2^-9 to 2^-8 of a number in bf16: moments whose betas
    leave less than that of them behind would stand still.
    """

    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update, where ``found_inf`` (a scalar on the device) is 0; the host is not asked."""
        go = self.found_inf == 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group, go)

    def _update(self, parameter: Tensor, group: dict[str, Any], go: Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        # Where it does not go nothing moves, so that what is computed of zeros does not count.
        steps = state["step"].add_(go).clamp(min=1)
        rate = go * group["lr"]
        size, root = rate / (1 - beta1**steps), (1 - beta2**steps).sqrt()
        assert parameter.grad is not None
        moments = state["exp_avg"], state["exp_avg_sq"]
        for p, gradient, narrow_m, narrow_v in _chunks(parameter, parameter.grad.contiguous(), *moments):
            g = torch.where(go, gradient, 0)
            m = narrow_m.to(p.dtype, copy=True).lerp_(g, go * (1 - beta1))
            v = narrow_v.to(p.dtype, copy=True).lerp_(g.square_(), go * (1 - beta2))
            narrow_m.copy_(m)
            narrow_v.copy_(v)
            p.mul_(1 - rate * group["weight_decay"]).sub_(m.div_(v.sqrt_().div_(root).add_(group["eps"])).mul_(size))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of tensors of one contiguous shape."""
    flat = [tensor.view(-1) for tensor in tensors]
    step = _CHUNK.get(tensors[0].device.type, _CHUNK["cuda"])
    for start in range(0, len(flat[0]), step):
        yield tuple(each[start : start + step] for each in flat)
