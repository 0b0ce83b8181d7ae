"""Folders whose weights lie in fp8 with a scale for each block, as DeepSeek-V3, Qwen3 and MiniMax-M2 are published."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changes import edit_config
from families import random_model, small
from pool import Pool
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Linear, Fp8Quantize, replace_with_fp8_linear

from megacore.inference.model_loader import model_from
from megacore.models.registry import configure
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.conversions import block_fp8_folder
from megacore.store.conversions.convert import convert
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.fp8_files import numbers
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import inspect, verify

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
SINGLE, SHARDS = "model.safetensors", ("model-1.safetensors", "model-2.safetensors")
BLOCKS = {"qwen3_moe": (3, 5), "deepseek_v3": (2, 2), "llama": (128, 128)}
"""{family: rows and columns of a block}: they divide the sides of few matrices, of all, and of none."""


def quantised(tensors: Tensors, rows: int, columns: int) -> tuple[Tensors, Tensors]:
    """(the file's, what they stand for): the matrices of layers in fp8, of which some are no numbers."""
    lie, mean = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.ndim != 2 or "proj" not in name:
            continue
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        narrow, wide = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape, dtype=torch.float32)
        for i in range(len(scales)):
            for j in range(len(scales[0])):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[part].float().abs().max() / 448
                narrow[part] = (weight[part].float() / scales[i, j]).to(FP8)
                wide[part] = narrow[part].float() * scales[i, j]
        lie[name], lie[f"{name}_scale_inv"], mean[name] = narrow, scales, wide.to(torch.bfloat16)
    return lie, mean


