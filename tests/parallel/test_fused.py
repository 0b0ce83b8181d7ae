"""Triton's kernels beside torch's operators: the same numbers in fp64, no further from the truth in fp32 and bf16.

Triton's interpreter runs them; what a GPU would run is looked at by ``test_fused_code.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from interpreter import rounding
from torch import Tensor

from megacore.parallel.kernels import activation as plain_activation
from megacore.parallel.kernels import choice
from megacore.parallel.kernels import norm as plain_norm
from megacore.parallel.kernels import rotation as plain_rotation
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.loss import PLAIN, Finish, Objective
from megacore.parallel.mesh import ALONE

__all__ = ["rounding"]

NAMES = ("activation", "cross_entropy", "launching", "norm", "rotation")
FUSED = "megacore.parallel.kernels.fused"
activation, cross_entropy, launching, norm, rotation = (import_module(f"{FUSED}.{name}") for name in NAMES)

Function = Callable[..., Any]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that bf16 has, some large."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()
    return numbers * torch.where(torch.arange(numbers.numel()).view(shape) % 7 == 3, 8, 1)


def results(function: Function, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs and the gradient of each input, in fp64; the outputs' gradients are drawn from fixed seeds."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    made = function(*leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward(outputs, [drawn(*y.shape, seed=1 + i).to(dtype) for i, y in enumerate(outputs)])
    return [y.detach().double() for y in outputs] + [x.grad.double() for x in leaves if x.grad is not None]


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    assert [x.shape for x in got] == [x.shape for x in want]
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def check(fused: Function, plain: Function, inputs: Sequence[Tensor]) -> None:
    """In fp64 to its rounding; in others as near to that as torch's operators, which may have no error at all."""
    exact = results(plain, inputs, F64)
    assert max(errors(results(fused, inputs, F64), exact)) < 1e-13
    for dtype in (F32, BF16, F16):
        own, torchs = (errors(results(function, inputs, dtype), exact) for function in (fused, plain))
        bound = 4 * torch.finfo(F32).eps
        assert all(a <= 1.1 * b + bound for a, b in zip(own, torchs, strict=True)), (dtype, own, torchs)


SHAPES = [(1, 3), (7, 20), (3, 5, 64), (70, 48), (2, 1100)]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 256])
def test_norms(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], parts: int) -> None:
    """With several tiles for each program that sums the weight's gradient, and with one."""
    monkeypatch.setattr(norm, "_PARTS", parts)
    x, weight, bias = drawn(*shape), drawn(shape[-1], seed=5), drawn(shape[-1], seed=6)
    check(lambda x, w: norm.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), (x, weight))
    check(lambda *x: norm.layer_norm(*x, 1e-5), lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), (x, weight, bias))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_with_an_offset_and_without_a_bias(offset: float) -> None:
    x, weight, bias = drawn(70, 48), drawn(48, seed=5), drawn(48, seed=6)
    for name, inputs in (("rms_norm", (x, weight)), ("layer_norm", (x, weight)), ("layer_norm", (x, weight, bias))):
        fused, plain = getattr(norm, name), getattr(plain_norm, name)
        no_bias = () if name == "rms_norm" or len(inputs) == 3 else (None,)
        check(
            lambda *given, f=fused, none=no_bias: f(*given, *none, 1e-5, offset),
            lambda *given, f=plain, none=no_bias: f(*given, *none, 1e-5, offset),
            inputs,
        )


def test_norms_of_views_and_of_frozen_weights() -> None:
    x = drawn(9, 40)[:, 3:35].requires_grad_()
    weight = drawn(32)
    y = norm.rms_norm(x, weight, 1e-5)
    dy = drawn(1, 32).expand(9, 32)
    y.backward(dy)
    (want,) = torch.autograd.grad(F.rms_norm(x, (32,), weight, 1e-5), x, dy)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (2, 3, 96), (3, 2 * 1500)])
@pytest.mark.parametrize("name", activation.FUNCTIONS)
@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential, beyond which there is nothing
def test_gated(name: str, shape: tuple[int, ...]) -> None:
    check(partial(activation.gated, name), partial(plain_activation.gated, name), [drawn(*shape)])


