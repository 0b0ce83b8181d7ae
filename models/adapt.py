"""Putting low-rank adapters beside the linears of a model that is being built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from megacore.models.lora import WEIGHT, A, B, Lora
from megacore.parallel import kernels
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megacore.parallel.layers.lora import (
    ColumnAdapted,
    ExpertsAdapted,
    ReplicatedAdapted,
    RouterAdapted,
    RowAdapted,
    Rows,
)
from megacore.parallel.layers.quantised import QuantisedGroupedProducts, QuantisedProduct
from megacore.parallel.layers.router import Router
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import Shard
from megacore.parallel.weights.pattern import Pattern

_ADAPTED: Mapping[type[nn.Module], Callable[..., nn.Module]] = {
    ColumnParallelLinear: ColumnAdapted,
    RowParallelLinear: RowAdapted,
    ReplicatedLinear: ReplicatedAdapted,
}
"""{linear: the one with adapters}."""


def adapt(chunk: nn.Module, parameters: Parameters, lora: Lora) -> None:
    """Replace each linear, router and experts of a chunk that have adapters among the parameters by what uses them."""
    names = {parameter: name.removesuffix(WEIGHT) for name, parameter in parameters.items() if name.endswith(WEIGHT)}

    def pair(weight: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter] | None:
        a, b = (parameters.get(f"{names[weight]}.{each}") for each in (A, B))
        return None if a is None or b is None else (a, b)

    for parent in list(chunk.modules()):
        for place, module in list(parent.named_children()):
            if isinstance(module, Experts):
                up, down = pair(module.up), pair(module.down)
                if up or down:
                    setattr(parent, place, ExpertsAdapted(module, up, down, lora.scale))
            elif isinstance(module, Router | ColumnParallelLinear | RowParallelLinear | ReplicatedLinear) and (
                own := pair(module.weight)
            ):
                setattr(parent, place, _adapted(module, *own, parameters, names[module.weight], lora))


def with_adapter(linear: nn.Module, parameters: Parameters, weight: str, a: str, b: str) -> nn.Module:
    """Return a column-parallel linear of a weight of this name with an adapter of the model's own, whose halves have
    these names; itself where there is none."""
    if a not in parameters:
        return linear
    rows = _rows(parameters.shards[weight], parameters.shards[a])
    return ColumnAdapted(linear, parameters[a], parameters[b], rows, 1.0, 0.0)


def multiply_quantised(chunk: nn.Module, parameters: Parameters) -> None:
    """Have the linears and experts of a chunk multiply by weights that are quantised, where theirs are.

    Raises:
        ValueError: something else uses such a weight.
    """
    names = {parameters[name]: name for name in parameters.blocks}
    for module in chunk.modules() if names else ():
        own = [each for each in module.parameters(recurse=False) if each in names]
        if not own:
            continue
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ReplicatedLinear):
            module.product = QuantisedProduct(parameters.blocks[names[module.weight]], parameters.dtype)
        elif isinstance(module, Experts):
            # A number for each of theirs says what is multiplied, and takes no memory.
            number = torch.empty((), dtype=parameters.dtype, device=parameters.mesh.device)
            wide = (number.expand(parameters.shards[names[each]].shape) for each in own)
            others = (each for each in module.parameters() if each.dim() == 3 and each not in names)
            plain = kernels.grouped_products(*wide, *others)
            module.products = QuantisedGroupedProducts(plain, parameters.blocks[names[module.up]], parameters.dtype)
        else:
            raise ValueError(f"{names[own[0]]}: a {type(module).__name__} cannot use a weight that is quantised")


def _adapted(
    module: nn.Module, a: nn.Parameter, b: nn.Parameter, parameters: Parameters, name: str, lora: Lora
) -> nn.Module:
    if isinstance(module, Router):
        return RouterAdapted(module, a, b, lora.scale)
    rows = _rows(parameters.shards[name + WEIGHT], parameters.shards[f"{name}.{A}"])
    return _ADAPTED[type(module)](module, a, b, rows, lora.scale, lora.dropout)


def _rows(weight: Shard, a: Shard) -> Rows:
    """Return all rows of a weight where it has one adapter; else those of each of its pieces."""
    if a.param.sentence.labels == ("",):
        return [(weight.shape[0], True)]
    sentence = weight.param.sentence
    dims = {label: Pattern(sentence.select(label).dims[:1]) for label in sentence.outer_labels}
    return [(dim.shape(weight.sizes)[0], label in a.param.sentence.labels) for label, dim in dims.items()]
