"""AdamW on spans: what has one set of replicas has one optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import kernels
from parallel.sync import Gradients, Span


@dataclass(frozen=True)
class Target:
    """What the optimizer updates for one span: the parameter's own memory, or an fp32 master of it.

    A span whose memory has gaps gets a master of its own dtype, as the fused kernels walk memory without strides.
    """

    span: Span
    tensor: Tensor
    master: bool


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with clipping by the global norm.

    Weight decay applies to matrices, not to norms and biases.

    Args:
        gradients: The spans and their summed gradients.
        lr, betas, eps, weight_decay: As in the paper.
        clip: Largest global gradient norm; None for no clipping.
        master_weights: Whether parameters narrower than fp32 are updated through an fp32 copy.
    """

    def __init__(
        self,
        gradients: Gradients,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float | None = 1.0,
        master_weights: bool = True,
    ) -> None:
        self.clip = clip
        self.targets = [_target(span, master_weights) for span in gradients.spans]
        shards = gradients.parameters.shards
        decays = [(t, shards[t.span.name].param.decays) for t in self.targets]
        groups = [
            {"params": [t.tensor for t, decayed in decays if decayed], "weight_decay": weight_decay},
            {"params": [t.tensor for t, decayed in decays if not decayed], "weight_decay": 0.0},
        ]
        device = gradients.parameters.mesh.device
        self.adamw = kernels.adamw([g for g in groups if g["params"]], device, lr, betas, eps)

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, go: Tensor | None = None) -> None:
        """Update the parameters from the summed gradients.

        Args:
            lr: Learning rate.
            norm: The global norm of the gradient.
            go: A bool scalar on the device; where it is false nothing changes. By default, whether ``norm`` is finite.
        """
        for target in self.targets:
            target.tensor.grad = target.span.gradient
        tensors = [target.tensor for target in self.targets]
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(tensors, self.clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        kernels.step_if(self.adamw, torch.isfinite(norm) if go is None else go)
        masters = [target for target in self.targets if target.master]
        if masters:
            torch._foreach_copy_([t.span.data for t in masters], [t.tensor for t in masters])
        for tensor in tensors:
            tensor.grad = None  # else this step's gradients would live through the next backward


def _target(span: Span, master_weights: bool) -> Target:
    data = span.data
    if master_weights and data.dtype.itemsize < 4:
        return Target(span, data.to(torch.float32, copy=True).contiguous(), True)
    if not data.is_contiguous():
        return Target(span, data.clone(memory_format=torch.contiguous_format), True)
    return Target(span, data, False)