@pytest.mark.filterwarnings("ignore:overflow")  # of an exponential, beyond which there is nothing
@pytest.mark.parametrize("name", activation.FUNCTIONS)
def test_gated_far_from_zero(name: str) -> None:
    gate_up = torch.tensor([[1e4, -1e4, 90.0, -90.0, 1.0, 1.0, 2.0, 3.0]], requires_grad=True)
    y = activation.gated(name, gate_up)
    y.sum().backward()
    assert y.tolist() == [[1e4, 0, 180, 0]]
    assert gate_up.grad is not None and gate_up.grad.isfinite().all()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv", "head", "turning"),
    [(1, 1, 1, 2, 2), (5, 4, 2, 16, 16), (3, 14, 3, 10, 10), (2, 20, 20, 6, 6), (5, 4, 2, 16, 4), (3, 14, 3, 10, 8)],
)
def test_rotation(tokens: int, heads: int, kv: int, head: int, turning: int) -> None:
    cos, sin = drawn(2, tokens, turning // 2, seed=3)

    def turn(rotate: Function, *counts: int) -> Function:
        return lambda x: rotate(x, cos.to(x.dtype), sin.to(x.dtype), *counts)

    qkv = drawn(tokens, (heads + 2 * kv) * head)
    check(turn(rotation.split_and_apply, heads, kv), turn(plain_rotation.split_and_apply, heads, kv), [qkv])
    check(turn(rotation.apply), turn(plain_rotation.apply), [drawn(tokens, heads, head)])


def test_gradients_of_the_rotation_may_lie_as_attention_leaves_them() -> None:
    """[heads, t, head] in memory, and a part of something wider."""
    cos, sin = drawn(2, 5, 4, seed=3)
    qkv, q = drawn(5, 8 * 8).requires_grad_(), drawn(4, 5, 8).transpose(0, 1).requires_grad_()
    dq, dk, dv = drawn(4, 5, 8).transpose(0, 1), drawn(5, 2, 20)[..., 5:13], drawn(8, 2, 5).permute(2, 1, 0)
    want, got = (
        torch.autograd.grad(split(qkv, cos, sin, 4, 2), qkv, (dq, dk, dv))[0]
        for split in (plain_rotation.split_and_apply, rotation.split_and_apply)
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    want, got = (torch.autograd.grad(apply(q, cos, sin), q, dq)[0] for apply in (plain_rotation.apply, rotation.apply))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: norm.rms_norm(x, w, 1e-2), [(3, 5), (5,)]),
        (lambda x, w, b: norm.layer_norm(x, w, b, 1e-2), [(3, 5), (5,), (5,)]),
        (partial(activation.gated, "silu"), [(3, 6)]),
        (partial(activation.gated, "gelu_tanh"), [(3, 6)]),
        (lambda x: rotation.split_and_apply(x, *drawn(2, 3, 2), 2, 1), [(3, 16)]),
    ],
)
def test_gradients_are_derivatives(function: Function, shapes: Sequence[tuple[int, ...]]) -> None:
    inputs = tuple(drawn(*shape, seed=i).div_(4).requires_grad_() for i, shape in enumerate(shapes))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


# -- the loss

# 5 over 4 ranks: the third has one valid column, the fourth none at all. 9000: more than a program reads at a time.
LOSSES = [
    (5, 4, 0.0, 0.0, PLAIN),
    (5, 4, 0.1, 0.03, PLAIN),
    (16, 1, 0.0, 0.03, PLAIN),
    (16, 4, 0.1, 0.0, PLAIN),
    (9000, 1, 0.1, 0.03, PLAIN),
    (9000, 2, 0.0, 0.0, PLAIN),
    (5, 4, 0.1, 0.03, Finish(0.3, 9.0)),
    (16, 1, 0.0, 0.0, Finish(softcap=5.0)),
    (9000, 1, 0.0, 0.03, Finish(1 / 16)),
]


def loss_and_gradient(
    logits: Tensor, labels: Tensor, dy: Tensor, ranks: int, smoothing: float, z_loss: float, finish: Finish = PLAIN
) -> tuple[Tensor, Tensor]:
    """What so many ranks make of their columns, whose padding must not matter."""
    vocab = logits.shape[1]
    padded = F.pad(logits, (0, -vocab % ranks), value=50.0)
    own = [part.clone() for part in padded.chunk(ranks, 1)]
    columns = own[0].shape[1]
    spans = [(rank * columns, max(0, min(columns, vocab - rank * columns))) for rank in range(ranks)]
    bend = finish.scale, finish.softcap
    found = [cross_entropy.statistics(z, labels, *at, smoothing > 0, *bend) for z, at in zip(own, spans, strict=True)]
    loss, log_sum = cross_entropy.finish(torch.stack(found), labels, columns, vocab, smoothing, z_loss)
    for z, span in zip(own, spans, strict=True):
        assert cross_entropy.gradient_(z, labels, log_sum, dy, *span, vocab, smoothing, z_loss, *bend) is z
    gradient = torch.cat(own, 1)
    assert not gradient[:, vocab:].any()
    return loss, gradient[:, :vocab]


