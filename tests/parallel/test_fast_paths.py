"""Kernels of our own against torch's: in float64 the same numbers, in bf16 no further from the truth."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.kernels import bands, cpu

Function = Callable[..., Tensor]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def own_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return cpu.rms_norm(x, weight, 1e-5)


def results(function: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradient of each input, in float64; the output's gradient is drawn from a fixed seed."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y.backward(dy.to(dtype))
    return [y.detach().double(), *(x.grad.double() for x in leaves if x.grad is not None)]


def distances(got: list[Tensor], want: list[Tensor]) -> list[float]:
    assert len(got) == len(want)
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def attention_inputs(heads: int, kv: int, length: int, head: int) -> list[Tensor]:
    """q, k, v as views of one projection, as the model has them, with scores large enough to matter."""
    torch.manual_seed(0)
    qkv = torch.randn(2 * length, heads + 2 * kv, head, dtype=torch.bfloat16).double() * 2
    parts = qkv.split([heads, kv, kv], 1)
    return [part.unflatten(0, (2, length)).transpose(1, 2) for part in parts]


ATTENTION = [(4, 2, 300, 16), (4, 4, 128, 8), (6, 1, 257, 32), (2, 1, 5, 64)]


@pytest.mark.parametrize(("heads", "kv", "length", "head"), ATTENTION)
def test_attention_in_float64(heads: int, kv: int, length: int, head: int) -> None:
    inputs = attention_inputs(heads, kv, length, head)
    want = results(torch_attention, inputs, torch.float64)
    assert max(distances(results(bands.causal_attention, inputs, torch.float64), want)) < 1e-13


@pytest.mark.parametrize(("heads", "kv", "length", "head"), ATTENTION)
@pytest.mark.parametrize("size", [1, 8])
def test_attention_in_bf16(heads: int, kv: int, length: int, head: int, size: int) -> None:
    """Close to torch's error, also with scores so large that the exponential of one that is masked overflows."""
    q, k, v = attention_inputs(heads, kv, length, head)
    inputs = [q * size, k, v]
    exact = results(torch_attention, inputs, torch.float64)
    own = distances(results(bands.causal_attention, inputs, torch.bfloat16), exact)
    torchs = distances(results(torch_attention, inputs, torch.bfloat16), exact)
    # Torch rounds neither the probabilities nor their gradient before it multiplies the two.
    assert all(a < 2.5 * b for a, b in zip(own, torchs, strict=True)), (own, torchs)


def test_attention_is_chosen_by_dtype_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "causal_attention", lambda q, k, v, scale: "own")
    short, long = torch.zeros(1, 2, 64, 8), torch.zeros(1, 2, 1024, 8)
    for x, own in ((short.bfloat16(), True), (short, False), (short.double(), False), (long.bfloat16(), False)):
        assert (kernels.causal_attention(x, x, x) == "own") == own


@pytest.mark.parametrize("shape", [(64, 48), (3, 7, 20), (1, 3), (700, 600)])
def test_rms_norm_in_float64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64) * 3, torch.rand(shape[-1], dtype=torch.float64)]
    want = results(torch_rms_norm, inputs, torch.float64)
    assert max(distances(results(own_rms_norm, inputs, torch.float64), want)) < 1e-13


def test_rms_norm_in_bf16_is_as_good_as_torchs() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(256, 64).bfloat16().double() * 3, torch.rand(64).bfloat16().double()]
    exact = results(torch_rms_norm, inputs, torch.float64)
    own = distances(results(own_rms_norm, inputs, torch.bfloat16), exact)
    torchs = distances(results(torch_rms_norm, inputs, torch.bfloat16), exact)
    assert all(a < 1.1 * b for a, b in zip(own, torchs, strict=True)), (own, torchs)


def test_rms_norm_leaves_its_inputs_alone() -> None:
    """In fp32 and fp64 there is no copy in a wider type that could take the intermediate results."""
    x, weight = torch.randn(4, 8).requires_grad_(), torch.rand(8).requires_grad_()
    before = x.detach().clone(), weight.detach().clone()
    y = cpu.rms_norm(x, weight, 1e-5)
    dy = torch.randn(4, 8)
    kept = dy.clone()
    y.backward(dy)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1]) and torch.equal(dy, kept)


@pytest.mark.parametrize("kv", [1, 2])
def test_the_backward_gives_what_the_compiler_is_told(kv: int) -> None:
    """Strides too: a compiled block is made for those."""
    q, k, v = (x.bfloat16().contiguous() for x in attention_inputs(4, kv, 32, 16))
    inputs = q, q, k, v, q, torch.zeros(q.shape[:3])
    torch.library.opcheck(bands.backward, inputs, test_utils="test_faketensor")
