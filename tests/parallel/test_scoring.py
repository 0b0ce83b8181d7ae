"""Windows, softcaps, sinks and scales: every way of computing them is the dense formula, gradients and all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import flash_formula
import pytest
import torch
import torch.nn.functional as F
from attention_formula import attention, distances
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megacore.models.attention import MultiHeadAttention
from megacore.models.context import Context
from megacore.parallel import kernels
from megacore.parallel.kernels import bands, flash
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring, attend
from megacore.parallel.layers.cache import Cache, Decode, Prefill
from megacore.parallel.layers.whole_attention import DocumentAttention
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema

CPU = torch.device("cpu")
SEQUENCES, LENGTHS = 2, (3, 1, 26, 1, 1, 16, 12)
TOKENS, HEADS, KV, HEAD = sum(LENGTHS), 6, 2, 8
SCORINGS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "itself": {"window": 1},
    "wide": {"window": 30},
    "wider": {"window": 1000},
    "chunks": {"chunk": 7},
    "softcap": {"softcap": 2.0},
    "hard": {"scale": 3.0, "softcap": 50.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.7},
    "all": {"scale": 0.7, "window": 9, "softcap": 3.0, "sinks": True},
}
Attend = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]


def scored(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Scoring:
    given = SCORINGS[name] | more
    if given.get("sinks"):
        given["sinks"] = torch.linspace(-1, 2, HEADS, dtype=torch.float64).to(dtype).requires_grad_()
    return Scoring(**given)


def drawn(dtype: torch.dtype = torch.float64, kv: int = KV) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(TOKENS, HEADS + 2 * kv, HEAD, generator=generator, dtype=torch.float64) * 1.5
    return qkv.to(dtype).requires_grad_()


def split(qkv: Tensor) -> Sequence[Tensor]:
    return qkv.tensor_split((HEADS, (HEADS + qkv.shape[1]) // 2), 1)


def results(attend: Attend, qkv: Tensor, scoring: Scoring) -> list[Tensor]:
    """The output and the gradients of q, k and v together, and of the sinks."""
    leaves = [qkv] if scoring.sinks is None else [qkv, scoring.sinks]
    q, k, v = split(qkv)
    y = attend(q, k, v, scoring)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    return [x.double() for x in (y.detach(), *torch.autograd.grad(y, leaves, dy))]


def in_sequences(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """As the model has it where no documents are told apart."""
    q, k, v = (x.unflatten(0, (SEQUENCES, -1)).transpose(1, 2) for x in (q, k, v))
    return kernels.causal_attention(q, k, v, scoring).transpose(1, 2).flatten(0, 1)


def in_documents(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return kernels.documents_attention(q, k, v, Documents.of(LENGTHS, CPU), SEQUENCES, scoring)


WAYS: dict[str, tuple[Attend, Sequence[int]]] = {
    "sequences": (in_sequences, (TOKENS // SEQUENCES,) * SEQUENCES),
    "documents": (in_documents, LENGTHS),
}


def wanted(way: str, qkv: Tensor, scoring: Scoring) -> list[Tensor]:
    return results(lambda q, k, v, scoring: attention(q, k, v, WAYS[way][1], scoring), qkv, scoring)


@pytest.mark.parametrize(("block", "kv"), [(1, 2), (7, 6), (128, 1)])
@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("way", WAYS)
def test_the_formula(monkeypatch: pytest.MonkeyPatch, way: str, name: str, block: int, kv: int) -> None:
    monkeypatch.setattr(bands, "_BLOCK", block)
    qkv, attend = drawn(kv=kv), WAYS[way][0]
    want = wanted(way, qkv, scored(name))
    assert max(distances(results(attend, qkv, scored(name)), want)) < 1e-12
    # Dropping next to nothing goes another way.
    assert max(distances(results(attend, qkv, scored(name, dropout=1e-30)), want)) < 1e-12


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(scale=0.7), Scoring(0.7, 9, 3.0), Scoring(dropout=1e-30)])
@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_narrower_than_keys(way: str, scoring: Scoring) -> None:
    """As latent attention has them."""
    qkv, (attend, lengths) = drawn(), WAYS[way]

    def by(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return attend(q, k, v[..., :5], scoring)

    def formula(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return attention(q, k, v[..., :5], lengths, scoring)

    got, want = results(by, qkv, scoring), results(formula, qkv, scoring)
    assert got[0].shape == (TOKENS, HEADS, 5) and max(distances(got, want)) < 1e-12


@pytest.mark.parametrize(("dtype", "place"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("way", WAYS)
def test_in_narrow_numbers(way: str, name: str, dtype: torch.dtype, place: float) -> None:
    """Scores and their softmax are wide; the exact values are those of the rounded inputs."""
    qkv = drawn(dtype)
    exact = qkv.detach().double().requires_grad_()
    got = results(WAYS[way][0], qkv, scored(name, dtype))
    assert max(distances(got, wanted(way, exact, scored(name)))) < place


def test_sharp_scores_do_not_overflow() -> None:
    """The exponential of one that is masked may."""
    qkv = drawn() * 8
    exact = qkv.detach().requires_grad_()
    narrow = qkv.detach().bfloat16().requires_grad_()
    for name in ("window", "all"):
        got = results(in_documents, narrow, scored(name, torch.bfloat16))
        assert all(x.isfinite().all() for x in got)
    got, want = results(in_documents, exact, scored("window")), wanted("documents", exact, scored("window"))
    assert max(distances(got, want)) < 1e-11


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_dropped_are_in_the_window(way: str) -> None:
    """The mean over many draws is what nothing dropped gives, and the same seed drops the same."""
    q, k, v = split(drawn(torch.float32).detach())
    attend, _ = WAYS[way]
    torch.manual_seed(0)
    made = torch.stack([attend(q, k, v, scored("all", torch.float32, dropout=0.3)).detach() for _ in range(600)])
    want = attend(q, k, v, scored("all", torch.float32)).detach()
    assert float((made.mean(0) - want).norm() / want.norm()) < 0.06 < float((made[0] - want).norm() / want.norm())
    torch.manual_seed(0)
    assert torch.equal(attend(q, k, v, scored("all", torch.float32, dropout=0.3)), made[0])


def test_masks_are_replayed_where_it_is_computed_again() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        qkv, scoring = drawn(), scored("all", dropout=0.3)
        inner: Attend = in_documents
        attend: Attend = partial(checkpoint, inner, use_reentrant=False) if again else inner
        found.append(results(attend, qkv, scoring))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- what it costs


class Costs(TorchDispatchMode):
    """Counts multiplications of products, and the elements of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.largest = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "megacore":
            with self:  # what our operators are made of
                return OPDEFS[op._schema.name]._init_fn(*args, **(kwargs or {}))
        out = op(*args, **(kwargs or {}))
        name = op._schema.name
        if "bmm" in name:
            a, b = args[1:3] if "baddbmm" in name else args[:2]
            self.products += len(a) * a.shape[1] * a.shape[2] * b.shape[2]
        elif "flash" in name:
            q, k = args[:2]
            self.products += 2 * q.numel() * k.shape[2]
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def costs(length: int, scoring: Scoring, documents: Sequence[int] | None = None) -> Costs:
    """Of a forward and a backward."""
    q, k, v = (torch.ones(length, heads, HEAD).requires_grad_() for heads in (HEADS, KV, KV))
    with Costs() as seen:
        kernels.documents_attention(q, k, v, Documents.of(documents or [length], CPU), 1, scoring).sum().backward()
    return seen


