"""Gradients and parameters in shares, on models that are no transformer: what is late, missing or shared."""

import gc
import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.parallel.collectives import Pending
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients import buckets, reduce
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.parameters import Parameters, WeightGradient
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema

NAMES = ("first", "left", "right", "last")
SCHEMA = Schema(tuple(Param(name, "embed mlp", std=1.0) for name in NAMES), {"embed": 5, "mlp": 7, "layer": 1})
STEPS, MICROBATCHES = 2, 3
RUNGS: tuple[ZeroShard, ...] = ("none", "optimizer", "gradients", "parameters")


class Times(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.receive: Callable[[Tensor, WeightGradient], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.weight if self.receive is None else InputGradient.apply(x, self.weight, self.receive)
        return y


class InputGradient(torch.autograd.Function):
    """Hands the weight gradient on, as linears do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, receive: Callable[[Tensor, WeightGradient], None]) -> Tensor:
        ctx.x, ctx.weight, ctx.receive = x, weight, receive
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        def add_to(total: Tensor, first: bool) -> None:
            _ = total.copy_(ctx.x * dy) if first else total.add_(ctx.x * dy)

        dx = dy * ctx.weight  # before the weight may go
        ctx.receive(ctx.weight, WeightGradient(lambda: ctx.x * dy, add_to))
        return dx, None, None


class Fork(nn.Module):
    """Goes left or right. (Ranks may do so differently within a unit: each of them gathers what it may use.)"""

    def __init__(self, left: nn.Parameter, right: nn.Parameter) -> None:
        super().__init__()
        self.left, self.right = Times(left), Times(right)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        y: Tensor = self.left(x) if left else self.right(x)
        return y


class Chain(nn.Module):
    """``first`` is used again at the end."""

    def __init__(self, weights: Parameters) -> None:
        super().__init__()
        self.first, self.fork = Times(weights["first"]), Fork(weights["left"], weights["right"])
        self.last, self.again = Times(weights["last"]), Times(weights["first"])

    def forward(self, x: Tensor, left: bool) -> Tensor:
        y: Tensor = self.again(self.last(self.fork(self.first(x), left)))
        return y


def went_left(rank: int, step: int, microbatch: int) -> bool:
    """On rank 1 always; on rank 0 never in the second step."""
    return rank == 1 or (step == 0 and microbatch == 1)


def train(shard: ZeroShard, splits: bool = False) -> list[dict[str, Tensor]]:
    """The summed gradients of each step. Where the backward ``splits``, those of ``last`` are computed when the next
    microbatch's backward is over; those of the others come from autograd."""
    mesh = Mesh.create(MeshShape(dp=2))
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float64)
    weights.initialise(0)
    model = Chain(weights)
    gradients = Gradients(weights, [model], torch.float64, shard, bucket_bytes=300)
    model.last.receive = gradients.receive if splits else None
    found = []
    for step in range(STEPS):
        gradients.begin(MICROBATCHES)
        waiting = deque[Callable[[], None]]()
        for microbatch in range(MICROBATCHES):
            x = torch.full((5, 7), 1.0 + mesh.rank + 10 * microbatch, dtype=torch.float64)
            loss = model(x, went_left(mesh.rank, step, microbatch)).sum()
            with gradients.deferred() if splits else nullcontext(lambda: None) as compute:
                loss.backward()
            waiting.append(compute)
            with torch.no_grad():
                if len(waiting) > 1:
                    waiting.popleft()()
        with torch.no_grad():
            waiting.pop()()
        gradients.finish()
        gradients.norm()
        whole = {name: torch.empty(5, 7, dtype=torch.float64) for name in NAMES}
        for name, tensor in whole.items():
            gradients.read(name, lambda part: part.gradient, tensor)
        found.append(whole)
        gradients.updated()
    for values in gradients.values.values():
        values.wait()
    return found


def lives_on(shard: ZeroShard) -> bool:
    """Whether something is left of a step when all have let go of it."""
    train(shard)
    gc.collect()
    return any(isinstance(each, Mesh | Parameters | Chain) for each in gc.get_objects())


@pytest.mark.parametrize("shard", RUNGS)
def test_hooks_keep_nothing_alive(pool: Pool, shard: ZeroShard) -> None:
    assert not any(pool.run(2, lives_on, shard))


def by_hand() -> list[dict[str, Tensor]]:
    mesh = Mesh.single()
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float64)
    weights.initialise(0)
    model, found = Chain(weights), []
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(2):
            for microbatch in range(MICROBATCHES):
                x = torch.full((5, 7), 1.0 + rank + 10 * microbatch, dtype=torch.float64)
                model(x, went_left(rank, step, microbatch)).sum().backward()
        grads = {name: weights[name].grad for name in NAMES}
        found.append({name: torch.zeros(5, 7) if grad is None else grad.clone() for name, grad in grads.items()})
    return found


