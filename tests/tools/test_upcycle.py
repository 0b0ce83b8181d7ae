"""A dense model with experts in the place of its feed-forward networks: the same loss, each weight where it belongs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_model, small
from hub import converted, flip
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megacore.control import Control
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.stages import layout_of
from megacore.models.upcycle import WITH_EXPERTS
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.formats import open_folder
from megacore.store.weight_folders.loader import Loader
from megacore.tools import convert, inspect, upcycle

pytestmark = pytest.mark.usefixtures("not_durable")

TOKENS = torch.arange(24) * 5 % 43
HIDDEN = 24
WAYS = {"copies": (4, 2, 1), "slices": (8, 4, 4), "thirds": (6, 3, 3)}
"""{name: (experts, top-k, granularity)}."""


def dense(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float64, **fields: Any) -> Path:
    model: Any = random_model(small(family, **fields))
    model.to(dtype).save_pretrained(folder)
    return folder


def run(*arguments: object) -> int:
    return upcycle.main([str(each) for each in arguments])


def made(source: Path, target: Path, way: tuple[int, int, int], *arguments: object) -> Path:
    experts, top_k, granularity = way
    asked = ("--experts", experts, "--top-k", top_k, "--granularity", granularity, "--seed", 3)
    assert run(source, target, *asked, *arguments) == 0
    return target


ONE = MeshShape()


def loss(folder: Path, shape: MeshShape = ONE) -> float:
    """The loss in float64 of this rank's tokens, with the model of a folder."""
    mesh, held = Mesh.single() if shape == ONE else Mesh.create(shape, "cpu"), open_folder(folder)
    layout = layout_of(held.config, shape)
    model = Model.create(held.config, layout, mesh, torch.float64)
    model.train(False)
    loader = Loader(model.parameters, Control.create(mesh))
    with torch.no_grad():
        for name, tensor in loader.tensors(held, "weights", set(model.parameters)):
            model.parameters[name].copy_(tensor)
        n, part = len(TOKENS), len(TOKENS) // shape.tp
        batch = Microbatch(TOKENS, TOKENS.roll(-1), torch.arange(n), 1, (part, held.config.sizes["embed"]))
        (decoder,) = model.chunks
        return float(decoder(None, batch))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_loss_is_the_dense_models(family: str, way: str, tmp_path: Path) -> None:
    source = dense(tmp_path / "dense", family)
    target = made(source, tmp_path / "experts", WAYS[way])
    want = loss(source)
    assert abs(loss(target) - want) <= 1e-9 * want
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == WITH_EXPERTS[family] and config["dtype"] == "float64"
    assert not (target / "config.json").read_text().count("LlamaForCausalLM")


