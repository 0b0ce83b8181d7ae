"""Linears in fp8 against quantisation spelled out in numpy, by themselves and split over tensor parallel ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from operators import kept_for_backward
from pool import Pool
from torch import Tensor, nn

from megacore.parallel.layers.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    Multiply,
    multiply_on,
    multiply_scaled,
    multiply_wide,
    quantise,
    units,
)
from megacore.parallel.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, multiply_by
from megacore.parallel.layers.product import Operand
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

# (bits of the exponent, of the mantissa, the bias, the largest number)
FORMATS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def numbers(dtype: torch.dtype) -> np.ndarray:
    """All numbers that are not negative, in order, from the definition of the format: even ones have even places."""
    exponents, mantissas, bias, largest = FORMATS[dtype]
    steps = 2**mantissas
    subnormal = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    normal = [(1 + m / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponents) for m in range(steps)]
    return np.array([x for x in subnormal + normal if x <= largest])


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """To the nearest number of the format, of two as near to the one with the even place."""
    table = numbers(dtype)
    above = np.searchsorted(table, np.abs(x)).clip(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (np.abs(x) - low > high - np.abs(x)) | ((np.abs(x) - low == high - np.abs(x)) & (above % 2 == 0))
    return np.where(up, high, low) * np.sign(x)


def quantised(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """What is left of a tensor that is scaled by its largest magnitude."""
    unit = 2.0 ** math.ceil(math.log2(np.abs(x).max() / FORMATS[dtype][3]))
    return rounded(x / unit, dtype) * unit


def drawn(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    """Numbers of several magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(spread).exp()


# -- one tensor


@pytest.mark.quick
@DTYPES
@pytest.mark.parametrize("largest", [1.0, 448.0, 448.1, 449.0, 57344.0, 57345.0, 3e-9, 7e30, 0.875, 0.876, 0.4999])
def test_the_unit_is_the_smallest_power_of_two_with_which_the_largest_fits(largest: float, dtype: torch.dtype) -> None:
    value = torch.tensor(largest)
    unit = units(value, dtype)
    assert math.frexp(unit.item())[0] == 0.5
    limit = FORMATS[dtype][3]
    assert value.double() / unit.double() <= limit < value.double() / (unit.double() / 2)


@pytest.mark.quick
@DTYPES
def test_zeros_stay_zeros_and_tiny_numbers_numbers(dtype: torch.dtype) -> None:
    for value in (torch.zeros(4), torch.full((4,), 1e-44)):
        found = quantise(value, units(value.amax(), dtype), dtype)
        assert found.scale is not None and found.scale > 0
        assert torch.isfinite(found.values.float()).all()


@pytest.mark.quick
@DTYPES
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen(value: float, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, value])
    largest = torch.linalg.vector_norm(x, torch.inf)
    assert not torch.isfinite(quantise(x, units(largest, dtype), dtype).values.float()).all()


@pytest.mark.quick
@DTYPES
def test_it_rounds_as_spelled_out(dtype: torch.dtype) -> None:
    table = numbers(dtype)
    between = (table[1:] + table[:-1]) / 2  # ties
    exact = np.concatenate([table, between, -between])
    wide = drawn(1, 4000, spread=3.0).double().numpy()
    for x in (exact, exact / 2**20, wide, drawn(2, 4000).bfloat16().double().numpy()):
        for precision in (torch.float32, torch.bfloat16):
            given = torch.from_numpy(x).to(precision)
            unit = units(given.abs().amax().float(), dtype)
            found = quantise(given, unit, dtype)
            want = quantised(given.double().numpy(), dtype)
            np.testing.assert_array_equal(found.values.double().numpy() * float(unit), want)


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "error"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_the_error_is_half_a_place(dtype: torch.dtype, error: float) -> None:
    """Of numbers that are within the range of normal ones below the largest: 2^14 and 2^29."""
    x = drawn(3, 10000)
    unit = units(x.abs().amax(), dtype)
    normal = x.abs() > unit * 2.0 ** (1 - FORMATS[dtype][2])
    found = quantise(x, unit, dtype).values.float() * unit
    away = ((found - x).abs() / x.abs())[normal]
    assert normal.float().mean() > 0.95
    assert error * 0.85 < away.max() <= error


# -- one product


def pair(m: int, n: int, k: int) -> tuple[Operand, Operand, np.ndarray]:
    a, b = drawn(4, m, k), drawn(5, n, k)
    left = quantise(a, units(a.abs().amax(), E5M2), E5M2)
    right = quantise(b, units(b.abs().amax(), E4M3), E4M3)
    return left, right, quantised(a.double().numpy(), E5M2) @ quantised(b.double().numpy(), E4M3).T


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("multiply", [multiply_wide, multiply_scaled], ids=["reference", "scaled"])
@pytest.mark.parametrize("sizes", [(32, 48, 16), (5, 16, 32), (6, 10, 12)], ids=str)
def test_products_are_of_the_quantised_numbers(
    multiply: Multiply, sizes: tuple[int, int, int], dtype: torch.dtype, error: float
) -> None:
    """Also where the scaled product does not take the sizes; torch has one for CPUs too, which is slow."""
    a, b, want = pair(*sizes)
    found = multiply(a, b, dtype)
    assert found.dtype == dtype
    assert np.abs(found.double().numpy() - want).max() <= error * np.abs(want).max()


