"""Activation functions, gated and plain: the formulas, and hand-written backwards that are their derivatives."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from megacore.models.blocks import ACTIVATIONS, FeedForward
from megacore.parallel.kernels.activation import FUNCTIONS, gated
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gates_multiply(name: str) -> None:
    gate_up = torch.randn(3, 5, 14, dtype=torch.float64)
    gate, up = gate_up[..., :7], gate_up[..., 7:]
    torch.testing.assert_close(gated(name, gate_up), FUNCTIONS[name].of(gate) * up, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_derivatives(name: str) -> None:
    gate_up = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gated(name, x), gate_up)
    assert torch.autograd.gradcheck(FUNCTIONS[name].of, gate_up)


def test_what_pads_features_adds_nothing() -> None:
    assert [float(function.of(torch.zeros(()))) for function in FUNCTIONS.values()] == [0.0] * len(FUNCTIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("up", ["mlp embed", "(gate: mlp + up: mlp) embed"])
def test_a_feed_forward_network_is_that_of_transformers_names(name: str, up: str) -> None:
    """gelu_fast's constant has ten digits there."""
    schema = Schema((Param("f.up.weight", up), Param("f.down.weight", "embed mlp")), {"embed": 3, "mlp": 5})
    parameters = Parameters(Layout(schema, MeshShape(), ()), Mesh.single(), torch.float64)
    network = FeedForward(parameters, "f", name)
    for weight in network.parameters():
        nn.init.normal_(weight)
    x = torch.randn(7, 3, dtype=torch.float64)
    made = x @ network.up.weight.t()
    function = ACT2FN[name]
    hidden = function(made[:, :5]) * made[:, 5:] if "gate" in up else function(made)
    torch.testing.assert_close(network(x), hidden @ network.down.weight.t(), rtol=1e-9, atol=1e-9)