@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"sinks": True}, {"dropout": 0.1}])
def test_a_window_costs_what_it_sees(more: dict[str, Any]) -> None:
    """Twice the tokens take twice the products, each query's with its window and a block's length at most; and no
    tensor holds more than a few times what comes in."""
    given = more | ({"sinks": torch.zeros(HEADS)} if "sinks" in more else {})
    once, twice = (costs(length, Scoring(window=40, **given)) for length in (1024, 2048))
    padded = 4 * HEAD  # to the width of the matrix units, in some
    assert twice.products < 2.05 * once.products
    assert once.products <= 6 * 1024 * HEADS * (40 + 128) * padded
    assert twice.largest <= max(2 * once.largest, 2048 * HEADS * padded)
    assert costs(1024, Scoring(**given)).products > 1.5 * once.products


def test_documents_cost_what_they_see() -> None:
    short, long = (costs(1024, Scoring(softcap=2.0), documents) for documents in ((64,) * 16, (1024,)))
    assert short.products < long.products / 3


# -- on CUDA


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("name", ["window", "itself", "wider", "sinks", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_torchs_kernel_for_cuda_is_asked_for_this(
    monkeypatch: pytest.MonkeyPatch, way: str, name: str, groups: bool
) -> None:
    """It is not there on a CPU: what it is given is checked, and computed by the formula."""
    monkeypatch.setattr(flash, "aten", flash_formula.STAND_IN)
    monkeypatch.setattr(flash, "takes", lambda q: True)
    monkeypatch.setattr(flash, "shares", lambda: groups)
    monkeypatch.setitem(SCORINGS, "both", {"window": 4, "sinks": True, "scale": 0.6})
    qkv, attend = drawn(), WAYS[way][0]
    want = wanted(way, qkv, scored(name))
    assert max(distances(results(attend, qkv, scored(name)), want)) < 1e-12


def test_torchs_operators_take_it() -> None:
    """As far as shapes go."""
    q, k = (torch.empty(10, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (HEADS, KV))
    ends = torch.empty(3, dtype=torch.int32, device="meta"), 7
    out, log_sum = flash.forward(q, k, k, ends=ends, scale=0.3, window=4)
    assert out.shape == q.shape and log_sum.shape == (HEADS, 10) and log_sum.dtype == torch.float32
    dq, dk, dv = flash.backward(log_sum, out, q, k, k, out, ends=ends, scale=0.3, window=4)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


def test_a_softcap_is_not_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "takes", lambda q: True)
    monkeypatch.setattr(flash, "aten", None)
    qkv = drawn()
    assert max(distances(results(in_documents, qkv, scored("all")), wanted("documents", qkv, scored("all")))) < 1e-12


# -- under the compiler


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dropout", [0.0, 1e-30])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_in_one_graph(way: str, dropout: float) -> None:
    torch.compiler.reset()
    scoring = scored("all", dropout=dropout)
    compiled = torch.compile(WAYS[way][0], backend="aot_eager", fullgraph=True)
    qkv = drawn()
    assert max(distances(results(compiled, qkv, scoring), wanted(way, qkv, scoring))) < 1e-12
    torch.compiler.reset()


@pytest.mark.parametrize("kv", [1, 2, 6])
def test_the_operators_give_what_the_compiler_is_told(kv: int) -> None:
    """Strides too: a compiled block is made for those."""
    q, k, v = (x.detach().unflatten(0, (SEQUENCES, -1)).transpose(1, 2) for x in split(drawn(kv=kv)))
    options = None, 0.3, 7, 2.0
    inputs = q, k, v, torch.zeros(HEADS).double(), *options
    torch.library.opcheck(bands.forward, inputs, test_utils=("test_schema", "test_faketensor"))
    out, log_sum = bands.forward(*inputs)
    given = out, q, k, v, out, log_sum, *options
    torch.library.opcheck(bands.backward, given, test_utils=("test_schema", "test_faketensor"))


# -- with a cache


@pytest.mark.parametrize("dropout", [0.0, 1e-30])
@pytest.mark.parametrize("value", [HEAD, 5], ids=["values", "narrow-values"])
@pytest.mark.parametrize("name", SCORINGS)
def test_tokens_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch, name: str, value: int, dropout: float) -> None:
    """Rows of different lengths: prompts at once, then token by token, are as all at once; a window reads no more of
    the cache than the rows need."""
    scoring, prompts, more = scored(name, dropout=dropout), (2, 11, 5), 20
    lengths = [length + more for length in prompts]
    qkv = torch.randn(sum(lengths), HEADS + 2 * KV, HEAD, dtype=torch.float64)
    rows = [qkv[stop - n : stop] for n, stop in zip(lengths, accumulate(lengths), strict=True)]
    q, k, v = split(qkv)
    want = attention(q, k, v[..., :value], lengths, scoring).split(lengths)
    read = list[int]()

    def noting(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, *others: Any, **options: Any) -> Tensor:
            read.append(k.shape[2])
            return real(q, k, *others, **options)

        return call

    monkeypatch.setattr("megacore.parallel.layers.cache.attend", noting(attend))
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting(F.scaled_dot_product_attention))
    layer: Any = SimpleNamespace(name="a", kv=KV, head=HEAD, value=value)
    kept = Cache.of([layer], [[[*range(length)]] for length in prompts], lengths, torch.float64, CPU, Mesh.single().cp)
    prefill = Prefill.of(kept, DocumentAttention(Documents.of([*prompts, 3], CPU), 1))
    padded = torch.cat([*(row[:n] for row, n in zip(rows, prompts, strict=True)), qkv[:3]])
    q, k, v = split(padded)
    found = [list(prefill("a", q, k, v[..., :value], scoring)[:-3].split(prompts))]
    read.clear()
    for step in range(more):
        positions = [length + step for length in prompts]
        new = torch.stack([row[at] for row, at in zip(rows, positions, strict=True)] + [qkv[0]])
        q, k, v = split(new)
        y = Decode.of(kept, positions, CPU)("a", q, k, v[..., :value], scoring)
        assert not y[len(rows) :].any()  # the padding
        found.append(list(y[: len(rows)].split(1)))
    for row, right in enumerate(want):
        torch.testing.assert_close(torch.cat([each[row] for each in found]), right, rtol=1e-12, atol=1e-12)
    if scoring.window is not None:
        assert max(read) <= scoring.window + max(prompts) - min(prompts)


