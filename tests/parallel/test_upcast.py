"""Products of bf16 on CPUs without instructions for it: how such a CPU is known, and the numbers."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators import kept_for_backward
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacore.parallel import kernels
from megacore.parallel.kernels import bands, upcast
from megacore.parallel.kernels.scoring import Scoring

X86 = torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU has no instructions for bf16."""
    monkeypatch.setitem(upcast._found, "bf16", False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# -- how such a CPU is known


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "ALL"])
@pytest.mark.skipif(not X86, reason="needs an x86 CPU with AVX2")
def test_the_instructions_that_products_may_use_decide(instructions: str) -> None:
    """Told by what may be used, not by what the CPU has: so that such CPUs can be had anywhere."""
    done = subprocess.run(
        [sys.executable, "-c", "from parallel import kernels; print(kernels.cpu_has_bf16())"],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": instructions},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = instructions == "ALL" and torch.cpu._is_avx512_bf16_supported()
    assert done.stdout.strip() == str(expected)


def test_the_question_is_asked_once_and_of_no_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    known = kernels.cpu_has_bf16()
    monkeypatch.setattr(upcast, "_found", {})
    with FakeTensorMode():
        assert kernels.cpu_has_bf16() == known
    monkeypatch.setattr(torch, "full", None)
    assert kernels.cpu_has_bf16() == known


@pytest.mark.usefixtures("without")
def test_other_devices_and_dtypes_are_multiplied_as_they_are() -> None:
    assert upcast.upcasts(torch.empty(1, dtype=torch.bfloat16))
    assert not upcast.upcasts(torch.empty(1, dtype=torch.bfloat16, device="meta"))
    assert not any(upcast.upcasts(torch.empty(1, dtype=x)) for x in (torch.float16, torch.float32, torch.float64))


def test_where_it_has_them_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upcast._found, "bf16", True)
    x, weight, bias = draw(8, 40), draw(24, 40), draw(24)
    assert torch.equal(kernels.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(kernels.mm(x, weight.t()), x @ weight.t())
    assert torch.equal(kernels.matmul(x, weight.t()), x @ weight.t())
    assert kernels.chosen(torch.device("cpu"), False, torch.bfloat16) == ""


@pytest.mark.usefixtures("without")
def test_it_is_said_of_bf16_alone() -> None:
    device = torch.device("cpu")
    assert "multiplied in fp32" in kernels.chosen(device, False, torch.bfloat16)
    assert kernels.chosen(device, False, torch.float32) == ""


# -- the numbers


# m, k and n: each the longest once, and none at all.
SIZES = [(9, 7, 5), (5, 9, 7), (7, 5, 9), (8, 8, 8), (0, 3, 4), (3, 0, 4), (4, 3, 0), (2, 1, 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", [1 << 22, 16, 1])
@pytest.mark.usefixtures("without")
def test_products_are_those_of_fp32_rounded(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], part: int
) -> None:
    """However few elements are there in fp32 at a time; and in the memory that is given."""
    monkeypatch.setattr(upcast, "_WIDE", part)
    m, k, n = size
    a, b, bias = draw(m, k), draw(k, n, seed=1), draw(n, seed=2)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    assert kernels.mm(a, b, out) is out
    # A sum in several parts may round to the other side, now and then.
    rtol, atol = (2**-7, 1e-6) if k == max(size) else (0.0, 0.0)
    torch.testing.assert_close(out, (a.float() @ b.float()).bfloat16(), rtol=rtol, atol=atol)
    with_bias = upcast._in_fp32(a, b, bias)
    torch.testing.assert_close(with_bias, (a.float() @ b.float() + bias.float()).bfloat16(), rtol=2**-7, atol=1e-6)


def differentiated(multiply: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = multiply(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=9).to(y.dtype))]


def in_fp32(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: multiply(*(x.float() for x in tensors)).bfloat16()


LINEAR = (kernels.linear, F.linear, draw(24, 16, seed=1), draw(24, seed=2))
BATCHED = (kernels.matmul, torch.matmul, draw(3, 16, 8, seed=1))


@pytest.mark.parametrize(
    ("shape", "product"), [((6, 16), LINEAR), ((2, 5, 16), LINEAR), ((1, 16), LINEAR), ((3, 6, 16), BATCHED)]
)
@pytest.mark.usefixtures("without")
def test_products_and_their_gradients(shape: tuple[int, ...], product: tuple[Any, ...]) -> None:
    ours, theirs, *others = product
    tensors = draw(*shape), *others
    for found, wanted in zip(differentiated(ours, *tensors), differentiated(in_fp32(theirs), *tensors), strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("without")
def test_linears_can_be_differentiated_twice() -> None:
    x, weight = draw(8, 16).requires_grad_(), draw(24, 16, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(kernels.linear(x, weight).float().square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.float().sum(), weight)
    wide, matrix = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    (dx,) = torch.autograd.grad(F.linear(wide, matrix).square().sum(), wide, create_graph=True)
    (wanted,) = torch.autograd.grad(dx.sum(), matrix)
    torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=0.5)


@pytest.mark.usefixtures("without")
def test_what_is_kept_is_not_wide() -> None:
    with kept_for_backward() as kept:
        y = kernels.linear(draw(8, 16).requires_grad_(), draw(24, 16))
    assert y.requires_grad and [x.dtype for x in kept] == [torch.bfloat16]  # the weight: it gets no gradient itself


@pytest.mark.usefixtures("without")
def test_sums_in_fp32_take_products_that_nothing_rounds() -> None:
    total, a, b = torch.ones(6, 8), draw(6, 16), draw(16, 8, seed=1)
    kernels.add_mm_(total, a, b)
    torch.testing.assert_close(total, 1 + a.float() @ b.float())


@pytest.mark.parametrize(
    "scoring", [Scoring(), Scoring(window=5), Scoring(softcap=3.0), Scoring(sinks=draw(4)), Scoring(scale=0.3)]
)
@pytest.mark.usefixtures("without")
def test_attention(scoring: Scoring) -> None:
    """Forward and backward, no further from fp64 than bf16 is."""
    q, k, v = draw(2, 4, 20, 8), draw(2, 2, 20, 8, seed=1), draw(2, 2, 20, 8, seed=2)
    wide = Scoring(scoring.scale, scoring.window, scoring.softcap, None if scoring.sinks is None else draw(4).double())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.causal_attention(q, k, v, scoring if q.dtype == torch.bfloat16 else wide)

    exact = differentiated(attend, *(x.double() for x in (q, k, v)))
    for found, wanted in zip(differentiated(attend, q, k, v), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.usefixtures("without")
def test_rows_of_any_length_have_the_kernel_with_this_backward() -> None:
    assert all(bands.is_faster(torch.empty(1, 2, length, 8, dtype=torch.bfloat16)) for length in (64, 1000))
    assert not bands.is_faster(torch.empty(1, 2, 64, 8))


@pytest.mark.parametrize(("rows", "cast"), [(1, False), (5, False), (6, True)])
@pytest.mark.usefixtures("without")
def test_a_matrix_is_not_cast_for_few_rows(monkeypatch: pytest.MonkeyPatch, rows: int, cast: bool) -> None:
    """As those of a decode; but where the matrix lies across, torch is slow at few too."""
    asked, multiply = list[Tensor](), upcast._in_fp32

    def count(a: Tensor, b: Tensor, *more: Any, **named: Any) -> Tensor:
        asked.append(a)
        return multiply(a, b, *more, **named)

    monkeypatch.setattr(upcast, "_in_fp32", count)
    x, weight = draw(rows, 16), draw(24, 16)
    kernels.linear(x, weight)
    kernels.mm(x, weight.t())
    assert len(asked) == 2 * cast
    kernels.mm(x, weight.t().contiguous())
    assert len(asked) == 2 * cast + 1