def test_on_any_layout(tmp_path: Path, pool: Pool) -> None:
    source = dense(tmp_path / "dense")
    target = made(source, tmp_path / "experts", WAYS["slices"])
    want = loss(source)
    for shape in (MeshShape(ep=2, tp=2), MeshShape(tp=2)):
        got = sum(pool.run(shape.world, loss, target, shape)) / shape.ep  # each tp rank has tokens of its own
        assert abs(got - want) <= 1e-9 * want


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    source = dense(tmp_path / "dense", dtype=torch.float32)
    target = made(source, tmp_path / "experts", WAYS["slices"])

    def logits(folder: Path) -> Tensor:
        # Its other products of experts take no rows of 24 bytes.
        model: Any = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
        with torch.no_grad():
            found: Tensor = model(TOKENS[None]).logits
        return found

    torch.testing.assert_close(logits(target), logits(source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("way", "dtype"), [("copies", torch.bfloat16), ("slices", torch.bfloat16), ("thirds", None)])
def test_each_weight_is_a_part_of_the_dense_one(way: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """By hand: bit for bit, as the factors of copies and quarters are 1 and 4."""
    source = dense(tmp_path / "dense", dtype=dtype or torch.float64)
    (source / "tokenizer.json").write_text("{}")
    experts, _, granularity = WAYS[way]
    target = made(source, tmp_path / "experts", WAYS[way])
    got, want = (load_file(folder / "model.safetensors") for folder in (target, source))
    each = HIDDEN // granularity
    for name in [name for name in want if ".mlp." in name]:
        block, _, which = name.partition(".mlp.")
        other = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[which.removesuffix(".weight")]
        for e in range(experts):
            part = slice(e % granularity * each, (e % granularity + 1) * each)
            of = want[name][:, part] * granularity if other == "w2" else want[name][part]
            assert torch.equal(got.pop(f"{block}.block_sparse_moe.experts.{e}.{other}.weight"), of)
        del want[name]
    routers = {name: got.pop(name) for name in [*got] if name.endswith("gate.weight")}
    for rows in routers.values():
        copies = rows.unflatten(0, (-1, granularity))
        assert (copies == copies[:, :1]).all() and copies[:, 0].unique(dim=0).shape == copies[:, 0].shape
    assert len(routers) == 3 and not torch.equal(*list(routers.values())[:2])
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert (target / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("way", ["copies", "slices"])
def test_a_checkpoint_becomes_the_same(way: str, tmp_path: Path) -> None:
    """Of a layout whose ranks hold parts of a slice, or nothing but padding, and to another one."""
    fields: dict[str, Any] = {"intermediate_size": 5} if way == "copies" else {}
    source = dense(tmp_path / "dense", dtype=torch.bfloat16, **fields)
    parts = converted(source, tmp_path / "parts", "--tp", "4" if way == "copies" else "2", "--pp", "2")
    want = made(source, tmp_path / "want", WAYS[way])
    got = made(parts, tmp_path / "got", WAYS[way], "--to", "megacore", "--ep", 2, "--tp", 2)
    assert inspect.main([str(got), "--check"]) == 0
    assert convert.main([str(got), str(tmp_path / "back"), "--to", "hf"]) == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", want))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_damaged_weight_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = converted(dense(tmp_path / "dense", dtype=torch.float32), tmp_path / "parts")
    file = next(parts.glob("weights/*"))
    for tensor, words in (("layers.1.mlp.up.weight", "is damaged"), ("layers.1.attn.out.weight", "fingerprints")):
        flip(file, tensor, 5, 3)
        assert run(parts, tmp_path / "out", "--experts", 4, "--top-k", 2) == 1
        flip(file, tensor, 5, 3)
        assert words in (said := capsys.readouterr().err) and tensor in said
        assert not (tmp_path / "out").exists()


REFUSED = [
    ("llama", {}, (4, 5, 1), (), "num_experts_per_tok is 5: choose from 1 to 4"),
    ("llama", {}, (4, 2, 5), (), "cut mlp (24) into 5 slices: choose --granularity from 1, 2, 3, 4, 6, 8, 12, 24"),
    ("llama", {}, (6, 4, 4), (), "6 experts are no whole copies of 4 slices: choose --experts from the multiples of 4"),
    ("llama", {}, (8, 3, 2), (), "misses some of the 2 slices: choose --top-k from the multiples of 2"),
    ("llama", {"mlp_bias": True}, (4, 2, 1), (), "lacks layers.{layer}.mlp.experts.down.bias"),
    ("llama", {"attention_bias": True}, (4, 2, 1), (), "lacks layers.{layer}.attn.out.bias"),
    ("gpt2", {}, (4, 2, 1), (), "no family here is gpt2 with experts: there are some of llama (mixtral)"),
    ("mixtral", {}, (4, 2, 1), (), "it has 4 experts already"),
    ("gemma2", {}, (4, 2, 1), ("--family", "mixtral"), "norm_offset is 0.0 in the one and 1.0 in the other"),
    ("llama", {}, (4, 2, 1), ("--family", "qwen2"), "qwen2 has no experts"),
    ("llama", {}, (4, 2, 1), ("--family", "mixtrall"), "there is no family 'mixtrall': did you mean 'mixtral'?"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, fields, (experts, top_k, granularity), more, words = case
    source = dense(tmp_path / "dense", family, torch.float32, **fields)
    asked = ["--experts", experts, "--top-k", top_k, "--granularity", granularity, *more]
    assert run(source, tmp_path / "out", *asked) == 1
    said = capsys.readouterr().err
    assert words in said and not (tmp_path / "out").exists()


def test_parts_of_slices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = converted(dense(tmp_path / "dense", dtype=torch.float32), tmp_path / "parts", "--tp", "4")
    assert run(parts, tmp_path / "out", "--experts", 8, "--top-k", 4, "--granularity", 2) == 0
    assert run(parts, tmp_path / "other", "--experts", 6, "--top-k", 3, "--granularity", 3) == 1
    assert "`megacore reshard` it to --tp 1 first" in capsys.readouterr().err


def test_a_factor_that_rounds_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = dense(tmp_path / "dense", dtype=torch.bfloat16)
    made(source, tmp_path / "thirds", WAYS["thirds"])
    told = capsys.readouterr()
    assert "times 3, which is no power of two" in told.err and "llama -> mixtral" in told.out
    made(source, tmp_path / "quarters", WAYS["slices"])
    assert not capsys.readouterr().err
    made(source, tmp_path / "wide", WAYS["thirds"], "--dtype", "float32")  # which has room for it
    assert not capsys.readouterr().err
    got, want = (load_file(folder / "model.safetensors") for folder in (tmp_path / "wide", source))
    down = want["model.layers.0.mlp.down_proj.weight"].float()
    for e in range(6):
        part = down[:, e % 3 * HIDDEN // 3 : (e % 3 + 1) * HIDDEN // 3]
        assert torch.equal(got[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"], 3 * part)
    router = got["model.layers.0.block_sparse_moe.gate.weight"]
    assert router.dtype == torch.float32 and not torch.equal(router, router.bfloat16().float())
    sizes = {stored.name for stored in hugging_face(open_folder(tmp_path / "thirds").config.schema)}
    assert sizes == load_file(tmp_path / "thirds" / "model.safetensors").keys()
