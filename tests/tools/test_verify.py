"""`megacore verify`: it passes for what was converted, in every layout, and finds and names whatever was done to it."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from changes import edit_config
from families import rotated
from hub import change, converted, save
from pool import Pool
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from megacore.inference.verification import Pair, _microbatch, mesh_shape, parallel_model, transformers_model
from megacore.inference.verification import verify as verify_pair
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import verify
from megacore.tools.verify import encode

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def data(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    """(exit status, what --json prints)."""
    capsys.readouterr()
    status = verify.main([*map(str, arguments), "--json", "--tokens", "12"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save("llama", tmp_path / "hf")


def elements(checkpoint: Checkpoint) -> int:
    """Of all shards, replicas and all, without padding."""
    count, sizes = 0, checkpoint.index.layout.schema.sizes
    for stored in checkpoint.stored():
        whole = math.prod(stored.shape)
        for axis in {"vocab", "input_vocab", "shared_mlp"} & stored.box.keys():
            start, stop = stored.box[axis]
            whole = whole // (stop - start) * max(0, min(stop, sizes[axis]) - start)
        count += whole
    return count


# -- what is the same


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    rotated(["--tp 1 --pp 1", "--tp 2 --pp 2", "--tp 4 --pp 3", "--tp 2 --pp 1 --chunks 2"], few=8),
)
def test_every_layout_passes(family: str, layout: str, tmp_path: Path, capsys: Capture) -> None:
    hf = save(family, tmp_path / "hf")
    target = converted(hf, tmp_path / "sharded", *layout.split())
    status, facts = data(capsys, target, hf)
    assert status == 0 and facts["passes"] and not facts["differing"] and not facts["config"]
    assert sum(group["elements"] for group in facts["parameters"]) == elements(Checkpoint.open(target))
    for prompt in facts["prompts"]:
        assert prompt["tokens"] == 12 and prompt["agreement"] == 1.0
        assert 0 < prompt["difference"] < 1e-5 * prompt["largest"]


@pytest.mark.quick
def test_the_table(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    target = converted(llama, tmp_path / "sharded", "--tp", "2")
    assert verify.main([str(target), str(llama)]) == 0
    shown = capsys.readouterr().out
    for words in ("layers.{layer}.attn.qkv.weight", "float32", "100.0%", "The same model."):
        assert words in shown


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_converted_dtypes_are_compared_after_the_same_rounding(dtype: str, tmp_path: Path, capsys: Capture) -> None:
    """Experts too, which are one tensor in transformers' memory and many on disk."""
    hf = save("qwen3_moe", tmp_path / "hf")
    target = converted(hf, tmp_path / "other", "--tp", "2", "--dtype", dtype)
    status, facts = data(capsys, target, hf)
    assert status == 0 and all(
        group["dtypes"] == [f"{dtype} (folder: float32, compared rounded)"] for group in facts["parameters"]
    )
    exported = converted(target, tmp_path / "exported", "--to", "hf")
    status, facts = data(capsys, target, exported)
    assert status == 0 and all(group["dtypes"] == [dtype] for group in facts["parameters"])
    back = converted(converted(hf, tmp_path / "one"), tmp_path / "back", "--to", "hf", "--dtype", dtype)
    assert data(capsys, tmp_path / "one", back)[0] == 0
    change(hf / "model.safetensors", "model.norm.weight", lambda norm: norm[3].mul_(1.1))
    status, facts = data(capsys, target, hf)
    assert status == 1 and "norm.weight" in facts["differing"][0]


@pytest.mark.in_turn(2, 0)
def test_a_model_that_loses_digits_passes(tmp_path: Path, capsys: Capture) -> None:
    """A residual stream of thousands, of which norms take the mean away: float32 is 2e-4 off, here and in transformers.
    What is wrong is seen all the same."""
    hf = save("gpt_neox", tmp_path / "hf", tie_word_embeddings=False)
    change(hf / "model.safetensors", "gpt_neox.embed_in.weight", lambda embed: embed.add_(3000))
    target = converted(hf, tmp_path / "sharded", "--tp", "2")
    status, facts = data(capsys, target, hf)
    assert status == 0
    for prompt in facts["prompts"]:
        assert 3e-5 < prompt["theirs"] / prompt["largest"] < 3e-3
        assert prompt["difference"] < prompt["bound"] < 1e-2 * prompt["largest"]
    change(target / "weights/pp0-ep0-tp1.safetensors", "layers.1.attn.out.weight", lambda w: w.copy_(w.flip(1)))
    status, facts = data(capsys, target, hf)
    assert status == 1 and not any(prompt["passes"] for prompt in facts["prompts"])


# -- what differs


def swap(halves: Tensor) -> None:
    """Exchange the two halves of the rows."""
    one, other = halves.chunk(2)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


