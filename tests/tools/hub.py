"""Tiny Hugging Face folders, checkpoints of them, and damage to their files."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import random_model, small
from torch import Tensor
from transformers import AutoModelForCausalLM
from whole import Whole

from megacore.models.lora import Lora
from megacore.models.stages import layout_of
from megacore.models.tuning import Tuning
from megacore.parallel.weights.fingerprint import combined
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.conversion import to_checkpoint
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.tensors import DTYPES, TensorFile
from megacore.store.weight_folders.audit import fingerprints
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import Adapters, Index
from megacore.tools import convert


def save(family: str, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """A folder as transformers saves it, of a small model whose weights are all random."""
    random_model(small(family, **fields), seed).save_pretrained(folder)
    return folder


def in_dtype(folder: Path, dtype: torch.dtype) -> Path:
    """The same folder, its weights now in this dtype."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def converted(source: Path, target: Path, *arguments: str) -> Path:
    assert convert.main([str(source), str(target), *arguments]) == 0
    return target


def adapted(folder: Path, target: Path, lora: Lora, companions: Mapping[str, Companion] | None = None) -> Path:
    """A checkpoint of adapters of a folder, on tp=2 x pp=2, every weight of them random."""
    base = HuggingFace.open(folder)
    layout, schema = layout_of(base.config, MeshShape(tp=2, pp=2)), Tuning(lora).kept(base.schema)
    stored, rng = list(hugging_face(schema)), np.random.default_rng(1)
    bits = {s.name: rng.normal(0, 0.3, s.shape).astype(np.float32).view(DTYPES["F32"]) for s in stored}
    of = Adapters(lora, str(folder), combined(fingerprints(base, "weights", 1)))
    kept = replace(layout, schema=schema)
    index = Index(base.raw, kept, ("weights",), None, {}, of)
    reads = {"weights": lambda s: ("F32", bits[s.name])}
    source = Whole(folder, index, schema, reads, beside=companions or {})
    to_checkpoint(source, kept).write(target, jobs=1)
    return target


def of_a_run(states: Mapping[str, Path], target: Path, tp: int, pp: int, step: int = 7) -> Path:
    """A checkpoint as a run has them: each state holds what a Hugging Face folder holds."""
    opened = {state: HuggingFace.open(path) for state, path in states.items()}
    weights = opened["weights"]
    layout = layout_of(weights.config, MeshShape(tp=tp, pp=pp))
    trainer = {"step": step, "consumed_samples": 56, "lr": 0.125, "scaler": None, "recipe": {"out": "runs/x"}}
    index = Index(weights.raw, layout, tuple(opened), step, {})
    reads = {state: folder.read() for state, folder in opened.items()}
    source = Whole(target, index, weights.schema, reads, json.dumps(trainer).encode())
    to_checkpoint(source, layout).write(target, jobs=1)
    return target


def change(file: Path, tensor: str, how: Callable[[Tensor], Any]) -> None:
    """Change the bytes of one float32 tensor in place; ``how`` is given it to write to."""
    entry = TensorFile.open(file).entries[tensor]
    data = bytearray(file.read_bytes())
    values = torch.frombuffer(data, dtype=torch.float32, offset=entry.start, count=(entry.stop - entry.start) // 4)
    how(values.view(entry.shape))
    file.write_bytes(data)


def flip(file: Path, tensor: str, element: int, bit: int) -> None:
    """Flip one bit of a float32 tensor."""

    def how(values: Tensor) -> None:
        values.view(torch.int32).view(-1)[element] ^= 1 << bit

    change(file, tensor, how)