def plain(
    logits: Tensor, labels: Tensor, dy: Tensor, smoothing: float, z_loss: float, finish: Finish = PLAIN
) -> tuple[Tensor, Tensor]:
    objective = Objective(ALONE, logits.shape[1], smoothing, z_loss, finish)
    logits = logits.clone()
    loss, log_sum = objective.losses(logits, labels)
    return loss, objective.gradient_(logits, labels, log_sum, dy)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("vocab", "ranks", "smoothing", "z_loss", "finish"), LOSSES)
def test_cross_entropy(vocab: int, ranks: int, smoothing: float, z_loss: float, finish: Finish) -> None:
    tokens = 4 if vocab < 100 else 2
    # Of many columns the later ones are larger, so that the maximum rises.
    logits = (drawn(tokens, vocab) + torch.arange(vocab) / 300).bfloat16().double()
    labels, dy = torch.arange(tokens) * 3 % vocab, drawn(tokens, seed=1)
    labels[-1] = IGNORE
    extras = smoothing, z_loss, finish
    loss, gradient = plain(logits, labels, dy, *extras)
    for got, want in zip(loss_and_gradient(logits, labels, dy, ranks, *extras), (loss, gradient), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for dtype in (F32, BF16):
        got_loss, got = loss_and_gradient(logits.to(dtype), labels, dy.float(), ranks, *extras)
        assert got_loss.dtype == F32 and got.dtype == dtype
        torch.testing.assert_close(got_loss.double(), loss, rtol=2e-6, atol=2e-6)
        # Rounded once; where probability and label cancel, fp32's own rounding shows.
        eps = torch.finfo(dtype).eps
        assert ((got.double() - gradient).abs() <= gradient.abs() * eps + 1e-5 * dy.abs()[:, None]).all()


@pytest.mark.parametrize("extreme", [1e4, -1e4, 3e38])
def test_large_logits_do_not_overflow(extreme: float) -> None:
    logits = (drawn(3, 11) + extreme).float()
    labels = torch.tensor([0, 5, 10])
    loss, gradient = loss_and_gradient(logits, labels, torch.ones(3), 2, 0.1, 0.0)
    want = plain(logits, labels, torch.ones(3), 0.1, 0.0)
    torch.testing.assert_close((loss, gradient), want)


def test_logits_in_columns_and_one_gradient_for_all_tokens() -> None:
    """Strides other than those of rows: what backward gives to a sum is one number, expanded."""
    logits, labels, dy = drawn(11, 4).t(), torch.tensor([1, 2, IGNORE, 10]), torch.ones(1, dtype=F64).expand(4)
    found = cross_entropy.statistics(logits, labels, 0, 11, False)
    loss, log_sum = cross_entropy.finish(found[None], labels, 11, 11, 0.0, 0.0)
    want = plain(logits, labels, dy, 0.0, 0.0)
    got = loss, cross_entropy.gradient_(logits, labels, log_sum, dy, 0, 11, 11, 0.0, 0.0)
    torch.testing.assert_close(got, want)


def test_rows_beyond_what_32_bits_count() -> None:
    """Tokens times the vocabulary may be more than 2**31; the memory between these rows is never touched."""
    stride, width = 2**30, 6
    memory = torch.empty(2 * stride + width, dtype=BF16)
    rows = memory.as_strided((3, width), (stride, 1))
    logits, labels, dy = drawn(3, width).bfloat16(), torch.tensor([0, 3, 5]), torch.ones(3)
    rows.copy_(logits)
    found = cross_entropy.statistics(rows, labels, 0, width, False)
    loss, log_sum = cross_entropy.finish(found[None], labels, width, width, 0.0, 0.0)
    cross_entropy.gradient_(rows, labels, log_sum, dy, 0, width, width, 0.0, 0.0)
    torch.testing.assert_close((loss, rows), plain(logits, labels, dy, 0.0, 0.0))
    rows.copy_(logits)
    weight = torch.ones(width, dtype=BF16)
    torch.testing.assert_close(norm.rms_norm(rows, weight, 1e-5), norm.rms_norm(logits, weight, 1e-5))
    q = memory.as_strided((3, 1, width), (stride, 1, 1))
    cos, sin = drawn(2, 3, width // 2).bfloat16()
    want = rotation._turned(logits[:, None], logits[:, None], logits[:, None], cos, sin, -1)
    torch.testing.assert_close(rotation._turned(q, q, q, cos, sin, -1), want)


def test_of_nothing_nothing_is_launched() -> None:
    with patch.object(launching, "launch", side_effect=launching.launch) as launches:
        weight = torch.ones(4, requires_grad=True)
        norm.rms_norm(torch.empty(0, 4), weight, 1e-5).sum().backward()
        activation.gated("silu", torch.empty(0, 4, requires_grad=True)).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    assert [call.args[1] for call in launches.call_args_list if call.args[1]] == [1]  # the weight's gradient, of zeros


# -- which is chosen


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Choose for this CPU as for a GPU; Triton's interpreter runs it."""
    with patch.object(choice, "_fused", lambda name, device: import_module(f"megacore.parallel.kernels.fused.{name}")):
        yield


def test_a_model_has_the_numbers_of_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, norms and weights of whole steps, with and without chunks of the loss; GPT-2's layer norms."""
    from benchmarks.gpu import correctness
    from benchmarks.gpu.correctness import GPT2, LLAMA, Run

    cpu, llama, gpt2 = torch.device("cpu"), {**LLAMA, "num_hidden_layers": 1}, {**GPT2, "n_layer": 1}
    for name, size in (("STEPS", 2), ("LENGTH", 8), ("SEQUENCES", 1)):
        monkeypatch.setattr(correctness, name, size)
    gated = {"norm", "cross_entropy", "activation", "rotation"}
    for run, uses in (
        (Run(F64, llama), gated),
        (Run(F64, llama, loss_chunk=5), gated),
        (Run(F64, gpt2), {"norm", "cross_entropy"}),
    ):
        want = correctness.train(run, cpu)
        with as_on_a_gpu(), patch.object(launching, "launch", side_effect=launching.launch) as launches:
            got = correctness.train(run, cpu)
        assert {call.args[0].fn.__module__.rpartition(".")[2] for call in launches.call_args_list} == uses
        for part in ("losses", "norms", "gradients", "weights"):
            a, b = getattr(got, part), getattr(want, part)
            assert (a - b).norm() <= 1e-11 * b.norm(), part


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices are as if Triton had been tried on a GPU."""
    monkeypatch.setattr(launching, "try_out", lambda device: None)
    choice._triton_serves.cache_clear()
    yield
    choice._triton_serves.cache_clear()


def in_torch(gated: Function) -> bool:
    return isinstance(gated, partial) and gated.func is plain_activation.gated


def test_they_are_for_gpus_with_triton(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert in_torch(choice.gated("silu", cpu)) and choice.cross_entropy(cpu) is None
    assert choice.split_and_rotate(cpu) is plain_rotation.split_and_apply
    assert choice.rotate(cpu) is plain_rotation.apply
    assert choice.cross_entropy(cuda) is cross_entropy
    assert not in_torch(choice.gated("silu", cuda)) and in_torch(choice.gated("relu", cuda))
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    choice._triton_serves.cache_clear()
    assert in_torch(choice.gated("silu", cuda)) and choice.cross_entropy(cuda) is None


def test_a_triton_that_does_not_serve_is_named(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    error = RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")
    monkeypatch.setattr(launching, "try_out", Mock(side_effect=error))
    with pytest.warns(UserWarning, match=r"fails on cuda \(Failed to find C compiler.\): torch's operators serve"):
        assert in_torch(choice.gated("silu", torch.device("cuda")))


def test_trying_launches_a_kernel() -> None:
    with patch.object(launching, "launch", side_effect=launching.launch) as launches:
        launching.try_out(torch.device("cpu"))
    assert launches.call_count == 1


@pytest.mark.parametrize("how", ["compiled", "too wide"])
def test_compiled_or_too_wide_they_are_torchs(monkeypatch: pytest.MonkeyPatch, gpu: None, how: str) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(launching, "launch", None)
    chosen = choice.rms_norm(cuda)
    if how == "compiled":
        gate_up, qkv, table = drawn(2, 8), drawn(2, 12), drawn(2, 1)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert choice.gated("silu", cuda)(gate_up).equal(plain_activation.gated("silu", gate_up))
        assert choice.split_and_rotate(cuda)(qkv, table, table, 2, 2)[2].equal(qkv.unflatten(-1, (6, 2))[:, 4:])
        q = qkv.unflatten(-1, (6, 2))
        assert choice.rotate(cuda)(q, table, table).equal(plain_rotation.apply(q, table, table))
        assert choice.cross_entropy(cuda) is None
    else:
        monkeypatch.setattr(norm, "WIDEST", 7)
        chosen = choice.rms_norm(cuda)
    x = drawn(2, 8)
    assert chosen(x, x[0], 1e-5).equal(F.rms_norm(x, (8,), x[0], 1e-5))
