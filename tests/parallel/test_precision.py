"""What docs/precision.md says is wider than the activations: computed in it, and rounded once."""

import pytest
import torch
from torch import Tensor

from megacore.models.rope import tables
from megacore.models.rope_config import DefaultRope
from megacore.parallel import kernels

NARROW = pytest.mark.parametrize(("dtype", "place"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
CPU = torch.device("cpu")
pytestmark = pytest.mark.quick


def drawn(dtype: torch.dtype, *shape: int, scale: float = 1.0, seed: int = 1) -> Tensor:
    """Numbers of dtype."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def away(found: Tensor, want: Tensor) -> float:
    """The largest distance, in the largest magnitude of what is wanted."""
    return float((found.double() - want).abs().max() / want.abs().max())


@NARROW
def test_norms_are_rounded_once(dtype: torch.dtype, place: float) -> None:
    """Squares of such numbers overflow fp16, and their sum in bf16 would be off by per cents."""
    x, weight = drawn(dtype, 16, 4096, scale=300.0), 1 + drawn(dtype, 4096, scale=0.1)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = kernels.rms_norm(CPU)(x, weight, 1e-6)
    assert found.dtype == dtype
    # Below 2^-14 fp16 has fewer places.
    assert ((found.double() - want).abs() <= 1.01 * place * want.abs().clamp(min=2**-14)).all()
    bias = drawn(dtype, 4096)
    mean = wide.mean(-1, keepdim=True)
    centred = (wide - mean) / (wide.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    found = kernels.layer_norm(CPU)(x, weight, bias, 1e-5)
    assert away(found, centred * weight.double() + bias.double()) <= place


@NARROW
@pytest.mark.parametrize("length", [128, 1024])
def test_the_sums_of_a_softmax_are_wide(dtype: torch.dtype, place: float, length: int) -> None:
    """Of many small probabilities, which a narrow sum would lose."""
    q, k = (drawn(dtype, 1, 2, length, 32, scale=0.05) for _ in range(2))
    v = torch.ones(1, 2, length, 32, dtype=dtype)
    found = kernels.causal_attention(q, k, v)
    assert found.dtype == dtype
    assert away(found, torch.ones_like(found).double()) <= 2 * place


@NARROW
def test_rotations_are_rounded_once(dtype: torch.dtype, place: float) -> None:
    positions = torch.arange(8192)
    wide = tables(DefaultRope(), 64, positions, sequence_length=8192, dtype=torch.float32)
    narrow = tables(DefaultRope(), 64, positions, sequence_length=8192, dtype=dtype)
    assert all(torch.equal(found, want.to(dtype)) for found, want in zip(narrow, wide, strict=True))