def test_a_layer_says_how_it_scores() -> None:
    """Its sinks are a parameter, which learns; weights are dropped in training alone."""
    sizes = {"layer": 1, "heads": HEADS, "kv": KV, "head": HEAD, "embed": 16}
    names = {"qkv.weight": "(q: heads head + k: kv head + v: kv head) embed", "out.weight": "embed (heads head)"}
    params = (Param(f"layers.{{layer}}.a.{name}", to) for name, to in (names | {"sinks": "heads"}).items())
    layout = Layout(Schema(tuple(params), sizes), MeshShape(), (1,))
    parameters = Parameters(layout, Mesh.create(MeshShape()), torch.float64)
    scoring = Scoring(0.5, 3, 2.0, parameters["layers.0.a.sinks"], 0.25)
    layer = MultiHeadAttention(parameters, "layers.0.a", None, scoring)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    told = list[Scoring]()

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        told.append(scoring)
        return in_sequences(q, k, v, replace(scoring, dropout=0.0))

    x = torch.randn(TOKENS, 16, dtype=torch.float64)
    layer(x, Context(attend)).sum().backward()
    layer.eval()(x, Context(attend))
    sinks = layer.sinks
    assert sinks is not None and sinks.grad is not None and sinks.grad.all()
    assert [(s.scale, s.window, s.softcap, s.dropout) for s in told] == [(0.5, 3, 2.0, 0.25), (0.5, 3, 2.0, 0.0)]
    assert all(s.sinks is sinks for s in told)
