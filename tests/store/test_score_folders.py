"""Folders of models whose heads score sequences: read, laid out, verified beside transformers, exported and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import drawn, of_transformers, random_model
from tiny import hugging_face_folder, layout_of
from transformers import AutoModelForSequenceClassification

from megacore.inference.verification import Pair, verify
from megacore.models.mtp import FIELD
from megacore.models.registry import family
from megacore.parallel.mesh import Mesh
from megacore.store.conversions.conversion import to_checkpoint, to_hugging_face
from megacore.store.conversions.convert import convert
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace

LABELS = {str(number): f"LABEL_{number}" for number in range(5)}


def section(name: str, **fields: Any) -> dict[str, Any]:
    return drawn(name, 1, architectures=[family(name).config.scoring_architecture()], id2label=LABELS, **fields)


CASES = {
    "tied": section("llama", tie_word_embeddings=True),
    "untied": section("gpt_neox", tie_word_embeddings=False),
    "without layers that predict further tokens": section("deepseek_v3", layers=5, **{FIELD: 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_bit_goes_through_layouts_and_back(tmp_path: Path, name: str) -> None:
    """Five labels over two ranks, of which the last one is filled up."""
    bits = hugging_face_folder(tmp_path / "hf", CASES[name])
    assert "score.weight" in bits and not any("lm_head" in each or "embed_out" in each for each in bits)
    layout = layout_of(CASES[name], (3, 2), pp=2, tp=2)
    to_checkpoint(HuggingFace.open(tmp_path / "hf"), layout).write(tmp_path / "c", jobs=1)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.config.labels == 5
    to_checkpoint(checkpoint, layout_of(CASES[name], (5,), tp=4)).write(tmp_path / "other", jobs=1)
    to_hugging_face(Checkpoint.open(tmp_path / "other"), 1 << 30).write(tmp_path / "back", jobs=1)
    file = TensorFile.open(tmp_path / "back/model.safetensors")
    assert file.entries.keys() == bits.keys()
    assert all(np.array_equal(file.array(each), bits[each]) for each in bits)
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("hf", "back"))
    assert after == before | ({FIELD: 0} if FIELD in before else {}) and after["id2label"] == LABELS


def test_scores_are_verified_beside_transformers(tmp_path: Path) -> None:
    there = of_transformers(drawn("qwen3", 2, layers=2, vocab=64, positions=32))
    there.id2label = {int(number): label for number, label in LABELS.items()}
    random_model(there, auto=AutoModelForSequenceClassification).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "c")
    pair = Pair(Checkpoint.open(tmp_path / "c"), HuggingFace.open(tmp_path / "hf"))
    assert verify(pair, [[7, 9, 11, 8]], Mesh.single()).passes
    damaged = np.fromfile(tmp_path / "hf/model.safetensors", np.uint8)
    damaged[-1] ^= 0x3F  # of the head, which is stored last
    (tmp_path / "hf/model.safetensors").write_bytes(damaged.tobytes())
    report = verify(pair, [[7, 9, 11, 8]], Mesh.single())
    assert not report.passes and any("score.weight" in each for each in report.differing)


BAD = {
    "a map": ({"id2label": ["a"]}, r"id2label is \['a'\]: it must be {number: label}"),
    "others": ({"id2label": {"0": "a"}}, r"shape \[5, \d+\] instead of \[1, \d+\]: score.weight"),
    "no class": ({"model_type": "granite"}, "transformers has no ForSequenceClassification of this family"),
    "a larger model": (
        {"model_type": "llava", "text_config": {}, "architectures": ["LlavaForSequenceClassification"]},
        "of larger models only language models are read",
    ),
    "a language model": ({"architectures": ["LlamaForCausalLM"]}, "tensors are not of this model: score.weight"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    fields, message = BAD[name]
    hugging_face_folder(tmp_path / "hf", CASES["tied"])
    file = tmp_path / "hf/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(StoreError, match=message):
        open_folder(tmp_path / "hf")


def test_what_predicts_tokens_refuses_them(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "hf", CASES["tied"])
    with pytest.raises(StoreError, match="is a LlamaForSequenceClassification, whose head scores a sequence"):
        convert(tmp_path / "hf", tmp_path / "model.gguf", to="gguf")
