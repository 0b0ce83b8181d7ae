"""Dtypes of numbers by their names in safetensors files, and converting the bits of one into those of another."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megacore.parallel.weights.schema import Param

FLOATS: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""{name in a file: torch's}: what a weight may be."""
NUMBERS: Mapping[str, str] = {**FLOATS, "I64": "int64", "I32": "int32"}
"""And what a table of whole numbers may be."""


def kinds_of(param: Param) -> Mapping[str, str]:
    """Return what a parameter may be in a file: floats, and where it is a table of whole numbers these too."""
    return NUMBERS if param.below else FLOATS


def dtype_named(kind: str) -> str:
    """Return the name in a file of one of torch's float dtypes."""
    return next(name for name, known in FLOATS.items() if known == kind)


def as_floats(bits: np.ndarray, given: str, wide: str) -> np.ndarray:
    """Return the numbers of a dtype as numpy computes with them, in F32 or F64."""
    return as_dtype(bits, given, wide).view(f"f{8 if wide == 'F64' else 4}")


def rounded(floats: np.ndarray, wide: str, wanted: str) -> np.ndarray:
    """Return the bits in another dtype of numbers that were computed in F32 or F64."""
    width = 8 if wide == "F64" else 4
    return as_dtype(floats.astype(f"f{width}", copy=False).view(f"u{width}"), wide, wanted)


def as_dtype(bits: np.ndarray, given: str, wanted: str) -> np.ndarray:
    """Return the bits (unsigned integers) of the same numbers in another dtype, rounded to nearest, ties to even."""
    if given == wanted:
        return bits
    import torch  # only to compute with: moving bytes must not wait for its import

    kinds = {name: getattr(torch, kind) for name, kind in NUMBERS.items()}
    # A copy: what lies in a mapped file is not torch's to write.
    signed = torch.from_numpy(np.array(bits, order="C").view(f"i{bits.itemsize}"))
    made = signed.view(kinds[given]).to(kinds[wanted])
    return made.view(getattr(torch, f"int{8 * made.itemsize}")).numpy().view(f"u{made.itemsize}")
