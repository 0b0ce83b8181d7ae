"""A word that chooses nothing is refused wherever one is asked for, never taken as something else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacore.models.blocks import FeedForward
from megacore.models.rope_config import DefaultRope, to_hugging_face
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema

# They are wrong on purpose, whatever the annotations say.
Wrong = Any
ONE = Mesh.single()


def parameters() -> Parameters:
    params = Param("a", "embed"), Param("mlp.up.weight", "mlp embed")
    return Parameters(Layout(Schema(params, {"embed": 4, "mlp": 4}), MeshShape(), (0,)), ONE, torch.float32)


def column(**words: Wrong) -> ColumnParallelLinear:
    return ColumnParallelLinear(4, 4, mesh=ONE, **words)


def row(**words: Wrong) -> RowParallelLinear:
    return RowParallelLinear(4, 4, mesh=ONE, **words)


wrong: Wrong = "Sequence"
CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: column(input=wrong), "input 'Sequence': did you mean 'sequence'? (choose from sequence, replicated)"),
    (lambda: column(input="split"), "input 'split' (choose from sequence, replicated)"),
    (lambda: column(output="gather"), "output 'gather': did you mean 'gathered'? (choose from split, gathered)"),
    (lambda: row(input=None), "input None (choose from split, replicated)"),
    (lambda: row(output="sum"), "output 'sum' (choose from sequence, replicated)"),
    (lambda: Activations(wrong), "recompute 'Sequence' (choose from none, selective, full)"),
    (lambda: Activations(recompute=True), "recompute True (choose from none, selective, full)"),  # type: ignore[arg-type]
    (
        lambda: Gradients(parameters(), [], torch.float32, "optimiser"),  # type: ignore[arg-type]
        "shard 'optimiser': did you mean 'optimizer'? (choose from none, optimizer, gradients, parameters)",
    ),
    (
        lambda: Pipeline(ONE, [], torch.float32, "1F1B"),
        "schedule '1F1B' (choose from gpipe, 1f1b, interleaved, overlapped, zb-h1, zb-interleaved, zb-v, dualpipe-v)",
    ),
    (lambda: MeshShape(tp=2).along(0, "tpp"), "dimension of the mesh 'tpp': did you mean 'tp'? (choose from pp, dp,"),
    (lambda: MeshShape(tp=2).ranks(TP=[0]), "dimension of the mesh 'TP' (choose from pp, dp, ep, cp, tp)"),
    (lambda: ONE.along("tpp"), "dimension of the mesh 'tpp': did you mean 'tp'?"),
    (lambda: FeedForward(parameters(), "mlp", "gelu_old"), "activation 'gelu_old': did you mean 'gelu'? (choose from"),
    (lambda: to_hugging_face(DefaultRope(), "rope_scale"), "spelling 'rope_scale': did you mean 'rope_scaling'?"),  # type: ignore[arg-type]
    (lambda: Param("a", "embed", at="middle"), "a: at='middle' is not one of 'first', 'last', 'first last'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("make", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_unknown_words_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_words_are_refused_before_weights_are_drawn() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError):
        column(output=wrong)
    assert torch.equal(torch.get_rng_state(), before)
