"""Experts on one rank and on several, against the formula token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators import kept_for_backward
from pool import Pool
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacore.models.blocks import CHEAP, Activation
from megacore.parallel import kernels
from megacore.parallel.kernels import grouped, upcast
from megacore.parallel.layers import experts as layer
from megacore.parallel.layers.experts import Experts
from megacore.parallel.memory.recompute import Activations, runner
from megacore.parallel.mesh import ALONE, Mesh
from megacore.parallel.parameters import WeightGradient
from megacore.parallel.weights.layout import MeshShape

TOKENS, EMBED, FEATURES, EXPERTS, K = 24, 16, 24, 8, 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Drawn:
    """What a layer is made of and given, and the gradient that comes back; the same on every rank."""

    up: Tensor
    down: Tensor
    up_bias: Tensor
    down_bias: Tensor
    x: Tensor
    chosen: Tensor
    weights: Tensor
    dy: Tensor

    @classmethod
    def of(cls, dtype: torch.dtype) -> Drawn:
        draw = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        # Expert 5 gets nothing, and the last rank of four gets most.
        scores = torch.randn(TOKENS, EXPERTS, generator=draw).add_(torch.arange(EXPERTS) / 4)
        scores[:, 5] = -torch.inf
        weights, chosen = scores.softmax(-1).topk(K, -1)
        return cls(
            normal(EXPERTS, 2 * FEATURES, EMBED),
            normal(EXPERTS, EMBED, FEATURES),
            normal(EXPERTS, 2 * FEATURES),
            normal(EXPERTS, EMBED),
            normal(TOKENS, EMBED),
            chosen,
            weights.to(torch.promote_types(dtype, torch.float32)),
            normal(TOKENS, EMBED),
        )


def gated() -> Activation:
    return Activation(kernels.gated("silu", torch.device("cpu")))


def one_by_one(drawn: Drawn, biases: bool) -> dict[str, Tensor]:
    """The formula, each token and slot by itself, and autograd's gradients."""
    leaf = {name: value.clone().requires_grad_() for name, value in vars(drawn).items() if name not in ("chosen", "dy")}
    made = []
    for token, chosen, weights in zip(leaf["x"], drawn.chosen.tolist(), leaf["weights"], strict=True):
        y = torch.zeros_like(token)
        for e, w in zip(chosen, weights, strict=True):
            gate, up = (leaf["up"][e] @ token + (leaf["up_bias"][e] if biases else 0)).chunk(2)
            y = y + w * (leaf["down"][e] @ (F.silu(gate) * up) + (leaf["down_bias"][e] if biases else 0))
        made.append(y)
    y = torch.stack(made)
    y.backward(drawn.dy)
    return {"y": y.detach()} | {name: value.grad for name, value in leaf.items() if value.grad is not None}


def on_mesh(
    shape: MeshShape,
    features: bool,
    dtype: torch.dtype,
    biases: bool,
    drawn: Drawn | None = None,
    prepare: Callable[[Experts], object] = lambda experts: None,
) -> dict[str, Tensor]:
    """What this rank finds: of its tokens, of its experts, and of the features of those that it has."""
    mesh = Mesh.create(shape) if shape.world > 1 else Mesh.single()
    group, inner = (mesh.along("ep"), mesh.along("tp")) if features else (mesh.along("ep", "tp"), ALONE)
    drawn, at, part = drawn or Drawn.of(dtype), group.index, inner.index

    def own(whole: Tensor, dim: int, parts: int) -> Tensor:
        """The features of this rank, those of gate and up."""
        return torch.cat([each.chunk(inner.size, dim)[part] for each in whole.chunk(parts, dim)], dim)

    held = {"up": own(drawn.up.chunk(group.size)[at], 1, 2), "down": own(drawn.down.chunk(group.size)[at], 2, 1)}
    if biases:
        held["up_bias"] = own(drawn.up_bias.chunk(group.size)[at], 1, 2)
        held["down_bias"] = drawn.down_bias.chunk(group.size)[at]
    parameters = {name: nn.Parameter(value.contiguous()) for name, value in held.items()}
    biased = parameters.get("up_bias"), parameters.get("down_bias")
    experts = Experts(parameters["up"], parameters["down"], gated(), EXPERTS, group, inner, *biased)
    prepare(experts)
    x, weights = (each.chunk(shape.world)[mesh.rank].clone().requires_grad_() for each in (drawn.x, drawn.weights))
    y = experts(x, drawn.chosen.chunk(shape.world)[mesh.rank], weights)
    y.backward(drawn.dy.chunk(shape.world)[mesh.rank])
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    return found | {name: each.grad for name, each in experts.named_parameters() if each.grad is not None}


