"""Files whose weights lie in 4 or 8 bits as bitsandbytes keeps them: read as the floats that they stand for, bit for
bit what the library itself makes of them.

In 4 bits a weight ``NAME`` is a row of bytes, two numbers in each, the higher half first. Each is a place in
``NAME.quant_map`` [16], times the scale of its block in ``NAME.absmax``. Scales in 8 bits are places in
``NAME.nested_quant_map`` [256], times what ``NAME.nested_absmax`` has for each few of them, plus an offset. Shape,
dtype and blocks are in JSON, ``NAME.quant_state.bitsandbytes__nf4``. In 8 bits ``MODULE.weight`` is a matrix of
integers, and ``MODULE.SCB`` has the largest magnitude of each row.

Blocks run on from row to row, as GPUs read them; where they do not divide a row, bitsandbytes 0.50 takes other scales
on a CPU (2026-11-28).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megacore.models.quantization import Bitsandbytes
from megacore.parallel.enum_errors import nearest
from megacore.store.io.strict_json import StoreError, parse_json
from megacore.store.tensor_files.accounting import TensorInFile, alike, tensors_of
from megacore.store.tensor_files.dtypes import FLOATS, dtype_named
from megacore.store.tensor_files.quantised_files import AT_ONCE, Box, QuantisedWeight, halves, shown
from megacore.store.tensor_files.tensors import DTYPES, Bits, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

_STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__(?:nf4|fp4)")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STORAGE = ("U8", "I8", "BF16", "F16", "F32", "F64")
"""What `bnb_4bit_quant_storage` lets the bytes be kept as."""
_SCALES, _FORMAT = ".SCB", "_format"
_PER_ROW = 1 / 127
Parts = Mapping[str, TensorInFile]


def decoded(files: Sequence[TensorFile], how: Bitsandbytes) -> tuple[tuple[TensorFile, ...], list[str]]:
    """Return (the files as they are read, what belongs to a weight no tensor by itself, problems)."""
    tensors = tensors_of(files)
    quantised, problems, parts = dict[str, QuantisedWeight](), list[tuple[str, str]](), set[str]()
    for name, tensor in tensors.items():
        try:
            if how.bits == 4 and (found := _STATE.fullmatch(name)):
                weight = found[1]
                if weight in quantised:
                    raise StoreError("it has two quant_states, of nf4 and of fp4")
                quantised[weight] = _in_4_bits(weight, tensor, tensors)
            elif how.bits == 8 and name.endswith(_SCALES):
                weight = f"{name.removesuffix(_SCALES)}.weight"
                quantised[weight] = _in_8_bits(weight, tensor, tensors, how.dtype)
            else:
                continue
        except StoreError as error:
            problems.append((str(error), weight))
        parts |= {name, f"{weight}{_FORMAT}", *(f"{weight}.{part}" for part in _PARTS)}
    return shown(files, quantised, parts), alike(problems)


def _in_4_bits(name: str, state: TensorInFile, tensors: Parts) -> QuantisedWeight:
    """Return a weight by what is said of it. Raises StoreError: it is not what that says."""
    said = parse_json(state.bits.tobytes(), f"{state}")
    if not isinstance(said, dict):
        raise StoreError("its quant_state is no JSON object")
    shape, dtype = said.get("shape"), str(said.get("dtype"))
    block, nested, offset = said.get("blocksize", 64), said.get("nested_blocksize"), said.get("nested_offset", 0.0)
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
        raise StoreError(f"its quant_state has shape {shape!r}, which is no matrix's")
    if dtype not in FLOATS.values():
        raise StoreError(f"its quant_state has dtype {dtype!r}{nearest(dtype, list(FLOATS.values()))}")
    for key, size in (("blocksize", block), ("nested_blocksize", 1 if nested is None else nested)):
        if type(size) is not int or size < 1:
            raise StoreError(f"its quant_state has {key} {size!r}: it must be a whole number above 0")
    if type(offset) not in (int, float):
        raise StoreError(f"its quant_state has nested_offset {offset!r}, which is no number")
    blocks = -(-math.prod(shape) // block)
    wanted = {"absmax": ("F32" if nested is None else "U8", blocks), "quant_map": ("F32", 16)}
    if nested is not None:
        wanted |= {"nested_absmax": ("F32", -(-blocks // nested)), "nested_quant_map": ("F32", 256)}
    parts = {part: tensors[f"{name}.{part}"] for part in wanted if f"{name}.{part}" in tensors}
    if name not in tensors or len(parts) < len(wanted):
        lacking = [f".{part}" for part in wanted if part not in parts]
        raise StoreError(f"it has no {', '.join(lacking) or 'tensor of its name'}")
    for part, (kind, count) in wanted.items():
        entry = parts[part].entry
        if (entry.dtype, math.prod(entry.shape)) != (kind, count):
            given = f"{math.prod(entry.shape)} numbers in {entry.dtype}"
            raise StoreError(f"its {part} has {given}, and {shape} of them take {count} in {kind}")
    entry = tensors[name].entry
    if entry.dtype not in _STORAGE:
        raise StoreError(f"its bytes are in {entry.dtype}: only those in {', '.join(_STORAGE)} are read")
    width = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if width < (least := -(-math.prod(shape) // 2)) or width > least + 8:
        raise StoreError(f"it has {width} bytes, and {shape} in 4 bits take {least}")
    if len(entry.shape) != 2 or entry.shape[1] != 1:
        raise StoreError(f"its bytes lie as {list(entry.shape)}, and only one in a row is read: [..., 1]")
    return _In4Bits(tensors[name], tuple(shape), dtype_named(dtype), parts, block, nested, float(offset))


@dataclass(frozen=True)
class _In4Bits(QuantisedWeight):
    parts: Parts
    block: int
    nested: int | None
    offset: float

    def fill(self, floats: Tensor, box: Box) -> None:
        (top, bottom), (left, right) = box
        width, whole = self.shape[1], right - left == self.shape[1]
        for first, last in [(top, bottom)] if whole else ((row, row + 1) for row in range(top, bottom)):
            self._fill(floats.view(-1), first * width + left, (last - 1) * width + right)

    def _fill(self, floats: Tensor, first: int, last: int) -> None:
        """Write the numbers [first, last) of all rows one after the other."""
        import torch

        data = self.stored.bits.reshape(-1).view(np.uint8)
        numbers = _floats(self.parts["quant_map"].bits)
        if not np.isfinite(numbers).all():
            raise StoreError(f"{self.parts['quant_map']}: one is no number: it is damaged")
        pairs = halves(numbers, higher_first=True)
        step = max(1, AT_ONCE // (2 * self.block)) * 2 * self.block  # of whole blocks, and of whole bytes
        for start in range(first // (2 * self.block) * 2 * self.block, last, step):
            stop = min(start + step, last)
            values = pairs.take(data[start // 2 : -(-stop // 2)]).view(np.float32)[: stop - start]
            scales = self._scales(start // self.block, -(-stop // self.block))
            whole = len(values) // self.block
            values[: whole * self.block].reshape(whole, self.block)[:] *= scales[:whole, None]
            values[whole * self.block :] *= scales[whole:]
            floats[start:stop] = torch.from_numpy(values)

    def _scales(self, first: int, last: int) -> np.ndarray:
        """Return those of the blocks [first, last), in fp32."""
        scales = self.parts["absmax"].bits.reshape(-1)[first:last]
        if self.nested is None:
            found = _floats(scales)
        else:
            factors = _floats(self.parts["nested_absmax"].bits)[np.arange(first, last) // self.nested]
            found = _floats(self.parts["nested_quant_map"].bits)[scales] * factors + np.float32(self.offset)
        if not np.isfinite(found).all():
            raise StoreError(f"{self.parts['absmax']}: a scale is no number: it is damaged")
        return found


def _in_8_bits(name: str, scales: TensorInFile, tensors: Parts, dtype: str) -> QuantisedWeight:
    if name not in tensors:
        raise StoreError(f"there is {scales.name} and no such weight")
    entry, laid = tensors[name].entry, tensors.get(f"{name}{_FORMAT}")
    if entry.dtype != "I8" or len(entry.shape) != 2:
        raise StoreError(
            f"it has {scales.name}, and is {list(entry.shape)} in {entry.dtype}: only matrices in I8 are read"
        )
    if laid is not None and laid.bits.any():
        raise StoreError(f"its format is {int(laid.bits.max())}: only 0 is read, row by row")
    if (scales.entry.dtype, scales.entry.shape) != ("F32", entry.shape[:1]):
        given = f"{list(scales.entry.shape)} in {scales.entry.dtype}"
        raise StoreError(f"{scales.name} is {given}, and it must be [{entry.shape[0]}] in F32")
    return _In8Bits(tensors[name], entry.shape, dtype_named(dtype), scales)


@dataclass(frozen=True)
class _In8Bits(QuantisedWeight):
    scales: TensorInFile

    def fill(self, floats: Tensor, box: Box) -> None:
        import torch

        rows, columns = box
        scales, across = _floats(self.scales.bits), slice(*columns)
        if not np.isfinite(scales).all():
            raise StoreError(f"{self.scales}: a scale is no number: it is damaged")
        step = max(1, AT_ONCE // max(1, columns[1] - columns[0]))
        for row in range(*rows, step):
            part = slice(row, min(row + step, rows[1]))
            values = self.stored.bits[part, across].view(np.int8) * scales[part, None]
            floats[part, across] = torch.from_numpy(values * np.float32(_PER_ROW))


def _floats(bits: Bits) -> np.ndarray[Any, np.dtype[np.float32]]:
    return bits.reshape(-1).view(np.float32)