def folder(path: Path, family: str, **config: Any) -> Tensors:
    """Make one of two files, scales anywhere -> the tensors that it stands for."""
    rows, columns = BLOCKS[family]
    random_model(small(family)).bfloat16().save_pretrained(path)
    lie, mean = quantised(load_file(path / SINGLE), rows, columns)
    (path / SINGLE).unlink()
    named = {name: SHARDS[len(name) % 2] for name in lie}
    for shard in SHARDS:
        save_file({name: t for name, t in lie.items() if named[name] == shard}, path / shard, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    edit_config(path, quantization_config=said | config)
    return mean


def test_each_of_the_256_numbers_is_the_one_that_torch_reads() -> None:
    bits = np.arange(256, dtype=np.uint8)
    torch.testing.assert_close(
        numbers(bits) * 256, torch.from_numpy(bits).view(FP8).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("family", BLOCKS)
def test_a_folder_is_read_as_what_it_stands_for(
    family: str, tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through layouts and back it is bitwise what was computed by hand, and what transformers makes of it; so it is on
    ranks that load it, each the part that it holds."""
    mean = folder(tmp_path / "fp8", family)
    convert(tmp_path / "fp8", tmp_path / "ours", tp=2, pp=2, ep=1 if family == "llama" else 2)
    convert(tmp_path / "ours", tmp_path / "back", to="hf")
    back = load_file(tmp_path / "back" / SINGLE)
    assert back.keys() == mean.keys()
    assert all(torch.equal(back[name], mean[name]) and back[name].dtype == torch.bfloat16 for name in mean)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert configure({"config": str(tmp_path / "fp8")}) == configure({"config": str(tmp_path / "back")})
    # transformers wants blocks that divide.
    assert verify.main([str(tmp_path / "ours"), str(tmp_path / ("fp8" if family == "deepseek_v3" else "back"))]) == 0
    assert inspect.main([str(tmp_path / "ours"), "--diff", str(tmp_path / "fp8")]) == 0
    rows, columns = BLOCKS[family]
    assert f"in fp8, with a scale for each {rows} x {columns} of them, are read as bfloat16" in capsys.readouterr().err
    for of_rank in zip(*(pool.run(2, held, tmp_path / name) for name in ("fp8", "back")), strict=True):
        assert of_rank[0] == of_rank[1]


def held(path: Path) -> dict[str, bytes]:
    """What a rank of two has of a folder."""
    parameters = model_from(HuggingFace.open(path), Mesh.create(MeshShape(tp=2)), torch.float32).parameters
    return {name: parameters[name].detach().numpy().tobytes() for name in parameters}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_export_in_fp8_is_what_transformers_makes_of_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint whose ranks hold parts of blocks; transformers reads it, and so do we."""
    monkeypatch.setattr(block_fp8_folder, "BLOCK", 2)
    plain = random_model(small(family)).bfloat16()
    plain.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "ours", tp=2, pp=2)
    told = convert(tmp_path / "ours", tmp_path / "fp8", to="hf", dtype="fp8", max_shard_size="10KB")
    assert len(told.files) > 1
    assert [each.bytes for each in told.files] == [(tmp_path / "fp8" / each.path).stat().st_size for each in told.files]
    made = {name: t for file in told.files for name, t in load_file(tmp_path / "fp8" / file.path).items()}
    config = FineGrainedFP8Config(weight_block_size=(2, 2), dequantize=True)
    rounding = Fp8Quantize(type("Quantizer", (), {"quantization_config": config}))
    narrow = {name for name in made if made[name].dtype == FP8}
    want = load_file(tmp_path / "plain" / SINGLE)
    assert narrow == {name for name, t in want.items() if "proj" in name and not any(size % 2 for size in t.shape)}
    assert made.keys() - {f"{name}_scale_inv" for name in narrow} == want.keys()
    for name in list(want):
        if name in narrow:
            want |= rounding._quantize_one(name, want[name])
    assert all(torch.equal(made[name].float(), want[name].float()) for name in want)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", quantization_config=config, dtype=torch.bfloat16)
    convert(tmp_path / "fp8", tmp_path / "again")
    assert verify.main([str(tmp_path / "again"), str(tmp_path / "fp8")]) == 0
    back = convert(tmp_path / "again", tmp_path / "back", to="hf")
    read = load_file(tmp_path / "back" / back.files[0].path)
    assert all(torch.equal(t, read[name]) for name, t in theirs.state_dict().items() if "experts" not in name)
    convert(tmp_path / "fp8", tmp_path / "twice", to="hf", dtype="fp8")  # a folder of such is one already


def test_what_servers_multiply_by_at_once_lies_in_fp8_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a block ends `kv_a_proj_with_mqa` as DeepSeek-V3 is published: rounded as if zeros filled it. A matrix
    of keys that blocks do not divide leaves the queries wide."""
    monkeypatch.setattr(block_fp8_folder, "BLOCK", 4)
    config = FineGrainedFP8Config(weight_block_size=(4, 4))
    rounding = Fp8Quantize(type("Quantizer", (), {"quantization_config": config}))
    made, plain = {}, {}
    for family, fields in {
        "deepseek_v3": {"q_lora_rank": 12},
        "llama": {"num_key_value_heads": 1, "head_dim": 6},
    }.items():
        random_model(small(family, **fields)).bfloat16().save_pretrained(tmp_path / family)
        convert(tmp_path / family, tmp_path / f"{family}-fp8", to="hf", dtype="fp8")
        made[family] = load_file(tmp_path / f"{family}-fp8" / SINGLE)
        plain[family] = load_file(tmp_path / family / SINGLE)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    want = rounding._quantize_one(name, torch.nn.functional.pad(plain["deepseek_v3"][name], (0, 0, 0, 2)))
    assert torch.equal(made["deepseek_v3"][name].float(), want[name][:10].float())
    assert torch.equal(made["deepseek_v3"][f"{name}_scale_inv"], want[f"{name}_scale_inv"])
    convert(tmp_path / "deepseek_v3-fp8", tmp_path / "again", tp=2)
    assert inspect.main([str(tmp_path / "again"), "--diff", str(tmp_path / "deepseek_v3-fp8")]) == 0
    layer = {n.split(".")[-2] for n, t in made["llama"].items() if n.startswith("model.layers.0.") and t.dtype == FP8}
    assert layer == {"o_proj", "gate_proj", "up_proj", "down_proj"}


def test_what_lies_in_fp8_is_what_a_gpu_would_take_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a head that is the embedding, and in no file."""
    monkeypatch.setattr(block_fp8_folder, "BLOCK", 2)
    plain: Any = random_model(small("llama", tie_word_embeddings=True))
    plain.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "fp8", to="hf", dtype="fp8")
    narrow = {name for name, t in load_file(tmp_path / "fp8" / SINGLE).items() if t.dtype == FP8}
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    config = FineGrainedFP8Config(weight_block_size=(2, 2))
    made = replace_with_fp8_linear(plain, said["modules_to_not_convert"], config, pre_quantized=True)
    assert {f"{name}.weight" for name, each in made.named_modules() if isinstance(each, FP8Linear)} == narrow


def test_an_export_in_fp8_says_what_it_cannot_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = hf_tensors(tmp_path / "hf")
    with pytest.raises(StoreError, match="matrices that blocks of 128 x 128 divide, and the model has none"):
        convert(tmp_path / "hf", tmp_path / "made", to="hf", dtype="fp8")
    with pytest.raises(StoreError, match=r"`dtype=fp8`: choose from float64, .*bfloat16$"):
        convert(tmp_path / "hf", tmp_path / "made", dtype="fp8")
    monkeypatch.setattr(block_fp8_folder, "BLOCK", 4)
    tensors[WEIGHT][3, 3] = torch.inf
    save_file(tensors, tmp_path / "hf" / SINGLE, {"format": "pt"})
    with pytest.raises(StoreError, match=f"{WEIGHT}: a number is not finite"):
        convert(tmp_path / "hf", tmp_path / "made", to="hf", dtype="fp8")
    random_model(small("gpt2")).save_pretrained(tmp_path / "transposed")
    with pytest.raises(StoreError, match="transformers reads no linears of gpt2 in fp8"):
        convert(tmp_path / "transposed", tmp_path / "made", to="hf", dtype="fp8")
    random_model(small("gpt_oss")).save_pretrained(tmp_path / "stacked")
    with pytest.raises(StoreError, match=r"several at once, model\.layers\.0\.mlp\.experts\.\w+ among them"):
        convert(tmp_path / "stacked", tmp_path / "made", to="hf", dtype="fp8")
    assert not (tmp_path / "made").exists()


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


WEIGHT = "model.layers.0.self_attn.q_proj.weight"
SCALE, OTHER, NORM = f"{WEIGHT}_scale_inv", WEIGHT.replace("0", "1"), "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(SCALE), rf"an fp8 weight has no _scale_inv: {WEIGHT}$"),
        (drop(WEIGHT), rf"a scale is of no fp8 weight: {SCALE}"),
        (put(OTHER, torch.zeros(16, 16)), rf"a scale is of no fp8 weight: {OTHER}_scale_inv$"),
        (put(f"{NORM}_scale_inv", torch.ones(1, 1)), rf"a scale is of no fp8 weight: {NORM}_scale_inv$"),
        (put(SCALE, torch.ones(6, 3)), rf"scales have shape \[6, 3\], and blocks of 3 x 5 take \[6, 4\]: {SCALE}$"),
        (put(SCALE, torch.ones(6, 4).to(torch.float8_e8m0fnu)), rf"scales have dtype F8_E8M0, which is .*: {SCALE}$"),
        (put(SCALE, torch.full((6, 4), torch.nan)), rf"{SCALE} .*must be finite and above 0, .* it is damaged$"),
        (put(SCALE, torch.zeros(6, 4)), rf"{SCALE} .*must be finite and above 0"),
        (
            put(WEIGHT, torch.zeros(16, 4, 4).to(FP8)),
            rf"an fp8 weight has shape \[16, 4, 4\], and only matrices.*{WEIGHT}",
        ),
        (put(WEIGHT, torch.zeros(16, 15).to(FP8)), r"shape \[16, 15\] instead of \[16, 16\]"),
        (put(NORM, torch.zeros(16).to(torch.float8_e5m2)), r"dtype F8_E5M2 is not one of F64"),
    ],
)
def test_what_is_damaged_is_told(change: Callable[[Tensors], object], said: str, tmp_path: Path) -> None:
    lie, _ = quantised(hf_tensors(tmp_path / "hf"), 3, 5)
    change(lie)
    save_file(lie, tmp_path / "hf" / SINGLE, {"format": "pt"})
    edit_config(tmp_path / "hf", quantization_config={"quant_method": "fp8", "weight_block_size": [3, 5]})
    with pytest.raises(StoreError, match=re.compile(said, re.MULTILINE)):
        convert(tmp_path / "hf", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def hf_tensors(path: Path) -> Tensors:
    random_model(small("llama")).bfloat16().save_pretrained(path)
    return load_file(path / SINGLE)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantization_config has quant_method='gptq', bits=4: of"),
        (
            {"weight_block_size": None},
            "has weight_block_size=None: of quantised weights those are read that lie in fp8",
        ),
        ({"weight_block_size": [128, 0]}, r"has weight_block_size=\[128, 0\]"),
        ({"activation_scheme": "static", "fmt": "e5m2"}, "has fmt='e5m2', activation_scheme='static': of"),
    ],
)
def test_what_lies_otherwise_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder(tmp_path, "llama", **config)
    for read in (HuggingFace.open, lambda path: configure({"config": str(path)})):
        with pytest.raises(ValueError, match=said):
            read(tmp_path)
