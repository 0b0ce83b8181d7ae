"""The live mesh: whoever talks in a step has talked before."""

from __future__ import annotations

import pytest
import torch
from connections import connecting_at_first_use
from pool import Pool

from megacore.optimizer import Optimizer
from megacore.step import TrainStep
from models.assemble import Model
from models.decoder import Microbatch
from models.registry import configure
from models.stages import layout_of
from parallel.layout import MeshShape
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.zero import Shard, sharing


def connected_in_a_step(shape: MeshShape, shard: Shard, replicas: int) -> tuple[int, list[str]]:
    """(connections before the first step, those that it makes itself) of this rank."""
    with connecting_at_first_use() as connected:
        mesh = Mesh.create(shape)
        config = configure({"preset": "llama-tiny", "num_hidden_layers": 2, "tie_word_embeddings": True})
        model = Model.create(config, layout_of(config, shape, 1), mesh, torch.float32)
        model.parameters.initialise(0)
        gradients = sharing(model.parameters, model.chunks, torch.float32, shard, replicas)
        step = TrainStep(mesh, Pipeline(mesh, model.chunks, torch.float32), gradients, Optimizer(gradients, lr=0.1))
        before = len(connected)
        tokens = torch.arange(16)
        activation = (16 // shape.tp, config.sizes["embed"])
        step([Microbatch(tokens, tokens, tokens, 1, activation)] * 2, 0.1)
    return before, connected[before:]


@pytest.mark.parametrize(
    ("shape", "shard", "replicas"),
    [
        (MeshShape(pp=2, tp=2), "none", 1),
        (MeshShape(pp=2, dp=2), "gradients", 1),
        (MeshShape(dp=4), "parameters", 2),
    ],
    ids=str,
)
def test_all_connections_are_made_before_the_first_step(
    pool: Pool, shape: MeshShape, shard: Shard, replicas: int
) -> None:
    """NCCL makes them at first use, where each host waits for the others: in a step they may never meet."""
    for before, within in pool.run(shape.world, connected_in_a_step, shape, shard, replicas):
        assert before and not within