@pytest.mark.parametrize("splits", [False, True], ids=["", "split"])
@pytest.mark.parametrize("shard", RUNGS)
def test_a_gradient_that_does_not_come_is_zero_and_one_that_comes_later_is_waited_for(
    pool: Pool, shard: ZeroShard, splits: bool
) -> None:
    """Each rank has others of them, at other times: the sums must still meet."""
    want = by_hand()
    for found in pool.run(2, train, shard, splits):
        for step in range(STEPS):
            for name in NAMES:
                torch.testing.assert_close(found[step][name], want[step][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_squares_are_summed_in_fp64(dtype: torch.dtype) -> None:
    """On a CPU, and as a GPU does; a sum in fp32 would be off by a thousand times more."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in ((3, 5), (1 << 19,), (0,), ())]
    exact = [math.fsum(x * x for x in tensor.double().flatten().tolist()) for tensor in tensors]
    assert reduce.square_sums(tensors).tolist() == pytest.approx(exact, rel=1e-13)
    one_kernel = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square_()
    assert one_kernel.dtype == torch.float64 and one_kernel.tolist() == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["autograd's", "bucket's"])
def test_gradients_that_nobody_shares_can_be_handed_in(dtype: torch.dtype) -> None:
    mesh = Mesh.single()
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float64)
    gradients = Gradients(weights, [nn.ParameterList(weights.values())], dtype)
    gradients.begin(2)
    for _ in range(2):
        gradients.receive(weights["left"], torch.ones(5, 7))
    gradients.finish()
    assert gradients.norm() == torch.tensor(4 * 35, dtype=dtype).sqrt()
    assert [part.gradient.unique().tolist() for part in gradients.parts] == [[0.0], [2.0], [0.0], [0.0]]


@pytest.mark.parametrize("shard", ["gradients", "optimizer"])
def test_a_gradient_too_many_is_an_error(shard: ZeroShard) -> None:
    mesh = Mesh.single()
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float64)
    gradients = Gradients(weights, [nn.ParameterList(weights.values())], torch.float64, shard)
    gradients.begin(1)
    gradients.receive(weights["left"], torch.ones(5, 7))
    gradients.finish()
    assert gradients.norm() == 35**0.5
    with pytest.raises(RuntimeError, match=r"a gradient of left came after those of all microbatches"):
        gradients.receive(weights["left"], torch.ones(5, 7))


@pytest.mark.parametrize("shard", RUNGS[1:])
def test_groups_of_replicas_sum_their_slices_beside_the_backward(
    monkeypatch: pytest.MonkeyPatch, shard: ZeroShard
) -> None:
    """All but the last few are summed, or on their way, when it is over; then the others follow in their order."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = Mesh.create(MeshShape(dp=4))
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float64)
    model = Chain(weights)
    gradients = Gradients(weights, [model], torch.float64, shard, replicas=2, bucket_bytes=1)
    summed: list[int] = []
    start = buckets.start_all_reduce

    def note(x: Tensor, group: Group) -> Pending:
        summed.append(x.data_ptr())
        return start(x, group)

    monkeypatch.setattr(buckets, "start_all_reduce", note)
    gradients.begin(2)
    for _ in range(2):
        model(torch.ones(5, 7, dtype=torch.float64), True).sum().backward()
    beside = len(summed)
    gradients.finish()
    dist.destroy_process_group()
    assert beside > 0 and summed == [bucket.gradient.data_ptr() for bucket in gradients.buckets]
