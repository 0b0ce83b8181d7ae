"""The log-probabilities of pairs by the reference, in a file beside the prepared pairs."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.store.io.errors import StoreError
from megacore.store.tensor_files.publish import replace_file
from megacore.store.tensor_files.tensors import TensorFile, lay_out

Reference = npt.NDArray[np.float64]
"""[pairs, 2]: of the chosen and the rejected answer; NaN of pairs that no run has needed."""
_TENSOR, _DIGEST = "log_probabilities", "blake2b"


def read(path: Path, count: int) -> Reference:
    """Return the reference in a file, [count, 2]; all NaN where there is no file. Raises StoreError: it is damaged, or
    not of so many pairs."""
    if not path.exists():
        return np.full((count, 2), np.nan)
    file = TensorFile.open(path, path.parent)
    bits = file.array(_TENSOR)
    if bits.shape != (count, 2) or file.entry(_TENSOR).dtype != "F64" or file.metadata.get(_DIGEST) != _digest(bits):
        raise StoreError(f"{path} is damaged, or of other pairs: remove it")
    return bits.view(np.float64).copy()


def write(path: Path, reference: Reference) -> None:
    """Write a reference; StoreError where there is no room."""
    header, _, _ = lay_out([(_TENSOR, "F64", reference.shape)], {_DIGEST: _digest(reference)})
    replace_file(path, header + reference.tobytes())


def _digest(bits: npt.NDArray[Any]) -> str:
    return blake2b(bits.tobytes(), digest_size=16).hexdigest()
