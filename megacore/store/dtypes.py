"""Float dtypes by their names in safetensors files, and converting the bits of one into those of another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

FLOATS: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""{name in a file: torch's}: what a weight may be."""


def as_dtype(bits: np.ndarray, given: str, wanted: str) -> np.ndarray:
    """Return the bits (unsigned integers) of the same numbers in another dtype, rounded to nearest, ties to even."""
    if given == wanted:
        return bits
    import torch  # only to compute with: moving bytes must not wait for its import

    kinds = {name: getattr(torch, kind) for name, kind in FLOATS.items()}
    # A copy: what lies in a mapped file is not torch's to write.
    signed = torch.from_numpy(np.array(bits, order="C").view(f"i{bits.itemsize}"))
    made = signed.view(kinds[given]).to(kinds[wanted])
    return made.view(getattr(torch, f"int{8 * made.itemsize}")).numpy().view(f"u{made.itemsize}")
