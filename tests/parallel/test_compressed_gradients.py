"""Gradients that are rounded where they are sent: to what numbers, and which sums stay as they were."""

from pathlib import Path

import engine
import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from megacore.parallel.enum_errors import Compression, ZeroShard
from megacore.parallel.gradients import rounding
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


@pytest.mark.parametrize(("word", "shard"), [("int4", "none"), ("int8", "gradients")])
def test_what_does_not_fit_is_refused(word: Compression, shard: ZeroShard) -> None:
    mesh = Mesh.single()
    weights = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, torch.float32)
    with pytest.raises(ValueError, match="compress"):
        Gradients(weights, [Times(weights["weight"])], shard=shard, compress=word)


# -- 8 bits, with error feedback


@pytest.mark.quick
def test_blocks_of_8_bits_lose_what_is_said_and_say_what_they_lose() -> None:
    """By a definition of their own, block by block; the scale is a power of two, so nothing is lost unseen."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 700, generator=generator) * 2.0 ** torch.randint(-160, 90, (3, 700), generator=generator)
    x[0, 256:512], x[1, :256], x[2, 0] = 0, 127.9, 2.0**127
    sent = rounding.unpack(rounding.pack(x), 700)
    assert rounding.pack(x).shape == (3, 3, 257) and rounding.pack(x).dtype == torch.uint8
    for row, got in zip(x.double().numpy(), sent.double().numpy(), strict=True):
        for start in range(0, 700, 256):
            block, found = row[start : start + 256], got[start : start + 256]
            largest = np.abs(block).max()
            scale = 2.0 ** max(np.floor(np.log2(largest)) - 6, -126) if largest else 1.0
            np.testing.assert_array_equal(found, np.clip(np.round(block / scale), -127, 127) * scale)
            assert (np.abs(block - found) <= max(largest, 2.0**-119) / 128).all()
    torch.testing.assert_close(sent + (x - sent), x, rtol=0, atol=0)
    torch.testing.assert_close(sent.double() + (x - sent).double(), x.double(), rtol=0, atol=0)
    x[0, 3], x[2, 600] = float("nan"), float("-inf")
    finite = rounding.unpack(rounding.pack(x), 700).isfinite()
    assert not finite[0, :256].any() and not finite[2, 512:].any() and finite[0, 256:].all() and finite[1].all()


BIG, STEPS, LEFT_OUT = (50, 41), 6, 2
BIG_SCHEMA = Schema((Param("weight", "embed mlp", std=1.0),), {"embed": 50, "mlp": 41, "layer": 1})


def whole_numbers(rank: int, step: int) -> Tensor:
    """A gradient whose sums are exact in fp32, of many sizes."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(-50, 50, BIG, generator=generator) * 2.0 ** torch.randint(0, 8, BIG, generator=generator)


def fed_back(world: int, shard: ZeroShard, replicas: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sums of each step, and what is left on this rank after it."""
    mesh = Mesh.create(MeshShape(dp=world))
    weights = Parameters(Layout(BIG_SCHEMA, mesh.shape, (1,)), mesh, torch.float32)
    weights.initialise(0)
    model = Times(weights["weight"])
    gradients = Gradients(weights, [model], torch.float32, shard, replicas, compress="int8")
    sums, left = [], []
    for step in range(STEPS):
        gradients.begin(2)
        for part in (0.25, 0.75):
            model(part * whole_numbers(mesh.rank, step)).sum().backward()
        gradients.finish()
        gradients.keep_residuals(torch.tensor(step != LEFT_OUT))
        sums.append(torch.empty(BIG))
        gradients.read("weight", lambda part: part.gradient, sums[-1])
        left.append(torch.cat([residual.clone() for _, residual in gradients.residuals("weight")]))
    return sums, left


@pytest.mark.quick
@pytest.mark.parametrize(("shard", "replicas", "roundings"), [("none", 1, 2), ("optimizer", 1, 1), ("optimizer", 2, 3)])
def test_what_is_sent_and_what_is_left_are_all_there_is(
    pool: Pool, shard: ZeroShard, replicas: int, roundings: int
) -> None:
    """All that has been sent and what is left on all ranks is the sum of all gradients, to the last bit; all ranks get
    the same bits; a step that is left out leaves nothing."""
    (sums, *others), left = zip(*pool.run(4, fed_back, 4, shard, replicas), strict=True)
    assert all(torch.equal(one, other) for each in others for one, other in zip(sums, each, strict=True))
    total, sent, largest = torch.zeros(BIG), torch.zeros(BIG), 50 * 2.0**7
    for step in range(STEPS):
        after = torch.stack([each[step] for each in left]).sum(0)
        if step == LEFT_OUT:
            torch.testing.assert_close(after, torch.stack([each[step - 1] for each in left]).sum(0), rtol=0, atol=0)
            continue
        total += torch.stack([whole_numbers(rank, step) for rank in range(4)]).sum(0)
        sent += sums[step]
        assert after.abs().max() > 0
        torch.testing.assert_close(sent + after, total, rtol=0, atol=0)
        # Of the gradients of a step and what was left before: of each rank, of a group's sum, of that of all.
        assert after.abs().max() <= 1.05 * roundings * 4 * largest / 128


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("world", "more", "learned", "off"),
    [
        pytest.param(2, ["zero.shard=none"], 0.75, 0.01, id="none"),
        pytest.param(2, ["zero.shard=optimizer"], 0.75, 0.01, id="optimizer"),
        pytest.param(4, ["zero.shard=none", "mesh.pp=2"], 0.75, 0.01, id="pp"),
        pytest.param(2, ["zero.shard=optimizer", "mesh.cp=2"], 0.75, 0.01, id="cp"),
        pytest.param(2, ["optimizer.name=muon"], 0.75, 0.01, id="muon"),
        # Tokens go to other experts where scores are near.
        pytest.param(4, ["model.family=mixtral", "model.num_local_experts=4", "mesh.ep=2"], 0.9, 0.03, id="experts"),
        pytest.param(2, ["lora.rank=8"], 0.96, 0.02, id="lora"),
    ],
)
def test_losses_are_near_those_of_fp32(
    pool: Pool, recipe: str, tmp_path: Path, world: int, more: list[str], learned: float, off: float
) -> None:
    overrides = [*more, "train.precision=fp32", "train.steps=30", "evaluate.every=0"]
    if "lora.rank=8" in more:
        engine.train(
            recipe, [f"out={tmp_path / 'base'}", "train.precision=fp32", "train.steps=3", "checkpoint.at_end=true"]
        )
        overrides.append(f"checkpoint.init={tmp_path / 'base'}")
    found = []
    for word in ("none", "int8"):
        run = [*overrides, f"zero.compress={word}", f"out={tmp_path / word}"]
        ranks = pool.run(world, engine.train, recipe, run)
        assert world > 2 or engine.same(ranks[0].weights, ranks[1].weights)
        found.append(np.array(ranks[0].values("loss")))
    whole, rounded = found
    assert rounded[0] == whole[0] and not np.array_equal(rounded, whole) and whole[-1] < learned * whole[0]
    np.testing.assert_allclose(rounded, whole, rtol=off)
