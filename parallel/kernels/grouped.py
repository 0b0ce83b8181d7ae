"""Products of rows that are sorted by expert with a matrix of each expert: forward, input and weight gradient.

Experts without rows take part like all others: their weights' gradients are zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megacore.parallel.kernels.upcast import add_mm_, mm, upcasts


@dataclass(frozen=True, eq=False)
class Groups:
    """R rows, those of the first expert first.

    Args:
        rows: R.
        lengths: [experts], how many are of each.
        counts: The same as the host knows it; None where it does not.
    """

    rows: int
    lengths: Tensor
    counts: Sequence[int] | None = None

    @property
    def on_host(self) -> list[int]:
        assert self.counts is not None  # whoever made it for a loop has asked the device
        return list(self.counts)

    @property
    def ends(self) -> Tensor:
        """[experts], the end of the rows of each, as torch's kernels take it."""
        return self.lengths.cumsum(0, dtype=torch.int32)

    @property
    def experts(self) -> Tensor:
        """[R], the expert of each row; the host is not asked."""
        return torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(
            self.lengths, output_size=self.rows
        )


class HostCounts(NamedTuple):
    """Numbers of rows: those that go to each rank, those that come from each, those of each expert here, if asked."""

    sent: list[int]
    got: list[int]
    here: list[int] | None


def start_counts(sent: Tensor, got: Tensor, rows: int) -> Callable[[], HostCounts]:
    """Start to tell the host the numbers of rows -> what waits for them, while the device goes on with what has been
    launched since.

    Tensors without numbers have none to tell, so all share alike.

    Args:
        sent: [ranks, experts of a rank], rows of this rank.
        got: [ranks, experts here], rows from each rank.
        rows: The sum of ``sent``.
    """
    ranks, experts = got.shape
    if sent.is_meta:
        return lambda: HostCounts(shares(rows, ranks), shares(rows, ranks), shares(rows, experts))
    told, there = torch.stack([sent, got]), None
    if told.device.type == "cuda":
        there = torch.cuda.Event()
        told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
        there.record()

    def counts() -> HostCounts:
        if there is not None:
            there.synchronize()
        sums = told[0].sum(1), told[1].sum(1), told[1].sum(0)
        if isinstance(told, FakeTensor):
            return HostCounts(shares(rows, ranks), shares(rows, ranks), shares(rows, experts))
        return HostCounts(*(each.tolist() for each in sums))

    return counts


def shares(total: int, parts: int) -> list[int]:
    """Return ``parts`` whole numbers that add up to ``total`` and differ by one at most."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


class GroupedProducts(ABC):
    """A way to multiply the rows of experts; x: [R, in], weight: [experts, out, in], dy: [R, out]."""

    needs_host: bool
    """Whether the host must know how many rows there are of each expert."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """Return y = x weight' of each expert: [R, out]."""

    @abstractmethod
    def input_gradient(self, dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """Return dx = dy weight of each expert: [R, in]."""

    @abstractmethod
    def weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Return dweight = dy' x of each expert: [experts, out, in]."""

    def add_weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups, total: Tensor, first: bool) -> None:
        """Add dweight to ``total``: [experts, out, in], of any dtype, in which there is nothing yet where it is the
        ``first``.

        On a GPU the products of large experts add it themselves, in the dtype of the sum, where the host knows how many
        rows there are of each: none of torch's for all experts does. One of a small expert would leave units idle.
        """
        wider = total.device.type == "cuda" and total.dtype != x.dtype
        if wider and groups.counts is not None and total[0].numel() >= BUSY:
            add_one_by_one(dy, x, groups.on_host, total, first)
        else:
            gradient = self.weight_gradient(dy, x, groups)
            _ = total.copy_(gradient) if first else total.add_(gradient)

    @abstractmethod
    def sums(self, dy: Tensor, groups: Groups) -> Tensor:
        """Return the sum of the rows of each expert, what the gradient of a bias is: [experts, out]."""


BUSY = 1 << 24
"""Elements of a product that keeps a GPU busy by itself: 512 tiles of 128 x 256, nearly four for each of 132 units."""


