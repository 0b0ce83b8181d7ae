"""The seam between a linear and its products: the weight gradient is a call of its own, which may come later, and a
product may take the collective beside it along."""

import importlib
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from operators import Operators
from pool import Pool
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.layers.fp8 import Fp8
from megacore.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear, hand_to
from megacore.parallel.layers.product import DENSE, Product, SymmetricMemory
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.parameters import WeightGradient
from megacore.parallel.weights.layout import MeshShape

TOKENS, IN, OUT = 8, 16, 32


def gradients(mesh: Mesh, multiply: Product, later: bool) -> tuple[dict[str, Tensor], int]:
    """Of both linears, one after the other, and the messages of their backward.

    ``later``: those of the weights wait until the backward is over, as a zero bubble schedule has it.
    """
    waiting: list[tuple[nn.Parameter, WeightGradient]] = []
    torch.manual_seed(0)
    up = ColumnParallelLinear(IN, OUT, mesh=mesh, dtype=torch.bfloat16)
    down = RowParallelLinear(OUT, IN, mesh=mesh, bias=False, dtype=torch.bfloat16)
    up.product = down.product = multiply
    if later:
        hand_to(lambda *handed: waiting.append(handed), (up, down))
    x = torch.randn(TOKENS, IN).bfloat16().chunk(mesh.shape.tp)[mesh.place.tp].clone().requires_grad_()
    y = down(F.gelu(up(x)))
    with Operators(lambda operator, _, __: operator.namespace == "c10d") as messages:
        y.float().square().sum().backward()
        if later:
            assert x.grad is not None and up.weight.grad is None and down.weight.grad is None
            sent = messages.found
            for weight, gradient in waiting:
                weight.grad = gradient.make()
            assert messages.found == sent
    assert x.grad is not None and up.bias is not None and up.bias.grad is not None
    assert up.weight.grad is not None and down.weight.grad is not None
    found = {"dx": x.grad, "db": up.bias.grad, "up": up.weight.grad, "down": down.weight.grad}
    return found, messages.found


def queued() -> list[bool]:
    """Whether all gradients are the same to the bit, and the messages as many, for each product."""
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    same = []
    for multiply in (DENSE, Fp8.on(mesh.device)):
        (now, sent), (later, sent_later) = gradients(mesh, multiply, False), gradients(mesh, multiply, True)
        assert bool(sent) == (mesh.tp.size > 1)
        same.append(all(torch.equal(now[name], later[name]) for name in now) and sent == sent_later)
    return same


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_gradients_may_come_later(pool: Pool, tp: int) -> None:
    assert pool.run(tp, queued) == [[True, True]] * tp


def test_a_weight_that_two_linears_share_is_left_to_autograd() -> None:
    """One gradient of all its uses: whoever sums gradients counts how many come."""
    mesh = Mesh.single()
    one, other = ColumnParallelLinear(IN, IN, mesh=mesh), ColumnParallelLinear(IN, IN, mesh=mesh)
    again, handed = ColumnParallelLinear.of(one.weight, None, mesh), list[nn.Parameter]()
    hand_to(lambda weight, gradient: handed.append(weight), (one, other, again))
    again(other(one(torch.randn(TOKENS, IN)))).sum().backward()
    assert [weight is other.weight for weight in handed] == [True]
    assert one.weight.grad is not None and other.weight.grad is None


# -- products with their collectives


class Fallbacks:
    """torch's own plain forms of its two fused operators, for CPUs too, and how often each has run. They refuse what
    the fused ones do: parts of a gather whose memory has gaps."""

    def __init__(self) -> None:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        self.calls = Counter[str]()
        self.library = torch.library.Library("symm_mem", "IMPL")

        def gather_matmul(x: Tensor, *arguments: Any, **named: Any) -> Any:
            self.calls["gather"] += 1
            assert x.is_contiguous()
            return symmetric._fused_all_gather_matmul_fallback(x, *arguments, **named)

        def matmul_scatter(*arguments: Any) -> Any:
            self.calls["scatter"] += 1
            return symmetric._fused_matmul_reduce_scatter_fallback(*arguments)

        self.library.impl("fused_all_gather_matmul", gather_matmul, "CPU")
        self.library.impl("fused_matmul_reduce_scatter", matmul_scatter, "CPU")


def linears(mesh: Mesh, multiply: Product, shape: tuple[int, ...], dtype: torch.dtype, trained: bool) -> list[Tensor]:
    """The output of both linears, one after the other, and all gradients; those of the weights where they are
    trained."""
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(IN, OUT, mesh=mesh), RowParallelLinear(OUT, IN, mesh=mesh)
    for layer in (up, down):
        assert layer.bias is not None
        nn.init.normal_(layer.bias)
        layer.to(dtype).product = multiply
        layer.weight.requires_grad_(trained)
    x = torch.randn(shape).to(dtype).chunk(mesh.shape.tp)[mesh.place.tp].clone().requires_grad_()
    y = down(F.gelu(up(x.mT.contiguous().mT)))
    # A gradient whose memory is in another order than its tokens.
    y.backward(y.detach().mT.contiguous().mT)
    return [y.detach(), *(leaf.grad for leaf in (x, *up.parameters(), *down.parameters()) if leaf.grad is not None)]


