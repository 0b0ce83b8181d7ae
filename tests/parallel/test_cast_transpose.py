"""Triton's kernels that make fp8 numbers, beside torch's operators: the same to the bit, as Triton's interpreter runs
them."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreter import rounding
from torch import Tensor, nn

from megacore.parallel.kernels import grouped
from megacore.parallel.kernels.grouped import Groups
from megacore.parallel.layers import fp8
from megacore.parallel.layers.fp8 import E4M3, E5M2, Fp8, Fp8Weight, multiply_scaled, multiply_wide, quantise, units
from megacore.parallel.layers.fp8_experts import Fp8ExpertsWeight, Fp8Products
from megacore.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from megacore.parallel.layers.product import Operand
from megacore.parallel.mesh import ALONE, Mesh
from megacore.parallel.weights.layout import MeshShape

__all__ = ["rounding"]
cast_transpose = import_module("megacore.parallel.kernels.fused.cast_transpose")


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(2).exp()).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, but for which NaN it is."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(*(x.float().nan_to_num().view(torch.int32) for x in (a, b)))
    )


def check(x: Tensor, dtype: torch.dtype) -> None:
    want = quantise(x, units(torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32), dtype), dtype)
    assert want.scale is not None
    (largest,) = cast_transpose.largest([x])
    exponent = fp8.LARGEST[dtype]
    for straight, turned in ((True, True), (True, False), (False, True)):
        values, copy, unit = cast_transpose.cast(x, largest, dtype, exponent, straight, turned)
        assert (values is not None, copy is not None) == (straight, turned)
        assert same(unit, want.scale)
        assert values is None or same(values, want.values)
        assert copy is None or (copy.is_contiguous() and same(copy, want.values.t()))
        if values is not None:
            turned_later = cast_transpose.turn(values)
            assert turned_later.is_contiguous() and same(turned_later, want.values.t())


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("narrow", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 3), (130, 257), (16, 4100)], ids=str)
def test_kernels_and_operators_are_the_same_to_the_bit(
    shape: tuple[int, int], dtype: torch.dtype, narrow: torch.dtype
) -> None:
    """Tiles that are full, and some that are not; also where x is a transposed view."""
    x = drawn(dtype, *shape)
    check(x, narrow)
    check(x.t(), narrow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(3, 7), (5, 256), (2, cast_transpose._ROW + 9)], ids=str)
def test_rows_with_scales_of_their_own_are_the_same_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of their own largest magnitude, or of one that is given; where one is zero or infinite, too."""
    x = drawn(dtype, *shape) * 2.0 ** torch.arange(-60, 60, 120 // shape[0])[: shape[0], None].to(dtype)
    x[0], x[1, 5] = 0, -torch.inf
    largest = torch.linalg.vector_norm(x, torch.inf, 1, dtype=torch.float32)
    for given in (None, 3 * largest):
        unit = units(largest if given is None else given, E4M3)
        values, found = cast_transpose.cast_rows(x, given, E4M3, fp8.LARGEST[E4M3])
        assert same(found, unit) and same(values, (x.float() * unit.reciprocal()[:, None]).to(E4M3))
        assert same(values, (x * unit.reciprocal().to(dtype)[:, None]).to(E4M3))


def test_matrices_are_turned_each_by_itself() -> None:
    x = drawn(torch.bfloat16, 3, 130, 20).clamp(-400, 400).to(E4M3)
    turned = cast_transpose.turn(x)
    assert turned.is_contiguous() and same(turned, x.transpose(1, 2))


def test_experts_by_kernels_and_by_operators_are_the_same() -> None:
    draw, found = drawn(torch.bfloat16, 40, 32), []
    groups = Groups(40, torch.tensor([24, 0, 16]), [24, 0, 16])
    for kernels in (None, cast_transpose):
        products = Fp8Products(grouped.LOOP, lambda *given: multiplied(*given[:3]), kernels, ALONE, ALONE)
        weight = drawn(torch.bfloat16, 3, 48, 32)
        found.append([products.forward(draw, weight, groups)])
        found[-1].append(products.input_gradient(found[-1][0], weight, groups))
    assert all(map(same, *found))


def test_weights_of_experts_are_cast_by_kernels_as_by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, with their transposed copies, and in slices that begin and end wherever; in a launch each."""
    launched = list[str]()

    def launch(kernel: Any, *given: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        own(kernel, *given, **constants)

    own = cast_transpose.launching.launch
    monkeypatch.setattr(cast_transpose.launching, "launch", launch)
    weight = nn.Parameter(drawn(torch.bfloat16, 3, 144, 300) * 2.0 ** torch.tensor([[[-40]], [[0]], [[50]]]))
    weight.data[1, 2, 3], weight.data[2] = torch.inf, 0
    found = list[list[Tensor]]()
    for kernels in (None, cast_transpose):
        products = Fp8Products(grouped.LOOP, lambda *given: multiplied(*given[:3]), kernels, ALONE, ALONE)
        cast = Fp8ExpertsWeight(weight, products, 2, 6)
        with torch.no_grad():
            whole = cast.largest([(0, weight)])
            cast.cast(whole)
            assert products.narrow is not None and products.narrow.turned is not None
            narrow = [*(x for x in products.narrow if x is not None), whole]
            for lengths in ((1, 2, weight.numel() - 3), (50_000, 43_200, 36_400)):
                parts = weight.flatten().split(lengths)
                starts = np.cumsum([0, *lengths[:-1]]).tolist()
                largest = cast.largest(list(zip(starts, parts, strict=True)))
                for start, part in zip(starts, parts, strict=True):
                    narrow.append(torch.empty_like(part, dtype=E4M3))
                    cast.fill(narrow[-1], part, start, largest)
                cast.give(narrow[0], largest)
                assert products.narrow.scale is not None
                narrow += [largest, products.narrow.scale]
        found.append(narrow)
    assert all(map(same, *found))
    assert launched == ["fp8_largest", "fp8_cast", *2 * [*3 * ["fp8_largest"], *3 * ["fp8_cast_slice"], "fp8_units"]]


def test_a_slice_of_a_weight_is_cast_by_kernels_as_by_operators() -> None:
    part, largest, found = drawn(torch.bfloat16, 5000), torch.tensor(30.0), []
    for kernels in (None, cast_transpose):
        cast = Fp8Weight(SimpleNamespace(weight=nn.Parameter(part), product=Fp8(multiply_wide, kernels)))
        found.append(torch.empty_like(part, dtype=E4M3))
        cast.fill(found[-1], part, 7, largest)
        cast.give(found[-1], largest)
        assert isinstance(cast.linear.product, Fp8) and cast.linear.product.narrow is not None
        assert cast.linear.product.narrow.scale == 0.125
    assert same(*found)


def multiplied(rows: Operand, matrices: Operand, groups: Groups) -> Tensor:
    """The product of contiguous fp8 numbers."""
    assert rows.scale is not None and matrices.scale is not None and matrices.values.is_contiguous()
    wide = rows.values.bfloat16() * rows.scale.bfloat16()[:, None]
    return grouped.LOOP.forward(wide, matrices.values.bfloat16() * matrices.scale[:, :1, None].bfloat16(), groups)


@pytest.mark.parametrize("narrow", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "largest", [0.0, 1e-44, 3e-38, 0.4999, 0.875, 0.8750001, 448, 448.1, 7e30, 3.4e38, torch.inf, -torch.inf, torch.nan]
)
def test_the_unit_is_that_of_the_operators(largest: float, narrow: torch.dtype) -> None:
    check(torch.tensor([[0.0, -0.0, largest, largest / 3], [1e-45, -largest / 7, 0.0, 0.0]]), narrow)


def test_the_largest_of_many_is_found_wherever_it_is() -> None:
    x = torch.zeros(3 * cast_transpose._BLOCK * cast_transpose._BLOCKS + 5)
    for place in (0, len(x) // 2, len(x) - 1):
        y = x.clone()
        y[place] = -2.0
        assert cast_transpose.largest([x, y]).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layers_by_kernels_and_by_operators_are_the_same(kind: type[ColumnParallelLinear | RowParallelLinear]) -> None:
    """And the kernels' transposed copies are what the backward keeps and multiplies."""
    found, layouts = list[list[Any]](), set[bool]()

    def multiply(a: Any, b: Any, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None) -> Tensor:
        layouts.add(a.values.is_contiguous() and b.values.is_contiguous())
        return multiply_wide(a, b, dtype)

    for kernels in (None, cast_transpose):
        torch.manual_seed(0)
        layer = kind(32, 48, mesh=Mesh.create(MeshShape()), dtype=torch.bfloat16)
        layer.product = Fp8(multiply, kernels)
        layouts.clear()
        x = drawn(torch.bfloat16, 2, 24, 32).requires_grad_()
        y = layer(x)
        y.backward(drawn(torch.bfloat16, 2, 24, 48))
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert layouts == {True}
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_only_the_forward_accumulates_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = []

    def scaled(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        fast.append(options["use_fast_accum"])
        return torch.zeros(a.shape[0], b.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    product = Fp8(multiply_scaled, None)
    x, weight = (drawn(torch.bfloat16, 32, 32) for _ in range(2))
    left, right = product.operands(x, weight, ALONE, whole=True)
    product.forward(left, right)
    dy = product.gradient(x, ALONE, whole=True)
    product.input_gradient(dy, right)
    product.weight_gradient(dy, left, torch.bfloat16)
    assert fast == [True, False, False]
