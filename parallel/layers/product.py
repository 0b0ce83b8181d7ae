"""The products of a linear: forward, input gradient and weight gradient, each by itself.

:mod:`parallel.layers.linear` says what a linear that is split over ranks multiplies, sends and keeps, and in which
order. A :class:`Product` says how matrices are multiplied: as they are (:data:`DENSE`), in fp8
(:mod:`parallel.layers.fp8`), or as whoever writes the next one likes. The weight gradient is a call of its own and
nothing waits for it, so a product may hand it on before it is multiplied: to be multiplied later, or into the memory
where it is summed.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import EffectType

from megacore.parallel import kernels
from megacore.parallel.collectives import Pending, start_all_gather, start_reduce_scatter
from megacore.parallel.mesh import Group
from megacore.parallel.parameters import WeightGradient


class Operand(NamedTuple):
    """A tensor [t, ..., features] as a product multiplies, sends and keeps it.

    Args:
        values: The tensor, or narrow numbers that stand for it.
        scale: A scalar that goes with the values, where the product needs one.
        turned: [features, t], a transposed copy of the values, where the product multiplies that faster.
    """

    values: Tensor
    scale: Tensor | None = None
    turned: Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """The values as the weight's gradient multiplies them: in the memory of the transposed copy, where one is."""
        return self.values if self.turned is None else self.turned.t()


