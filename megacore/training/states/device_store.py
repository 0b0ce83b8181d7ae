"""Masters and moments on the device, beside the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.gradients.buckets import OwnedShard
from megacore.parallel.gradients.matrices import Matrices
from megacore.store.weight_folders.index import EMA, MASTER, MOMENTS
from megacore.training.states.muon import Muon, WholeMatrices


@dataclass(frozen=True)
class Rule:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), and in which numbers.

    Args:
        lr, betas, eps, weight_decay: The paper's; each step has a learning rate of its own.
        master_weights: Whether parameters narrower than fp32 are updated through an fp32 copy.
        moments: dtype of the moments; None for that of what is updated.
        muon: The rule of matrices, if it is another.
        ema: The share of an average of the weights that an update keeps; None where there is none. The first update
            sets it to the weights, as torch.optim.swa_utils does.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    master_weights: bool
    moments: torch.dtype | None
    muon: Muon | None = None
    ema: float | None = None

    def value(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of what is updated for a parameter of this one."""
        return torch.float32 if self.master_weights and parameter.itemsize < 4 else parameter

    def kept(self, parameter: torch.dtype) -> Mapping[str, torch.dtype]:
        """Return {state: dtype} of what is kept beside a parameter of this dtype: a wider master, moments, averages."""
        value = self.value(parameter)
        master = {} if value == parameter else {MASTER: value}
        averages = {} if self.ema is None else {EMA: value}
        return {**master, **dict.fromkeys(MOMENTS, self.moments or value), **averages}


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


@dataclass(frozen=True)
class Nothing:
    """The part of a rank all of whose parameters are frozen: it counts the steps as the others do."""

    data: Tensor
    gradient: Tensor
    decays: bool = False
    is_matrix: bool = False


class DeviceStore:
    """A store of masters and moments on the device: one fused kernel for all that AdamW updates, and no host is asked.

    ``nothing`` stands for the parts of a rank that AdamW has none of, ``matrices`` for those that are updated whole.
    """

    def __init__(
        self,
        parts: Sequence[OwnedShard],
        rule: Rule,
        device: torch.device,
        nothing: Nothing,
        matrices: Matrices | None = None,
    ) -> None:
        whole = {part for part in parts if matrices is not None and part.is_matrix}
        self.targets = [UpdatedTensor.of(part, rule) for part in parts]
        self._by_adamw = [t for t in self.targets if t.part not in whole] or [UpdatedTensor.of(nothing, rule)]
        groups = [
            {"params": [t.tensor for t in self._by_adamw if t.part.decays], "weight_decay": rule.weight_decay},
            {"params": [t.tensor for t in self._by_adamw if not t.part.decays], "weight_decay": 0.0},
        ]
        self.adamw = kernels.adamw(
            [g for g in groups if g["params"]], device, rule.lr, rule.betas, rule.eps, rule.moments
        )
        self._whole = (
            None
            if rule.muon is None or matrices is None
            else WholeMatrices(
                rule.muon,
                rule.weight_decay,
                {t.part: t.tensor for t in self.targets if t.part in whole},
                rule.value(nothing.data.dtype),
                rule.moments,
                matrices,
            )
        )
        self._of = {target.part: target for target in self.targets}
        self._ema = rule.ema
        self._averages = {} if rule.ema is None else {t.part: t.tensor.clone() for t in self.targets}

    @property
    def updates(self) -> int:
        """Steps taken, without those that were left out. Reading it waits for the device."""
        return kernels.updates(self.adamw)

    @updates.setter
    def updates(self, count: int) -> None:
        kernels.set_updates(self.adamw, count)

    def update(self, lr: float, go: Tensor, divisor: Tensor | None) -> None:
        """Update the values of all parts from their gradients, which count no more then, but nothing where ``go``, a
        bool scalar on the device, is false; it divides gradients by ``divisor``, an fp32 scalar there, as it reads
        them."""
        for target in self._by_adamw:
            target.tensor.grad = target.part.gradient
        for group in self.adamw.param_groups:
            group["lr"] = lr
        kernels.step_if(self.adamw, go, divisor)
        if self._whole is not None:
            self._whole.update(lr, go, divisor)
        if self._ema is not None:
            first = kernels.step_of(self.adamw) <= 1
            for part, average in self._averages.items():
                goes = go.to(average.dtype)
                average.lerp_(self._of[part].tensor, torch.where(first, goes, goes * (1 - self._ema)))
        masters = [target for target in self.targets if target.master]
        if masters:
            torch._foreach_copy_([t.part.data for t in masters], [t.tensor for t in masters])
        for target in self._by_adamw:
            target.tensor.grad = None  # else this step's gradients would live through the next backward

    def of(self, part: OwnedShard, state: str) -> Tensor:
        """Return the state of a part: a moment, empty if it has none, or what is updated in place of its values."""
        target = self._of[part]
        if state == MASTER:
            return target.tensor
        if state == EMA:
            return self._averages[part]
        if self._whole is not None and part in self._whole.means:
            return self._whole.means[part] if state == MOMENTS[0] else self._whole.means[part].new_empty(0)
        return self.adamw.state[target.tensor][state]

    def states(self, part: OwnedShard) -> Sequence[str]:
        """Return the names of what is kept of a part beside its values."""
        moments = MOMENTS[: 1 if self._whole is not None and part in self._whole.means else None]
        return [*([MASTER] if self.masters else []), *moments, *([] if self._ema is None else [EMA])]

    @property
    def masters(self) -> bool:
        """Whether what is updated are not, or not all, the parameters themselves."""
        return any(target.master for target in self.targets)