def overlapped() -> list[tuple[bool, dict[str, int]]]:
    mesh, found = Mesh.create(MeshShape(tp=torch.distributed.get_world_size())), []
    for shape, dtype, trained in (
        ((TOKENS, IN), torch.float64, True),
        ((TOKENS, 3, IN), torch.float64, False),
        ((TOKENS, IN), torch.bfloat16, True),
    ):
        fallbacks = Fallbacks()
        mine, want = (linears(mesh, each, shape, dtype, trained) for each in (SymmetricMemory(), DENSE))
        fallbacks.library._destroy()
        bound = 1e-12 if dtype == torch.float64 else 2e-2
        same = len(mine) == len(want) and all(a.dtype == b.dtype for a, b in zip(mine, want, strict=True))
        close = same and all(torch.allclose(a, b, rtol=bound, atol=bound) for a, b in zip(mine, want, strict=True))
        found.append((close, dict(fallbacks.calls)))
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_products_with_their_collectives_compute_the_same(pool: Pool, tp: int) -> None:
    """A gather and a scatter forward, a gather back, and the scatter that no weight gradient goes beside."""
    trained, frozen = {"gather": 2, "scatter": 1}, {"gather": 2, "scatter": 2}
    assert pool.run(tp, overlapped) == [[(True, trained), (True, frozen), (True, trained)]] * tp


def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 6)
    group = Group((8, 9, 10, 11), 1, None)
    assert isinstance(SymmetricMemory.on(torch.device("cuda", 1), group), SymmetricMemory)
    with pytest.raises(ValueError, match=r"cuda:5 cannot reach the memory of cuda:6"):
        SymmetricMemory.on(torch.device("cuda", 5), group)
    with pytest.raises(ValueError, match=r"need GPUs, and this is cpu"):
        SymmetricMemory.on(torch.device("cpu"), group)


# -- summed where they are multiplied


def buckets(handed: bool, compiled: bool = False, microbatches: int = 2) -> list[Tensor]:
    """Of a small model after the backward of some microbatches, one for each parameter, and its norm."""
    config = configure({"preset": "llama-tiny", "num_hidden_layers": 2})
    mesh = Mesh.single()
    model = Model.create(config, layout_of(config, mesh.shape), mesh, torch.bfloat16)
    model.parameters.initialise(0)
    model.parameters.freeze([name for name in model.parameters if "norm" in name])
    held = model.parameters.values()
    memory = torch.cat([each.detach().flatten() for each in held])
    for each, part in zip(held, memory.split([each.numel() for each in held]), strict=True):  # as ZeRO has them
        each.data = part.view_as(each)
    if compiled:
        model.compile()
    summed = Gradients(model.parameters, model.chunks, bucket_bytes=1)
    received = Counter[type]()

    def receive(parameter: nn.Parameter, gradient: WeightGradient | torch.Tensor) -> None:
        received[type(gradient)] += 1
        before = [bucket.ended for bucket in summed.buckets]
        # Those of the layer that runs alone may still be to end.
        assert sum(bucket.complete and bucket.ended < bucket.rounds for bucket in summed.buckets) < 4
        summed.receive(parameter, gradient)
        # Where a round ends parameters may go, which compiled code that runs may need.
        assert not compiled or before == [bucket.ended for bucket in summed.buckets]

    if handed:
        model.hand_weight_gradients(receive)
    summed.begin(microbatches)
    for seed in range(microbatches):
        tokens = torch.randint(512, (32,), generator=torch.Generator().manual_seed(seed))
        model.chunks[0](None, Microbatch(tokens, tokens, torch.arange(32), 1, (32, 64))).backward()
    summed.finish()
    assert received == ({WeightGradient: 2 * 4 * microbatches} if handed else {})
    return [*(bucket.gradient for bucket in summed.buckets), summed.norm()]


def test_gradients_may_be_multiplied_where_they_are_summed() -> None:
    """Where the product cannot add by itself, to the same bit as autograd's."""
    pairs = zip(buckets(handed=True), buckets(handed=False), strict=True)
    assert all(torch.equal(mine, want) for mine, want in pairs)


@pytest.mark.in_turn(4, 1)
def test_compiled_code_hands_them_on_too() -> None:
    """All layers by the same code, to the same bit as autograd's."""
    torch.compiler.reset()
    counters.clear()
    real = torch.compile
    with patch.object(torch, "compile", lambda forward, options: real(forward, backend="aot_eager")):
        mine, graphs = buckets(handed=True, compiled=True), counters["stats"]["unique_graphs"]
        torch.compiler.reset()
        want = buckets(handed=False, compiled=True)
    torch.compiler.reset()
    assert graphs == 1 and all(torch.equal(one, other) for one, other in zip(mine, want, strict=True))
