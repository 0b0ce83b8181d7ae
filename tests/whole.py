"""Tensors of any origin in the place of a folder."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, hugging_face
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.stream import Read
from megacore.store.tensor_files.tensors import TensorWriter
from megacore.store.weight_folders.folder import WeightFolder


@dataclass(frozen=True)
class Whole(WeightFolder):
    """Whole tensors of any origin as a folder.

    Args:
        declared: What they are.
        reads: {state: what reads its tensors by the names that Hugging Face's have}.
        written: Its trainer.json.
        beside: Its companions.
    """

    declared: Schema
    reads: Mapping[str, Callable[[Stored], tuple[str, np.ndarray]]]
    written: bytes | None = None
    beside: Mapping[str, Companion] = field(default_factory=dict)

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        return hugging_face(self.declared) if state in self.states else iter(())

    def dtype(self, state: str, stored: Stored) -> str:
        return self.reads[state](stored)[0]

    def read(self, state: str = "weights") -> Read:
        return lambda stored, view=None: self.reads[state](stored)

    def companions(self) -> Mapping[str, Companion]:
        return self.beside

    def trainer_json(self) -> bytes | None:
        return self.written


def write_tensor(writer: TensorWriter, name: str, array: np.ndarray, start: int = 0) -> None:
    """Write elements of a tensor from ``start`` on, in whatever order the array has them in memory."""
    if array.size:
        writer.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8), writer.offset(name, start))
