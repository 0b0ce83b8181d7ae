"""Adapters beside weights in NF4 or int8 (QLoRA): the numbers of bitsandbytes and of peft, runs, and what is merged."""

import json
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import torch
from engine import path_of, problems, same, train, write_recipe
from families import in_float64, loaded
from hub import adapted
from pool import Pool
from test_convert_adapters import TOKENS, model_folder, run, theirs
from torch import Tensor

from megacore.inference.loaded_model import ModelSetup
from megacore.inference.model_loader import logits_of, model_from
from megacore.models.decoder import Microbatch
from megacore.models.lora import Lora
from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.mesh import Mesh
from megacore.parallel.quantised import Blocks
from megacore.parallel.weights.layout import MeshShape
from megacore.recipe import ConfigError
from megacore.store.conversions.formats import open_model
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training.check import check

FORMATS: tuple[BaseDtype, ...] = ("nf4", "int8")
LLAMA: dict[str, Any] = engine.LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 256,
    "head_dim": 32,
    "max_position_embeddings": 32,
}
MIXTRAL = LLAMA | {"family": "mixtral", "num_local_experts": 4, "intermediate_size": 128}
GPT2 = engine.GPT2 | {"n_embd": 128, "n_positions": 32, "n_layer": 4}
SECTIONS = {"llama": LLAMA, "mixtral": MIXTRAL, "gpt2": GPT2}


# -- the numbers


def drawn(dtype: torch.dtype = torch.float32) -> Tensor:
    """[96, 320], with a block of zeros, small ones, and numbers in the middle of two codes."""
    matrix = torch.randn(96, 320, generator=torch.Generator().manual_seed(3))
    matrix[3, 64:128] = 0
    matrix[5] *= 1e-6
    matrix[7, :64] = torch.linspace(-127, 127, 64).round() / 2
    return matrix.to(dtype)


def by_hand(matrix: Tensor, dtype: BaseDtype) -> Tensor:
    """What the papers say, in float64: the nearest number of NF4, or of 255, times the largest magnitude of 64."""
    blocks = matrix.double().reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    numbers = torch.arange(-127, 128).double() / 127
    if dtype == "nf4":
        numbers = Blocks.on("cpu", "nf4").pairs[:16, 1].double()
    near = (torch.where(largest > 0, blocks / largest, 0)[..., None] - numbers).abs().argmin(-1)
    return (numbers[near] * largest).reshape(matrix.shape)


@pytest.mark.quick
def test_nf4_has_the_quantiles_of_the_normal_distribution() -> None:
    """Its appendix E: 8 and 9 quantiles between what leaves 1/2 (1/32 + 1/30) outside, and 0 once, over the largest."""
    inside = 1 - (1 / 32 + 1 / 30) / 2
    below, above = (torch.special.ndtri(torch.linspace(0.5, inside, n, dtype=torch.float64)) for n in (8, 9))
    wanted = torch.cat([-below.flip(0)[:-1], above]) / above[-1]
    found = Blocks.on("cpu", "nf4").pairs
    torch.testing.assert_close(found[:16, 1].double(), wanted, rtol=0, atol=2e-7)
    assert torch.equal(found[::16, 0], found[:16, 1]) and found[0x3C].tolist() == [found[3, 1], found[12, 1]]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", FORMATS)
