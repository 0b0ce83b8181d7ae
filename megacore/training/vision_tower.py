"""The tower of a model that also sees, on the ranks that embed: frozen, and run by transformers, with its projector."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.data import pretrained
from megacore.data.batches import Batch
from megacore.data.guard import Guard, GuardError
from megacore.data.images import ImageProcessor
from megacore.data.text import InputError
from megacore.data.tokenizer import files_for_transformers, import_transformers
from megacore.models.assemble import Model
from megacore.models.decoder import MicrobatchImage, Projector
from megacore.models.names import PROJECTOR
from megacore.models.wrappers import rope_axes
from megacore.parallel.mesh import Mesh
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import NUMBERS, as_dtype, dtype_named
from megacore.store.weight_folders.folder import WeightFolder
from megacore.training.resume import Setup


def load_vision_tower(setup: Setup, mesh: Mesh, model: Model) -> Callable[[Batch], Batch] | None:
    """Give the chunk that embeds the model's tower, if this rank has it and the data have images, and return what reads
    them; have the ropes of all ranks turn by their positions. Raises StoreError: the folder that the run starts from
    has no such tower, or no processor of images."""
    source = setup.start.source
    if source is None or not setup.corpora.have_images:
        return None
    assert source.index.carried is not None  # or its chats had no images
    if axes := rope_axes(source.index.carried.config, setup.model):
        for each in model.chunks:
            each.turn_by(axes)
    chunk = next((each for each in model.chunks if each.embedding is not None), None)
    if chunk is None:
        return None
    chunk.tower = Tower(source, chunk.dtype, mesh.device, chunk.projector)
    import_transformers()
    with files_for_transformers(setup.companions, None) as folder:
        try:
            guard = Guard(lambda: ImageProcessor(folder))
        except GuardError as error:
            raise StoreError(f"the model's processor of images cannot be loaded: {error}") from error
    return ImageReader(guard, mesh.tp.index, mesh.tp.size)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of which a rank holds tokens: part ``index`` of ``parts`` of those of a microbatch."""

    guard: Guard
    index: int
    parts: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, batch: Batch) -> Batch:
        """Return a microbatch with the images of this part alone, and their inputs. InputError: one cannot be read."""
        own = np.arange(batch.tokens.size).reshape(self.parts, -1)[self.index]
        images = batch.of_tokens(own)
        return replace(batch, images=tuple(replace(each, inputs=self._inputs(each.file)) for each in images))

    def _inputs(self, file: str) -> dict[str, npt.NDArray[Any]]:
        try:
            with self._lock:  # of the threads that prepare steps and evaluations
                found = self.guard.call("inputs", file)
        except GuardError as error:
            raise InputError(f"the image {file} can no longer be made into what the tower takes: {error}") from error
        return {name: numbers.reshape(shape) for name, shape, numbers in found}


class Tower:
    """An image of a microbatch -> its features, [1 + n, features, embed], as of :class:`~models.decoder.Decoder`: what
    the tower and the projector of a folder make of it, in a dtype on a device, by the ``projector`` of a chunk that has
    its weights, which may be trained. Raises StoreError: as of :func:`megacore.data.pretrained.tower`; ValueError:
    these are not as many as the tokens that stand for them."""

    def __init__(
        self, source: WeightFolder, dtype: torch.dtype, device: torch.device, projector: Projector | None = None
    ) -> None:
        carried, of = source.carried, source.index.carried
        assert carried is not None and of is not None  # or its chats had no images
        name, read = dtype_named(str(dtype).removeprefix("torch.")), carried.read()
        tensors = dict[str, Tensor]()
        for stored in carried.stored():
            kind, bits = read(stored)
            if kind in NUMBERS:  # the others are no weights
                made = as_dtype(bits, kind, name)
                tensors[stored.name] = torch.from_numpy(made.copy().view(f"i{made.itemsize}")).view(dtype)
        weights = {} if projector is None else dict(zip(projector.names, projector.weights, strict=True))
        theirs = {f"model.{name.removeprefix(PROJECTOR)}": weight for name, weight in weights.items()}
        tensors |= {name: torch.zeros(weight.shape, dtype=dtype) for name, weight in theirs.items()}
        self._model = pretrained.tower(of.config, tensors, dtype).to(device)
        for name, weight in theirs.items():
            module, _, last = name.rpartition(".")
            setattr(self._model.get_submodule(module), last, weight)
        self._dtype = dtype

    def __call__(self, image: MicrobatchImage) -> Tensor:
        floats = {name: each.to(self._dtype) for name, each in image.inputs.items() if each.is_floating_point()}
        found: Any = self._model.get_image_features(**{**image.inputs, **floats})
        depths = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        parts = [[each] if isinstance(each, Tensor) else each for each in depths]
        features = torch.stack([torch.cat([each.flatten(0, -2) for each in depth]) for depth in parts])
        if features.shape[1] != image.tokens:
            raise ValueError(
                f"{image.file} has {features.shape[1]} features, and {image.tokens} tokens stand for it: the model's "
                "processor is another model's, or the file has changed since it was prepared"
            )
        return features
