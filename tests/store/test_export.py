"""Hugging Face folders as targets: the names, the cut and the JSON are those of ``save_pretrained``."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import drawn, random_model, rotated, saved
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megacore.models.config import ModelConfig
from megacore.models.registry import FAMILIES, configure, family
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import NUMBERS
from megacore.store.tensor_files.stream import METADATA
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.hugging_face_files import (
    Shard,
    config_json,
    export_files,
    index_json,
    parse_size,
    texts,
    with_dtype,
)

TORCH = {getattr(torch, name): short for short, name in NUMBERS.items()}


def model(name: str, **fields: Any) -> PreTrainedModel:
    """A model that the family draws, with random weights in bf16."""
    values = ours(name, **fields).to_hugging_face()
    made: Any = random_model(CONFIG_MAPPING[name](**values), seed=5)
    return made.to(torch.bfloat16)


def ours(name: str, **fields: Any) -> ModelConfig:
    return configure(drawn(name, 1, layers=4, vocab=512, positions=512, **fields))


def planned(theirs: PreTrainedModel, max_shard_bytes: int) -> tuple[list[Shard], dict[str, str]]:
    dtypes = {name: TORCH[t.dtype] for name, t in saved(theirs).items()}
    return export_files([*hugging_face(schema_of(theirs))], dtypes, max_shard_bytes), dtypes


def schema_of(theirs: PreTrainedModel) -> Schema:
    return family(theirs.config.model_type).config.from_hugging_face(theirs.config.to_dict()).schema


def tensors_of(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(file, "pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@pytest.mark.quick
@pytest.mark.parametrize(("name", "case"), rotated(product((10**9, 20_000, 1), (False, True)), few=8))
def test_names_are_those_that_transformers_writes(name: str, case: tuple[int, bool], tmp_path: Path) -> None:
    size, tied = case
    theirs = model(name, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    files = {file.name: tensors_of(file) for file in tmp_path.glob("*.safetensors")}
    shards, dtypes = planned(theirs, size)
    mine = {file: {s.name: (dtypes[s.name], s.shape) for s in held} for file, held in shards}
    written, shown = ({k: v for held in each.values() for k, v in held.items()} for each in (mine, files))
    assert written == shown
    # Theirs is cut in the order of the state dict, ours in that of the table: where several fit into a file, the files
    # may be others; so they are where theirs holds stacked what it writes as a list, which it keeps together.
    listed = size == 1 and any(len(held) > 1 for held in files.values())
    assert list(mine) == sorted(files) if size in (1, 10**9) and not listed else len(mine) > 1
    assert size > 1 or all(len(held) == 1 for held in mine.values())
    made = texts(ours(name).to_hugging_face(), schema_of(theirs), shards, dtypes)
    if size == 10**9:
        assert mine == files and list(made) == ["config.json"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    written = json.loads(made["model.safetensors.index.json"])
    # Parameters that get no gradient are buffers here, which count for none.
    index["metadata"]["total_parameters"] -= sum(p.numel() for p in theirs.parameters() if not p.requires_grad)
    assert written["metadata"] == index["metadata"]
    assert written["weight_map"] == {tensor: file for file, held in mine.items() for tensor in held}
    assert list(written["weight_map"]) == list(index["weight_map"])


@pytest.mark.parametrize(("name", "size"), rotated([1, 700, 16_384, 16_512, 32_768, 40_000, 10**6], few=8))
def test_files_are_full_and_not_too_full(name: str, size: int) -> None:
    schema = ours(name).schema
    dtypes = dict.fromkeys((p for _, held in planned(model(name), 1)[0] for p in (s.name for s in held)), "BF16")
    shards = export_files([*hugging_face(schema)], dtypes, size)
    sizes = [[2 * torch.Size(s.shape).numel() for s in held] for _, held in shards]
    for held, after in zip(sizes, [*sizes[1:], [10**9]], strict=True):
        assert sum(held) <= size or len(held) == 1
        assert sum(held) + after[0] > size
    assert [s.name for _, held in shards for s in held] == [
        s.name for _, held in export_files([*hugging_face(schema)], dtypes, 10**9) for s in held
    ]


@pytest.mark.parametrize(("name", "case"), rotated(product((False, True), (10**9, 30_000)), few=8))
def test_transformers_reads_what_is_planned(name: str, case: tuple[bool, int], tmp_path: Path) -> None:
    tied, size = case
    theirs = model(name, tie_word_embeddings=tied)
    shards, dtypes = planned(theirs, size)
    state = saved(theirs)
    for file, held in shards:
        save_file({s.name: state[s.name].clone() for s in held}, tmp_path / file, METADATA)
    for file, content in texts(theirs.config.to_dict(), schema_of(theirs), shards, dtypes).items():
        (tmp_path / file).write_bytes(content)
    assert {file.name for file in tmp_path.iterdir()} >= {file for file, _ in shards} | {"config.json"}
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, info = both
    assert not any(info.values())
    assert type(loaded) is type(theirs) and loaded.dtype == torch.bfloat16
    assert all(torch.equal(t, theirs.state_dict()[key]) for key, t in loaded.state_dict().items())
    assert {s.name for s in HuggingFace.open(tmp_path).stored()} == set(state)


# -- config.json


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_means_the_same(name: str, tmp_path: Path) -> None:
    kind: Any = CONFIG_MAPPING[name]
    theirs = kind(architectures=["Mine"], eos_token_id=[7, 8], pad_token_id=3, name_or_path="ä\ud800")
    raw = json.loads(theirs.to_json_string(use_diff=False))
    (tmp_path / "config.json").write_bytes(config_json(raw))
    raw |= family(name).config.written
    assert json.loads((tmp_path / "config.json").read_bytes()) == raw
    read = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    assert read | {"_name_or_path": 0} == raw | {"_name_or_path": 0}


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}, {"architectures": []}])
def test_config_json_names_the_class(architectures: dict[str, Any]) -> None:
    bare = {k: v for k, v in ours("llama").to_hugging_face().items() if k != "architectures"}
    assert json.loads(config_json(bare | architectures)) == bare | {"architectures": ["LlamaForCausalLM"]}


def test_config_json_takes_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        config_json(ours("llama").to_hugging_face() | {"temperature": float("nan")})


def test_dtype_after_a_conversion() -> None:
    """In the spelling that is there, or in today's."""
    assert with_dtype({"torch_dtype": "float32", "a": 1}, "BF16") == {"torch_dtype": "bfloat16", "a": 1}
    assert with_dtype({"dtype": "float32"}, "F16") == {"dtype": "float16"}
    assert with_dtype({"dtype": "float32", "torch_dtype": "x"}, "F64") == {"dtype": "float64", "torch_dtype": "float64"}
    assert with_dtype({}, "F32") == {"dtype": "float32"}


# -- sizes

SIZES = {
    "5GB": 5_000_000_000,
    "500MB": 500_000_000,
    "2GiB": 2 << 30,
    "1.5 GiB": 3 << 29,
    "3kb": 3000,
    "3 KIB": 3072,
    "1TB": 10**12,
    "0.001TiB": 1099511627,
    "7B": 7,
    " 12345 ": 12345,
    "0.3kB": 300,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str) -> None:
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "-5GB", "5 G B", "1e9", "5,0GB", "\u0665GB", "0x10", "nan", "5GB 3", "9" * 5000]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(StoreError, match="is not a size: write 5GB, 500MB, 2GiB or a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.0001KB"])
def test_sizes_that_hold_nothing(text: str) -> None:
    with pytest.raises(StoreError, match="holds nothing"):
        parse_size(text)


def test_the_index_is_sorted_and_ends_its_line() -> None:
    theirs = model("gpt2")
    shards, dtypes = planned(theirs, 1)
    content = index_json(schema_of(theirs), shards, dtypes)
    assert content.endswith(b"}\n") and list(json.loads(content)["weight_map"]) == sorted(dtypes)
