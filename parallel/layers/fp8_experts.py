"""Experts whose products take fp8: E4M3 for all operands, with a scale for each row and one for the matrix of each
expert.

That is what torch's product of all experts takes on a GPU (compute capability 9 and 10): E4M3 alone, scales of the rows
of one operand and of the columns of the other. A row has room for its gradient in E4M3, too, where a scale is its own
(DeepSeek-V3, arXiv 2412.19437). A row's scale goes by that row, an expert's by its own weights, on all ranks that hold
features of it: so the quantised numbers are the same on every layout.

Weight gradients are as wide as without fp8. They are sums along tokens, and scales of these would go by which tokens
meet at an expert: by ep, dp and the size of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.parallel import kernels
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.kernels.grouped import GroupedProducts, Groups
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.fp8 import E4M3, LARGEST, MULTIPLE, units
from megacore.parallel.layers.product import Operand
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.parameters import CastWeight

GroupedMultiply = Callable[[Operand, Operand, Groups, torch.dtype, bool], Tensor]
"""(rows: [R, k] and a scale of each, matrices: [experts, n, k] and scales of their rows, [experts, n or more], the rows
of each expert, the dtype of the product, whether to be ``fast`` as of :class:`parallel.layers.fp8.Multiply`) -> [R, n].
"""


def multiply_scaled(rows: Operand, matrices: Operand, groups: Groups, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply by the hardware's fp8 units."""
    assert rows.scale is not None and matrices.scale is not None
    return torch._scaled_grouped_mm(
        rows.values,
        matrices.values.transpose(1, 2),
        rows.scale,
        matrices.scale[:, : matrices.values.shape[1]],
        groups.ends,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def multiply_on(device: torch.device) -> GroupedMultiply | None:
    """Return what multiplies on a device; None where its hardware does not. ``meta`` plans for one that does."""
    hardware = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return multiply_scaled if hardware or device.type == "meta" else None


@dataclass(eq=False)
class Fp8Products(GroupedProducts):
    """The products of the experts' one weight, which is kept as it is, and cast once for all of them until it changes,
    where somebody says when that is (:class:`Fp8ExpertsWeight`); else for each.

    Args:
        plain: Multiplies what is not in fp8.
        multiply: The device's product of fp8 numbers, if it has one.
        kernels: :mod:`parallel.kernels.fused.cast_transpose`, where it runs; None for torch's operators.
        inputs, outputs: The ranks that hold parts of the rows that it multiplies, and of those that come of them.
        narrow: The weight in fp8, if it is cast once for all.
    """

    plain: GroupedProducts
    multiply: GroupedMultiply | None
    kernels: ModuleType | None
    inputs: Group
    outputs: Group
    narrow: Operand | None = None

    def __post_init__(self) -> None:
        self.needs_host = self.plain.needs_host

    def forward(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return self._product(self._rows(x, self.inputs), weight, groups, False)

    def input_gradient(self, dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return self._product(self._rows(dy, self.outputs), weight, groups, True)

    def weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        return self.plain.weight_gradient(dy, x, groups)

    def add_weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups, total: Tensor, first: bool) -> None:
        self.plain.add_weight_gradient(dy, x, groups, total, first)

    def sums(self, dy: Tensor, groups: Groups) -> Tensor:
        return self.plain.sums(dy, groups)

    def largest(self, weight: Tensor) -> Tensor:
        """weight: [experts here, out, in] -> the largest magnitude of each: [experts here]."""
        if self.kernels is None:
            return torch.linalg.vector_norm(weight.flatten(1), torch.inf, 1, dtype=_wide(weight.dtype))
        found = torch.zeros(len(weight), device=weight.device)
        self.kernels.add_largest(weight.flatten(), 0, weight[0].numel(), found)
        return found

    def cast(self, weight: Tensor, largest: Tensor, straight: bool = True, turned: bool = False) -> Operand:
        """weight: [experts here, out, in], the largest magnitude of each -> what is multiplied. A kernel also makes the
        transposed copy that the hardware multiplies gradients by where it is ``turned``, or that alone."""
        if self.kernels is None:
            scale = self.scales(largest, weight)
            values = (weight * scale[:, :1, None].reciprocal().to(weight.dtype)).to(E4M3)
            return self.with_turned(Operand(values, scale)) if turned else Operand(values, scale)
        width = max(weight.shape[1:])
        values, copy, scale = self.kernels.cast(weight, largest, E4M3, LARGEST[E4M3], straight, turned, width)
        return Operand(copy.transpose(1, 2) if values is None else values, scale, copy)

    def scales(self, largest: Tensor, weight: Tensor) -> Tensor:
        """largest: [experts here] -> their units, for each row and each column of the weight."""
        width = max(weight.shape[1:])
        if self.kernels is not None:
            scales: Tensor = self.kernels.units(largest, LARGEST[E4M3], width)
            return scales
        return units(largest, E4M3)[:, None].expand(-1, width).contiguous()

    def with_turned(self, weight: Operand) -> Operand:
        """Return a weight with the transposed copy."""
        if self.multiply is None or weight.turned is not None:
            return weight
        values = weight.values
        turned = values.transpose(1, 2).contiguous() if self.kernels is None else self.kernels.turn(values)
        return weight._replace(turned=turned)

    def _product(self, rows: Operand, weight: Tensor, groups: Groups, back: bool) -> Tensor:
        """Multiply by the weight's transpose, or by itself on the way ``back``."""
        narrow, dtype = self.narrow, weight.dtype
        if narrow is None:
            parts = max(self.inputs, self.outputs, key=lambda group: group.size)
            largest = all_reduce_(self.largest(weight), parts, dist.ReduceOp.MAX)
            copied = back and self.multiply is not None
            narrow = self.cast(weight, largest, not copied, copied)
        fits = not any(size % MULTIPLE for size in weight.shape[1:])
        if self.multiply is not None and fits and groups.rows:
            turned = self.with_turned(narrow).turned if back else narrow.values
            assert turned is not None
            return self.multiply(rows, Operand(turned, narrow.scale), groups, dtype, not back)
        # The same numbers, every one of which is one of bf16.
        assert rows.scale is not None and narrow.scale is not None
        wide = rows.values.to(dtype) * rows.scale.to(dtype)[:, None]
        matrices = narrow.values.to(dtype) * narrow.scale[:, :1, None].to(dtype)
        return (self.plain.input_gradient if back else self.plain.forward)(wide, matrices, groups)

    def _rows(self, x: Tensor, parts: Group) -> Operand:
        """x: [R, ...], the rows' features on one of the ranks that hold parts of them -> in fp8."""
        largest = None
        if self.kernels is None or parts.size > 1:
            largest = torch.linalg.vector_norm(x, torch.inf, 1, dtype=_wide(x.dtype))
            largest = all_reduce_(largest, parts, dist.ReduceOp.MAX)
        if self.kernels is not None:
            return Operand(*self.kernels.cast_rows(x, largest, E4M3, LARGEST[E4M3]))
        assert largest is not None
        unit = units(largest, E4M3)
        return Operand((x * unit.reciprocal().to(x.dtype)[:, None]).to(E4M3), unit)


@dataclass(eq=False)
class Fp8ExpertsWeight:
    """The :class:`~parallel.parameters.CastWeight` of experts that multiply in fp8.

    Args:
        weight: [experts here, out, in].
        products: What multiplies by it.
        first: The number of the first expert that is here, of ``experts`` in all.
    """

    weight: nn.Parameter
    products: Fp8Products
    first: int
    experts: int
    dtype = E4M3

    @property
    def scales(self) -> tuple[int, ...]:
        return (self.experts,)

    @property
    def made(self) -> Operand | None:
        return self.products.narrow

    def largest(self, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        found = torch.zeros(self.experts, dtype=_wide(self.weight.dtype), device=self.weight.device)
        for start, part in parts:
            if (kernels := self.products.kernels) is not None:
                kernels.add_largest(part.reshape(-1), start, self.weight[0].numel(), found[self.first :])
                continue
            for number, rows in self._by_expert(start, part.reshape(-1)):
                own = found[number : number + len(rows)]
                torch.maximum(own, torch.linalg.vector_norm(rows, torch.inf, 1, dtype=found.dtype), out=own)
        return found

    def cast(self, largest: Tensor) -> None:
        self.products.narrow = self.products.cast(
            self.weight, self._here(largest), turned=self.products.multiply is not None
        )

    def fill(self, narrow: Tensor, part: Tensor, start: int, largest: Tensor) -> None:
        if (kernels := self.products.kernels) is not None:
            kernels.cast_slice(part, start, self.weight[0].numel(), self._here(largest), LARGEST[E4M3], narrow)
            return
        inverse = units(largest, E4M3).reciprocal().to(part.dtype)
        for (number, rows), own in zip(self._by_expert(start, part), self._by_expert(start, narrow), strict=True):
            own[1].copy_(rows * inverse[number : number + len(rows), None])

    def give(self, values: Tensor, largest: Tensor) -> None:
        self.products.narrow = Operand(values, self.products.scales(self._here(largest), self.weight))

    def _here(self, largest: Tensor) -> Tensor:
        return largest[self.first : self.first + len(self.weight)]

    def _by_expert(self, start: int, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield flat elements of the weight, from element ``start`` on, as rows of an expert each: those of a first one
        of which there may be some, of all that are whole, and of a last one, with the number of the first."""
        each = self.weight[0].numel()
        head = min(-start % each, len(part))
        whole = (len(part) - head) // each * each
        for rows, length in zip(part.split([head, whole, len(part) - head - whole]), (head, each, None), strict=True):
            if len(rows):
                yield self.first + start // each, rows.view(-1, length or len(rows))
            start += len(rows)


def multiply_by_fp8(experts: Experts) -> dict[Tensor, CastWeight]:
    """Have experts multiply in fp8 -> {weight: its narrow numbers}."""
    device, parts = experts.up.device, experts.features
    common = experts.products, multiply_on(device), kernels.cast_transpose(device)
    up, down = experts.own_products = Fp8Products(*common, ALONE, parts), Fp8Products(*common, parts, ALONE)
    first = experts.group.index * len(experts.up)
    return {
        weight: Fp8ExpertsWeight(weight, products, first, experts.experts)
        for weight, products in ((experts.up, up), (experts.down, down))
    }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
