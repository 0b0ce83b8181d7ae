"""The optimizer's state by the names and in the shapes of the parameters, whatever it lies in."""

import pytest
import torch
from device_store import device_store
from pool import Pool
from torch import nn

from megacore.parallel.gradients.buckets import WholeSpan
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema
from megacore.training.states.optimizer import Optimizer

# With 2 kv heads on 4 ranks the pieces have other replicas each; beside each other in dim 1, they lie in gaps.
SIZES = {"layer": 1, "embed": 6, "heads": 8, "kv": 2, "head": 3}
SCHEMA = Schema(
    (
        Param("qkv", "embed (q: heads head + k: kv head + v: kv head)", std=1.0),
        Param("rows", "(q: heads head + k: kv head) embed", std=1.0),
        Param("plain", "embed", std=1.0),
    ),
    SIZES,
)


def made(dtype: torch.dtype, masters: bool = True) -> tuple[Parameters, Optimizer]:
    mesh = Mesh.create(MeshShape(tp=4))
    parameters = Parameters(Layout(SCHEMA, mesh.shape, (1,)), mesh, dtype)
    parameters.initialise(0)
    wide = torch.float32 if dtype == torch.bfloat16 and masters else dtype
    gradients = Gradients(parameters, [nn.ParameterList(parameters.values())], wide)
    optimizer = Optimizer(gradients, lr=0.1, master_weights=masters)
    gradients.begin(1)
    for name, parameter in parameters.items():
        (parameter.float() * numbered(parameters, name)).sum().backward()
    gradients.finish()
    optimizer.update(0.1, gradients.norm())
    gradients.updated()
    return parameters, optimizer


def numbered(parameters: Parameters, name: str) -> torch.Tensor:
    return torch.arange(parameters[name].numel(), dtype=torch.float32).view(parameters[name].shape) + 1


def round_trip(kind: str, masters: bool) -> tuple[dict[str, list[str]], int, bool]:
    """(parameters by state, spans with a copy of their own in the parameter's dtype, whether all came back)."""
    parameters, optimizer = made(getattr(torch, kind), masters)
    states, good = optimizer.states(), optimizer.updates == 1
    for state, dtypes in states.items():
        for name, dtype in dtypes.items():
            host = torch.empty(parameters[name].shape, dtype=dtype)
            optimizer.read_into(state, name, host)
            if state == "master":
                good &= torch.equal(host.to(parameters[name].dtype), parameters[name])
            elif name == "plain":
                # After one step the first moment goes as the gradient, and the second as its square.
                power = 1 if state == "exp_avg" else 2
                want = (numbered(parameters, name) ** power).to(dtype)
                good &= torch.allclose(host / host[0], want, rtol=2e-2)
            if state != "master":
                optimizer.load_from(state, name, numbered(parameters, name))
                optimizer.read_into(state, name, host)
                good &= torch.equal(host, numbered(parameters, name).to(dtype))
    for name, parameter in parameters.items():
        optimizer.load_weight(name, numbered(parameters, name) / 3)
        good &= torch.equal(parameter, (numbered(parameters, name) / 3).to(parameter.dtype))
    copies = [t for t in device_store(optimizer).targets if t.master and t.tensor.dtype == t.part.data.dtype]
    for target in device_store(optimizer).targets:
        assert isinstance(target.part, WholeSpan)
        span = target.part.span
        want = span.of(numbered(parameters, span.name) / 3)
        good &= torch.equal(target.tensor, want.to(target.tensor.dtype))
    return {state: sorted(dtypes) for state, dtypes in states.items()}, len(copies), good


ALL = ["plain", "qkv", "rows"]


@pytest.mark.parametrize(
    ("kind", "masters", "states", "copies"),
    [
        ("float64", True, ("exp_avg", "exp_avg_sq"), 3),
        ("bfloat16", True, ("master", "exp_avg", "exp_avg_sq"), 0),
        ("bfloat16", False, ("exp_avg", "exp_avg_sq"), 3),
    ],
)
def test_every_state_is_read_and_filled_in_the_shape_of_its_parameter(
    pool: Pool, kind: str, masters: bool, states: tuple[str, ...], copies: int
) -> None:
    for found, gaps, good in pool.run(4, round_trip, kind, masters):
        assert found == dict.fromkeys(states, ALL)
        assert gaps == copies and good
