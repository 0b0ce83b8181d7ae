"""Batches of the data become microbatches on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.config import Config
from megacore.data.batches import Batch, BatchAhead, BatchImage, BatchPairs
from megacore.models.assemble import Model
from megacore.models.decoder import FurtherTokens, Microbatch, MicrobatchImage
from megacore.parallel.labels import with_labels
from megacore.parallel.mesh import Mesh
from megacore.parallel.preference import MicrobatchPairs
from megacore.parallel.random import key

_TOGETHER = 64
"""The head computes tokens with a label alone, in multiples of so many on each rank, which suit products."""


@dataclass(frozen=True)
class Uploader:
    """Makes the microbatches of a step on the device."""

    config: Config
    mesh: Mesh
    model: Model

    def __call__(self, batches: Sequence[Batch], step: int, first: int = 0) -> list[Microbatch]:
        """Return the microbatches of a step, from its ``first`` on; they have its masks."""
        return [self._microbatch(batch, step, number) for number, batch in enumerate(batches, first)]

    def _microbatch(self, batch: Batch, step: int, number: int) -> Microbatch:
        tp, width = self.mesh.shape.tp, self.model.config.boundary_width
        tokens, labels, positions = map(self._to_device, (batch.tokens, batch.labels, batch.positions))
        balanced, both_ways = self.model.balance is not None, self.model.config.anatomy.both_ways
        image_of = batch.prompt_of if both_ways == "prompts" else batch.image_of if both_ways else None
        return Microbatch(
            tokens,
            labels,
            positions,
            self.config.batch.micro_size,
            (len(tokens) // tp, width),
            batch.documents,
            key(self.config.train.seed, step, number),
            wanted=self._wanted(batch.labels),
            padding=self._to_device(batch.padding) if balanced and batch.padding is not None else None,
            split=batch.split,
            rows=self._to_device(batch.rows) if balanced and batch.rows is not None else None,
            blank=batch.blank,
            pairs=None if batch.pairs is None else self._pairs(batch.pairs),
            ahead=tuple(map(self._ahead, batch.ahead)),
            replica=self.mesh.place.dp,
            images=tuple(self._image(each) for each in batch.images if each.inputs),  # which ranks that embed have
            positions_3d=None if batch.positions_3d is None else self._to_device(batch.positions_3d).view(3, -1),
            image_of=None if image_of is None else self._to_device(image_of),
        )

    def _image(self, image: BatchImage) -> MicrobatchImage:
        inputs = {name: self._to_device(each).view(each.shape) for name, each in image.inputs.items()}
        own = self._to_device(image.features), self._to_device(image.places)
        return MicrobatchImage(image.file, image.tokens, inputs, *own)

    def _ahead(self, batch: BatchAhead) -> FurtherTokens:
        tokens, labels = map(self._to_device, (batch.tokens, batch.labels))
        return FurtherTokens(tokens, labels, self._wanted(batch.labels))

    def _wanted(self, labels: npt.NDArray[np.int64]) -> Tensor | None:
        wanted = with_labels(labels.ravel(), _TOGETHER * self.mesh.shape.tp)
        return None if wanted is None else self._to_device(wanted)

    def _pairs(self, pairs: BatchPairs) -> MicrobatchPairs:
        """Return pairs in a number that the ranks of cp x tp divide."""
        shape = self.mesh.shape
        fill = (0, -len(pairs.counted) % (shape.cp * shape.tp)), (0, 0)
        counted, reference = (np.pad(each, fill) for each in (pairs.counted, pairs.reference))
        places, *of_pairs = map(self._to_device, (pairs.places, counted, reference))
        return MicrobatchPairs(places, *(each.unflatten(0, (-1, 2)) for each in of_pairs))

    def _to_device(self, array: object) -> Tensor:
        tensor = torch.as_tensor(array).flatten()
        if self.mesh.device.type == "cuda":
            tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the device
        return tensor.to(self.mesh.device, non_blocking=True)
