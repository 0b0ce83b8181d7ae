"""Putting low-rank adapters beside the linears of a model that is being built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from models.lora import WEIGHT, A, B, Lora
from parallel.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from parallel.layers.lora import ColumnAdapted, ReplicatedAdapted, RowAdapted, Rows
from parallel.parameters import Parameters
from parallel.weights.layout import Shard
from parallel.weights.pattern import Pattern

_ADAPTED: Mapping[type[nn.Module], Callable[..., nn.Module]] = {
    ColumnParallelLinear: ColumnAdapted,
    RowParallelLinear: RowAdapted,
    ReplicatedLinear: ReplicatedAdapted,
}
"""{linear: the one with adapters}."""


def adapt(chunk: nn.Module, parameters: Parameters, lora: Lora) -> None:
    """Replace each linear of a chunk that has adapters among the parameters by one that uses them."""
    names = {parameter: name.removesuffix(WEIGHT) for name, parameter in parameters.items() if name.endswith(WEIGHT)}
    for parent in list(chunk.modules()):
        for place, module in list(parent.named_children()):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear):
                name = names[module.weight]
                if f"{name}.{A}" in parameters:
                    setattr(parent, place, _adapted(module, parameters, name, lora))


def _adapted(linear: nn.Module, parameters: Parameters, name: str, lora: Lora) -> nn.Module:
    a, b = f"{name}.{A}", f"{name}.{B}"
    rows = _rows(parameters.shards[name + WEIGHT], parameters.shards[a])
    return _ADAPTED[type(linear)](linear, parameters[a], parameters[b], rows, lora.scale, lora.dropout)


def _rows(weight: Shard, a: Shard) -> Rows:
    """All rows of a weight where it has one adapter; else those of each of its pieces."""
    if a.param.sentence.labels == ("",):
        return [(weight.shape[0], True)]
    sentence = weight.param.sentence
    dims = {label: Pattern(sentence.select(label).dims[:1]) for label in sentence.outer_labels}
    return [(dim.shape(weight.sizes)[0], label in a.param.sentence.labels) for label, dim in dims.items()]