@pytest.mark.quick
@pytest.mark.parametrize("multiply", [multiply_wide, multiply_scaled], ids=["reference", "scaled"])
def test_operands_may_be_transposed(multiply: Multiply) -> None:
    a, b, want = pair(16, 32, 48)
    a, b = (Operand(x.values.t().contiguous().t(), x.scale) for x in (a, b))
    np.testing.assert_allclose(multiply(a, b, torch.float32).double().numpy(), want, atol=1e-6 * np.abs(want).max())


@pytest.mark.quick
def test_cpus_use_the_reference() -> None:
    assert multiply_on(torch.device("cpu")) is multiply_wide


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)
def test_the_gpu_multiplies_as_the_reference() -> None:
    device = torch.device("cuda")
    assert multiply_on(device) is multiply_scaled
    a, b, want = pair(64, 128, 512)
    a, b = (Operand(x.values.to(device), x.scale.to(device)) for x in (a, b) if x.scale is not None)
    found = multiply_scaled(a, b, torch.bfloat16).double().cpu().numpy()
    assert np.abs(found - want).max() <= 2**-7 * np.abs(want).max()


# -- layers

TOKENS, IN, OUT = 16, 24, 32


@dataclass(frozen=True)
class Case:
    """A layer, and how its input and output are held: tokens or features in parts, or all of them."""

    column: bool
    sequence: bool
    bias: bool

    @property
    def held(self) -> tuple[int | None, int | None]:
        """Dimensions over which x and y are split."""
        tokens = 0 if self.sequence else None
        return (tokens, 1) if self.column else (1, tokens)

    def layer(self, mesh: Mesh) -> ColumnParallelLinear | RowParallelLinear:
        between = "sequence" if self.sequence else "replicated"
        if self.column:
            return ColumnParallelLinear(IN, OUT, mesh=mesh, bias=self.bias, input=between)  # type: ignore[arg-type]
        return RowParallelLinear(IN, OUT, mesh=mesh, bias=self.bias, output=between)  # type: ignore[arg-type]


CASES = [Case(*flags) for flags in itertools.product((True, False), repeat=3)]
BIAS = drawn(8, OUT)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, dy; the ranks' parts have other magnitudes, so that scales of their own would be others."""
    x, weight, dy = drawn(5, TOKENS, IN), drawn(6, OUT, IN), drawn(7, TOKENS, OUT)
    x[0, 0], weight[0, 0], dy[0, 0] = 50, 70, 90
    return x, weight, dy


