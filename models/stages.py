"""The layers of a model are dealt to the stages of a pipeline. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.models.config import ModelConfig, active_elements
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.enum_errors import Placement
from megacore.parallel.weights.layout import Layout, MeshShape, balanced_layers
from megacore.parallel.weights.schema import SPLIT, Split


def default_layers(config: ModelConfig, virtual_stages: int, bare_ends: bool = False) -> tuple[int, ...]:
    """Return a balanced split of the layers that counts the head and, at a quarter of it, the embedding; layers that
    predict further tokens, each with the head again, stand at the last stage. ``bare_ends``: whether embedding and head
    may be alone in a virtual stage.

    Layers and the head count by the parameters that a token meets in them, as their products do. Looking tokens up is
    cheap, but the table's gradient and optimizer traffic are not: a quarter is what they came to on the model of
    ``benchmarks/train_step.py``.
    """
    schema = config.schema
    layers, params = schema.sizes["layer"], [param for param in schema.params if "layer" in param.named_axes]
    work = [0] * layers
    for param in params:
        held = param.values("layer", schema.sizes)
        of_each = active_elements(config, schema, param) // len(held)
        for layer in held:
            work[layer] += of_each
    mean = sum(work) / layers
    table = schema.sizes["vocab"] * schema.sizes["embed"] / mean
    further = sum(active_elements(config, schema, param) for param in schema.params if param.predicts) / mean
    head = (0 if config.labels else table) + config.mtp_layers * table + further
    uneven = [each / mean for each in work] if len({*work}) > 1 else None
    return balanced_layers(layers, virtual_stages, embedding=table / 4, head=head, work=uneven, bare_ends=bare_ends)


def chooser_apart(
    config: ModelConfig, virtual_stages: int, bare_ends: bool, counts: Sequence[int] | None = None
) -> tuple[int, int] | None:
    """Return the first layer that looks at what the indexer of another one chooses which is in another virtual stage,
    and that one; None where each virtual stage has all that its layers look at. ``counts``: the layers of each, if that
    is not the balanced split."""
    index = config.schema.by_name.get("layers.{layer}.attn.index.q.weight")
    if index is None or index.layers is None:
        return None  # there is none, or each layer has its own
    counts = counts or default_layers(config, virtual_stages, bare_ends)
    parts = [part for part, count in enumerate(counts) for _ in range(count)]
    for layer, (each, part) in enumerate(zip(config.anatomy.layers, parts, strict=False)):
        if each.chooser is not None and parts[each.chooser] != part:
            return layer, each.chooser
    return None


def layout_of(
    config: ModelConfig,
    mesh: MeshShape,
    chunks: int = 1,
    layers: tuple[int, ...] | None = None,
    tuning: Tuning = EVERYTHING,
    split: Split = SPLIT,
    placement: Placement = "loop",
) -> Layout:
    """Return the layout of a model and its adapters on a mesh, its layers split as given or in a balanced way."""
    layers = layers or default_layers(config, mesh.pp * chunks, bare_ends=chunks > 1)
    return Layout(tuning.schema(config.schema), mesh, layers, split, placement)
