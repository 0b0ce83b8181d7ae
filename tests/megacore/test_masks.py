"""Dropout masks, caught where torch draws them: which ones are the same, and which ones must not be."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import GPT2, RECIPE, trainer, write_recipe
from pool import Pool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS, STEPS, MICROBATCHES = 4, 2, 2
MODEL = GPT2 | {"n_layer": LAYERS, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5}
RESIDUAL, ATTENTION = (4, 16), (1, 2, 8, 8)
"""Shapes of the masks with tp=2: [tokens/tp, embed], and [sequences, heads/tp, queries, keys]."""

Mask = tuple[tuple[int, ...], tuple[bool, ...]]
"""The shape, and what is kept of the first 64 elements: masks that are drawn alike begin alike in any shape."""


class Drawing(TorchDispatchMode):
    """Notes every mask that is drawn inside of it; what is recomputed is drawn in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Mask] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            assert isinstance(made, Tensor)
            self.masks.append((tuple(made.shape), tuple(made.flatten()[:64].bool().tolist())))
        return made


def masks(recipe: str, overrides: list[str]) -> list[Mask]:
    """Of this rank, in some steps over the same samples."""
    made = trainer(recipe, overrides)
    with Drawing() as drawing:
        for step in range(STEPS):
            made.train_step.backward(made.upload(made.batches.microbatches(0), step))
    return drawing.masks


@pytest.mark.in_turn(2, 1)
def test_a_mask_is_drawn_for_one_use_and_again_for_its_backward(pool: Pool, tmp_path: Path) -> None:
    """Ranks of tp hold other tokens and heads, those of dp other samples, stages and their chunks other layers."""
    recipe = write_recipe(tmp_path, RECIPE | {"model": MODEL})
    layout = ["mesh.tp=2", "mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved"]
    batch = [f"batch.global_size={2 * MICROBATCHES}", "batch.micro_size=1", "memory.recompute=full"]
    ranks = pool.run(8, masks, recipe, [*layout, *batch])
    drawn, by = Counter[tuple[bool, ...]](), defaultdict[tuple[bool, ...], set[int]](set)
    shapes = Counter[tuple[int, ...]]()
    for rank, found in enumerate(ranks):
        for shape, beginning in found:
            shapes[shape] += 1
            drawn[beginning] += 1
            by[beginning].add(rank)
    assert {tuple(sorted(shared)) for shared in by.values() if len(shared) > 1} == set()
    # Of 2 tensor-parallel x 2 data-parallel ranks: the embedding drops once, of a layer its attention and both its
    # outputs. Layers are recomputed.
    uses = 4 * STEPS * MICROBATCHES
    assert sorted(drawn.values()) == [1] * uses + [2] * (uses * LAYERS * 3)
    assert shapes == {RESIDUAL: uses * (1 + 2 * LAYERS * 2), ATTENTION: 2 * uses * LAYERS}
