"""A Hugging Face folder whose matrices lie in fp8, a scale in fp32 for each block, as Qwen3 is published.

What is not made of matrices stays as it is: embeddings, heads, norms, routers and biases, and matrices that blocks do
not divide, with those that servers put beside them into one product. Numbers are rounded as transformers does it
(`FineGrainedFP8Config`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megacore.models.config import ModelConfig
from megacore.models.quantization import QUANTIZATION
from megacore.parallel.weights.schema import Schema
from megacore.store.conversions.conversion import FolderPlan
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.fp8_files import FP8, SCALE, encoded
from megacore.store.tensor_files.stream import METADATA, File, Fingerprints, Tensor, assemble
from megacore.store.tensor_files.tensors import DTYPES, Declared, TensorWriter
from megacore.store.weight_folders.hugging_face import CONFIG, INDEX

BLOCK = 128
"""Rows and columns of a block: those of the folders that are published so, and of the kernels that read them."""
_OWN_LINEARS = ("falcon", "gpt2")
"""Families whose matrices are in modules of transformers' own, which takes none of them for a linear in fp8: on a GPU
they would be read without their scales."""
_PRODUCT = ("q_proj", "k_proj", "v_proj")
"""Matrices of one module that vLLM and SGLang multiply by at once: all of them lie in fp8, or none."""
_PARTLY = "kv_a_proj_with_mqa"
"""The matrix whose last rows may be a part of a block (576 in DeepSeek-V3, which is published so): servers put it
behind `q_a_proj`, in one product."""


def in_block_fp8(plan: FolderPlan, config: ModelConfig) -> FolderPlan:
    """Return the plan of a Hugging Face folder of a model in which its matrices lie in fp8. Raises StoreError: it has
    none that blocks divide, keeps several matrices in one tensor, or is of a family of which nothing reads fp8."""
    if config.family in _OWN_LINEARS:
        raise StoreError(f"`dtype=fp8`: transformers reads no linears of {config.family} in fp8, choose another dtype")
    params = {param.name: param for param in plan.schema.params}
    tensors = [tensor.stored for file in plan.files for tensor in file.tensors]
    matrices = [each for each in tensors if params[each.param].is_matrix and len(each.shape) > 1]
    names = {each.name for each in matrices}
    if stacked := [each.name for each in matrices if len(each.shape) > 2]:
        raise StoreError(
            f"`dtype=fp8` takes matrices, and {len(stacked)} tensors are several at once, {stacked[0]} among them: "
            "choose another dtype"
        )
    narrow = frozenset(each.name for each in matrices if _divides(each.name, each.shape))
    narrow -= {name for name in narrow if any(each not in narrow for each in _beside(name) if each in names)}
    if not narrow:
        raise StoreError(f"`dtype=fp8` takes matrices that blocks of {BLOCK} x {BLOCK} divide, and the model has none")
    wide = {each.name.removesuffix(".weight") for each in tensors if len(each.shape) == 2 and each.name not in narrow}
    if config.tie_word_embeddings and not config.labels:
        wide.add(config.tied[1].removesuffix(".weight"))  # which the file does not have, and the model does

    def texts(fingerprints: Mapping[str, Fingerprints]) -> Mapping[str, bytes]:
        made = {name: json.loads(text) for name, text in plan.texts(fingerprints).items()}
        made[CONFIG][QUANTIZATION] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(wide),
        }
        if INDEX in made:
            held = {name: file.path for file in files for name, *_ in file.headers}
            made[INDEX]["weight_map"] = dict(sorted(held.items()))
            made[INDEX]["metadata"]["total_size"] = sum(file.bytes for file in files)
        return {name: json.dumps(tree, indent=2).encode() + b"\n" for name, tree in made.items()}

    part = plan.states["weights"]
    files = tuple(_NarrowFile(file.path, file.tensors, file.read, narrow) for file in part.files)
    states = {"weights": replace(part, files=files)}
    return replace(plan, kind="a Hugging Face folder in fp8", states=states, texts=texts, writer=_write)


def _divides(name: str, shape: tuple[int, ...]) -> bool:
    return not shape[1] % BLOCK and (not shape[0] % BLOCK or _module(name)[1] == _PARTLY)


def _module(name: str) -> tuple[str, str]:
    """Return (the module that a linear is in, the linear's own name) of a tensor."""
    parent, _, linear = name.removesuffix(".weight").rpartition(".")
    return parent, linear


def _beside(name: str) -> list[str]:
    """Return the names of what is multiplied by at once with a tensor, itself among them."""
    parent, linear = _module(name)
    return [f"{parent}.{each}.weight" for each in (_PRODUCT if linear in _PRODUCT else [linear])]


@dataclass(frozen=True)
class _NarrowFile(File):
    """A file some of whose tensors are ``narrow``: rounded to fp8, with a scale for each block beside them."""

    narrow: frozenset[str]

    @property
    def headers(self) -> list[Declared]:
        return [each for tensor in self.tensors for each in self.declared(tensor)]

    def declared(self, tensor: Tensor) -> Iterator[Declared]:
        name, shape = tensor.stored.name, tensor.stored.shape
        if name not in self.narrow:
            yield name, tensor.dtype, shape
            return
        yield name, FP8, shape
        yield f"{name}{SCALE}", "F32", tuple(-(-size // BLOCK) for size in shape)

    @property
    def bytes(self) -> int:
        """Those of its tensors alone."""
        return sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self.headers)

    def made(self, tensor: Tensor, found: dict[str, int]) -> list[np.ndarray]:
        """Return what is written of a tensor; ``found``: as :func:`assemble`."""
        bits = assemble(tensor.stored, tensor.copies, self.read, tensor.dtype, found)
        if tensor.stored.name not in self.narrow:
            return [bits]
        try:
            return [*encoded(bits, tensor.dtype, BLOCK)]
        except ValueError as error:
            raise StoreError(f"{tensor.stored.name}: {error}") from error


def _write(
    folder: Path, files: Iterable[File], schema: Schema, jobs: int, progress: Callable[[int], object]
) -> dict[str, Fingerprints]:
    """Write files whose tensors are computed one by one, each thread in the memory of one."""
    return {file.path: _write_file(file, folder, jobs, progress) for file in files if isinstance(file, _NarrowFile)}


def _write_file(file: _NarrowFile, folder: Path, jobs: int, progress: Callable[[int], object]) -> Fingerprints:
    with TensorWriter.create(folder / file.path, file.headers, METADATA) as writer, ThreadPoolExecutor(jobs) as pool:

        def write(tensor: Tensor) -> dict[str, int]:
            found = dict.fromkeys(tensor.stored.labels, 0)
            for (name, *_), made in zip(file.declared(tensor), file.made(tensor, found), strict=True):
                data = made.reshape(-1).view(np.uint8)
                writer.put(data, writer.offset(name, 0))
                progress(data.size)
            return found

        return dict(zip((tensor.stored.name for tensor in file.tensors), pool.map(write, file.tensors), strict=True))