@pytest.mark.in_turn(7)
@pytest.mark.parametrize(
    ("tensor", "how", "label"),
    [
        # q of a shard has 2 heads of 4 rows, its k and v 1 each.
        ("layers.1.attn.qkv.weight", lambda w: swap(w[4:12]), "q) k"),
        (
            "layers.1.attn.qkv.weight",
            lambda w: w[:8].copy_(w[:8].view(2, 2, 2, 16).transpose(1, 2).reshape(8, 16)),
            "q",
        ),
        ("layers.1.mlp.up.weight", swap, "gate) up"),
        ("layers.1.attn.out.weight", lambda w: w.copy_(w.flip(1)), ""),
        ("layers.1.mlp.down.weight", lambda w: w[7, 2].mul_(1 + 2e-7), ""),
        ("layers.1.mlp_norm.weight", lambda w: w[0].add_(0.5), ""),
        ("embed.weight", lambda w: w[21].fill_(2.0), "padding"),
    ],
    ids=["q and k", "rope halves", "gate and up", "columns", "one element", "one replica", "padding"],
)
def test_a_shard_that_was_changed(
    tensor: str, how: Callable[[Tensor], Any], label: str, llama: Path, tmp_path: Path, capsys: Capture
) -> None:
    target = converted(llama, tmp_path / "sharded", "--tp", "2")
    file = "weights/pp0-ep0-tp1.safetensors"
    change(target / file, tensor, how)
    status, facts = data(capsys, target, llama)
    assert status == 1 and not facts["passes"]
    named = label.split(") ") if label not in ("", "padding") else [""]
    wanted = [f"{file}: {tensor}" + (f" ({piece})" if piece else "") for piece in named]
    assert [line.rsplit(": ", 1)[0] for line in facts["differing"]] == wanted
    if tensor == "layers.1.mlp.down.weight":
        assert "1 of 192 elements differ" in facts["differing"][0]
    assert verify.main([str(target), str(llama)]) == 1
    shown = capsys.readouterr().out
    assert wanted[0] in shown and "Not the same model." in shown


def test_logits_tell_what_the_tensors_cannot(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """The same weights, and a model that computes something else with them."""
    target = converted(llama, tmp_path / "sharded")
    edit_config(llama, rms_norm_eps=0.1)
    status, facts = data(capsys, target, llama)
    assert status == 1 and list(facts["config"]) == ["rms_norm_eps"] and not facts["differing"]
    assert not any(prompt["passes"] for prompt in facts["prompts"])
    assert verify.main([str(target), str(llama)]) == 1
    shown = capsys.readouterr().out
    assert "config: rms_norm_eps is 1e-06" in shown and "prompt 3: the logits differ" in shown


@pytest.mark.in_turn(2, 0)
def test_numbers_that_are_not_finite_do_not_pass(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    change(llama / "model.safetensors", "model.norm.weight", lambda norm: norm[3].fill_(torch.nan))
    target = converted(llama, tmp_path / "sharded")
    status, facts = data(capsys, target, llama)
    assert status == 1 and not facts["differing"] and facts["prompts"][0]["difference"] is None
    assert verify.main([str(target), str(llama)]) == 1
    assert "not finite" in capsys.readouterr().out


# -- in the checkpoint's own layout


def in_this_rank(checkpoint: Path, folder: Path, chunks: int, cp: int) -> tuple[Any, list[float] | None]:
    """(the report, the logits of a prompt) on one rank."""
    torch.set_num_threads(1)
    pair = Pair(Checkpoint.open(checkpoint), HuggingFace.open(folder))
    mesh = Mesh.create(mesh_shape(pair.checkpoint, torch.distributed.get_world_size(), cp))
    assert pair.checkpoint.layout.chunks == chunks
    exchange: ContextExchange = "gather" if cp > 1 else "auto"
    model = parallel_model(pair, mesh, exchange)
    logits = model.logits(_microbatch(range(8), model))
    report = verify_pair(pair, [[3, 1, 4, 1, 5, 9, 2, 6]], mesh, exchange=exchange)
    return report, None if logits is None else logits.tolist()


WORLDS = {
    "--tp 2 --pp 2": 4,
    "--tp 4 --pp 1": 4,
    "--tp 1 --pp 3": 3,
    "--pp 2 --layers-per-stage 1,1,1,1 --chunks 2": 2,
    "--tp 2": 4,  # and dp 2
    "--pp 2": 4,  # and cp 2
}
CP = {"--pp 2": 2}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("family", "layout"), rotated(WORLDS, few=18))
def test_under_ranks(family: str, layout: str, tmp_path: Path, pool: Pool) -> None:
    world = WORLDS[layout]
    hf = save(family, tmp_path / "hf", num_hidden_layers=4)
    target = converted(hf, tmp_path / "sharded", *layout.split())
    arguments = target, hf, 2 if "chunks" in layout else 1, CP.get(layout, 1)
    results = pool.run(world, in_this_rank, *arguments)
    reports = [report for report, _ in results]
    assert all(report == reports[0] for report in reports) and reports[0].passes
    stages, tp = reports[0].mesh["pp"], reports[0].mesh["tp"]
    ids = torch.arange(8)[None]
    wanted = transformers_model(Pair(Checkpoint.open(target), HuggingFace.open(hf)))(input_ids=ids).logits[0]
    shape, rounding = MeshShape(**reports[0].mesh), 1e-5 * max(1.0, float(wanted.abs().max()))
    for rank, (_, logits) in enumerate(results):
        assert (logits is None) == (shape.place(rank).pp < stages - 1)
        if logits is not None:
            torch.testing.assert_close(torch.tensor(logits), wanted.detach(), rtol=0, atol=rounding)
    changed = target / f"weights/pp{stages - 1}-ep0-tp{tp - 1}.safetensors"
    mixers = {
        **dict.fromkeys(("laguna", "mimo_v2_flash"), "local_attn"),
        "minimax": "lightning",
        "recurrent_gemma": "lru",
        **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "zamba2"), "ssm"),
    }
    out = f"layers.3.{mixers.get(family, 'attn')}.out.weight"
    change(changed, out, swap)
    reports = [report for report, _ in pool.run(world, in_this_rank, *arguments)]
    assert all(report == reports[0] for report in reports)
    assert not reports[0].passes and not reports[0].prompts[0].passes
    assert f"weights/{changed.name}: {out}" in reports[0].differing[0]


