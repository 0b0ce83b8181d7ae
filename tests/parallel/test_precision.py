"""What docs/precision.md says is wider than the activations: computed in it, and rounded once."""

import pytest
import torch
from torch import Tensor

from megacore.models.rope import tables
from megacore.models.rope_config import DefaultRope
from megacore.parallel import kernels
from megacore.parallel.layers.loss import cross_entropy
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

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
def test_losses_are_those_of_the_logits(dtype: torch.dtype, place: float) -> None:
    logits = drawn(dtype, 32, 1000, scale=5.0).requires_grad_()
    labels = torch.arange(32) * 7
    loss = cross_entropy(logits, labels, Mesh.create(MeshShape()).tp, 1000)
    assert loss.dtype == torch.float32
    wide = logits.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    want.sum().backward()
    assert logits.grad is not None and wide.grad is not None
    assert away(logits.grad, wide.grad) <= place


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
@pytest.mark.parametrize("length", [128, 1024])
def test_attention_s_gradients_are_finite_and_near(dtype: torch.dtype, place: float, length: int) -> None:
    q, k, v, dy = (drawn(dtype, 1, 2, length, 32, seed=seed) for seed in range(4))
    narrow = q, k, v = [x.clone().requires_grad_() for x in (q, k, v)]
    kernels.causal_attention(q, k, v).backward(dy)
    wide = q, k, v = [x.detach().double().requires_grad_() for x in narrow]
    kernels.causal_attention(q, k, v).backward(dy.double())
    for found, want in zip(narrow, wide, strict=True):
        assert found.grad is not None and want.grad is not None
        assert float((found.grad.double() - want.grad).norm() / want.grad.norm()) <= 4 * place


@NARROW
def test_rotations_are_rounded_once(dtype: torch.dtype, place: float) -> None:
    positions = torch.arange(8192)
    wide = tables(DefaultRope(), 64, positions, sequence_length=8192, dtype=torch.float32)
    narrow = tables(DefaultRope(), 64, positions, sequence_length=8192, dtype=dtype)
    assert all(torch.equal(found, want.to(dtype)) for found, want in zip(narrow, wide, strict=True))
