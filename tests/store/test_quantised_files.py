"""Folders whose weights lie in 4 or 8 bits of bitsandbytes, and experts in mxfp4 as gpt-oss is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changes import edit_config
from families import random_model, small
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megacore.models.config import ModelConfigError
from megacore.models.quantization import Bitsandbytes, dequantised
from megacore.models.registry import configure
from megacore.store.conversions.convert import convert
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.bitsandbytes_files import decoded
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.hugging_face import HuggingFace

Tensors = dict[str, torch.Tensor]
Lies = tuple[Tensors, torch.Tensor]  # what the files hold of a weight, and what it stands for
SINGLE, WEIGHT = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


def in_4_bits(name: str, shape: tuple[int, ...], *, nested: bool, kind: str = "nf4", block: int = 10) -> Lies:
    """One number after the other, by the layout's description; blocks of 10 that rows of 16 are not divided by."""
    draw = np.random.default_rng(len(name))
    rows, columns = shape
    numbers = draw.integers(0, 16, rows * columns)
    table = draw.standard_normal(16).astype(np.float32)
    data = np.zeros(-(-numbers.size // 2), np.uint8)
    for at, number in enumerate(numbers):
        data[at // 2] |= number << (0 if at % 2 else 4)
    blocks = -(-numbers.size // block)
    said: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    made = {f"{name}.quant_map": torch.from_numpy(table)}
    if nested:
        places, of_places = draw.integers(0, 256, blocks), draw.standard_normal(256).astype(np.float32)
        largest = draw.random(-(-blocks // 3)).astype(np.float32)
        said |= {"nested_blocksize": 3, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = [of_places[place] * largest[at // 3] + np.float32(0.25) for at, place in enumerate(places)]
        made |= {
            f"{name}.absmax": torch.from_numpy(places.astype(np.uint8)),
            f"{name}.nested_quant_map": torch.from_numpy(of_places),
            f"{name}.nested_absmax": torch.from_numpy(largest),
        }
    else:
        scales = list(draw.random(blocks).astype(np.float32))
        made[f"{name}.absmax"] = torch.tensor(np.array(scales))
    made[name] = torch.from_numpy(data)[:, None]
    made[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    floats = [table[number] * scales[at // block] for at, number in enumerate(numbers)]
    return made, torch.tensor(np.array(floats)).view(shape).bfloat16()


def in_wide_bytes(name: str, shape: tuple[int, ...]) -> Lies:
    """As `bnb_4bit_quant_storage` has it, for FSDP."""
    made, mean = in_4_bits(name, shape, nested=False, block=64)
    return made | {name: made[name].view(-1).view(torch.bfloat16)[:, None]}, mean


def in_8_bits(name: str, shape: tuple[int, ...]) -> Lies:
    numbers, largest = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0])
    module = name.removesuffix(".weight")
    made = {name: numbers, f"{module}.SCB": largest, f"{name}_format": torch.tensor(0, dtype=torch.uint8)}
    return made, (numbers.float() * largest[:, None] * (1 / 127)).bfloat16()


def in_mxfp4(name: str, shape: tuple[int, ...]) -> Lies:
    experts, inner, outer = shape
    blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
    scales = torch.randint(1, 250, (experts, outer, inner // 32), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


BNB4, BNB8 = ({"quant_method": "bitsandbytes", f"load_in_{bits}bit": True} for bits in (4, 8))
CASES: dict[str, tuple[str, dict[str, Any], Callable[[str, tuple[int, ...]], Lies]]] = {
    "nf4, scales in 8 bits": ("llama", BNB4, lambda name, shape: in_4_bits(name, shape, nested=True)),
    "fp4": ("llama", BNB4, lambda name, shape: in_4_bits(name, shape, nested=False, kind="fp4")),
    "wide bytes": ("llama", BNB4 | {"bnb_4bit_quant_storage": "bfloat16"}, in_wide_bytes),
    "int8": ("llama", BNB8, in_8_bits),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, in_mxfp4),
}


def folder(path: Path, family: str, said: dict[str, Any], lie: Callable[[str, tuple[int, ...]], Lies]) -> Tensors:
    """Make one -> the tensors that it stands for."""
    fields = {"hidden_size": 64, "intermediate_size": 96} if family == "gpt_oss" else {"intermediate_size": 26}
    random_model(small(family, **fields)).bfloat16().save_pretrained(path)
    held = load_file(path / SINGLE)
    mean = dict(held)
    for name, weight in mean.items():
        if name.endswith("proj" if family == "gpt_oss" else "proj.weight"):
            made, mean[name] = lie(name, tuple(weight.shape))
            del held[name]
            held |= made
    save_file(held, path / SINGLE, {"format": "pt"})
    edit_config(path, quantization_config=said)
    return mean


@pytest.mark.parametrize("case", CASES)
def test_weights_in_few_bits_are_read_as_what_they_stand_for(case: str, tmp_path: Path) -> None:
    """Through a layout that cuts rows, columns, gates from ups and experts, and back."""
    family, said, lie = CASES[case]
    mean = folder(tmp_path / "few", family, said, lie)
    assert len(HuggingFace.open(tmp_path / "few").remarks) == 1
    convert(tmp_path / "few", tmp_path / "ours", tp=2, pp=2)
    back = convert(tmp_path / "ours", tmp_path / "back", to="hf")
    read = load_file(tmp_path / "back" / back.files[0].path)
    assert read.keys() == mean.keys()
    assert [name for name in mean if not torch.equal(read[name], mean[name])] == []
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert configure({"config": str(tmp_path / "few")}) == configure({"config": str(tmp_path / "back")})


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_they_are_the_numbers_of_bitsandbytes(kind: str, nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(
        torch.randn(48, 128, dtype=torch.bfloat16), quant_type=kind, blocksize=64, compress_statistics=nested
    )
    held = {WEIGHT: data} | {f"{WEIGHT}.{part}": value for part, value in state.as_dict(packed=True).items()}
    save_file(held, tmp_path / SINGLE)
    (file,), problems = decoded([TensorFile.open(tmp_path / SINGLE)], Bitsandbytes(4, "bfloat16"))
    made = torch.from_numpy(file.array(WEIGHT).view(np.int16)).view(torch.bfloat16)
    assert (problems, torch.equal(made, functional.dequantize_4bit(data, state))) == ([], True)


def stated(**fields: Any) -> Callable[[Tensors], None]:
    """Let the state of a weight say otherwise."""

    def change(tensors: Tensors) -> None:
        said = json.loads(bytes(tensors[STATE].tolist())) | fields
        tensors[STATE] = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)

    return change


def put(name: str, value: torch.Tensor | None) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


SCALES, EXPERTS = WEIGHT.replace("weight", "SCB"), "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("nf4, scales in 8 bits", stated(shape=[16]), r"has shape \[16\], which is no matrix's"),
        ("nf4, scales in 8 bits", stated(dtype="bfloat"), "has dtype 'bfloat': did you mean 'bfloat16'"),
        ("nf4, scales in 8 bits", stated(blocksize=None), "has blocksize None: it must"),
        ("nf4, scales in 8 bits", stated(nested_blocksize="3"), "has nested_blocksize '3': it must"),
        ("nf4, scales in 8 bits", stated(shape=[16, 18]), r"its absmax has 26 numbers in U8, and \[16, 18\] of .* 29"),
        ("nf4, scales in 8 bits", stated(nested_offset=None), "has nested_offset None, which is no number"),
        ("nf4, scales in 8 bits", put(STATE, torch.tensor([91, 93], dtype=torch.uint8)), "state is no JSON object"),
        ("nf4, scales in 8 bits", put(f"{WEIGHT}.quant_map", None), f"it has no .quant_map: {WEIGHT}"),
        ("nf4, scales in 8 bits", put(WEIGHT, None), f"it has no tensor of its name: {WEIGHT}"),
        (
            "nf4, scales in 8 bits",
            put(WEIGHT, torch.zeros(120, 1).byte()),
            r"it has 120 bytes, and \[16, 16\] in 4 .* 128",
        ),
        ("nf4, scales in 8 bits", put(WEIGHT, torch.zeros(137, 1).byte()), r"it has 137 bytes"),
        ("nf4, scales in 8 bits", put(WEIGHT, torch.zeros(1, 128).byte()), r"its bytes lie as \[1, 128\]"),
        (
            "nf4, scales in 8 bits",
            put(WEIGHT, torch.zeros(128, 1).bool()),
            "its bytes are in BOOL: only those in U8, I8, BF16",
        ),
        ("fp4", put(STATE, torch.zeros(2).byte()), f"it has two quant_states, of nf4 and of fp4: {WEIGHT}"),
        ("nf4, scales in 8 bits", put(STATE, None), r"shape \[128, 1\] instead of \[16, 16\]"),
        ("fp4", put(f"{WEIGHT}.absmax", torch.full((26,), torch.nan)), "a scale is no number: it is damaged"),
        ("fp4", put(f"{WEIGHT}.quant_map", torch.full((16,), torch.inf)), "quant_map .*: one is no number"),
        ("int8", put(WEIGHT, torch.zeros(16, 16)), r"is \[16, 16\] in F32: only matrices in I8 are read"),
        ("int8", put(SCALES, torch.zeros(4)), r"SCB is \[4\] in F32, and it must be \[16\] in F32"),
        ("int8", put(SCALES, torch.full((16,), torch.inf)), "a scale is no number: it is damaged"),
        ("int8", put(SCALES, None), f"dtype I8 is not one of .*: {WEIGHT}"),
        ("int8", put(WEIGHT, None), "and no such weight"),
        ("int8", put(f"{WEIGHT}_format", torch.tensor(1, dtype=torch.uint8)), "its format is 1: only 0 is read"),
        ("mxfp4", put(f"{EXPERTS}_scales", torch.full((4, 64, 3), 255, dtype=torch.uint8)), "a scale is no number"),
        ("mxfp4", put(f"{EXPERTS}_scales", torch.full((4, 64, 3), 254, dtype=torch.uint8)), "one of numbers too large"),
        ("mxfp4", put(EXPERTS, torch.zeros(4, 96, 64)), f"it is there by itself, and as _blocks and .*: {EXPERTS}"),
        ("mxfp4", put(f"{EXPERTS}_scales", None), f"there are _blocks or _scales alone: {EXPERTS}"),
        (
            "mxfp4",
            put(f"{EXPERTS}_scales", torch.zeros(4, 64, 2).byte()),
            r"with scales \[4, 64, 2\] in U8: it must be",
        ),
    ],
)
def test_what_is_damaged_is_told(case: str, change: Callable[[Tensors], None], said: str, tmp_path: Path) -> None:
    folder(tmp_path / "few", *CASES[case])
    tensors = load_file(tmp_path / "few" / SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / "few" / SINGLE, {"format": "pt"})
    with pytest.raises(StoreError, match=said):
        convert(tmp_path / "few", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "has neither or both of load_in_4bit, load_in_8bit: of"),
        (BNB4 | {"load_in_8bit": True}, "has neither or both of load_in_4bit, load_in_8bit: of"),
        (BNB8 | {"llm_int8_has_fp16_weight": True, "bits": 3}, "has llm_int8_has_fp16_weight=True, bits=3: of"),
        ({"quant_method": "mxfp4", "group": 16}, "has group=16: of"),
    ],
)
def test_what_lies_otherwise_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelConfigError, match=said):
        dequantised({"model_type": "llama", "quantization_config": config})
