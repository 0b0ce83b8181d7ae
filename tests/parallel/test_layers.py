"""Layers standing alone, against torch's with the gathered weights: outputs and all gradients, in float64."""

from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from operators import kept_for_backward
from pool import Pool
from torch import Tensor, nn

from megacore.parallel.layers.embedding import VocabParallelEmbedding
from megacore.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from megacore.parallel.layers.norm import LayerNorm, RMSNorm
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

TPS = (1, 2, 4)
TOKENS, IN, OUT, VOCAB = 8, 12, 20, 11
WIDE = torch.float64
Found = dict[Any, dict[str, Tensor]]
"""{case: {name: what this rank has}}."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def here(x: Tensor, held: str, mesh: Mesh) -> Tensor:
    """What this rank has of a tensor: "tokens" or "features" are split, "all" is held by everyone."""
    if held == "all":
        return x
    return x.chunk(mesh.shape.tp, 0 if held == "tokens" else -1)[mesh.place.tp]


def run(layer: nn.Module, x: Tensor, y: Tensor, x_held: str, y_held: str, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's parameters, output and gradients, given whole x and dy."""
    mine = here(x, x_held, mesh).clone().requires_grad_()
    out = layer(mine)
    out.backward(here(y, y_held, mesh))
    assert mine.grad is not None
    found = {"y": out.detach(), "dx": mine.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        found |= {name: parameter.detach(), f"d{name}": parameter.grad}
    return found


def whole(parts: list[Tensor], held: str) -> Tensor:
    """The tensor of which the ranks hold parts; "sum": each holds a part of a sum."""
    if held == "sum":
        return torch.stack(parts).sum(0)
    if held == "all":
        assert all(torch.equal(part, parts[0]) for part in parts), "replicas differ"
        return parts[0]
    return torch.cat(parts, {"tokens": 0, "rows": 0, "columns": 1, "features": -1}[held])


def check(results: list[Found], case: Any, held: dict[str, str], reference: Callable[[Tensor], Tensor], x: Tensor,
          dy: Tensor, **parameters: Tensor) -> None:  # fmt: skip
    x = x.clone().requires_grad_()
    y = reference(x)
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    want = {"y": y, "dx": gradients[0]} | {f"d{n}": g for n, g in zip(parameters, gradients[1:], strict=True)}
    for name, value in want.items():
        got = whole([result[case][name] for result in results], held[name])
        torch.testing.assert_close(got, value.detach(), rtol=1e-12, atol=1e-12, msg=f"{case} {name}")


# -- linears

Between = Literal["sequence", "replicated"]
# input, output, bias, dimensions of x
COLUMNS: list[tuple[Between, Literal["split", "gathered"], bool, int]] = list(
    product(("sequence", "replicated"), ("split", "gathered"), (True, False), (2, 3))
)
ROWS: list[tuple[Literal["split", "replicated"], Between, bool, int]] = list(
    product(("split", "replicated"), ("sequence", "replicated"), (True, False), (2, 3))
)


def batch(dims: int, features: int, seed: int) -> Tensor:
    """[tokens, features], or [tokens, sequences, features]: dimension 0 is the one that is split."""
    return drawn(seed, *((TOKENS, features) if dims == 2 else (TOKENS, 3, features)))


def linears() -> Found:
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    found: Found = {}
    for came, goes, bias, dims in COLUMNS:
        torch.manual_seed(mesh.rank)
        column = ColumnParallelLinear(IN, OUT, mesh=mesh, bias=bias, input=came, output=goes, dtype=WIDE)
        if column.bias is not None:
            nn.init.normal_(column.bias)
        x_held = "tokens" if came == "sequence" else "all"
        y_held = "features" if goes == "split" else "all"
        x, y = batch(dims, IN, 1), batch(dims, OUT, 2)
        found["column", came, goes, bias, dims] = run(column, x, y, x_held, y_held, mesh)
    for to, leaves, bias, dims in ROWS:
        torch.manual_seed(mesh.rank)
        row = RowParallelLinear(IN, OUT, mesh=mesh, bias=bias, input=to, output=leaves, dtype=WIDE)
        if row.bias is not None:
            row.bias.data.copy_(drawn(3, OUT))
        x_held = "features" if to == "split" else "all"
        y_held = "tokens" if leaves == "sequence" else "all"
        found["row", to, leaves, bias, dims] = run(row, batch(dims, IN, 1), batch(dims, OUT, 2), x_held, y_held, mesh)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("tp", TPS)
def test_linears(pool: Pool, tp: int) -> None:
    """Every combination of options, 2-D and 3-D. Replicated results and gradients are equal on all ranks to the bit."""
    results = pool.run(tp, linears)
    case: Any
    for case in (("column", *c) for c in COLUMNS):
        _, came, goes, bias, dims = case
        linear = nn.Linear(IN, OUT, bias=bias, dtype=WIDE)
        held = {"dx": "tokens" if came == "sequence" else "all", "y": "features" if goes == "split" else "all"}
        held |= {"dweight": "rows", "dbias": "rows"}
        assert_shapes(results, case, weight=(OUT // tp, IN))
        fill(linear, results, case, {"weight": "rows", "bias": "rows"})
        check(results, case, held, linear, batch(dims, IN, 1), batch(dims, OUT, 2), **dict(linear.named_parameters()))
    for case in (("row", *c) for c in ROWS):
        _, came, goes, bias, dims = case
        linear = nn.Linear(IN, OUT, bias=bias, dtype=WIDE)
        held = {"dx": "features" if came == "split" else "all", "y": "tokens" if goes == "sequence" else "all"}
        # With tokens split each rank sees a part of the bias's gradient, otherwise all of it.
        held |= {"dweight": "columns", "dbias": "sum" if goes == "sequence" else "all"}
        assert_shapes(results, case, weight=(OUT, IN // tp))
        fill(linear, results, case, {"weight": "columns", "bias": "all"})
        check(results, case, held, linear, batch(dims, IN, 1), batch(dims, OUT, 2), **dict(linear.named_parameters()))


def assert_shapes(results: list[Found], case: Any, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        assert all(result[case][name].shape == shape for result in results)


def fill(module: nn.Module, results: list[Found], case: Any, held: dict[str, str]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(whole([result[case][name] for result in results], held[name]))


@pytest.mark.parametrize("tp", [2, 4])
def test_features_that_do_not_divide_are_an_error(tp: int) -> None:
    mesh = Mesh(MeshShape(tp=tp), 0, torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"cannot split out_features \(9\) over tp={tp}: choose a multiple of {tp}"):
        ColumnParallelLinear(8, 9, mesh=mesh)
    with pytest.raises(ValueError, match=rf"cannot split in_features \(9\) over tp={tp}: choose a multiple of {tp}"):
        RowParallelLinear(9, 8, mesh=mesh)


def beginnings(mesh: Mesh | None = None) -> list[Tensor]:
    mesh = mesh or Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    torch.manual_seed(0)
    layers = (
        ColumnParallelLinear(64, 256, mesh=mesh),
        RowParallelLinear(64, 256, mesh=mesh),
        VocabParallelEmbedding(11, 64, mesh=mesh),
    )
    assert not any(layer.bias.any() for layer in layers[:2] if layer.bias is not None)
    return [layer.weight.detach() for layer in layers]


def test_ranks_that_are_seeded_alike_begin_with_parts_of_one_weight(pool: Pool) -> None:
    parts = list(zip(*pool.run(4, beginnings), strict=True))
    column, row, table = beginnings(Mesh.single())
    assert torch.equal(whole(list(parts[0]), "rows"), column)
    assert torch.equal(whole(list(parts[1]), "columns"), row)
    assert torch.equal(whole(list(parts[2]), "rows")[:11], table)
    for weight in (column, row):
        assert 0.95 / 8 < weight.abs().max().item() <= 1 / 8


def frozen() -> list[bool]:
    """A frozen weight, and an input that needs no gradient: nothing more is computed, and nobody hangs."""
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    group, right = mesh.tp, []
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(IN, OUT, mesh=mesh, dtype=WIDE)
        layer.weight.requires_grad_(False)
        x_held = "tokens" if kind is ColumnParallelLinear else "features"
        x = here(drawn(1, TOKENS, IN), x_held, mesh).clone().requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        right.append(x.grad is not None and layer.weight.grad is None)
        layer.weight.requires_grad_(True)
        x = here(drawn(1, TOKENS, IN), x_held, mesh)
        y = layer(x)
        y.backward(torch.ones_like(y))
        right.append(x.grad is None and layer.weight.grad is not None)
    assert group.size > 1
    return right


def test_frozen_weights_and_inputs(pool: Pool) -> None:
    assert pool.run(2, frozen) == [[True] * 4] * 2


def saved(
    trained: bool, kind: type[ColumnParallelLinear | RowParallelLinear] = ColumnParallelLinear
) -> list[tuple[int, ...]]:
    mesh = Mesh.create(MeshShape(tp=2))
    layer = kind(IN, OUT, mesh=mesh, bias=False, dtype=WIDE).requires_grad_(trained)
    shape = (TOKENS // 2, IN) if kind is ColumnParallelLinear else (TOKENS, IN // 2)
    x = drawn(mesh.rank, *shape).requires_grad_()
    with kept_for_backward() as tensors:
        layer(x)
    return sorted(tuple(tensor.shape) for tensor in tensors)


@pytest.mark.quick
def test_the_gathered_input_is_not_kept_for_the_backward(pool: Pool) -> None:
    """A column-parallel linear keeps its own tokens and gathers again."""
    assert pool.run(2, saved, True) == [[(TOKENS // 2, IN), (OUT // 2, IN)]] * 2


@pytest.mark.quick
def test_a_frozen_linear_does_not_keep_its_input(pool: Pool) -> None:
    """Only the gradient of its weight would need it."""
    assert pool.run(2, saved, False) == [[(OUT // 2, IN)]] * 2
    assert pool.run(2, saved, False, RowParallelLinear) == [[(OUT, IN // 2)]] * 2


# -- the embedding

VOCABS = (1, 5, VOCAB, 12)
# The first row of a rank, one counted from the end, and one between; each is looked up.
PADDING = {1: None, 5: 2, VOCAB: -2, 12: 7}


def embeddings() -> Found:
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    found: Found = {}
    for vocab, dims in product(VOCABS, (1, 2)):
        torch.manual_seed(mesh.rank)
        layer = VocabParallelEmbedding(vocab, IN, mesh=mesh, padding_idx=PADDING[vocab], dtype=WIDE)
        y = layer(tokens(vocab, dims))
        y.backward(here(batch(dims + 1, IN, 2), "tokens", mesh))
        assert layer.weight.grad is not None
        found[vocab, dims] = {"y": y.detach(), "weight": layer.weight.detach(), "dweight": layer.weight.grad}
    return found


def tokens(vocab: int, dims: int) -> Tensor:
    shape = (TOKENS,) if dims == 1 else (TOKENS, 3)
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tp", TPS)
def test_embedding(pool: Pool, tp: int) -> None:
    """Any vocabulary; the rows of its padding start as zeros and get no gradient."""
    results = pool.run(tp, embeddings)
    for vocab, dims in product(VOCABS, (1, 2)):
        table, got, gradient = (
            whole([result[vocab, dims][name] for result in results], held)
            for name, held in (("weight", "rows"), ("y", "tokens"), ("dweight", "rows"))
        )
        assert table.shape == (-(-vocab // tp) * tp, IN)
        padding = PADDING[vocab]
        assert not table[vocab:].any() and (padding is None or not table[padding % vocab].any())
        assert table[:vocab].any(1).sum() == vocab - (padding is not None)
        real = table[:vocab].clone().requires_grad_()
        want = F.embedding(tokens(vocab, dims), real, padding)
        want.backward(batch(dims + 1, IN, 2))
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=0)
        torch.testing.assert_close(gradient[:vocab], real.grad, rtol=1e-12, atol=1e-12)
        assert not gradient[vocab:].any()


def test_a_padding_beyond_the_vocabulary_is_refused() -> None:
    for padding in (VOCAB, -VOCAB - 1):
        with pytest.raises(ValueError, match=rf"padding_idx is {padding}: it must be below vocab \({VOCAB}\), or None"):
            VocabParallelEmbedding(VOCAB, IN, mesh=Mesh.single(), padding_idx=padding)


# -- norms


def norms() -> Found:
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    rms, layer = RMSNorm(IN, mesh=mesh, eps=1e-5).double(), LayerNorm(IN, mesh=mesh).double()
    rms.weight.data.copy_(drawn(3, IN))
    layer.weight.data.copy_(drawn(3, IN))
    assert layer.bias is not None
    layer.bias.data.copy_(drawn(4, IN))
    found: Found = {}
    for dims in (2, 3):
        for name, norm in (("rms", rms), ("layer", layer)):
            norm.zero_grad()
            found[name, dims] = run(norm, batch(dims, IN, 1), batch(dims, IN, 2), "tokens", "tokens", mesh)
    return found


@pytest.mark.parametrize("tp", TPS)
def test_norms(pool: Pool, tp: int) -> None:
    """On split tokens the gradients of the weights are parts of a sum (RMSNorm: against the formula too)."""
    results = pool.run(tp, norms)
    held = {"y": "tokens", "dx": "tokens", "dweight": "sum", "dbias": "sum"}
    for dims in (2, 3):
        x, dy, weight, bias = batch(dims, IN, 1), batch(dims, IN, 2), drawn(3, IN), drawn(4, IN)
        weight.requires_grad_()
        bias.requires_grad_()

        def rms(x: Tensor, weight: Tensor = weight) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

        def layer(x: Tensor, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            return F.layer_norm(x, (IN,), weight, bias, 1e-5)

        check(results, ("rms", dims), held, rms, x, dy, weight=weight)
        check(results, ("layer", dims), held, layer, x, dy, weight=weight, bias=bias)


# -- a network of them


class Mlp(nn.Module):
    """What somebody would write with nn.Linear."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(IN, 4 * IN, mesh=mesh, input="replicated", dtype=WIDE)
        self.down = RowParallelLinear(4 * IN, IN, mesh=mesh, output="replicated", dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def megatron() -> list[np.ndarray]:
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    model = Mlp(mesh)
    with torch.no_grad():
        model.up.weight.copy_(here(drawn(1, 4 * IN, IN), "tokens", mesh))
        model.down.weight.copy_(here(drawn(2, IN, 4 * IN), "features", mesh))
    x = batch(3, IN, 5).requires_grad_()
    loss = model(x).square().sum()
    loss.backward()
    assert x.grad is not None
    return [loss.detach().numpy(), x.grad.numpy()]


@pytest.mark.quick
@pytest.mark.parametrize("tp", TPS)
def test_a_model_of_ones_own(pool: Pool, tp: int) -> None:
    x = batch(3, IN, 5).requires_grad_()
    loss = (F.gelu(x @ drawn(1, 4 * IN, IN).t()) @ drawn(2, IN, 4 * IN).t()).square().sum()
    loss.backward()
    assert x.grad is not None
    for got, gradient in pool.run(tp, megatron):
        np.testing.assert_allclose(got, loss.detach().numpy(), rtol=1e-12)
        np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-11)
