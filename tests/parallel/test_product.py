"""The seam between a linear and its products: the weight gradient is a call of its own, which may come later, and a
product may take the collective beside it along."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.fp8 import Fp8
from parallel.layout import MeshShape
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.mesh import Group, Mesh
from parallel.product import DENSE, Operand, Product, SymmetricMemory

TOKENS, IN, OUT = 8, 16, 32


@dataclass(frozen=True)
class Queued(Product):
    """Another product, whose weight gradients wait until they are asked for: what a zero bubble schedule does."""

    of: Product
    waiting: list[Callable[[], Tensor | None]] = field(default_factory=list)

    def operands(self, *arguments: Any) -> tuple[Operand, Operand]:
        return self.of.operands(*arguments)

    def gradient(self, *arguments: Any) -> Operand:
        return self.of.gradient(*arguments)

    def forward(self, *arguments: Any) -> Tensor:
        return self.of.forward(*arguments)

    def input_gradient(self, *arguments: Any) -> Tensor:
        return self.of.input_gradient(*arguments)

    def weight_gradient(self, *arguments: Any) -> None:
        self.waiting.append(partial(self.of.weight_gradient, *arguments))


class Messages(TorchDispatchMode):
    """How many there are."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += function.namespace == "c10d"
        return function(*arguments, **(named or {}))


def gradients(mesh: Mesh, multiply: Product) -> tuple[dict[str, Tensor], int]:
    """Of both linears, one after the other, and the messages of their backward."""
    torch.manual_seed(0)
    up = ColumnParallelLinear(IN, OUT, mesh=mesh, dtype=torch.bfloat16)
    down = RowParallelLinear(OUT, IN, mesh=mesh, bias=False, dtype=torch.bfloat16)
    up.product = down.product = multiply
    x = torch.randn(TOKENS, IN).bfloat16().chunk(mesh.shape.tp)[mesh.place.tp].clone().requires_grad_()
    y = down(F.gelu(up(x)))
    with Messages() as messages:
        y.float().square().sum().backward()
        if isinstance(multiply, Queued):
            assert x.grad is not None and up.weight.grad is None and down.weight.grad is None
            sent = messages.count
            down.weight.grad, up.weight.grad = (gradient() for gradient in multiply.waiting)
            assert messages.count == sent
    assert x.grad is not None and up.bias is not None and up.bias.grad is not None
    assert up.weight.grad is not None and down.weight.grad is not None
    found = {"dx": x.grad, "db": up.bias.grad, "up": up.weight.grad, "down": down.weight.grad}
    return found, messages.count


def queued() -> list[bool]:
    """Whether all gradients are the same to the bit, and the messages as many, for each product."""
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    same = []
    for multiply in (DENSE, Fp8.on(mesh.device)):
        (now, sent), (later, sent_later) = gradients(mesh, multiply), gradients(mesh, Queued(multiply))
        assert bool(sent) == (mesh.tp.size > 1)
        same.append(all(torch.equal(now[name], later[name]) for name in now) and sent == sent_later)
    return same


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_gradients_may_come_later(pool: Pool, tp: int) -> None:
    assert pool.run(tp, queued) == [[True, True]] * tp


# -- products with their collectives


class Emulated:
    """torch's two fused operators for CPUs, and how often each has run: collectives and products, one after another."""

    def __init__(self) -> None:
        importlib.import_module("torch.distributed._symmetric_memory")
        self.calls = Counter[str]()
        self.library = torch.library.Library("symm_mem", "IMPL")
        self.library.impl("fused_all_gather_matmul", self.gather_matmul, "CPU")
        self.library.impl("fused_matmul_reduce_scatter", self.matmul_scatter, "CPU")

    def gather_matmul(
        self, a: Tensor, matrices: list[Tensor], dim: int, group: str, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        self.calls["gather"] += 1
        found = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        parts = [torch.empty_like(a) for _ in range(found.size())]
        dist.all_gather(parts, a.contiguous(), found)
        whole = torch.cat(parts, dim)
        return whole if return_A else None, [whole @ matrix for matrix in matrices]

    def matmul_scatter(self, a: Tensor, matrix: Tensor, op: str, dim: int, group: str) -> Tensor:
        self.calls["scatter"] += 1
        found = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        y = a @ matrix
        dist.all_reduce(y, dist.ReduceOp.SUM, found)
        assert op == "sum"
        return y.chunk(found.size(), dim)[found.rank()].clone()


def linears(mesh: Mesh, multiply: Product, shape: tuple[int, ...]) -> list[Tensor]:
    """The output of both linears, one after the other, and all gradients."""
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(IN, OUT, mesh=mesh), RowParallelLinear(OUT, IN, mesh=mesh)
    for layer in (up, down):
        assert layer.bias is not None
        nn.init.normal_(layer.bias)
        layer.double().product = multiply
    x = torch.randn(shape).double().chunk(mesh.shape.tp)[mesh.place.tp].clone().requires_grad_()
    y = down(F.gelu(up(x)))
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, *up.parameters(), *down.parameters()) if leaf.grad is not None)]


def overlapped() -> tuple[bool, dict[str, int]]:
    mesh, emulated = Mesh.create(MeshShape(tp=torch.distributed.get_world_size())), Emulated()
    close = True
    for shape in ((TOKENS, IN), (TOKENS, 3, IN)):
        pairs = zip(linears(mesh, SymmetricMemory(), shape), linears(mesh, DENSE, shape), strict=True)
        close &= all(torch.allclose(mine, want, rtol=1e-12, atol=1e-12) for mine, want in pairs)
    emulated.library._destroy()
    return close, dict(emulated.calls)


@pytest.mark.parametrize("tp", [2, 4])
def test_products_with_their_collectives_compute_the_same(pool: Pool, tp: int) -> None:
    """Two of each kind in a forward and a backward: a gather and a scatter of each linear."""
    assert pool.run(tp, overlapped) == [(True, {"gather": 4, "scatter": 4})] * tp


def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 6)
    group = Group((8, 9, 10, 11), 1, None)
    assert isinstance(SymmetricMemory.on(torch.device("cuda", 1), group), SymmetricMemory)
    with pytest.raises(ValueError, match=r"cuda:5 cannot reach the memory of cuda:6"):
        SymmetricMemory.on(torch.device("cuda", 5), group)
    with pytest.raises(ValueError, match=r"need GPUs, and this is cpu"):
        SymmetricMemory.on(torch.device("cpu"), group)
