"""Gradients that are rounded where they are sent: to what numbers, and which sums stay as they were."""

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from megacore.parallel.enum_errors import Compression, ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema

SHAPE, MICROBATCHES = (5, 7), 3
SCHEMA = Schema((Param("weight", "embed mlp", std=1.0),), {"embed": 5, "mlp": 7, "layer": 1})


class Times(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def drawn(rank: int, microbatch: int) -> Tensor:
    """The gradient that a rank has of a microbatch, of many sizes."""
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(SHAPE, generator=generator) * 10 ** torch.randint(-4, 5, SHAPE, generator=generator)


def summed(world: int, shard: ZeroShard, replicas: int, compress: Compression) -> Tensor:
    mesh = Mesh.create(MeshShape(dp=world))
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float32)
    weights.initialise(0)
    model = Times(weights["weight"])
    gradients = Gradients(weights, [model], torch.float32, shard, replicas, compress=compress)
    gradients.begin(MICROBATCHES)
    for microbatch in range(MICROBATCHES):
        model(drawn(mesh.rank, microbatch)).sum().backward()
    gradients.finish()
    assert all(part.gradient.dtype == torch.float32 for part in gradients.parts)
    whole = torch.empty(SHAPE)
    gradients.read("weight", lambda part: part.gradient, whole)
    return whole


def rounded_sum(sent: list[Tensor]) -> Tensor:
    """Each is rounded, and their sum is."""
    return torch.stack([each.bfloat16().double() for each in sent]).sum(0).bfloat16().float()


def by_hand(world: int, shard: ZeroShard, replicas: int) -> Tensor:
    own = [[drawn(rank, microbatch) for microbatch in range(MICROBATCHES)] for rank in range(world)]
    if shard in ("none", "optimizer"):  # which add up microbatches first
        own = [[sum(each[1:], each[0])] for each in own]
    size = world // replicas
    slices = []
    for first in range(0, world, size):
        rounds = [rounded_sum(list(sent)) for sent in zip(*own[first : first + size], strict=True)]
        slices.append(sum(rounds[1:], rounds[0]))
    return slices[0] if replicas == 1 else rounded_sum(slices)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("world", "shard", "replicas"),
    [
        (2, "none", 1),
        (4, "optimizer", 1),
        (4, "gradients", 1),
        (4, "parameters", 1),
        (4, "optimizer", 2),
        (4, "gradients", 2),
    ],
)
def test_each_message_is_rounded_and_what_is_added_up_is_not(
    pool: Pool, world: int, shard: ZeroShard, replicas: int
) -> None:
    want = by_hand(world, shard, replicas)
    for found in pool.run(world, summed, world, shard, replicas, "bf16"):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
    # Two roundings, of a message and of a sum of messages, or four where slices are summed too.
    terms = sum(drawn(rank, m).double().abs() for rank in range(world) for m in range(MICROBATCHES))
    for exact in pool.run(world, summed, world, shard, replicas, "none"):
        assert ((exact - want).abs() <= 2.02 * replicas * 2**-8 * terms).all() and not torch.equal(exact, want)


def test_a_rank_that_sends_nothing_rounds_nothing() -> None:
    mesh = Mesh.single()
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.bfloat16)
    weights.initialise(0)
    model = Times(weights["weight"])
    gradients = Gradients(weights, [model], torch.float32, "optimizer", compress="bf16")
    gradients.begin(1)
    gradients.receive(weights["weight"], drawn(0, 0))
    gradients.finish()
    whole = torch.empty(SHAPE)
    gradients.read("weight", lambda part: part.gradient, whole)
    torch.testing.assert_close(whole, drawn(0, 0), rtol=0, atol=0)


def test_another_word_is_refused() -> None:
    mesh = Mesh.single()
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float32)
    with pytest.raises(ValueError, match="compress"):
        Gradients(weights, [Times(weights["weight"])], compress="int8")  # type: ignore[arg-type]
