"""Sound folders, from which hostile ones are made: a model, its checkpoint, a run of it, corpora and recipes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from whole import Whole, write_tensor

from megacore.data import tokenizer
from megacore.data.indexed import IndexedWriter
from megacore.data.stage import Partition
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.conversion import to_checkpoint
from megacore.store.tensor_files.tensors import DTYPES, TensorWriter
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import Index
from megacore.tools.tokenize import Options, tokenize

MODEL = {
    "family": "llama",
    "vocab_size": 320,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
RECIPE = """
model: {config: hf}
data: {train: data/tokens, sequence_length: 8, validation_fraction: 0}
batch: {global_size: 1}
train: {steps: 1, precision: fp32, device: cpu}
log: {peak_tflops: 1}
out: run
"""
TUNING = """
data: {train: data/chats.jsonl, sequence_length: 32, validation_fraction: 0}
checkpoint: {init: hf, at_end: false}
batch: {global_size: 1}
train: {steps: 1, precision: fp32, device: cpu}
log: {peak_tflops: 1}
out: run
"""
TRAINER: Mapping[str, Any] = {
    "step": 7,
    "consumed_samples": 7,
    "tokens": 56,
    "optimizer_steps": 7,
    "data_order": 2,
    "scaler": None,
    "recipe": {},
}
STATES = ("weights", "exp_avg", "exp_avg_sq")


def build(folder: Path) -> None:
    """Make all of it in a folder: `hf`, `ckpt`, `state` (a checkpoint of a run), `data` and the two recipes."""
    model = folder / "hf"
    model.mkdir(parents=True)
    config = configure(MODEL)
    rng = np.random.default_rng(0)
    shapes = [(s.name, "F32", s.shape) for s in hugging_face(config.schema)]
    with TensorWriter.create(model / "model.safetensors", shapes) as writer:
        for name, _, shape in shapes:
            write_tensor(writer, name, rng.normal(0, 0.3, shape).astype(np.float32).view(DTYPES["F32"]))
    (model / "config.json").write_text(json.dumps(config.to_hugging_face()))
    tokenizer.train(["a few words, and a few more"] * 3, 270, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 10**30}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "LICENSE").write_text("free")
    source = HuggingFace.open(model)
    layout = layout_of(config, MeshShape(tp=2))
    to_checkpoint(source, layout).write(folder / "ckpt", jobs=1)
    reads, trainer = dict.fromkeys(STATES, source.read()), json.dumps(TRAINER).encode()
    state = Whole(model, Index(source.raw, layout, STATES, 7, {}), source.schema, reads, trainer)
    to_checkpoint(state, layout).write(folder / "state", jobs=1)
    data = folder / "data"
    data.mkdir()
    with IndexedWriter(data / "tokens", 320) as documents:
        for _ in range(8):
            documents.write(rng.integers(0, 269, 12))
    (data / "texts.jsonl").write_text('{"text": "a few words"}\n' * 3)
    turns = [{"role": "user", "content": "a few"}, {"role": "assistant", "content": "words"}]
    (data / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    tokenize(Options((data / "texts.jsonl",), folder / "parts", str(model), part=Partition(1, 1)))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "tuning.yaml").write_text(TUNING)
