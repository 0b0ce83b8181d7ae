"""The live mesh: whoever talks in a step has talked before, and a group has the same name in all of its ranks."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from connections import connecting_at_first_use
from pool import Pool
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.rank_sets import divided, in_rounds
from megacore.parallel.weights.layout import MeshShape
from megacore.rank import RankPlace, join
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep


class NCCL:
    """Stands for torch's, which a build for CPUs has not."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.urgent, self._timeout = is_high_priority_stream, timedelta(0)


def test_every_group_of_nccl_has_urgent_streams_and_the_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[dict[str, Any]]()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: made.append(given))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.append(given))
    minutes = timedelta(minutes=7)
    join(RankPlace(0, 2, 0, 2, True), "cuda", minutes)
    Mesh(MeshShape(dp=2), 0, torch.device("cuda", 0), minutes)._new_group((0, 1))
    assert [(each["timeout"], each["pg_options"].urgent, each["pg_options"]._timeout) for each in made] == [
        (minutes, True, minutes)
    ] * 2
    join(RankPlace(0, 2, 0, 2, True), "cpu", minutes)
    Mesh(MeshShape(dp=2), 0, torch.device("cpu"), minutes)._new_group((0, 1))
    assert [(each["timeout"], each["pg_options"]) for each in made[2:]] == [(minutes, None)] * 2


def connected_in_a_step(shape: MeshShape, shard: ZeroShard, replicas: int) -> tuple[int, list[str]]:
    """(connections before the first step, those that it makes itself) of this rank."""
    with connecting_at_first_use() as connected:
        mesh = Mesh.create(shape)
        config = configure({"preset": "llama-tiny", "num_hidden_layers": 2, "tie_word_embeddings": True})
        model = Model.create(config, layout_of(config, shape, 1), mesh, torch.float32)
        model.parameters.initialise(0)
        gradients = Gradients(model.parameters, model.chunks, torch.float32, shard, replicas)
        step = TrainStep(mesh, Pipeline(mesh, model.chunks, torch.float32), gradients, Optimizer(gradients, lr=0.1))
        before = len(connected)
        tokens = torch.arange(16)
        activation = (16 // shape.tp, config.sizes["embed"])
        step([Microbatch(tokens, tokens, tokens, 1, activation)] * 2, 0.1)
    return before, connected[before:]


@pytest.mark.parametrize(
    ("shape", "shard", "replicas"),
    [(MeshShape(pp=2, tp=2), "none", 1), (MeshShape(pp=2, dp=2), "gradients", 1), (MeshShape(dp=4), "parameters", 2)],
    ids=str,
)
def test_all_connections_are_made_before_the_first_step(
    pool: Pool, shape: MeshShape, shard: ZeroShard, replicas: int
) -> None:
    """NCCL makes them at first use, where each host waits for the others: in a step they may never meet."""
    for before, within in pool.run(shape.world, connected_in_a_step, shape, shard, replicas):
        assert before and not within


@contextmanager
def groups_made(world: int, rank: int) -> Iterator[list[tuple[int, ...]]]:
    """In this block, as one rank of a world that is not there -> the ranks of each group that it makes."""
    made, real = list[tuple[int, ...]](), dist.new_group

    def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
        made.append(tuple(ranks))
        group: dist.ProcessGroup | None = real(ranks, **options)
        return group

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with patch.object(dist, "new_group", new_group):
            yield made
    finally:
        dist.destroy_process_group()


def make_all(shape: MeshShape, preset: str, layers: int, tied: bool, parts: int) -> None:
    """The groups that a run of a model makes, hybrid sharding included."""
    mesh = Mesh.create(shape)
    config = configure({"preset": preset, "num_hidden_layers": layers, "tie_word_embeddings": tied})
    layout = layout_of(config, shape, 1)
    mesh.make_groups(layout.replica_sets())
    mesh.make_groups(divided(layout, parts))


@pytest.mark.parametrize(
    "shape", [MeshShape(pp=4, dp=2, tp=2), MeshShape(pp=2, dp=4, tp=1), MeshShape(pp=3, dp=4, tp=4)], ids=str
)
def test_all_ranks_of_a_group_make_it_as_the_same_one_of_theirs(shape: MeshShape) -> None:
    """torch names it by its ranks and the number of groups that a process has. Tied tables are on two of the stages:
    the others make none for them, and must count on all the same."""
    made = []
    for rank in range(shape.world):
        with groups_made(shape.world, rank) as own:
            make_all(shape, "llama-tiny", 2 * shape.pp, tied=True, parts=2)
        made.append(own)
    for rank, own in enumerate(made):
        for number, ranks in enumerate(own):
            assert rank in ranks and all(made[other][number] == ranks for other in ranks)
    assert len({len(own) for own in made}) == 1


@pytest.mark.parametrize("shape", [MeshShape(pp=8, dp=64, tp=8), MeshShape(pp=16, dp=128, tp=8)], ids=str)
def test_thousands_of_ranks_make_a_handful_of_groups_each(shape: MeshShape) -> None:
    with groups_made(shape.world, shape.world // 2 + 1) as own:
        make_all(shape, "llama-3.1-70b", 80, tied=False, parts=4)
    assert 4 < len(own) <= 12


def test_rounds_share_no_rank_and_are_the_same_in_any_order() -> None:
    sets = [(0, 1), (2, 3), (0, 3), (1, 2), (0, 1, 2, 3), (4, 5)]
    rounds = in_rounds(sets)
    assert rounds == in_rounds(sets[::-1]) and sorted(itertools.chain(*rounds)) == sorted(sets)
    for each in rounds:
        ranks = [rank for one in each for rank in one]
        assert len(ranks) == len(set(ranks))