def part(x: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    return (x if dim is None else x.chunk(mesh.shape.tp, dim)[mesh.place.tp]).clone()


def layers(tp: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """For each case this rank's output and gradients."""
    mesh = Mesh.create(MeshShape(tp=tp))
    found = []
    for case in CASES:
        layer = case.layer(mesh).to(dtype)
        multiply_by(Fp8.on(mesh.device), [layer])
        x, weight, dy = (tensor.to(dtype) for tensor in operands())
        with torch.no_grad():
            layer.weight.copy_(part(weight, 0 if case.column else 1, mesh))
            if layer.bias is not None:
                layer.bias.copy_(part(BIAS, 0 if case.column else None, mesh))
        mine = part(x, case.held[0], mesh).requires_grad_()
        y = layer(mine)
        y.backward(part(dy, case.held[1], mesh))
        assert mine.grad is not None and layer.weight.grad is not None
        found.append({"y": y.detach(), "dx": mine.grad, "dw": layer.weight.grad})
        if layer.bias is not None:
            assert layer.bias.grad is not None
            found[-1]["db"] = layer.bias.grad
    return found


def joined(case: Case, ranks: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    (x, y), weight = case.held, 0 if case.column else 1
    dims = {"y": y, "dx": x, "dw": weight}
    found = {}
    for name, dim in dims.items():
        parts = [rank[name].float() for rank in ranks]
        if dim is None:
            assert all(torch.equal(each, parts[0]) for each in parts), name
        found[name] = (parts[0] if dim is None else torch.cat(parts, dim)).numpy()
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_multiply_quantised_numbers_on_every_layout(pool: Pool, tp: int) -> None:
    """In fp32 what is left to differ is the order of sums: the quantised numbers are the same on every layout."""
    x, weight, dy = (tensor.double().numpy() for tensor in operands())
    x8, w8, dy8 = quantised(x, E4M3), quantised(weight, E4M3), quantised(dy, E5M2)
    for case, ranks in zip(CASES, zip(*pool.run(tp, layers, tp, torch.float32), strict=True), strict=True):
        found = joined(case, list(ranks))
        want = {"y": x8 @ w8.T + BIAS.double().numpy() * case.bias, "dx": dy8 @ w8, "dw": dy8.T @ x8}
        for name, value in want.items():
            assert np.abs(found[name] - value).max() <= 2e-6 * np.abs(value).max(), (case, name)
        if case.bias and case.column:
            bias = np.concatenate([rank["db"].numpy() for rank in ranks])
            np.testing.assert_allclose(bias, dy.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_in_bf16_the_error_is_that_of_fp8(pool: Pool, tp: int) -> None:
    """Against products in float64 of the unquantised numbers: 2^-4 or 2^-3 of each operand at most."""
    bounds = {"y": 0.06, "dx": 0.12, "dw": 0.12}
    x, weight, dy = (tensor.bfloat16().double().numpy() for tensor in operands())
    for case, ranks in zip(CASES, zip(*pool.run(tp, layers, tp, torch.bfloat16), strict=True), strict=True):
        found = joined(case, list(ranks))
        want = {"y": x @ weight.T + BIAS.double().numpy() * case.bias, "dx": dy @ weight, "dw": dy.T @ x}
        for name, value in want.items():
            error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
            assert 0.005 < error < bounds[name], (case, name, error)


def replicated(tp: int) -> dict[str, Tensor]:
    """Of tokens that are split over tp: this rank's output, input gradient and share of the weight's."""
    mesh = Mesh.create(MeshShape(tp=tp))
    x, weight, dy = operands()
    layer = ReplicatedLinear(nn.Parameter(weight), nn.Parameter(BIAS.clone()), mesh, "sequence", "sequence")
    multiply_by(Fp8.on(mesh.device), [layer])
    mine = part(x, 0, mesh).requires_grad_()
    y = layer(mine)
    y.backward(part(dy, 0, mesh))
    assert mine.grad is not None and layer.weight.grad is not None
    return {"y": y.detach(), "dx": mine.grad, "dw": layer.weight.grad}


@pytest.mark.parametrize("tp", [1, 2])
def test_what_every_rank_holds_multiplies_quantised_numbers(pool: Pool, tp: int) -> None:
    """Tokens are scaled together, whoever has them."""
    x, weight, dy = (tensor.double().numpy() for tensor in operands())
    x8, w8, dy8 = quantised(x, E4M3), quantised(weight, E4M3), quantised(dy, E5M2)
    ranks = pool.run(tp, replicated, tp)
    found = {name: torch.cat([rank[name] for rank in ranks]).numpy() for name in ("y", "dx")}
    found["dw"] = sum(rank["dw"] for rank in ranks).numpy()
    for name, value in {"y": x8 @ w8.T + BIAS.double().numpy(), "dx": dy8 @ w8, "dw": dy8.T @ x8}.items():
        assert np.abs(found[name] - value).max() <= 2e-6 * np.abs(value).max(), name


def kept(narrow: bool) -> list[torch.dtype]:
    """dtypes of the matrices that a bf16 layer of x and its weight keeps for the backward."""
    layer = ColumnParallelLinear(IN, OUT, mesh=Mesh.create(MeshShape()), bias=False, dtype=torch.bfloat16)
    if narrow:
        multiply_by(Fp8.on(torch.device("cpu")), nn.Sequential(layer).modules())
    with kept_for_backward() as saved:
        layer(drawn(9, TOKENS, IN).bfloat16().requires_grad_())
    return sorted((t.dtype for t in saved if t.dim() == 2), key=str)


@pytest.mark.quick
def test_the_input_is_kept_in_fp8() -> None:
    assert kept(False) == [torch.bfloat16] * 2 and kept(True) == [torch.bfloat16, E4M3]


def broken(where: str) -> bool:
    """Whether an infinity that one rank has is seen on all ranks: in the output, or in its gradient."""
    mesh = Mesh.create(MeshShape(tp=2))
    layer = ColumnParallelLinear(IN, OUT, mesh=mesh, bias=False)
    multiply_by(Fp8.on(mesh.device), [layer])
    x, _, dy = operands()
    mine, back = part(x, 0, mesh), part(dy, 1, mesh)
    if mesh.place.tp == 1:
        (mine if where == "x" else back)[0, 0] = torch.inf
    mine.requires_grad_()
    y = layer(mine)
    y.backward(back)
    assert mine.grad is not None
    return not torch.isfinite(y if where == "x" else mine.grad).all()


@pytest.mark.parametrize("where", ["x", "dy"])
def test_an_overflow_is_seen_on_all_ranks(pool: Pool, where: str) -> None:
    assert pool.run(2, broken, where) == [True, True]