def joined(ranks: list[dict[str, Tensor]], inner: int = 1) -> dict[str, Tensor]:
    """What all ranks have found, put together; ``inner`` successive ones share the features of each expert."""

    def features(name: str, held: list[Tensor]) -> Tensor:
        if name == "down_bias":
            return torch.stack(held).sum(0)  # each has a share of every gradient
        dim = {"up": 1, "up_bias": 1, "down": 2}[name]
        halves = [each.chunk(2, dim) if name.startswith("up") else (each,) for each in held]
        return torch.cat([torch.cat(parts, dim) for parts in zip(*halves, strict=True)], dim)

    whole = {}
    for name in ranks[0]:
        held = [rank[name] for rank in ranks]
        if name not in ("y", "x", "weights"):
            held = [features(name, held[at : at + inner]) for at in range(0, len(held), inner)]
        whole[name] = torch.cat(held)
    return whole


SHAPES = [(MeshShape(), False), (MeshShape(ep=2), False), (MeshShape(ep=2, tp=2), False), (MeshShape(tp=2), True)]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize(
    ("shape", "features"), [*SHAPES, (MeshShape(ep=2, tp=2), True)], ids=["1", "ep2", "ep4", "etp2", "ep2-etp2"]
)
def test_layer_is_the_formula(pool: Pool, shape: MeshShape, features: bool, biases: bool) -> None:
    """Outputs and all gradients, with an expert that gets no token, and weights that have gradients too."""
    want = one_by_one(Drawn.of(torch.float64), biases)
    if shape.world == 1:
        found = joined([on_mesh(shape, features, torch.float64, biases)])
    else:
        ranks = pool.run(shape.world, on_mesh, shape, features, torch.float64, biases)
        found = joined(ranks, shape.tp if features else 1)
    assert found.keys() == want.keys() - (set() if biases else {"up_bias", "down_bias"})
    for name, value in found.items():
        assert torch.allclose(value, want[name], rtol=1e-11, atol=1e-12), name
    assert not found["up"][5].any() and not found["down"][5].any()


def in_all_dtypes(shape: MeshShape) -> list[dict[str, Tensor]]:
    return [on_mesh(shape, False, dtype, True) for dtype in DTYPES]


@pytest.mark.quick
def test_any_number_of_ranks_gives_the_same_bits(pool: Pool) -> None:
    alone = in_all_dtypes(MeshShape())
    for shape in (MeshShape(ep=2), MeshShape(ep=4)):
        for want, *ranks in zip(alone, *pool.run(shape.ep, in_all_dtypes, shape), strict=True):
            for name, value in joined(ranks).items():
                assert value.equal(want[name]), (shape, name, value.dtype)


def kept(experts: Experts, x: Tensor, drawn: Drawn) -> list[tuple[int, ...]]:
    with kept_for_backward() as tensors:
        experts(x, drawn.chosen, drawn.weights.requires_grad_())
    return [tuple(tensor.shape) for tensor in tensors]


def alone(drawn: Drawn) -> Experts:
    return Experts(nn.Parameter(drawn.up), nn.Parameter(drawn.down), gated(), EXPERTS, ALONE, ALONE)


