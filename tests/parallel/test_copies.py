"""Who holds the same, and who keeps whose copy: against what ranks hold, and against every set of nodes that dies."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from sentences import layouts, owners, region
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.choices import ZeroShard
from parallel.copies import holders, identical
from parallel.gradients.reduce import Gradients
from parallel.mesh import Mesh
from parallel.parameters import Parameters
from parallel.weights.layout import Layout, MeshShape
from parallel.weights.schema import Param, Schema

SCHEMA = Schema(
    (
        Param("embed", "vocab embed", std=1.0, at="first last"),
        Param("layers.{layer}.norm", "embed", std=1.0),
        Param("layers.{layer}.qkv", "(q: heads head + k: kv head + v: kv head) embed", std=1.0),
        Param("layers.{layer}.experts.{experts}.up", "expert_mlp embed", std=1.0),
    ),
    {"vocab": 30, "embed": 16, "layer": 2, "heads": 4, "kv": 1, "head": 16, "experts": 4, "expert_mlp": 8},
)


def grouped(keys: Mapping[int, Hashable]) -> dict[int, tuple[int, ...]]:
    return {rank: tuple(other for other in sorted(keys) if keys[other] == keys[rank]) for rank in sorted(keys)}


@settings(max_examples=40)
@given(layouts())
def test_ranks_are_identical_that_hold_the_same_elements(layout: Layout) -> None:
    held = owners(layout)
    assert identical(layout) == grouped(
        {
            rank: b"".join(np.packbits(array[rank]).tobytes() for array in held.values())
            for rank in range(layout.mesh.world)
        }
    )


def updated(layout: Layout, rank: int, shard: ZeroShard, replicas: int) -> frozenset[float]:
    """The numbers of the elements that a rank updates: those of all pieces are numbered one after the other."""
    dist.init_process_group("fake", rank=rank, world_size=layout.mesh.world, store=FakeStore())
    try:
        weights, first = Parameters(layout, Mesh.create(layout.mesh), torch.float64), 1
        numbers = dict[tuple[str, str], np.ndarray]()
        for key, array in owners(layout).items():
            numbers[key] = first + np.arange(math.prod(array.shape[1:])).reshape(array.shape[1:])
            first += numbers[key].size
        for name, label, view in weights.pieces():
            held = weights.shards[name]
            view.copy_(torch.from_numpy(numbers[name, label][region(held, held.piece(label))]))
        gradients = Gradients(weights, [nn.ParameterList(weights.values())], torch.float64, shard, replicas)
        return frozenset(number for part in gradients.parts for number in part.data.flatten().tolist() if number)
    finally:
        dist.destroy_process_group()


MESHES = (
    MeshShape(dp=4),
    MeshShape(dp=2, tp=2),
    MeshShape(pp=2, dp=2),
    MeshShape(dp=2, cp=2),
    MeshShape(dp=2, ep=2, tp=2),
    MeshShape(pp=2, tp=4),
)


RUNGS: tuple[tuple[ZeroShard, int], ...] = (("none", 1), ("optimizer", 1), ("gradients", 2), ("parameters", 2))


@pytest.mark.parametrize(
    ("mesh", "shard", "replicas"),
    [(mesh, *rung) for mesh in MESHES for rung in RUNGS if mesh.dp % rung[1] == 0],
    ids=str,
)
def test_ranks_are_identical_that_update_the_same_elements(mesh: MeshShape, shard: ZeroShard, replicas: int) -> None:
    layout = Layout(SCHEMA, mesh, (2,) if mesh.pp == 1 else (1, 1))
    keys = {rank: updated(layout, rank, shard, replicas) for rank in range(mesh.world)}
    assert identical(layout, shard, replicas) == grouped(keys)


def lasting(alike: Mapping[int, tuple[int, ...]], per_node: int) -> Iterator[frozenset[int]]:
    """The nodes that each image lies on, of its ranks and of those that keep copies of it."""
    kept = holders(alike, per_node)
    for same in set(alike.values()):
        copies = [kept[rank] for rank in same if rank in kept]
        yield frozenset(rank // per_node for rank in (*same, *copies))


@pytest.mark.quick
@pytest.mark.parametrize("world", range(1, 14))
@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
def test_each_image_is_on_two_nodes(world: int, per_node: int) -> None:
    """Be it on one rank, on two of a node, or on two nodes already: then nobody keeps a copy."""
    alone = {rank: (rank,) for rank in range(world)}
    pairs = {rank: tuple(range(rank // 2 * 2, min(rank // 2 * 2 + 2, world))) for rank in range(world)}
    everywhere = {rank: tuple(range(world)) for rank in range(world)}
    nodes = -(-world // per_node)
    for alike in (alone, pairs, everywhere):
        assert all(len(on) >= min(2, nodes) for on in lasting(alike, per_node))
        assert all(alike[holder] for holder in holders(alike, per_node).values())
    assert nodes == 1 or not holders(everywhere, per_node)
    assert nodes > 1 or not holders(alone, per_node)


@pytest.mark.quick
@pytest.mark.parametrize("nodes", [2, 4, 6, 10])
def test_pairs_of_nodes_keep_each_others(nodes: int) -> None:
    """Of all sets of two nodes, half as many lose something as there are nodes."""
    on = set(lasting({rank: (rank,) for rank in range(4 * nodes)}, 4))
    fatal = [pair for pair in combinations(range(nodes), 2) if any(each <= set(pair) for each in on)]
    assert len(fatal) == nodes // 2