def test_each_number_is_the_nearest_of_its_block(dtype: BaseDtype) -> None:
    matrix, blocks = drawn(), Blocks.on("cpu", dtype)
    held = blocks.quantise(matrix)
    assert held.shape == (96, 320 * {"nf4": 36, "int8": 68}[dtype] // 64) and held.dtype == torch.uint8
    wide, wanted = blocks.dequantise(held, torch.float64), by_hand(matrix, dtype)
    near = ((matrix - wide).abs() - (matrix - wanted).abs()).abs()  # in the middle of two codes either is right
    assert (near <= 1e-6 * matrix.abs().amax()).all()
    assert torch.isclose(wide, wanted, rtol=1e-6, atol=0).float().mean() > 0.998
    assert not wide[3, 64:128].any() and wide.unique().numel() > 1000
    assert torch.equal(blocks.dequantise(held, torch.bfloat16), wide.float().bfloat16())
    # Cut between blocks, and stacked as experts are, it is the same.
    for rows, columns in ((slice(3, 50), slice(128, 320)), (slice(0, 1), slice(64, 128))):
        part = blocks.dequantise(blocks.quantise(matrix[rows, columns]), torch.float64)
        assert torch.equal(part, wide[rows, columns])
    assert torch.equal(blocks.quantise(matrix.view(4, 24, 320)), held.view(4, 24, -1))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_the_numbers_are_those_of_bitsandbytes(given: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    matrix = drawn(given)
    codes, state = functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=False)
    blocks = Blocks.on("cpu", "nf4")
    held = blocks.quantise(matrix)
    assert torch.equal(held.view(-1, 36)[:, :32].reshape(-1, 1), codes)
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = wanted
        assert torch.equal(blocks.dequantise(held, wanted), functional.dequantize_4bit(codes, state))
    # Its rows are our blocks; one of zeros it divides by zero.
    ours = Blocks.on("cpu", "int8")
    rows = matrix.view(-1, 64)
    rows = rows[rows.abs().amax(1) > 0].contiguous()
    codes, largest, _ = functional.int8_vectorwise_quant(rows.clone())
    found = ours.dequantise(ours.quantise(rows), torch.float32)
    assert torch.equal(found, functional.int8_vectorwise_dequant(codes, largest))


# -- beside transformers and peft


def microbatch() -> Microbatch:
    return Microbatch(TOKENS, TOKENS.roll(-1), torch.arange(len(TOKENS)), 1, (len(TOKENS), 64))


def made(path: Path, name: str, dtype: BaseDtype, precision: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A model in a folder, and adapters of some of its linears in a checkpoint."""
    folder = model_folder(path, SECTIONS[name], precision)
    targets = ("attn", "experts.down") if name == "mixtral" else ("attn",)
    return folder, adapted(folder, path / "ckpt", Lora(3, 6.0, targets, base_dtype=dtype))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_merged_model_is_the_one_that_was_trained(
    tmp_path: Path, not_durable: None, name: str, dtype: BaseDtype
) -> None:
    """To transformers, linears without adapters too; merged into the base as it was it would be another."""
    folder, checkpoint = made(tmp_path, name, dtype, torch.float64)
    assert run(checkpoint, tmp_path / "hf", "--to", "hf", "--base", folder) == 0
    ours = logits_of(model_from(open_model(checkpoint), Mesh.single()), TOKENS.tolist())
    with in_float64():
        merged = theirs(loaded(tmp_path / "hf", torch.float64))
    torch.testing.assert_close(ours, merged, rtol=1e-9, atol=1e-9)
    tree = json.loads((checkpoint / "index.json").read_text())
    del tree["adapters"]["base_dtype"]
    (checkpoint / "index.json").write_text(json.dumps(tree))
    plain = logits_of(model_from(open_model(checkpoint), Mesh.single()), TOKENS.tolist())
    assert (plain - ours).abs().max() > {"nf4": 1e-2, "int8": 1e-4}[dtype] * ours.abs().max()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("holds", ["numbers", "bits"])
def test_losses_are_those_of_peft(tmp_path: Path, not_durable: None, holds: str) -> None:
    """Ten steps of AdamW from the same adapters, beside transformers' model with the numbers, or in the 4 bits of
    bitsandbytes. With ten times the rate they
    are 5e-4 apart after five, and so are ours in fp32 and fp64: each step then moves the loss by 0.7."""
    peft = pytest.importorskip("peft", reason="the peft library is not installed")
    if holds == "bits":
        bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder, checkpoint = made(tmp_path, "llama", "nf4")
    assert run(checkpoint, tmp_path / "peft", "--to", "peft") == 0
    base = loaded(folder, torch.float32)
    for name, module in list(base.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        if holds == "numbers":
            module.weight.data = by_hand(module.weight.data, "nf4").float()
        else:
            four = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, False, torch.float32, False, "nf4"
            )
            four.weight = bitsandbytes.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, blocksize=64
            )
            base.set_submodule(name, four.to("cpu"))  # where it quantises
    reference = peft.PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True)
    model = model_from(open_model(checkpoint), Mesh.single())
    model.train()
    ids, labels = TOKENS[None], TOKENS.roll(-1)

    def of_peft() -> Tensor:
        loss: Tensor = torch.nn.functional.cross_entropy(reference(ids).logits[0], labels)
        return loss

    def of_ours() -> Tensor:
        loss: Tensor = model.chunks[0](None, microbatch()) / len(TOKENS)
        return loss

    found = []
    for loss_of, parameters in ((of_peft, reference.parameters()), (of_ours, model.parameters.values())):
        trained = [each for each in parameters if each.requires_grad]
        optimizer, losses = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0), []
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4)
    assert found[0][0] - found[0][-1] > 0.1


# -- runs

LORA = ["lora.rank=2", "lora.alpha=8", "lora.targets=[attn]", "lora.base_dtype=nf4"]


def overrides(base: Path, out: Path, *more: str) -> list[str]:
    return [f"out={out}", f"checkpoint.init={base}", "checkpoint.every=2", "train.steps=4", *LORA, *more]


def recipe_and_base(folder: Path) -> tuple[str, Path]:
    recipe = engine.RECIPE | {"model": LLAMA}
    return write_recipe(folder, recipe), model_folder(folder / "base", LLAMA, torch.float32)


@pytest.mark.in_turn(4, 1)
def test_a_run_is_resumed_bitwise_and_goes_on_elsewhere(pool: Pool, tmp_path: Path, not_durable: None) -> None:
    """It saves adapters alone; what they are beside is quantised anew, the same on every layout."""
    recipe, base = recipe_and_base(tmp_path)
    straight = train(recipe, overrides(base, tmp_path / "straight"))
    second = path_of(tmp_path / "straight", 2)
    saved = Checkpoint.open(second)
    assert saved.index.adapters is not None and saved.index.adapters.lora.base_dtype == "nf4"
    assert {stored.param.rpartition(".")[2] for stored in saved.stored()} == {"lora_a", "lora_b"}
    resume = f"checkpoint.resume={second}"
    assert same(train(recipe, overrides(base, tmp_path / "resumed", resume)).weights, straight.weights)
    spread = ["mesh.tp=2", "zero.shard=gradients"]
    other = pool.run(2, train, recipe, overrides(base, tmp_path / "other", resume, *spread))
    np.testing.assert_allclose(other[0].values("loss"), straight.values("loss")[2:], rtol=1e-9)
    model = model_from(open_model(path_of(tmp_path / "straight", 4)), Mesh.single())
    for name, parameter in model.parameters.items():
        assert np.array_equal(parameter.detach().double().numpy(), straight.weights[name]), name
    with pytest.raises(ConfigError, match=r"lora\.base_dtype is None in the recipe and nf4 in the checkpoint"):
        check(recipe, overrides(base, tmp_path / "x", resume, "lora.base_dtype=null"), 1, 1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["mesh.tp=2", "model.head_dim=16"],
            "tp=2 cuts the 64 inputs of layers.{layer}.attn.out.weight into 32, which is no multiple of 64: choose "
            "other sizes of the mesh, or set lora.base_dtype=null",
        ),
        (
            ["model.intermediate_size=72"],
            "the 72 inputs of layers.{layer}.mlp.down.weight are no multiple of 64: set lora.base_dtype=null",
        ),
        (["train.precision=fp8"], "train.precision multiplies by weights as they are, and lora.base_dtype nf4 holds"),
        (["lora.base_dtype=fp4"], "lora.base_dtype"),
    ],
)
def test_what_cannot_be_held_is_said(tmp_path: Path, more: list[str], said: str) -> None:
    """Before anything starts."""
    recipe = write_recipe(tmp_path, engine.RECIPE | {"model": LLAMA})
    found = problems(recipe, *overrides(tmp_path / "base", tmp_path / "x"), *more, world=2)
    assert any(said in problem for problem in found), found


def test_blocks_are_cut_by_no_mesh_of_a_generation(tmp_path: Path, not_durable: None) -> None:
    _, checkpoint = made(tmp_path, "gpt2", "nf4")
    with pytest.raises(StoreError, match=r"tp=4 cuts the 128 inputs of .*attn.out.weight into 32, which is no"):
        ModelSetup.check(checkpoint, mesh=MeshShape(tp=4))
    tree = json.loads((checkpoint / "index.json").read_text())
    tree["adapters"]["base_dtype"] = "fp4"
    (checkpoint / "index.json").write_text(json.dumps(tree))
    with pytest.raises(StoreError, match="has base_dtype='fp4', which is none of nf4, int8"):
        Checkpoint.open(checkpoint)