class Product(ABC):
    """A way to multiply the matrices of a linear; x: [t, in], weight: [out, in], dy: [t, out].

    Two methods make operands of tensors and three are the products. The next four are a product and the collective
    before or after it; a product with a kernel for both at once overrides them.
    """

    hand: Callable[[WeightGradient | Tensor], None] | None = None
    """The function that is given weight gradients, or their sums, instead of autograd, if any."""
    late: bool = False
    """Whether it lets them wait, and the messages that they alone need."""
    beside: Callable[[], None] | None = None
    """Computes the one that was held for a message to travel beside it, where some may be held."""
    adds: ClassVar[bool] = False
    """Whether it may add them to a sum in the product itself: then compiled code hands them on too. What others make
    of their operands the compiler fuses with what comes before, and autograd is given the gradient."""

    def operands(self, x: Tensor, weight: Tensor, group: Group, whole: bool) -> tuple[Operand, Operand]:
        """Return what the forward multiplies; the ranks of the group hold parts of x, of the weight, or of both.

        ``whole``: whether the weight's gradient multiplies x as it is here, not one that is gathered.
        """
        return Operand(x), Operand(weight)

    def gradient(self, dy: Tensor, group: Group, whole: bool) -> Operand:
        """Return what the backward multiplies by; ``group`` and ``whole`` as of :meth:`operands`."""
        return Operand(dy)

    @abstractmethod
    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        """Return y = x weight' + bias: [t, out]."""

    @abstractmethod
    def input_gradient(self, dy: Operand, weight: Operand) -> Tensor:
        """Return dx = dy weight: [t, in]."""

    @abstractmethod
    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        """Return dweight = dy' x: [out, in], in the weight's dtype."""

    def gather_forward(self, x: Operand, weight: Operand, bias: Tensor | None, group: Group) -> Tensor:
        """x: [t/n, in] of each rank -> y: [t, out]."""
        return self.forward(gathered(x, group), weight, bias)

    def forward_scatter(self, x: Operand, weight: Operand, group: Group) -> Tensor:
        """Return this rank's tokens of the sum of all ranks' y: [t/n, out]."""
        return start_reduce_scatter(self.forward(x, weight), group).wait()

    def gather_input_gradient(self, dy: Operand, weight: Operand, group: Group) -> tuple[Operand, Tensor]:
        """dy: [t/n, out] of each rank -> all of dy: [t, out], and dx: [t, in]."""
        coming = start_gather(dy, group)
        if self.beside is not None and not torch.compiler.is_compiling():
            self.beside()
        full = Operand(coming.wait(), dy.scale)
        return full, self.input_gradient(full, weight)

    def input_gradient_scatter(self, dy: Operand, weight: Operand, group: Group, alone: bool) -> Pending:
        """Start to sum all ranks' dx, and return this rank's tokens of it: [t/n, in].

        ``alone``: whether no weight gradient is multiplied while it travels.
        """
        return start_reduce_scatter(self.input_gradient(dy, weight), group)

    def add_weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype, total: Tensor, first: bool) -> None:
        """Add dy' x to ``total``: [out, in], of any dtype, in which there is nothing yet where it is the ``first``."""
        gradient = self.weight_gradient(dy, x, dtype)
        _ = total.copy_(gradient) if first else total.add_(gradient)

    def give_weight_gradient(
        self, dy: Operand, x: Operand, weight: Tensor, group: Group | None = None, held: bool = False
    ) -> Tensor | None:
        """Return dweight, or None where it has been handed on.

        Args:
            dy, x, weight: What it is of.
            group: The ranks from which x is gathered once the gradient is asked for.
            held: Whether it may be held for the next message, as none travels beside it.
        """
        dtype, compiling = weight.dtype, torch.compiler.is_compiling()
        if self.hand is None or (compiling and not self.adds):
            return self.weight_gradient(dy, x, dtype)
        if compiling:
            _hand_on(weight, dy.values, x.values)
            return None
        if group is None:
            self.hand(self._handed(dy, x, dtype, held=held and self.beside is not None))
            return None
        start = cache(partial(start_gather, x, group))

        def whole() -> Operand:
            return Operand(start().wait(), x.scale)

        self.hand(
            WeightGradient(
                lambda: self.weight_gradient(dy, whole(), dtype),
                lambda total, first: self.add_weight_gradient(dy, whole(), dtype, total, first),
                start,
            )
        )
        return None

    def _handed(
        self, dy: Operand, x: Operand, dtype: torch.dtype, in_graph: bool = False, held: bool = False
    ) -> WeightGradient:
        make, add = partial(self.weight_gradient, dy, x, dtype), partial(self.add_weight_gradient, dy, x, dtype)
        return WeightGradient(make, add, in_graph=in_graph, held=held)

    def handing(
        self,
        hand: Callable[[WeightGradient | Tensor], None],
        late: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Self:
        """Return a product that is the same, but hands weight gradients on, to somebody who lets them wait or does
        not, or holds some (:attr:`beside`)."""
        other = copy(self)
        other.hand, other.late, other.beside = hand, late, beside
        return other

    def found_by(self, weight: Tensor) -> None:
        """Have compiled code find this product, which hands on, by the weight that it multiplies."""
        _handing[_key(weight)] = self


# Compiled code is shared by layers of one shape and knows tensors alone: it says of which weight a gradient is, and
# by where that lies, which is the same for its life, the product is found.
_handing = WeakValueDictionary[tuple[int, int], Product]()


def _key(weight: Tensor) -> tuple[int, int]:
    return weight.untyped_storage()._cdata, int(weight.storage_offset())


@torch.library.custom_op("megacore::hand_on_weight_gradient", mutates_args=())
def _hand_on(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    product = _handing[_key(weight)]
    assert product.hand is not None
    product.hand(product._handed(Operand(dy), Operand(x), weight.dtype, in_graph=True))


@_hand_on.register_fake
def _(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    pass


# Nobody uses what it gives, and it must run all the same.
_hand_on.register_effect(EffectType.ORDERED)


def start_gather(x: Operand, group: Group, after: Tensor | None = None) -> Pending:
    """values: [t/n, ...] of each rank -> [t, ...]; numbers of one byte travel as bytes."""
    if x.values.dtype.itemsize > 1:
        return start_all_gather(x.values, group, after)
    pending = start_all_gather(x.values.view(torch.uint8), group, after)
    return pending.then(lambda: pending.finish().view(x.values.dtype))


def gathered(x: Operand, group: Group) -> Operand:
    """x: [t/n, ...] of each rank -> [t, ...]."""
    return Operand(start_gather(x, group).wait(), x.scale)


class Dense(Product):
    """The matrices as they are."""

    adds = True

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return kernels.linear(x.values, weight.values, bias)

    def input_gradient(self, dy: Operand, weight: Operand) -> Tensor:
        return kernels.matmul(dy.values, weight.values)

    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        return kernels.mm(dy.values.flatten(0, -2).t(), x.values.flatten(0, -2))

    def add_weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype, total: Tensor, first: bool) -> None:
        """Add, on a GPU in the product itself and the dtype of the sum: the gradient is never rounded to a narrow
        one."""
        if total.device.type != "cuda" or total.dtype == dtype:
            super().add_weight_gradient(dy, x, dtype, total, first)
            return
        kernels.add_mm_(total, dy.values.flatten(0, -2).t(), x.values.flatten(0, -2), first)


DENSE = Dense()


class SymmetricMemory(Dense):
    """Dense products that start with the tokens of one rank while those of the next are on their way, and send a part
    of the sum while the next is multiplied: torch's fused ones, through memory that GPUs map of each other. An input
    gradient beside which a weight gradient is multiplied travels whole: that is one product instead of n smaller ones.
    """

    @classmethod
    def on(cls, device: torch.device, group: Group) -> Self:
        """Raise ValueError where a GPU of the group cannot reach another's memory; its ranks are successive GPUs."""
        importlib.import_module("torch.distributed._symmetric_memory")  # it is what defines the operators
        first = (device.index or 0) - group.index
        peers = [gpu for gpu in range(first, first + group.size) if gpu != device.index]
        if device.type != "cuda":
            raise ValueError(f"products that overlap with what they send need GPUs, and this is {device}")
        if away := [gpu for gpu in peers if not torch.cuda.can_device_access_peer(device, gpu)]:
            raise ValueError(f"{device} cannot reach the memory of {', '.join(f'cuda:{gpu}' for gpu in away)}")
        return cls()

    def gather_forward(self, x: Operand, weight: Operand, bias: Tensor | None, group: Group) -> Tensor:
        y: Tensor = _gather_matmul(x.values.contiguous(), [weight.values.t()], 0, group.name, return_A=False)[1][0]
        return y if bias is None else y.add_(bias)

    def forward_scatter(self, x: Operand, weight: Operand, group: Group) -> Tensor:
        return _matmul_scatter(x.values, weight.values.t(), "sum", 0, group.name)

    def gather_input_gradient(self, dy: Operand, weight: Operand, group: Group) -> tuple[Operand, Tensor]:
        full, (dx,) = _gather_matmul(dy.values.contiguous(), [weight.values], 0, group.name)
        return Operand(full), dx

    def input_gradient_scatter(self, dy: Operand, weight: Operand, group: Group, alone: bool) -> Pending:
        if not alone:
            return super().input_gradient_scatter(dy, weight, group, alone)
        dx = _matmul_scatter(dy.values, weight.values, "sum", 0, group.name)
        return Pending([], lambda: dx)


def _gather_matmul(*arguments: Any, **named: Any) -> Any:
    return torch.ops.symm_mem.fused_all_gather_matmul(*arguments, **named)


def _matmul_scatter(*arguments: Any) -> Any:
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(*arguments)
