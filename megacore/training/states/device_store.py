"""Masters and moments on the device, beside the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.training.states.store import MASTER, Rule
from parallel import kernels
from parallel.gradients.buckets import OwnedShard


@dataclass(frozen=True)
class UpdatedTensor:
    """The tensor that is updated for one part: the parameter's own memory, or an fp32 master of it.

    A part whose memory has gaps gets a master of its own dtype, as the fused kernels walk memory without strides.
    """

    part: OwnedShard
    tensor: Tensor
    master: bool

    @classmethod
    def of(cls, part: OwnedShard, rule: Rule) -> UpdatedTensor:
        data = part.data
        dtype = rule.value(data.dtype)
        if dtype != data.dtype or not data.is_contiguous():
            return cls(part, data.to(dtype, copy=True).contiguous(), True)
        return cls(part, data, False)

    @property
    def wider(self) -> bool:
        """Whether the master knows more than the parameter."""
        return self.tensor.dtype != self.part.data.dtype


@dataclass(frozen=True)
class Nothing:
    """The part of a rank all of whose parameters are frozen: it counts the steps as the others do."""

    data: Tensor
    gradient: Tensor
    decays: bool = False


class DeviceStore:
    """A :class:`~megacore.training.states.store.StateStore` on the device: one fused kernel for everything, and no host
    is asked.

    ``nothing`` stands for the parts of a rank that has none.
    """

    def __init__(self, parts: Sequence[OwnedShard], rule: Rule, device: torch.device, nothing: Nothing) -> None:
        self.targets = [UpdatedTensor.of(part, rule) for part in parts or [nothing]]
        groups = [
            {"params": [t.tensor for t in self.targets if t.part.decays], "weight_decay": rule.weight_decay},
            {"params": [t.tensor for t in self.targets if not t.part.decays], "weight_decay": 0.0},
        ]
        self.adamw = kernels.adamw(
            [g for g in groups if g["params"]], device, rule.lr, rule.betas, rule.eps, rule.moments
        )
        self._of = {id(target.part): target for target in self.targets}

    @property
    def updates(self) -> int:
        return kernels.updates(self.adamw)

    @updates.setter
    def updates(self, count: int) -> None:
        kernels.set_updates(self.adamw, count)

    def update(self, lr: float, go: Tensor, divisor: Tensor | None) -> None:
        for target in self.targets:
            target.tensor.grad = target.part.gradient
        for group in self.adamw.param_groups:
            group["lr"] = lr
        kernels.step_if(self.adamw, go, divisor)
        masters = [target for target in self.targets if target.master]
        if masters:
            torch._foreach_copy_([t.part.data for t in masters], [t.tensor for t in masters])
        for target in self.targets:
            target.tensor.grad = None  # else this step's gradients would live through the next backward

    def of(self, part: OwnedShard, state: str) -> Tensor:
        target = self._of[id(part)]
        if state == MASTER:
            return target.tensor
        tensor: Tensor = self.adamw.state[target.tensor][state]
        return tensor

    @property
    def masters(self) -> bool:
        return any(target.master for target in self.targets)
