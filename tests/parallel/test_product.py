"""The seam between a linear and its products: the weight gradient is a call of its own, which may come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.fp8 import Fp8
from parallel.layout import MeshShape
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.mesh import Mesh
from parallel.product import DENSE, Operand, Product

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
