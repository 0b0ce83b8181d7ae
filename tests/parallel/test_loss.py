"""Vocab-parallel cross entropy against torch's, on split, padded and narrow vocabularies."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from operators import Operators
from pool import Pool
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.loss import Finish, Objective, cross_entropy
from megacore.parallel.layers.scores import logit
from megacore.parallel.mesh import ALONE, Mesh
from megacore.parallel.weights.layout import MeshShape, split_axis

TPS = (1, 2, 4)
TOKENS = 12
# 5 over 4 ranks: the third has one valid column, the fourth none at all.
CASES = list(product((5, 11, 16), ("none", "some", "all"), (0.0, 0.1), (0.0, 0.03)))


def drawn(vocab: int, ignored: str) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [t, vocab], labels: [t], dy: [t]."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(TOKENS, vocab, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(vocab, (TOKENS,), generator=generator)
    dy = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    if ignored == "some":
        labels[[0, 5, 11]] = IGNORE
    if ignored == "all":
        labels[:] = IGNORE
    return logits, labels, dy


def own_columns(logits: Tensor, mesh: Mesh) -> Tensor:
    """This rank's columns; what stands in the padding must not matter."""
    start, stop = split_axis("vocab", logits.shape[1], mesh.shape.tp, mesh.place.tp)
    padded = F.pad(logits, (0, mesh.shape.tp * (stop - start) - logits.shape[1]), value=50.0)
    return padded[:, start:stop].clone()


def losses(cases: Sequence[Any] = CASES) -> dict[Any, tuple[Tensor, Tensor]]:
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    found = {}
    for case in cases:
        vocab, ignored, smoothing, z_loss = case
        logits, labels, dy = drawn(vocab, ignored)
        mine = own_columns(logits, mesh).requires_grad_()
        # The backward writes into the memory of the logits, so they are not a leaf.
        loss = cross_entropy(mine * 1, labels, mesh.tp, vocab, smoothing, z_loss)
        loss.backward(dy.chunk(mesh.shape.tp)[mesh.place.tp])
        assert mine.grad is not None
        found[case] = loss.detach(), mine.grad
    return found


def fused_losses() -> dict[Any, tuple[Tensor, Tensor]]:
    """By the kernels of GPUs, which Triton's interpreter runs; of some cases."""
    from megacore.parallel.kernels.fused import cross_entropy as fused

    with patch.object(kernels, "cross_entropy", lambda device: fused):
        return losses(CASES[::5])


def formula(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing)
    return loss + z_loss * logits.logsumexp(1).square() * (labels != IGNORE)


@pytest.mark.quick
@pytest.mark.parametrize("tp", TPS)
def test_cross_entropy(pool: Pool, tp: int) -> None:
    """Loss and gradient; padding has no probability and no gradient."""
    check(pool.run(tp, losses))


@pytest.mark.in_turn(2, 0)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_of_gpus_over_ranks(pool: Pool) -> None:
    check(pool.run(4, fused_losses))


def check(results: Sequence[dict[Any, tuple[Tensor, Tensor]]]) -> None:
    for case in results[0]:
        vocab, ignored, smoothing, z_loss = case
        logits, labels, dy = drawn(vocab, ignored)
        logits.requires_grad_()
        want = formula(logits, labels, smoothing, z_loss)
        want.backward(dy)
        assert logits.grad is not None
        loss = torch.cat([result[case][0] for result in results])
        gradient = torch.cat([result[case][1] for result in results], 1)
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12, msg=str(case))
        torch.testing.assert_close(gradient[:, :vocab], logits.grad, rtol=1e-12, atol=1e-12)
        assert not gradient[:, vocab:].any()
        assert ignored != "all" or (not loss.any() and not gradient.any())


def test_tokens_that_do_not_divide_are_an_error(pool: Pool) -> None:
    assert pool.run(2, indivisible) == ["cannot split the losses of 7 tokens over 2 ranks: choose a multiple of 2"] * 2


def indivisible() -> str:
    try:
        cross_entropy(torch.zeros(7, 4), torch.zeros(7, dtype=torch.long), Mesh.create(MeshShape(tp=2)).tp, 8)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_large_logits_do_not_overflow(extreme: float) -> None:
    logits, labels, _ = drawn(11, "none")
    logits = (logits + extreme).float()
    got = cross_entropy(logits.clone(), labels, ALONE, 11)
    torch.testing.assert_close(got, F.cross_entropy(logits.double(), labels, reduction="none").float())


def test_more_rows_than_a_chunk_holds() -> None:
    """Chunks of a few rows: 21 rows of 100000 columns are five."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(21, 100_000, generator=generator)
    labels = torch.randint(100_000, (21,), generator=generator)
    one, two = (logits.clone().requires_grad_() for _ in range(2))
    got = cross_entropy(one * 1, labels, ALONE, 100_000, label_smoothing=0.1)
    want = F.cross_entropy(two, labels, reduction="none", label_smoothing=0.1)
    (got.sum() + want.sum()).backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "place"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_narrow_logits_are_as_good_as_their_fp32_copy(dtype: torch.dtype, place: float, smoothing: float) -> None:
    """The loss is that of the fp32 copy; the gradient is rounded once (a relative error of half a place, and a half for
    the rounding of fp32 arithmetic before it)."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 1000, generator=generator) * 4).to(dtype)
    labels = torch.randint(1000, (64,), generator=generator)
    mine, wide = logits.clone().requires_grad_(), logits.float().requires_grad_()
    got = cross_entropy(mine * 1, labels, ALONE, 1000, smoothing)
    want = F.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    got.sum().backward()
    want.sum().backward()
    assert got.dtype == torch.float32
    assert mine.grad is not None and wide.grad is not None
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    # 1e-7: where probability and label cancel, fp32's own rounding shows.
    assert ((mine.grad.float() - wide.grad).abs() <= wide.grad.abs() * place + 1e-7).all()


def wide(operator: Any, arguments: Any, y: Any) -> int:
    """The elements of a result in fp32."""
    return y.numel() if isinstance(y, Tensor) and y.dtype == torch.float32 else 0


@pytest.mark.quick
def test_no_fp32_copy_of_all_logits_is_made() -> None:
    tokens, vocab = 128, 16_384
    logits = torch.randn(tokens, vocab).bfloat16().requires_grad_()
    with Operators(wide, max) as largest:
        loss = cross_entropy(logits * 1, torch.zeros(tokens, dtype=torch.long), ALONE, vocab, 0.1, 1e-3)
        loss.sum().backward()
    assert tokens < largest.found <= tokens * vocab // 4
    with Operators(wide, max) as largest:
        F.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long))
    assert largest.found == tokens * vocab


def test_the_gradient_takes_the_memory_of_the_logits() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    activations = logits * 1
    came: list[int] = []
    activations.register_hook(lambda gradient: came.append(gradient.data_ptr()))
    cross_entropy(activations, torch.zeros(4, dtype=torch.long), ALONE, 8).sum().backward()
    assert came == [activations.data_ptr()]


def own_logits(vocab: int) -> tuple[Tensor, Tensor]:
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    logits, labels, _ = drawn(vocab, "none")
    found = logit(Objective(mesh.tp, vocab, finish=Finish(2.0, 5.0)), own_columns(logits, mesh), labels)
    return found, 5.0 * torch.tanh(logits.gather(1, labels[:, None])[:, 0] * 2.0 / 5.0)


@pytest.mark.parametrize("vocab", [5, 16])
def test_the_logit_of_a_label_comes_from_the_rank_that_has_it(pool: Pool, vocab: int) -> None:
    for found, wanted in pool.run(4, own_logits, vocab):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
