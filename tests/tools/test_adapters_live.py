"""`megacore generate` and `evaluate` with adapters beside their base: what the merged model says, on every layout."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changes import edit_config
from families import in_float64, loaded
from hub import adapted, converted, in_dtype, save
from pool import Pool
from torch import Tensor
from transformers import AutoTokenizer

from megacore.data import tokenizer
from megacore.inference import model_loader
from megacore.inference.evaluation_data import Document, Windows
from megacore.inference.generation import Ending, generate
from megacore.inference.perplexity import evaluate
from megacore.inference.sampling import Greedy
from megacore.models.decoder import Microbatch
from megacore.models.lora import Lora
from megacore.models.registry import FAMILIES
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.conversions.formats import open_model
from megacore.store.tensor_files.companions import Companion
from megacore.tools import evaluate as evaluating
from megacore.tools import generate as generating

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
LORAS = {
    **{name: Lora(3, 6.0, ("*",), dropout=0.5) for name in FAMILIES},
    # Whose routers transformers keeps in float32, whatever it is asked for: merged ones would be rounded.
    **{
        name: Lora(3, 6.0, ("attn.*", "mlp.up", "mlp.down", "mlp.experts.*", "mlp.shared.*"), dropout=0.5)
        for name in ("ernie4_5_moe", "hunyuan_v1_moe")
    },
    "llama": Lora(3, 6.0, ("q_proj", "attn.qkv.v", "attn.out", "mlp"), dropout=0.5, rslora=True),
    "gpt2": Lora(3, 6.0, ("c_attn", "mlp.down", "mlp.up"), dropout=0.5),
}
TOKENS = torch.arange(12) * 5 % 43
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9]]
NEW = 7
IDS = [np.random.default_rng(n).integers(43, size=length) for n, length in enumerate((21, 2, 9, 33, 14))]
WINDOWS = Windows(12, 7)


@dataclass(frozen=True)
class Folders:
    """A model in float64, adapters of it that name it, and both merged."""

    base: Path
    adapters: Path
    merged: Path


def make(path: Path, family: str) -> Folders:
    # MiniCPM's embeddings, tied and scaled by 12, outweigh what layers add: no adapter changed a token.
    own = {"scale_emb": 1} if family == "minicpm3" else {}
    base = in_dtype(save(family, path / "base", **own), torch.float64)
    adapters = adapted(base, path / "adapters", LORAS[family])
    return Folders(base, adapters, converted(adapters, path / "merged", "--to", "hf", "--base", str(base)))


@pytest.fixture
def llama(tmp_path: Path, not_durable: None) -> Folders:
    return make(tmp_path, "llama")


@dataclass(frozen=True)
class Said:
    """Logits of TOKENS, new tokens after PROMPTS, and the loss on IDS."""

    logits: Tensor | None
    tokens: list[list[int]]
    loss: float


def ours(folder: Path, base: Path | None = None, shape: MeshShape | None = None) -> Said:
    """On this rank, in the dtype that all of the weights have room in."""
    model = model_loader.model_from(open_model(folder, base), Mesh.create(shape) if shape else Mesh.single())
    mesh = model.parameters.mesh
    activation = (len(TOKENS) // mesh.shape.tp, model.config.boundary_width)
    logits = model.logits(Microbatch(TOKENS, TOKENS, torch.arange(len(TOKENS)), 1, activation))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    if mesh.shape.data == 1:
        for step in generate(model, PROMPTS, Greedy(), Ending(frozenset(), NEW, 32), 2):
            for new in step:
                tokens[new.prompt].append(new.token)
    documents = [Document(ids, np.ones(ids.size, np.bool_), None) for ids in IDS]
    return Said(logits, tokens, evaluate(model, documents, WINDOWS, 40).loss)


def theirs(folder: Path) -> Said:
    """Through transformers."""
    model = loaded(folder)
    model.generation_config.eos_token_id = None
    for parameter in model.parameters():  # routers that stay in float32
        parameter.data = parameter.data.double()
    for buffer in model.buffers():  # factors, which are rounded
        buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
    with in_float64():
        return _said(model)


def _said(model: Any) -> Said:
    logits = model(TOKENS[None]).logits[0].detach()
    tokens = [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, pad_token_id=0) for p in PROMPTS]
    loss = 0.0
    for ids in IDS:
        for window, labels, _ in WINDOWS.of(Document(ids, np.ones(ids.size, np.bool_), None)):
            found = model(torch.from_numpy(window)[None]).logits[0].detach()
            loss += float(torch.nn.functional.cross_entropy(found, torch.from_numpy(labels), reduction="sum"))
    return Said(logits, [made[0, len(p) :].tolist() for made, p in zip(tokens, PROMPTS, strict=True)], loss)


def assert_said(found: Said, wanted: Said, tolerance: float) -> None:
    if found.logits is not None and wanted.logits is not None:
        torch.testing.assert_close(found.logits, wanted.logits, rtol=tolerance, atol=tolerance)
    assert found.loss == pytest.approx(wanted.loss, rel=tolerance)
    assert found.tokens in (wanted.tokens, [[]] * len(PROMPTS))


# -- what the merged model says


@pytest.mark.in_turn(40)
@pytest.mark.parametrize("family", LORAS)
def test_adapters_beside_their_base_are_the_merged_model(family: str, tmp_path: Path, not_durable: None) -> None:
    made = make(tmp_path, family)
    live = ours(made.adapters)
    assert live.logits is not None and live.logits.dtype == torch.float64 and len(live.tokens[0]) == NEW
    assert_said(live, ours(made.merged), 1e-12)
    assert_said(live, theirs(made.merged), 1e-9)
    plain = ours(made.base)
    assert plain.logits is not None
    assert (live.logits - plain.logits).abs().max() > 0.1 * plain.logits.abs().max()
    assert plain.tokens != live.tokens


@pytest.mark.in_turn(2, 1)
def test_the_base_may_lie_anywhere_and_in_any_layout(llama: Folders, tmp_path: Path, pool: Pool) -> None:
    """A checkpoint whose stages are of other layers than those of the adapters; the mesh takes them."""
    checkpoint = converted(llama.base, tmp_path / "checkpoint", "--tp", "2", "--pp", "2", "--layers-per-stage", "1,2")
    wanted = ours(llama.merged)
    shutil.rmtree(llama.base)
    assert_said(ours(llama.adapters, checkpoint), wanted, 1e-12)
    for found in pool.run(4, ours, llama.adapters, checkpoint, MeshShape(tp=2, pp=2)):
        assert_said(found, wanted, 1e-9)


def test_the_dtype_has_room_for_both(tmp_path: Path, not_durable: None) -> None:
    base = in_dtype(save("llama", tmp_path / "base"), torch.bfloat16)
    found = ours(adapted(base, tmp_path / "adapters", LORAS["llama"]))
    assert found.logits is not None and found.logits.dtype == torch.float32


# -- the commands


TEXTS = ["The sun rose over the quiet harbour. ", "a b c d e f g " * 9]
SIZES: Mapping[str, Any] = {"vocab_size": 290, "max_position_embeddings": 64}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture
def chat(tmp_path: Path, not_durable: None) -> Folders:
    """With a tokenizer and a chat template."""
    path = tmp_path / "chat"
    base = in_dtype(save("llama", path / "base", **SIZES), torch.float64)
    tokenizer.train(TEXTS, 290, base)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    adapters = adapted(base, path / "adapters", LORAS["llama"])
    return Folders(base, adapters, converted(adapters, path / "merged", "--to", "hf", "--base", str(base)))


def answer(capsys: Capture, command: Callable[[list[str]], int], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert command([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Capture, *arguments: object) -> str:
    """What both commands say."""
    said = set()
    for command, more in ((generating.main, ["--prompt", "The sun"]), (evaluating.main, ["--data", __file__])):
        capsys.readouterr()
        assert command([*map(str, arguments), *more]) == 1
        printed = capsys.readouterr()
        assert not printed.out
        said.add(printed.err)
    assert len(said) == 1
    return said.pop()


@pytest.mark.in_turn(2, 0)
def test_the_commands_compute_them_with_the_text_of_the_base(chat: Folders, tmp_path: Path, capsys: Capture) -> None:
    """Its tokenizer, chat template and stops."""
    asked = ["--chat", "--prompt", "a?", "--max-new-tokens", 9]
    found = answer(capsys, generating.main, chat.adapters, *asked)
    words: Any = AutoTokenizer.from_pretrained(chat.base)
    model = loaded(chat.merged)
    ids = words("<user>a?\n<assistant>", return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=[0, 5], pad_token_id=0)
    assert found["tokens"] == made[0, ids.shape[1] :].tolist()
    (tmp_path / "text.txt").write_text(TEXTS[0])
    ids = words(TEXTS[0], return_tensors="pt")["input_ids"]
    loss = answer(capsys, evaluating.main, chat.adapters, "--data", tmp_path / "text.txt")["loss"]
    assert loss == pytest.approx(float(model(ids, labels=ids).loss.detach()), rel=1e-6)
    moved = chat.base.rename(tmp_path / "moved")
    assert found == answer(capsys, generating.main, chat.adapters, *asked, "--base", moved)


def test_a_chat_template_of_the_run_goes_before_the_bases(chat: Folders, tmp_path: Path, capsys: Capture) -> None:
    asked = ["--chat", "--prompt", "a?", "--max-new-tokens", 9]
    (tmp_path / "own").write_text("{% for m in messages %}{{ m.content }}{% endfor %}!")
    files = {file.name: Companion(file) for file in chat.base.glob("*token*")}
    files["chat_template.jinja"] = Companion(tmp_path / "own")
    run = adapted(chat.base, tmp_path / "run", LORAS["llama"], files)
    found = answer(capsys, generating.main, run, *asked)
    assert found["tokens"] == answer(capsys, generating.main, run, "--prompt", "a?!", *asked[3:])["tokens"]
    assert found["tokens"] != answer(capsys, generating.main, chat.adapters, *asked)["tokens"]


# -- what does not belong together


def fingerprint(folder: Path) -> str:
    return str(json.loads((folder / "index.json").read_text())["adapters"]["base"]["fingerprint"])


def test_another_base_is_refused_with_both_fingerprints(chat: Folders, tmp_path: Path, capsys: Capture) -> None:
    other = shutil.copytree(chat.base, tmp_path / "other")
    in_dtype(save("llama", other, seed=1, **SIZES), torch.float64)
    its_own = fingerprint(adapted(other, tmp_path / "of-other", LORAS["llama"]))
    for base in (other, converted(other, tmp_path / "checkpoint", "--tp", "2")):
        said = refused(capsys, chat.adapters, "--base", base)
        assert f"the weights of {base} (fingerprint {its_own}) are not those" in said
        assert f"{chat.base} ({fingerprint(chat.adapters)})" in said


@pytest.mark.in_turn(12, 11)
@pytest.mark.slow
def test_processes_of_the_command_end_in_order(chat: Folders, tmp_path: Path) -> None:
    """What they find when they are live is said once, and none of them aborts."""
    other = shutil.copytree(chat.base, tmp_path / "other")
    in_dtype(save("llama", other, seed=1, **SIZES), torch.float64)
    command = [sys.executable, "-m", "megacore.tools.main", "evaluate", str(chat.adapters), "--base", str(other)]
    launcher = [*command, "--data", __file__, "--tp", "2"]
    done = subprocess.run(launcher, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("are not those that the adapters were trained on") == 1
    assert "Traceback" not in done.stderr and "SIGABRT" not in done.stderr


def test_what_is_wrong_is_said_before_weights_are_read(
    chat: Folders, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "fingerprint", None)
    larger = save("llama", tmp_path / "larger", intermediate_size=32, **SIZES)
    turned = shutil.copytree(chat.base, tmp_path / "turned")
    edit_config(turned, rms_norm_eps=0.5, attention_dropout=0.1)
    for arguments, says in (
        ((chat.base, "--base", chat.base), "is for a checkpoint of adapters"),
        ((chat.adapters, "--base", chat.adapters), "holds adapters (LoRA of rank 3)"),
        ((chat.adapters, "--base", tmp_path / "nowhere"), "nowhere is not a folder"),
        ((chat.adapters, "--base", larger), "other sizes"),
        ((chat.adapters, "--base", turned), "(rms_norm_eps is 0.5 and was 1e-06)"),
    ):
        assert says in refused(capsys, *arguments)
    chat.base.rename(tmp_path / "moved")
    said = refused(capsys, chat.adapters)
    assert f"of {chat.base}, and there is no such folder here" in said and "by --base" in said
