"""StarCoder2's own: embeddings are dropped too, with the probability of their own field."""

from __future__ import annotations

import pytest
import torch
from families import drawn

from models.assemble import Model
from models.decoder import Microbatch
from models.registry import configure
from models.stages import layout_of
from parallel.mesh import Mesh
from parallel.weights.layout import MeshShape


@pytest.mark.parametrize("field", ["attention_dropout", "embedding_dropout", "residual_dropout"])
def test_each_dropout_drops_in_training_alone(field: str) -> None:
    config = configure(drawn("starcoder2", **{field: 0.5}))
    model = Model.create(config, layout_of(config, MeshShape()), Mesh.single(), torch.float64)
    model.parameters.initialise(0)
    tokens = torch.arange(12)

    def loss(seed: int) -> float:
        batch = Microbatch(tokens, tokens, tokens, 1, (12, config.sizes["embed"]), seed=seed)
        return float(model.chunks[0](None, batch))

    assert loss(1) == loss(1) != loss(2)
    model.train(False)
    assert loss(1) == loss(2)