@pytest.mark.in_turn(12, 1)
@pytest.mark.slow
def test_torchrun(llama: Path, tmp_path: Path) -> None:
    target = converted(llama, tmp_path / "sharded", "--tp", "2")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "-m", "megacore", "verify", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    done = run(target, llama)
    assert done.returncode == 0 and done.stdout.count("The same model.") == 1
    assert "tp=2" in done.stdout
    refused = run(converted(llama, tmp_path / "three", "--pp", "3"), llama)
    assert refused.returncode != 0 and refused.stderr.count("start 3 or a multiple") == 1


# -- prompts


def with_tokenizer(folder: Path, words: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_texts_go_through_the_tokenizer(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """And transformers computes with its own attention, whatever is named for it to fetch."""
    edit_config(llama, attn_implementation="kernels-community/flash-attn")
    target = converted(with_tokenizer(llama, ["?", "the", "boats", "sea"]), tmp_path / "sharded")
    (tmp_path / "prompts").write_text("the sea the boats\n\nsea\n")
    status, facts = data(capsys, target, llama, "--prompts", tmp_path / "prompts", "--prompt", "boats the")
    assert status == 0 and [prompt["tokens"] for prompt in facts["prompts"]] == [2, 4, 1]
    folder = HuggingFace.open(llama)
    assert encode(folder, ["the sea the boats", "sea"], 3, 1) == [[1, 3, 1], [3]]
    assert encode(folder, ["the sea the boats", "sea"], 3, 2) == [[1, 3], [3, 3]]
    assert [len(ids) for ids in encode(folder, [], 64, 1)] == [len(ids) for ids in encode(folder, [], 1000, 1)]
    assert all(0 < len(ids) <= 32 for ids in encode(folder, [], 1000, 1))  # the model's longest


def test_what_cannot_be_compared(llama: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wide = converted(llama, tmp_path / "sharded"), save("llama", tmp_path / "wide", intermediate_size=32)
    other = save("gpt2", tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n \n")
    one, many = ["?"], [f"w{number}" for number in range(60)]
    cases: Sequence[tuple[tuple[object, ...], list[str] | None, str]] = [
        ((llama, llama), None, "give a checkpoint first"),
        ((target, target), None, "inspect --diff"),
        ((target, wide), None, "intermediate_size is 24 and 32"),
        ((target, other), None, "different models"),
        (
            (target, llama, "--cp", 2),
            None,
            "lies on pp=1 x ep=1 x cp=2 x tp=1, and 1 processes cannot form that: start",
        ),
        ((target, llama, "--exchange", "ring"), None, "--exchange ring: --cp is 1, and no text is split: leave it out"),
        ((target, llama, "--prompt", "sea"), None, "has no tokenizer"),
        ((target, llama, "--prompt", " "), one, "has no tokens"),
        ((target, llama, "--prompts", "nowhere"), one, "cannot read nowhere"),
        ((target, llama, "--prompts", "empty"), one, "has no prompts"),
        ((target, llama, "--prompt", "w50"), many, "another model's"),
    ]
    for arguments, words, says in cases:
        if words:
            with_tokenizer(llama, words)
        assert verify.main([*map(str, arguments)]) == 1
        assert says in capsys.readouterr().err, says
