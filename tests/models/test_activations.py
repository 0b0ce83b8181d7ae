"""What is held between the forward of blocks and their backward, byte for byte, and what the backward repeats."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from operators import calls_of
from pool import Pool
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megacore.models.assemble import Model
from megacore.models.decoder import Decoder, Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel import collectives
from megacore.parallel.layers import product as products
from megacore.parallel.memory.recompute import Activations, Recompute
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape

LLAMA = {"preset": "llama-tiny"}
GPT2 = {"preset": "gpt2-tiny", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TOKENS, EMBED, LAYERS = 256, 64, 4
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OPTIONS = list(product(RECOMPUTE, (False, True)))

# Of one token and block in bf16. Features: the inputs of both norms, of both column-parallel products, of both
# row-parallel ones, and what the products give to attention and to the activation function. In fp32 (LayerNorm's in
# bf16, two of them): a statistic of each norm, and one of each head.
KEPT = {
    ("llama", "none"): 2 * (2 * 64 + 2 * 64 + 64 + 176 + (64 + 32 + 32) + 2 * 176) + 2 * 4 + 4 * 4,
    ("llama", "selective"): 2 * (2 * 64 + 64 + (64 + 32 + 32) + 2 * 176) + 2 * 4 + 4 * 4,
    ("llama", "full"): 2 * 64,
    ("gpt2", "none"): 2 * (2 * 64 + 2 * 64 + 64 + 256 + 3 * 64 + 256) + 2 * 4 + 4 * 4,
    ("gpt2", "selective"): 2 * (2 * 64 + 64 + 3 * 64 + 256) + 2 * 4 + 4 * 4,
    ("gpt2", "full"): 2 * 64,
}


class Storages(TorchDispatchMode):
    """Every storage that comes to be."""

    def __init__(self, old: Iterable[Tensor]) -> None:
        super().__init__()
        self.old = {tensor.untyped_storage()._cdata for tensor in old}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.old:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def alive(self) -> int:
        """Bytes."""
        return sum(nbytes for storage, nbytes in self.made.values() if not storage.expired())


def made(section: dict[str, Any], dtype: torch.dtype, activations: Activations, mesh: Mesh | None = None) -> Decoder:
    config, mesh = configure(section), mesh or Mesh.single()
    model = Model.create(config, layout_of(config, mesh.shape), mesh, dtype, activations=activations)
    model.parameters.initialise(0)
    return model.chunks[0]


def microbatch(tp: int = 1) -> Microbatch:
    tokens = torch.randint(512, (TOKENS,), generator=torch.Generator().manual_seed(0))
    return Microbatch(tokens, tokens, torch.arange(TOKENS // 2).repeat(2), 2, (TOKENS // tp, EMBED))


def blocks(chunk: Decoder, x: Tensor) -> Tensor:
    return chunk.run(chunk.layers.values(), x, chunk.context(microbatch()))


@pytest.mark.parametrize(("recompute", "offload"), OPTIONS)
@pytest.mark.parametrize("section", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bytes_between_forward_and_backward(section: dict[str, Any], recompute: Recompute, offload: bool) -> None:
    """With offload as many, each of them once: had the tensors stayed, there would be twice as many."""
    chunk = made(section, torch.bfloat16, Activations(recompute, offload))
    context = chunk.context(microbatch())
    tables = context.rotations.get("rope", ())
    leaf = torch.randn(TOKENS, EMBED).bfloat16().requires_grad_()
    with Storages([*chunk.parameters(), *tables, leaf]) as storages:
        y = chunk.run(chunk.layers.values(), leaf * 1, context)
        family = "llama" if tables else "gpt2"
        # The tables go to the host too, once for all blocks; fully recomputed blocks are given them by their caller.
        copied = sum(t.nbytes for t in tables) if offload and recompute != "full" else 0
        want = LAYERS * TOKENS * KEPT[family, recompute] + y.nbytes + copied
        assert storages.alive == want
        y.backward(torch.ones_like(y))
        del y
    # Afterwards there is nothing but the leaf's gradient and those of the parameters.
    assert leaf.grad is not None
    assert storages.alive == leaf.grad.nbytes + sum(p.nbytes for p in chunk.layers.parameters())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("section", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_selective_recomputation_multiplies_no_matrices_again(section: dict[str, Any], offload: bool) -> None:
    products = dict[Recompute, int]()
    for recompute in RECOMPUTE:
        chunk = made(section, torch.float32, Activations(recompute, offload))
        y = blocks(chunk, torch.randn(TOKENS, EMBED).requires_grad_())
        with calls_of("mm", "addmm", "bmm") as calls:
            y.backward(torch.ones_like(y))
        products[recompute] = calls.found
    assert products["selective"] == products["none"] >= LAYERS * 4 * 2
    # Of a block's four products the last is not needed again.
    assert products["full"] == products["none"] + LAYERS * 3


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Counts the collectives of the linears."""
    before = {name: getattr(products, name) for name in ("start_all_gather", "start_reduce_scatter")}

    def counting(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> collectives.Pending:
            counts[name] += 1
            return before[name](*arguments, **named)

        return call

    for name in before:
        setattr(products, name, counting(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(products, name, function)


def messages(recompute: Recompute) -> tuple[int, int]:
    """(forward, backward)."""
    mesh = Mesh.create(MeshShape(tp=2))
    chunk = made(LLAMA, torch.float64, Activations(recompute), mesh)
    forward, backward = Counter[str](), Counter[str]()
    with counted(forward):
        y = blocks(chunk, torch.ones(TOKENS // 2, EMBED, dtype=torch.float64, requires_grad=True))
    with counted(backward):
        y.backward(torch.ones_like(y))
    return forward.total(), backward.total()


@pytest.mark.in_turn(4, 1)
def test_selective_recomputation_communicates_nothing_again(pool: Pool) -> None:
    """A block's forward has four collectives and its backward six, for the inputs of two products are gathered anew."""
    extra: dict[Recompute, int] = {"none": 0, "selective": 0, "full": 4}
    for recompute, again in extra.items():
        assert pool.run(2, messages, recompute) == [(LAYERS * 4, LAYERS * (6 + again))] * 2


def test_evaluation_keeps_nothing() -> None:
    for recompute, offload in OPTIONS:
        chunk = made(GPT2, torch.float32, Activations(recompute, offload))
        with torch.no_grad(), Storages(chunk.parameters()) as storages:
            y = blocks(chunk, torch.ones(TOKENS, EMBED))
        assert storages.alive == y.nbytes


def test_blocks_compiled_for_some_documents_take_any_others() -> None:
    """A packing is data: it is neither compiled again for each, nor forgotten."""
    compiles = Counter[str]()

    def backend(graph: Any, inputs: Any) -> Any:
        compiles["graphs"] += 1
        return graph

    chunk = made(LLAMA | {"num_hidden_layers": 1}, torch.float64, Activations("none"))
    (block,) = chunk.layers.values()
    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend)
    x, half = torch.randn(TOKENS, EMBED, dtype=torch.float64), TOKENS // 2
    for lengths in [(half, half), (1, half - 1, half), (2, half - 2, 3, half - 3), (half, 5, half - 5)] * 2:
        context = chunk.context(replace(microbatch(), documents=lengths))
        torch.testing.assert_close(compiled(x, context), block(x, context), rtol=1e-12, atol=1e-12)
    assert compiles["graphs"] <= 2
    torch.compiler.reset()
