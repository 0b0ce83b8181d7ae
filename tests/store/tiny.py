"""Tiny models in folders: random bits in Hugging Face's format, and checkpoints of training runs."""

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from families import drawn
from whole import Whole, write_tensor

from megacore.models.config import ModelConfig
from megacore.models.mtp import FIELD
from megacore.models.registry import FAMILIES, configure, family
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, hugging_face, native, plan
from megacore.store.conversions.conversion import to_checkpoint
from megacore.store.tensor_files import shares
from megacore.store.tensor_files.stream import File, Read, Tensor, assemble, write
from megacore.store.tensor_files.tensors import DTYPES, TensorWriter
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import STATES, FileRecord, Index, file_name, holder

Section = Mapping[str, Any]
Bits = dict[str, np.ndarray]
"""{Hugging Face's name: bits}."""

LLAMA: Section = {
    "family": "llama",
    "vocab_size": 13,
    "hidden_size": 6,
    "intermediate_size": 8,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 16,
}
GPT2: Section = {"family": "gpt2", "vocab_size": 13, "n_positions": 7, "n_embd": 8, "n_layer": 5, "n_head": 4}
MIXTRAL: Section = {
    "family": "mixtral",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 5,  # odd: parts are padded
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
}

SECTIONS: Mapping[str, tuple[Section, ...]] = {
    name: tuple(
        drawn(name, seed, tie_word_embeddings=not seed, **({FIELD: 1} if hasattr(family(name).config, FIELD) else {}))
        for seed in (0, 1)
    )
    for name in FAMILIES
}
"""Of each family: tied and not, with layers that predict further tokens where it may have some, all else at random.
All have 5 layers and split over tp=4."""

LAYERS = 5
TRAINER = b'{"step": 7,  "data": {"samples": 1792}}\n'
COMPANIONS = {"tokenizer.json": b"{}", "additional_chat_templates/tool.jinja": b"{{ x }}", "LICENSE": b"free"}


def tensors_of(schema: Schema, state: str) -> Iterator[Stored]:
    """Hugging Face's tensors that have a state: buffers have weights alone."""
    return (s for s in hugging_face(schema) if state == "weights" or not schema[s.param].buffer)


def random_bits(config: ModelConfig, dtype: str, seed: int, state: str = "weights") -> Bits:
    """Any bits, NaN and infinities among them."""
    rng, bits = np.random.default_rng(seed), DTYPES[dtype]
    return {s.name: rng.integers(0, 1 << 8 * bits.itemsize, s.shape, bits) for s in tensors_of(config.schema, state)}


def hugging_face_folder(path: Path, section: Section, dtype: str = "BF16", seed: int = 0) -> Bits:
    """A folder of one file, and the bits that are in it."""
    config = configure(section)
    bits = random_bits(config, dtype, seed)
    path.mkdir(parents=True)
    again = {copy: param.hf for param in config.schema.params for copy in param.hf_copies}
    stored = {s.name: bits[again.get(s.name, s.name)] for s in hugging_face(config.schema, copies=True)}
    with TensorWriter.create(path / "model.safetensors", [(n, dtype, b.shape) for n, b in stored.items()]) as writer:
        for name, array in stored.items():
            write_tensor(writer, name, array)
    (path / "config.json").write_text(json.dumps(config.to_hugging_face(), indent=2))
    for name, content in COMPANIONS.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return bits


OF_ADAMW = STATES[:4]
"""What a run without averages has: tests of shares know which rank writes which part of these."""


def run_checkpoint(
    path: Path, section: Section, layout: Layout, dtype: str = "BF16", states: tuple[str, ...] = STATES
) -> dict[str, Bits]:
    """A checkpoint of a training run: weights, fp32 masters, moments and averages, trainer.json; and the bits of each
    state."""
    config = configure(section)
    held = {name: random_bits(config, dtype if name == "weights" else "F32", i, name) for i, name in enumerate(states)}

    def reads(state: str) -> Read:
        kind = dtype if state == "weights" else "F32"
        return lambda stored, view=None: (kind, held[state][stored.name])

    index = Index(config.to_hugging_face(), layout, states, 7, {})
    source = Whole(path, index, config.schema, {state: reads(state) for state in states}, TRAINER)
    to_checkpoint(source, layout).write(path, jobs=2)
    return held


def spread(source: Path, target: Path, replicas: int = 4) -> Checkpoint:
    """The same checkpoint as so many replicas write it, if no share is too small for a writer of its own."""
    checkpoint = Checkpoint.open(source)
    index, schema = checkpoint.index, checkpoint.layout.schema
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "index.json"))
    records = {}
    with mock.patch.object(shares, "SHARE_BYTES", 1):
        for rank in range(index.layout.mesh.world):
            held = {s.name: s for s in native(index.layout, [rank])}
            widths = {
                state: [
                    (held[s.name], DTYPES[checkpoint.dtype(state, s)].itemsize)
                    for s in checkpoint.stored(state)
                    if s.where == holder(index.layout.mesh.place(rank))
                ]
                for state in index.states
            }
            for part in itertools.chain.from_iterable(shares.share_out(index.layout, widths, replicas)):
                path = file_name(part.state, index.layout.mesh.place(rank), part.number)
                planned = plan(schema, checkpoint.stored(part.state), part.tensors)
                dtype = "BF16" if part.state == "weights" else "F32"
                file = File(path, tuple(Tensor(s, dtype, c) for s, c in planned), checkpoint.read(part.state))
                cuts = {s.name: held[s.name].cut(s) for s in part.tensors}
                ranges = {name: cut for name, cut in cuts.items() if cut is not None}
                found = write(target, [file], schema, jobs=1)
                records[path] = FileRecord(file.size, found[path], ranges)
    (target / "index.json").write_bytes(dataclasses.replace(index, files=records).to_json())
    return Checkpoint.open(target)


def layout_of(section: Section, layers: tuple[int, ...] = (LAYERS,), **mesh: int) -> Layout:
    return Layout(configure(section).schema, MeshShape(**mesh), layers)


def whole(checkpoint: Checkpoint, state: str) -> dict[str, tuple[str, np.ndarray]]:
    """{Hugging Face's name: (dtype, bits)} of a state, put together in memory."""
    made, wanted = {}, tensors_of(checkpoint.config.schema, state)
    for stored, copies in plan(checkpoint.layout.schema, checkpoint.stored(state), wanted):
        dtype = checkpoint.dtype(state, copies[0].source)
        made[stored.name] = dtype, assemble(stored, copies, checkpoint.read(state), dtype)
    return made


def assert_holds(path: Path, held: Mapping[str, Bits], dtypes: Mapping[str, str]) -> Checkpoint:
    """A checkpoint has these states with these bits, and nothing else."""
    checkpoint = Checkpoint.open(path)
    assert set(checkpoint.index.states) == set(held)
    for state, bits in held.items():
        found = whole(checkpoint, state)
        assert found.keys() == bits.keys()
        for name, (dtype, array) in found.items():
            assert dtype == dtypes[state] and np.array_equal(array, bits[name]), (state, name)
    return checkpoint


def snapshot(folder: Path) -> dict[str, str]:
    """{path: digest} of all that is in a folder."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in found
    }


def tensor_file(folder: Path, state: str = "weights", **place: int) -> Path:
    coordinates = {"pp": 0, "ep": 0, "tp": 0} | place
    name = "-".join(f"{dim}{at}" for dim, at in coordinates.items())
    return folder / state / f"{name}.safetensors"


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "index.json").read_text())
    change(content)
    (folder / "index.json").write_text(json.dumps(content))