def test_no_copy_for_each_slot_is_kept() -> None:
    """Neither of the tokens nor of what the experts give, only of what is between."""
    drawn = Drawn.of(torch.float32)
    shapes = kept(alone(drawn), drawn.x, drawn)
    rows = TOKENS * K
    assert (rows, EMBED) not in shapes and (TOKENS, K, EMBED) not in shapes
    assert [x for x in shapes if len(x) == 2 and x[0] == rows and x[1] > 1] == [(rows, 2 * FEATURES), (rows, FEATURES)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_and_offload_change_nothing(recompute: Any, offload: bool) -> None:
    """And ``selective`` forgets what the activation has given."""
    drawn = Drawn.of(torch.float32)
    found = []
    for activations in (Activations(), Activations(recompute, offload)):
        experts, weights = alone(drawn), drawn.weights.clone().requires_grad_()
        run = runner(activations, [experts], CHEAP, torch.device("cpu"))
        x = drawn.x.clone().requires_grad_()
        run([experts], x, drawn.chosen, weights).backward(drawn.dy)
        found.append([x.grad, weights.grad, experts.up.grad, experts.down.grad])
    assert all(a is not None and b is not None and a.equal(b) for a, b in zip(*found, strict=True))


def test_what_stands_beside_runs_while_rows_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    drawn = Drawn.of(torch.float32)
    start = layer.Dispatch.start

    def started(self: layer.Dispatch, x: Tensor, weights: Tensor | None = None) -> Any:
        pending = start(self, x, weights)
        order.append("sent")
        return layer.Pending([], lambda: order.append("came") or pending.wait())  # type: ignore[func-returns-value]

    monkeypatch.setattr(layer.Dispatch, "start", started)
    experts = alone(drawn)
    plain = experts(drawn.x, drawn.chosen, drawn.weights)
    order.clear()
    y = experts(drawn.x, drawn.chosen, drawn.weights, lambda: order.append("beside") or drawn.x)  # type: ignore[func-returns-value]
    assert order == ["sent", "beside", "came"]
    assert y.equal(plain + drawn.x)


def test_weight_of_zero_has_a_finite_gradient() -> None:
    """And the gradients of all else are those of the formula."""
    drawn = Drawn.of(torch.float64)
    drawn.weights[3, 1] = 0
    want, experts = one_by_one(drawn, biases=False), alone(drawn)
    x, weights = drawn.x.clone().requires_grad_(), drawn.weights.clone().requires_grad_()
    experts(x, drawn.chosen, weights).backward(drawn.dy)
    assert x.grad is not None and torch.allclose(x.grad, want["x"], rtol=1e-11, atol=1e-12)
    assert weights.grad is not None and weights.grad[3, 1] == 0
    assert torch.allclose(weights.grad[:3], want["weights"][:3], rtol=1e-11, atol=1e-12)


def test_rows_in_blocks_are_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, also where the last block has fewer."""
    drawn, found = Drawn.of(torch.bfloat16), []
    for cached in (layer._CACHED, 3 * drawn.x.shape[1]):
        monkeypatch.setattr(layer, "_CACHED", cached)
        experts, x = alone(drawn), drawn.x.clone().requires_grad_()
        weights = drawn.weights.clone().requires_grad_()
        y = experts(x, drawn.chosen, weights)
        y.backward(drawn.dy)
        found.append([y, x.grad, weights.grad, *(each.grad for each in experts.parameters())])
    for whole, blocks in zip(*found, strict=True):
        assert whole is not None and torch.equal(whole, blocks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, dtype: torch.dtype) -> None:
    drawn = Drawn.of(dtype)
    experts, x = alone(drawn), drawn.x[:tokens].clone().requires_grad_()
    y = experts(x, drawn.chosen[:tokens], drawn.weights[:tokens])
    y.sum().backward()
    assert y.shape == x.shape and experts.up.grad is not None
    assert experts.up.grad.flatten(1).any(1).sum() == tokens * K


def test_tensors_without_numbers_go_through() -> None:
    """As ``megacore plan`` runs it: counts are even, and those of a CPU are the loop's."""
    drawn = Drawn.of(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = Drawn(**{name: mode.from_tensor(value) for name, value in vars(drawn).items()})
        experts = alone(fake)
        y = experts(fake.x, fake.chosen, fake.weights)
        y.backward(fake.dy)
        assert y.shape == (TOKENS, EMBED) and experts.up.grad is not None
    meta = Drawn(**{name: value.to("meta") for name, value in vars(drawn).items()})
    experts = alone(meta)
    y = experts(meta.x, meta.chosen, meta.weights)
    y.backward(meta.dy)
    assert experts.products is grouped.KERNEL and y.shape == (TOKENS, EMBED) and experts.down.grad is not None
    sent, got = (meta.chosen.new_empty(3, 2) for _ in range(2))
    assert grouped.start_counts(sent, got, 10)() == ([3, 3, 4], [3, 3, 4], [5, 5])


# -- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_is_the_loop(dtype: torch.dtype) -> None:
    """torch's grouped products, of rows that need not be contiguous, beside ours."""
    draw = torch.Generator().manual_seed(1)
    counts = [3, 0, 5, 8, 0]
    weight = torch.randn(5, 24, 16, generator=draw).to(dtype)
    x, dy = torch.randn(16, 16, generator=draw).to(dtype), torch.randn(16, 24, generator=draw).to(dtype)
    groups = grouped.Groups(16, torch.tensor(counts), counts)
    for call in (
        lambda products: products.forward(x, weight, groups),
        lambda products: products.input_gradient(dy, weight, groups),
        lambda products: products.weight_gradient(dy, x, groups),
        lambda products: products.sums(dy, groups),
    ):
        torch.testing.assert_close(call(grouped.KERNEL), call(grouped.LOOP), rtol=2e-2, atol=2e-2)
    dw = grouped.LOOP.weight_gradient(dy, x, groups)
    assert not dw[1].any() and not dw[4].any() and dw[0].any()


def test_products_add_to_a_wider_sum_each_by_itself() -> None:
    """As a GPU does it for large experts: nothing is left of what was there before the first."""
    draw = torch.Generator().manual_seed(1)
    counts = [3, 0, 5, 8, 0]
    rows = [torch.randn(2, 16, size, generator=draw).bfloat16() for size in (24, 16)]
    total, want = torch.full((5, 24, 16), 7.0), torch.zeros(5, 24, 16, dtype=torch.float64)
    for number, (dy, x) in enumerate(zip(*rows, strict=True)):
        grouped.add_one_by_one(dy, x, counts, total, first=number == 0)
        for own, out, into in zip(dy.split(counts), x.split(counts), want, strict=True):
            into.addmm_(own.double().t(), out.double())
    torch.testing.assert_close(total.double(), want, rtol=2e-2, atol=2e-2)
    assert not total[1].any() and not total[4].any()


@pytest.mark.parametrize("late", [False, True])
def test_gradients_may_be_handed_on(late: bool) -> None:
    """At once or later, bit for bit."""
    drawn = Drawn.of(torch.float64)
    plain, handing = alone(drawn), alone(drawn)
    sums, waiting = {handing.up: torch.full_like(handing.up, 7), handing.down: torch.full_like(handing.down, 7)}, []

    def take(weight: nn.Parameter, gradient: WeightGradient) -> None:
        waiting.append(lambda: gradient.add_to(sums[weight], True))
        if not late:
            waiting.pop()()

    handing.hand, handing.late = take, late
    for experts in (plain, handing):
        experts(drawn.x, drawn.chosen, drawn.weights).backward(drawn.dy)
    assert handing.up.grad is None and handing.down.grad is None and len(waiting) == 2 * late
    with torch.no_grad():
        for add in waiting:
            add()
    for weight, want in ((handing.up, plain.up.grad), (handing.down, plain.down.grad)):
        assert want is not None and torch.equal(sums[weight], want)


def test_choice_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(device: str, dtype: torch.dtype, *shape: int) -> grouped.GroupedProducts:
        return kernels.grouped_products(torch.empty(shape, dtype=dtype, device=device))

    assert chosen("meta", torch.bfloat16, 4, 32, 16) is grouped.KERNEL
    assert chosen("meta", torch.bfloat16, 4, 32, 12) is grouped.LOOP  # 24 bytes from row to row
    assert chosen("meta", torch.float64, 4, 32, 16) is grouped.LOOP
    assert chosen("meta", torch.float32, 4, 32, 16) is grouped.LOOP
    assert chosen("cpu", torch.float32, 4, 32, 16) is grouped.KERNEL_ON_HOST
    for has_bf16, products in ((True, grouped.KERNEL_ON_HOST), (False, grouped.LOOP)):
        monkeypatch.setitem(upcast._found, "bf16", has_bf16)
        assert chosen("cpu", torch.bfloat16, 4, 32, 16) is products
    assert chosen("cpu", torch.float32, 4, 32, 6) is grouped.LOOP
    assert chosen("cpu", torch.float64, 4, 32, 16) is grouped.LOOP