def add_one_by_one(dy: Tensor, x: Tensor, counts: Sequence[int], total: Tensor, first: bool) -> None:
    """Add dy' x of each expert, of whose rows there are ``counts``, to its own of ``total``, in a product each."""
    for own, rows, its in zip(dy.split(counts), x.split(counts), total.unbind(), strict=True):
        if len(rows):
            add_mm_(its, own.t(), rows, first)
        elif first:
            its.zero_()


class Loop(GroupedProducts):
    """One product after the other, of any dtype."""

    needs_host = True

    def forward(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        y, counts = x.new_empty(len(x), weight.shape[1]), groups.on_host
        # Each split and unbound once: an index of its own for each expert takes longer than a small product.
        for own, matrix, out in zip(x.split(counts), weight.unbind(), y.split(counts), strict=True):
            mm(own, matrix.t(), out)
        return y

    def input_gradient(self, dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        dx, counts = dy.new_empty(len(dy), weight.shape[2]), groups.on_host
        for own, matrix, out in zip(dy.split(counts), weight.unbind(), dx.split(counts), strict=True):
            mm(own, matrix, out)
        return dx

    def weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        counts = groups.on_host
        dw = x.new_empty(len(counts), dy.shape[1], x.shape[1])
        for own, rows, out in zip(dy.split(counts), x.split(counts), dw.unbind(), strict=True):
            mm(own.t(), rows, out)  # zeros where there is no row
        return dw

    def sums(self, dy: Tensor, groups: Groups) -> Tensor:
        return torch.stack([own.sum(0) for own in dy.split(groups.on_host)])


class Kernel(GroupedProducts):
    """One call of torch for all experts, which reads their counts on the device; none where no rank has sent a row."""

    needs_host = False

    def forward(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        if not groups.rows:
            return x.new_empty(0, weight.shape[1])
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)

    def input_gradient(self, dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        if not groups.rows:
            return dy.new_empty(0, weight.shape[2])
        return F.grouped_mm(dy.contiguous(), weight, offs=groups.ends)

    def weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        if not groups.rows:
            return x.new_zeros(len(groups.lengths), dy.shape[1], x.shape[1])
        dw = F.grouped_mm(dy.contiguous().t(), x, offs=groups.ends)
        if _writes_nothing(dw.device):
            dw.masked_fill_((groups.lengths == 0)[:, None, None], 0)
        return dw

    def sums(self, dy: Tensor, groups: Groups) -> Tensor:
        # A product, for sums by atomic additions would come out otherwise each time.
        experts = torch.arange(len(groups.lengths), device=dy.device)
        return (experts[:, None] == groups.experts).to(dy.dtype) @ dy


class KernelOnHost(Kernel):
    """The same for a CPU, where the call is a loop without Python: what an expert gives goes by its rows alone, bit for
    bit, as with :class:`Loop`. An expert of 128 rows takes a tenth less."""

    needs_host = True
    sums = Loop.sums


def _writes_nothing(device: torch.device) -> bool:
    """Return whether the kernel leaves what it finds in memory as the gradient of an expert without rows (pytorch
    #172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


LOOP, KERNEL, KERNEL_ON_HOST = Loop(), Kernel(), KernelOnHost()


def products(*weights: Tensor) -> GroupedProducts:
    """Return what multiplies by these weights, [experts, out, in]: torch's call takes strides of 16 bytes alone, and on
    a GPU no dtype but bf16, which CPUs without instructions for it multiply one by one in fp32."""
    on_host = any(weight.device.type == "cpu" for weight in weights)
    dtypes = {torch.bfloat16, torch.float32} if on_host else {torch.bfloat16}
    strides = {size * weight.dtype.itemsize for weight in weights for size in weight.shape[1:]}
    unfit = any(stride % 16 for stride in strides) or any(map(upcasts, weights))
    if {weight.dtype for weight in weights} <= dtypes and not unfit:
        return KERNEL_ON_HOST if on_host else KERNEL
    return LOOP
