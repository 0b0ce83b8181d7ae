"""AdamW on the parts of the parameters that this rank updates: spans, or slices of flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import kernels
from parallel.sync import Part, Sharing

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
_AWAY_FROM_0 = 1e-6


@dataclass(frozen=True)
class Target:
    """What the optimizer updates for one part: the parameter's own memory, or an fp32 master of it.

    A part whose memory has gaps gets a master of its own dtype, as the fused kernels walk memory without strides.
    """

    part: Part
    tensor: Tensor
    master: bool

    @property
    def wider(self) -> bool:
        """Whether the master knows more than the parameter."""
        return self.tensor.dtype != self.part.data.dtype


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with clipping by the global norm.

    Weight decay applies to matrices, not to norms and biases.

    Args:
        gradients: The parts and their summed gradients.
        lr, betas, eps, weight_decay: As in the paper.
        clip: Largest global gradient norm; None for no clipping.
        master_weights: Whether parameters narrower than fp32 are updated through an fp32 copy.
        moments: dtype of the moments; None for that of what is updated.
    """

    def __init__(
        self,
        gradients: Sharing,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float | None = 1.0,
        master_weights: bool = True,
        moments: torch.dtype | None = None,
    ) -> None:
        self.clip = clip
        self._sharing = gradients
        self.targets = [_target(part, master_weights) for part in gradients.parts]
        groups = [
            {"params": [t.tensor for t in self.targets if t.part.decays], "weight_decay": weight_decay},
            {"params": [t.tensor for t in self.targets if not t.part.decays], "weight_decay": 0.0},
        ]
        device = gradients.parameters.mesh.device
        self.adamw = kernels.adamw([g for g in groups if g["params"]], device, lr, betas, eps, moments)
        self._of = {id(target.part): target for target in self.targets}
        self._names = tuple(dict.fromkeys(span.name for span in gradients.spans))

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, go: Tensor | None = None, scale: Tensor | None = None) -> None:
        """Update the parameters from the summed gradients.

        Args:
            lr: Learning rate.
            norm: The global norm of the gradient, without the scale.
            go: A bool scalar on the device; where it is false nothing changes. By default, whether ``norm`` is finite.
            scale: What the summed gradients are multiples of; None for 1.
        """
        for target in self.targets:
            target.tensor.grad = target.part.gradient
        tensors = [target.tensor for target in self.targets]
        if self.clip is not None or scale is not None:
            torch._foreach_mul_([target.part.gradient for target in self.targets], self._factor(norm, scale))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        kernels.step_if(self.adamw, torch.isfinite(norm) if go is None else go)
        masters = [target for target in self.targets if target.master]
        if masters:
            torch._foreach_copy_([t.part.data for t in masters], [t.tensor for t in masters])
        for tensor in tensors:
            tensor.grad = None  # else this step's gradients would live through the next backward
        self._sharing.updated()

    def _factor(self, norm: Tensor, scale: Tensor | None) -> Tensor:
        """What gradients are multiplied by: clipping and the way out of the scale in one pass over them."""
        kept = torch.ones_like(norm) if self.clip is None else (self.clip / (norm + _AWAY_FROM_0)).clamp_(max=1)
        return kept if scale is None else kept / scale

    # -- the state, by the names and in the shapes of the parameters

    @property
    def updates(self) -> int:
        """Steps taken, without those that were left out. Reading it waits for the device."""
        return kernels.updates(self.adamw)

    @updates.setter
    def updates(self, count: int) -> None:
        kernels.set_updates(self.adamw, count)

    def states(self) -> Mapping[str, Mapping[str, torch.dtype]]:
        """{state: {parameter: dtype}} of what is to be kept beside the parameters: masters that are wider, moments."""
        first = {name: self._of[id(self._sharing.parts_of(name)[0])] for name in self._names}
        states = {
            state: {name: self._tensor(target, state).dtype for name, target in first.items()} for state in MOMENTS
        }
        masters = {name: target.tensor.dtype for name, target in first.items() if target.wider}
        return {MASTER: masters, **states} if masters else states

    @torch.no_grad()
    def read_into(self, state: str, name: str, host: Tensor | None) -> None:
        """Copy the state of a parameter to a host tensor of its shape; from a GPU, it is there once the stream is.

        All ranks do so for all states and names in one order, for some hold a part of what others want: those that do
        not want it leave out ``host``.
        """
        self._sharing.read(name, self._state(state), host)

    @torch.no_grad()
    def read_weight(self, name: str, host: Tensor | None) -> None:
        """As :meth:`read_into`, the parameter itself."""
        self._sharing.read_weight(name, host)

    @torch.no_grad()
    def load_from(self, state: str, name: str, host: Tensor) -> None:
        """Fill the moments of a parameter from a host tensor of its shape, of any float dtype."""
        self._sharing.write(name, self._state(state), host)

    @torch.no_grad()
    def load_weight(self, name: str, host: Tensor) -> None:
        """Fill a parameter, and its master if it has one, from a host tensor of its shape, of any float dtype."""
        self._sharing.fill(name, host)
        if any(target.master for target in self.targets):
            self._sharing.write(name, self._state(MASTER), host)

    def _state(self, state: str) -> Callable[[Part], Tensor]:
        return lambda part: self._tensor(self._of[id(part)], state)

    def _tensor(self, target: Target, state: str) -> Tensor:
        if state == MASTER:
            return target.tensor
        tensor: Tensor = self.adamw.state[target.tensor][state]
        return tensor


def _target(part: Part, master_weights: bool) -> Target:
    data = part.data
    if master_weights and data.dtype.itemsize < 4:
        return Target(part, data.to(torch.float32, copy=True).contiguous(), True)
    if not data.is_contiguous():
        return Target(part, data.clone(memory_format=torch.contiguous_format), True)
    return Target(part, data, False)
