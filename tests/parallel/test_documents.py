"""Attention within documents: every way of computing it is that of each document by itself, and compiles once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_formula import attention, distances
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.kernels import documents as within
from megacore.parallel.kernels import flash
from megacore.parallel.kernels.documents import Documents, masked, on_cpu, one_by_one, with_varlen
from megacore.parallel.kernels.scoring import Scoring

CPU = torch.device("cpu")
LENGTHS = (3, 1, 12, 7, 9)
SEQUENCES = 2
HEADS = [(4, 2), (3, 3), (6, 1)]
Ways = dict[str, Callable[[Tensor, Tensor, Tensor, Documents], Tensor]]
WAYS: Ways = {
    "on-cpu": on_cpu,
    "one-by-one": one_by_one,
    "masked": lambda q, k, v, documents: masked(q, k, v, documents, SEQUENCES),
    "chosen": lambda q, k, v, documents: kernels.documents_attention(q, k, v, documents, SEQUENCES),
}


def projected(heads: int, kv: int, head: int = 16, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(sum(LENGTHS), heads + 2 * kv, head, generator=generator, dtype=torch.float64) * 2
    return qkv.to(dtype).requires_grad_()


def results(function: Callable[..., Tensor], qkv: Tensor, heads: int, kv: int, given: object) -> list[Tensor]:
    """The output and the gradient of what q, k and v are views of."""
    qkv.grad = None
    y = function(*qkv.split([heads, kv, kv], 1), given)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype))
    assert qkv.grad is not None
    return [y.detach().double(), qkv.grad.double()]


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float64, 1e-14), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("heads", "kv"), HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_documents_are_each_by_itself(way: str, heads: int, kv: int, dtype: torch.dtype, distance: float) -> None:
    """In bf16 as near as torch."""
    qkv = projected(heads, kv, dtype=dtype)
    want = results(attention, qkv.detach().double().requires_grad_(), heads, kv, LENGTHS)
    assert max(distances(results(WAYS[way], qkv, heads, kv, Documents.of(LENGTHS, CPU)), want)) < distance


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(64, 65, 1, 130, 63, 128, 129), (3, 770, 5, 769, 64), (800, 100)])
def test_documents_of_many_lengths(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Some go together in one batch, filled up to the longest: neither they nor their neighbours see the filling. The
    backward of the last ones is torch's in bf16."""
    qkv = torch.randn(sum(lengths), 4, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    want = results(attention, qkv.clone().requires_grad_(), 2, 1, lengths)
    got = results(on_cpu, qkv.to(dtype).requires_grad_(), 2, 1, Documents.of(lengths, CPU))
    assert max(distances(got, want)) < (1e-14 if dtype == torch.float64 else 2e-2)


def test_dropout_of_attention_weights_keeps_documents_apart() -> None:
    """Values of one in a document, and of zero elsewhere: what leaks is seen, and the mean stays."""
    q = torch.randn(sum(LENGTHS), 2, 8)
    documents = Documents.of(LENGTHS, CPU)
    v = torch.zeros_like(q)
    v[4:16] = 1
    torch.manual_seed(0)
    for way in (
        lambda: kernels.documents_attention(q, q, v, documents, SEQUENCES, Scoring(dropout=0.5)),
        lambda: masked(q, q, v, documents, SEQUENCES, Scoring(dropout=0.5)),
    ):
        drawn = torch.stack([way() for _ in range(200)])
        assert not drawn[:, :4].any() and not drawn[:, 16:].any()
        inside = drawn[:, 4:16]
        assert inside.std() > 0.1 and abs(float(inside.mean()) - 1) < 0.05


@pytest.mark.parametrize(("dropout", "distance"), [(0.0, 1e-14), (1e-9, 1e-8)])
def test_what_is_compiled_for_one_packing_serves_all_others(dropout: float, distance: float) -> None:
    """Gradients and all, in float64 and with other numbers of documents; at first the one number is taken for fixed."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        return kernels.documents_attention(q, k, v, documents, SEQUENCES, Scoring(dropout=dropout))

    torch.compiler.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    qkv = projected(4, 2)
    for lengths in [LENGTHS, (16, 16), (5,) * 3 + (1, 16), (16, 1, 15), (1,) * 32, (9, 7, 3, 13), (4,) * 8]:
        want = results(attention, qkv, 4, 2, lengths)
        assert max(distances(results(compiled, qkv, 4, 2, Documents.of(lengths, CPU)), want)) < distance
    assert len(graphs) <= 2
    torch.compiler.reset()


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize(("heads", "kv"), HEADS)
def test_torchs_kernel_for_cuda_is_asked_for_this(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv: int, groups: bool
) -> None:
    """It is not there on a CPU: what it is given is checked, and computed by the formula. In torch 2.11 it knows no
    groups."""

    def stand_in(q: Tensor, k: Tensor, v: Tensor, *given: Any, window_size: tuple[int, int], **more: Any) -> Tensor:
        starts, same, longest, same_again = given
        assert starts is same and longest == same_again >= max(LENGTHS)
        assert starts.dtype == torch.int32 and window_size == (-1, 0)
        assert more.pop("scale") == q.shape[-1] ** -0.5 and more.keys() == ({"enable_gqa"} if groups else set())
        assert more.get("enable_gqa", False) or q.shape[1] == k.shape[1]
        return attention(q, k, v, starts.diff().tolist())

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    qkv, documents = projected(heads, kv), replace(Documents.of(LENGTHS, CPU), groups=groups)
    want = results(attention, qkv, heads, kv, LENGTHS)
    got = results(
        lambda q, k, v, d: with_varlen(q, k, v, d, len(q) // SEQUENCES, q.shape[-1] ** -0.5), qkv, heads, kv, documents
    )
    assert max(distances(got, want)) < 1e-14


def test_torch_is_asked_what_its_kernel_takes() -> None:
    """Of the versions that the tests are run with."""
    known = {"2.11": False, "2.13": True}
    assert flash.shares() is known[torch.__version__[:4]]


def test_torchs_kernel_for_cuda_takes_narrow_heads_of_eighths() -> None:
    starts = torch.tensor([0, 2], dtype=torch.int32)
    on, off = Documents(starts, starts, True), Documents(starts, starts)
    assert on.varlen_takes(torch.empty(2, 1, 64, dtype=torch.bfloat16))
    assert not off.varlen_takes(torch.empty(2, 1, 64, dtype=torch.bfloat16))
    for head, dtype in ((64, torch.float32), (20, torch.bfloat16), (264, torch.bfloat16)):
        assert not on.varlen_takes(torch.empty(2, 1, head, dtype=dtype))


@pytest.mark.parametrize(("heads", "kv"), HEADS)
@pytest.mark.parametrize("way", ["one-by-one", "masked"])
def test_keys_and_values_are_repeated_where_no_fused_kernel_shares_them(
    monkeypatch: pytest.MonkeyPatch, way: str, heads: int, kv: int
) -> None:
    shared, real = list[bool](), F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        shared.append(more["enable_gqa"] or k.shape[1] != q.shape[1])
        return real(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    monkeypatch.setattr(within, "fused_takes_groups", lambda *_: False)
    qkv, documents = projected(heads, kv), Documents.of(LENGTHS, CPU)
    got = results(WAYS[way], qkv, heads, kv, documents)
    assert max(distances(got, results(attention, qkv, heads, kv, LENGTHS))) < 1e-14
    assert shared and not any(shared)


def test_which_fused_kernels_share_keys_and_values() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert within.fused_takes_groups("cuda", bf16, False) and within.fused_takes_groups("cpu", fp32, True)
    assert not within.fused_takes_groups("cuda", fp32, False)
    assert not within.fused_takes_groups("cuda", bf16, True)


def test_as_torch_has_it() -> None:
    """The reference itself, on one document."""
    q, k, v = projected(4, 2).split([4, 2, 2], 1)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    theirs = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, (len(q),)), theirs[0].transpose(0, 1))
