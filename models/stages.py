"""The layers of a model are dealt to the stages of a pipeline. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megacore.models.config import ModelConfig, active_elements
from megacore.models.tuning import EVERYTHING, Tuning
from megacore.parallel.enum_errors import Placement
from megacore.parallel.weights.layout import Layout, MeshShape, balanced_layers, least_layers
from megacore.parallel.weights.schema import SPLIT, Split


def default_layers(config: ModelConfig, virtual_stages: int, bare_ends: bool = False) -> tuple[int, ...]:
    """Return a balanced split of the layers that counts the head and, at a quarter of it, the embedding; layers that
    predict further tokens, each with the head again, stand at the last stage. ``bare_ends``: whether embedding and head
    may be alone in a virtual stage. Layers that look at the keys of one before them stay with it where that is
    possible.

    Layers and the head count by the parameters that a token meets in them, as their products do. Looking tokens up is
    cheap, but the table's gradient and optimizer traffic are not: a quarter is what they came to on the model of
    ``benchmarks/train_step.py``.
    """
    schema = config.schema
    layers, params = schema.sizes["layer"], [param for param in schema.params if "layer" in param.named_axes]
    work = [0] * layers
    for param in params:
        if param.is_table:
            continue
        of_each = active_elements(config, schema, param) // len(param.values("layer", schema.sizes))
        for layer in param.used_in(range(layers)):
            work[layer] += of_each
    mean = sum(work) / layers
    table = schema.sizes["vocab"] * schema.sizes["embed"] / mean
    further = sum(active_elements(config, schema, param) for param in schema.params if param.predicts) / mean
    head = (0 if config.labels else table) + config.mtp_layers * table + further
    firsts = together(config)
    if sum(least_layers(virtual_stages, bare_ends)) > len(firsts):
        firsts = [*range(layers)]  # rules say which of them are apart
    done, ends = [0, *accumulate(work)], [*firsts[1:], layers]
    runs = [done[end] - done[first] for first, end in zip(firsts, ends, strict=True)]
    uneven = [each / mean for each in runs] if len({*runs}) > 1 else None
    counts = balanced_layers(len(runs), virtual_stages, table / 4, head, uneven, bare_ends)
    edges = [[0, *ends][each] for each in accumulate(counts, initial=0)]
    return tuple(end - start for start, end in pairwise(edges))


def together(config: ModelConfig) -> list[int]:
    """Return the first layer of each run of layers that cannot be parted, for some look at the keys of another one."""
    found, layers = list[int](), config.anatomy.layers
    for layer in reversed(range(config.sizes["layer"])):
        first = min((own.keys for own in layers[layer:] if own.keys is not None), default=layer)
        found += [layer] * (first >= layer)
    return found[::-1]


def source_apart(
    config: ModelConfig, virtual_stages: int, bare_ends: bool, counts: Sequence[int] | None = None
) -> tuple[int, int] | None:
    """Return the first layer that looks at what the indexer of another one chooses, or at its keys, which is in another
    virtual stage, and that one; None where each virtual stage has all that its layers look at. ``counts``: the layers
    of each, if that is not the balanced split."""
    looked_at = [own.chooser if own.keys is None else own.keys for own in config.anatomy.layers]
    sources = {layer: source for layer, source in enumerate(looked_at) if source is not None}
    if not sources:
        return None
    counts = counts or default_layers(config, virtual_stages, bare_ends)
    parts = [part for part, count in enumerate(counts) for _ in range(count)]
    apart = (each for each in sources.items() if max(each) < len(parts) and len({parts[at] for at in each}) > 1)
    return next(apart, None)


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
