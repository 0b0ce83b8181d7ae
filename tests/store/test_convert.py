"""There and back: Hugging Face, any chain of layouts with optimizer state, and Hugging Face again, bit for bit."""

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
from families import rotated
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentences import splits
from tiny import (
    COMPANIONS,
    GPT2,
    LAYERS,
    LLAMA,
    SECTIONS,
    TRAINER,
    Section,
    assert_holds,
    hugging_face_folder,
    layout_of,
    run_checkpoint,
    snapshot,
    tensor_file,
    whole,
)
from whole import Whole

from megacore.models.registry import FAMILIES, configure
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.pattern import Pattern
from megacore.parallel.weights.schema import Param, Schema, split_of
from megacore.parallel.weights.transfer import Stored, hugging_face
from megacore.store.conversions.conversion import to_checkpoint, to_hugging_face
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders import audit, hugging_face_files
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import INDEX, STATES, Index, path_of
from megacore.tools import convert, reshard

pytestmark = pytest.mark.usefixtures("not_durable")

ROOT = Path(__file__).parents[2]
DTYPES = {state: "BF16" if state == "weights" else "F32" for state in STATES}
NUMBERS = range(len(SECTIONS["gpt2"]))


@st.composite
def layouts(draw: st.DrawFn, section: Section) -> tuple[list[str], Layout]:
    """(arguments that ask for it, a layout): kv < tp, padded vocabularies, uneven and interleaved stages, those without
    layers at the ends, experts whole or in parts."""
    schema = configure(section).schema
    ep = draw(st.sampled_from([1, 2])) if "experts" in schema.sizes else 1
    mesh = MeshShape(pp=draw(st.integers(1, 3)), ep=ep, tp=draw(st.sampled_from([1, 2, 4])))
    etp = draw(st.sampled_from([1, mesh.tp])) if "experts" in schema.sizes else 1
    layers = draw(splits(LAYERS, mesh).filter(lambda counts: min(counts[1:-1], default=1) > 0))
    options: dict[str, object] = {"tp": mesh.tp, "pp": mesh.pp, "ep": ep, "etp": etp, "jobs": draw(st.integers(1, 3))}
    options |= {"chunks": len(layers) // mesh.pp, "layers-per-stage": ",".join(map(str, layers))}
    asked = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return asked, Layout(schema, mesh, layers, split_of(etp))


def run(command: ModuleType, source: Path, target: Path, *more: str) -> None:
    assert command.main([str(source), str(target), *more]) == 0


@pytest.mark.parametrize(("family", "number"), rotated(NUMBERS, few=40))
def test_any_chain_of_layouts_and_back(family: str, number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    section, seen = SECTIONS[family][number], set()

    @settings(max_examples=5)
    @given(st.data(), st.sampled_from(["F32", "F16", "BF16"]))
    def chain(data: st.DataObject, dtype: str) -> None:
        folder = tmp_path_factory.mktemp("chain")
        bits = hugging_face_folder(folder / "hf", section, dtype)
        source: Path = folder / "hf"
        command: ModuleType = convert
        for i in range(data.draw(st.integers(1, 4))):
            asked, layout = data.draw(layouts(section))
            run(command, source, folder / f"c{i}", *asked)
            source, command = folder / f"c{i}", reshard
            checkpoint = assert_holds(source, {"weights": bits}, {"weights": dtype})
            there = checkpoint.layout
            assert (there.mesh, there.layers, there.split) == (layout.mesh, layout.layers, layout.split)
            seen.add((layout.mesh, layout.layers))
        size = data.draw(st.sampled_from(["1KB", "5GB"]))
        run(convert, source, folder / "back", "--to", "hf", "--max-shard-size", size)
        one, two = (
            {k: t for file in f.glob("*.safetensors") for k, t in load_file(file).items()}
            for f in (folder / "hf", folder / "back")
        )
        assert one.keys() == two.keys()
        for name in one:
            assert one[name].dtype == two[name].dtype and one[name].shape == two[name].shape
            assert torch.equal(*(each[name].ravel().view(torch.uint8) for each in (one, two))), name
        written, again = (json.loads((folder / name / "config.json").read_text()) for name in ("hf", "back"))
        assert written == again
        for name, content in COMPANIONS.items():
            assert (folder / "back" / name).read_bytes() == content
        shutil.rmtree(folder)

    chain()
    assert len(seen) >= 4


_JSON = b'{"a":  1.0,\r\n "\\u00e9": "\xc3\xa9", "n": 1e30}'
TRAVELS = {
    **dict.fromkeys(
        ("generation_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"), _JSON
    ),
    **dict.fromkeys(("vocab.json", "chat_template.json", "tekken.json"), _JSON),
    **dict.fromkeys(("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"), _JSON),
    "tokenizer_config.json": b'{"chat_template": [{"name":"default", "template": "{{ x }}"}],"vocab_file":null}\n\n',
    **dict.fromkeys(("tokenizer.model", "tokenizer.model.v3", "tiktoken.model", "qwen.tiktoken"), bytes(range(256))),
    **dict.fromkeys(("vocab.txt", "merges.txt"), b"a b\r\n\xff \n"),
    **dict.fromkeys(("chat_template.jinja", "additional_chat_templates/tool_use.jinja"), b"{{ x }}\r\n \n"),
    **dict.fromkeys(("LICENSE", "NOTICE.txt", "USE_POLICY.md"), b"free"),
}
"""In bytes that no program would write again as they are."""
STAYS = dict.fromkeys(
    (
        *("README.md", "training_args.bin", "optimizer.pt", "modeling_custom.py", "original/tokenizer.model"),
        "additional_chat_templates/tool.txt",
    ),
    b"{}",
)


def test_what_travels_with_a_model_is_copied_byte_for_byte(tmp_path: Path) -> None:
    """It goes by no family."""
    hugging_face_folder(tmp_path / "hf", SECTIONS["llama"][0])
    for name in COMPANIONS:
        (tmp_path / "hf" / name).unlink()
    for name, content in {**TRAVELS, **STAYS}.items():
        (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_bytes(content)
    run(convert, tmp_path / "hf", tmp_path / "a", "--tp", "2")
    run(reshard, tmp_path / "a", tmp_path / "b", "--pp", "2")
    run(convert, tmp_path / "b", tmp_path / "back", "--to", "hf")
    for folder in (tmp_path / "a/tokenizer", tmp_path / "b/tokenizer", tmp_path / "back"):
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        ours = {"config.json", "model.safetensors"} & {*found}
        assert {name: content for name, content in found.items() if name not in ours} == TRAVELS


@pytest.mark.parametrize(("family", "number"), rotated(NUMBERS, few=40))
def test_any_chain_of_layouts_with_optimizer_state(
    family: str, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """States have the sentences of their weights, which above go through chains in every family."""
    section = SECTIONS[family][number]

    @settings(max_examples=3)
    @given(st.data())
    def chain(data: st.DataObject) -> None:
        folder = tmp_path_factory.mktemp("chain")
        _, layout = data.draw(layouts(section))
        held = run_checkpoint(folder / "c0", section, layout)
        first = assert_holds(folder / "c0", held, DTYPES)
        fingerprints = {state: first.fingerprints(state) for state in held}
        for i in range(1, data.draw(st.integers(2, 3))):
            asked, layout = data.draw(layouts(section))
            run(reshard, folder / f"c{i - 1}", folder / f"c{i}", *asked)
            checkpoint = assert_holds(folder / f"c{i}", held, DTYPES)
            assert (checkpoint.layout.mesh, checkpoint.layout.layers) == (layout.mesh, layout.layers)
            assert checkpoint.index.step == 7 and (folder / f"c{i}/trainer.json").read_bytes() == TRAINER
            assert {state: checkpoint.fingerprints(state) for state in held} == fingerprints
            assert not audit.check(checkpoint, jobs=1)
        # And the files are the very same that the layout gets at once.
        to_checkpoint(first, layout).write(folder / "at-once", jobs=1)
        assert snapshot(folder / "at-once") == snapshot(checkpoint.path)
        shutil.rmtree(folder)

    chain()


@pytest.mark.in_turn(10)
@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_once(family: str, tmp_path: Path) -> None:
    bits = hugging_face_folder(tmp_path / "hf", SECTIONS[family][0])
    run(convert, tmp_path / "hf", tmp_path / "a", "--tp", "4", "--pp", "2")
    run(reshard, tmp_path / "a", tmp_path / "b", "--tp", "2", "--pp", "2", "--chunks", "2")
    assert_holds(tmp_path / "b", {"weights": bits}, {"weights": "BF16"})
    run(convert, tmp_path / "b", tmp_path / "back", "--to", "hf")
    one, other = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("hf", "back"))
    assert one[-64:] == other[-64:]
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)


def test_the_safetensors_library_opens_all_files(tmp_path: Path) -> None:
    run_checkpoint(tmp_path / "c", LLAMA, layout_of(LLAMA, (2, 3), pp=2, tp=4))
    checkpoint = Checkpoint.open(tmp_path / "c")
    files = sorted((tmp_path / "c").rglob("*.safetensors"))
    assert len(files) == len(STATES) * 8
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                assert opened.get_tensor(name).dtype in (torch.float32, torch.bfloat16)
    held = load_file(tensor_file(tmp_path / "c", pp=1, tp=1))
    assert {s.name: s.shape for s in checkpoint.stored() if s.where == "pp1-ep0-tp1"} == {
        n: tuple(t.shape) for n, t in held.items()
    }


@pytest.mark.parametrize("vocabulary", [13, 5])
def test_padding_is_zero(vocabulary: int, tmp_path: Path) -> None:
    """A rank may hold nothing else."""
    bits = hugging_face_folder(tmp_path / "hf", {**LLAMA, "vocab_size": vocabulary})
    run(convert, tmp_path / "hf", tmp_path / "c", "--tp", "4")
    held = [load_file(tensor_file(tmp_path / "c", tp=i))["embed.weight"].view(torch.int16).numpy() for i in range(4)]
    rows = np.concatenate(held)
    assert len(rows) % 4 == 0 and rows.shape[1] == 6 and not rows[vocabulary:].any()
    assert np.array_equal(rows[:vocabulary].view(np.uint16), bits["model.embed_tokens.weight"])
    run(reshard, tmp_path / "c", tmp_path / "d", "--tp", "2")
    assert_holds(tmp_path / "d", {"weights": bits}, {"weights": "BF16"})


# -- dtypes

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("wanted", NAMES)
@pytest.mark.parametrize("held", NAMES)
def test_numbers_are_converted_as_torch_does(held: str, wanted: str, tmp_path: Path) -> None:
    """Subnormals, ties, overflow, NaN; both ways, and config.json says so."""
    hugging_face_folder(tmp_path / "hf", GPT2, NAMES[held])
    edge = torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-9, 2**-24, 1e-40, 70000.0, 3.4e38, torch.inf, torch.nan])
    before = load_file(tmp_path / "hf/model.safetensors")
    before["transformer.wte.weight"].view(-1)[:10] = edge.to(getattr(torch, held))
    save_file(before, tmp_path / "hf/model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(convert, tmp_path / "hf", tmp_path / "there", "--tp", "2", "--dtype", wanted)
        run(convert, tmp_path / "hf", tmp_path / "same", "--pp", "2")
        run(convert, tmp_path / "same", tmp_path / "back", "--to", "hf", "--dtype", wanted)
    run(convert, tmp_path / "there", tmp_path / "then-back", "--to", "hf")
    for folder in ("back", "then-back"):
        after = load_file(tmp_path / folder / "model.safetensors")
        raw = json.loads((tmp_path / folder / "config.json").read_text())
        assert raw["dtype"] == wanted if folder == "then-back" or held != wanted else raw.get("dtype") in (None, wanted)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            made = after[name]
            assert made.dtype == getattr(torch, wanted)
            if held == wanted:  # not even the bits of a NaN
                assert torch.equal(made.view(torch.uint8), tensor.view(torch.uint8))
            else:
                theirs, nan = tensor.to(made.dtype), tensor.isnan()
                assert torch.equal(made.isnan(), nan)  # whose bits are anybody's, in torch too
                assert torch.equal(made[~nan].view(torch.uint8), theirs[~nan].view(torch.uint8)), name


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    mixed = {name: t.float() if "norm" in name else t.half() if "mlp" in name else t for name, t in tensors.items()}
    save_file(mixed, tmp_path / "hf/model.safetensors")
    run(convert, tmp_path / "hf", tmp_path / "c", "--tp", "2", "--pp", "2")
    run(reshard, tmp_path / "c", tmp_path / "d", "--tp", "4")
    run(convert, tmp_path / "d", tmp_path / "back", "--to", "hf")
    after = load_file(tmp_path / "back/model.safetensors")
    for name, tensor in mixed.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))


def test_what_was_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    c, d, back = (str(tmp_path / name) for name in ("c", "d", "back"))
    numbers = f"{configure(LLAMA).schema.parameters:,} parameters and"
    for main, arguments, kind, files in (
        (convert.main, [str(tmp_path / "hf"), c, "--tp", "2"], "a checkpoint in tp=2", 2),
        (reshard.main, [c, d, "--pp", "3"], "a checkpoint in pp=3", 3),
        (convert.main, [d, back, "--to", "hf"], "a Hugging Face folder", 1),
    ):
        assert main(arguments) == 0
        size = sum(file.stat().st_size for file in Path(arguments[1]).rglob("*.safetensors"))
        size += sum(len(content) for content in COMPANIONS.values())
        said = f"{arguments[1]}: {kind}, {numbers} {size:,} bytes in {files} file{'s' * (files > 1)} of weights\n"
        assert capsys.readouterr().out == said


def test_a_field_that_changes_nothing_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    file = tmp_path / "hf/config.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"my_note": "x", "his_note": 2}))
    command = [str(tmp_path / "hf"), str(tmp_path / "c")]
    assert convert.main(command) == 1
    said = capsys.readouterr().err
    assert "unknown field 'my_note'" in said and "--ignore-field his_note --ignore-field my_note" in said
    assert convert.main([*command, "--ignore-field", "my_note"]) == 1
    assert "my_note" not in (said := capsys.readouterr().err) and "--ignore-field his_note" in said
    notes = ["--ignore-field", "his_note", "--ignore-field", "my_note"]
    for more, message in (("mynote", "has no field 'mynote': did you mean 'my_note'?"), ("vocab_size", "is known")):
        assert convert.main([*command, *notes, "--ignore-field", more]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert convert.main([*command, *notes]) == 0
    assert convert.main([str(tmp_path / "c"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == plain
    assert convert.main([str(tmp_path / "c"), str(tmp_path / "d"), "--to", "hf", *notes]) == 1
    assert "is a checkpoint" in capsys.readouterr().err


def test_mixed_dtypes_within_a_tensor_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.3.mlp.up_proj.weight"):
        tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "hf/model.safetensors")
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "c")]) == 1
    said = capsys.readouterr().err
    assert "layers.1.attn.qkv.weight (BF16 and F32), layers.3.mlp.up.weight (BF16 and F32)" in said
    assert "--dtype" in said and not (tmp_path / "c").exists()
    run(convert, tmp_path / "hf", tmp_path / "c", "--dtype", "float32")
    assert {dtype for dtype, _ in whole(Checkpoint.open(tmp_path / "c"), "weights").values()} == {"F32"}


def test_only_the_weights_change_their_dtype(tmp_path: Path) -> None:
    """The optimizer's state stays what it is."""
    held = run_checkpoint(tmp_path / "c", GPT2, layout_of(GPT2))
    opened = Checkpoint.open(tmp_path / "c")
    to_checkpoint(opened, layout_of(GPT2, tp=2), dtype="F64").write(tmp_path / "d", jobs=1)
    made = Checkpoint.open(tmp_path / "d")
    found = {state: {dtype for dtype, _ in whole(made, state).values()} for state in held}
    assert found == {state: {"F64" if state == "weights" else "F32"} for state in STATES}
    assert made.index.raw["dtype"] == "float64"


@pytest.mark.parametrize("ours_listed", [True, False])
def test_the_dtypes_of_listed_and_stacked_experts(ours_listed: bool) -> None:
    listed, stacked = ("e.{experts}.up", "expert_mlp embed"), ("e.up", "experts expert_mlp embed")
    (name, pattern), (hf, hf_pattern) = (listed, stacked) if ours_listed else (stacked, listed)
    pattern_there = "experts expert_mlp embed"
    schema = Schema((Param(name, pattern, hf, pattern_there),), {"experts": 4, "expert_mlp": 4, "embed": 2, "layer": 1})
    assert {s.pattern for s in hugging_face(schema)} == {Pattern.parse(hf_pattern)}

    def planned(odd: str) -> set[str]:
        class Odd(Whole):
            def dtype(self, state: str, stored: Stored) -> str:
                return "F16" if stored.name == odd else "BF16"

        layout = Layout(schema, MeshShape(ep=2, tp=2), (1,))
        source = Odd(
            Path("a"),
            Index({}, layout, ("weights",), None, {}),
            schema,
            {"weights": mock.Mock(side_effect=AssertionError)},
        )
        plan = to_checkpoint(source, layout)
        return {tensor.dtype for file in plan.files for tensor in file.tensors}

    assert planned("") == {"BF16"}
    if ours_listed:
        assert planned("e.up") == {"F16"}
    else:
        with pytest.raises(StoreError, match=r"e.up \(BF16 and F16\)"):
            planned("e.3.up")


# -- what was damaged since


def flip(file: Path, at: int = -1, bit: int = 1) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= bit
    file.write_bytes(raw)


@pytest.mark.parametrize("lost", ["config.json", "nothing"])
def test_what_we_could_not_read_again_is_not_published(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export with a file too few, or with a config that means something that no reader knows."""
    run_checkpoint(tmp_path / "ckpt", GPT2, layout_of(GPT2))
    made = hugging_face_files.texts

    def texts(raw: Section, *others: Any) -> dict[str, bytes]:
        found = made({**raw, "logit_scale": 2.0}, *others)
        return {name: content for name, content in found.items() if name != lost}

    monkeypatch.setattr(hugging_face_files, "texts", texts)
    plan = to_hugging_face(Checkpoint.open(tmp_path / "ckpt"), 1 << 20)
    with pytest.raises(StoreError, match=r"(?s)out is not published, for it could not be read again: .*config\.json"):
        plan.write(tmp_path / "out", jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_an_export_does_not_take_is_not_asked(tmp_path: Path) -> None:
    """Where the optimizer's state is damaged the weights can still be had."""
    run_checkpoint(tmp_path / "c", LLAMA, layout_of(LLAMA, tp=2))
    flip(tensor_file(tmp_path / "c", "exp_avg"))
    assert reshard.main([str(tmp_path / "c"), str(tmp_path / "d")]) == 1
    assert convert.main([str(tmp_path / "c"), str(tmp_path / "d"), "--to", "hf"]) == 0


# -- other releases


def reordered(section: Section, **patterns: str) -> Schema:
    """The family's table with some tensors stored in another order, as another release may have had it."""
    schema = configure(section).schema
    changed = {p.name: p for p in schema.params} | {
        param.name: dataclasses.replace(param, pattern=patterns[key], hf_pattern=param.hf_pattern or param.pattern)
        for key in patterns
        for param in schema.params
        if param.name.endswith(key.replace("_", "."))
    }
    return Schema(tuple(changed.values()), schema.sizes)


OTHER = {
    "llama": reordered(
        LLAMA,
        qkv_weight="embed (k: kv head + q: heads head + v: kv head)",
        out_weight="(heads head) embed",
        up_weight="(mlp (gate: + up:)) embed",
        embed_weight="embed vocab",
    ),
    "gpt2": reordered(
        GPT2,
        qkv_weight="(heads (q: + k: + v:) head) embed",
        qkv_bias="(heads head (q: + k: + v:))",
        down_weight="mlp embed",
    ),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("family", OTHER)
def test_a_checkpoint_of_other_sentences(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"llama": LLAMA, "gpt2": GPT2}[family]
    held = run_checkpoint(tmp_path / "today", section, layout_of(section, tp=2))
    today = Checkpoint.open(tmp_path / "today")
    other = Layout(OTHER[family], MeshShape(pp=2, tp=4), (1, 4))
    assert {p.name for p in other.schema.params if p.pattern != today.layout.schema[p.name].pattern}
    to_checkpoint(today, other).write(tmp_path / "old", jobs=2)
    old = assert_holds(tmp_path / "old", held, DTYPES)
    assert [p.pattern for p in old.layout.schema.params] == [p.pattern for p in other.schema.params]
    assert not audit.check(old, jobs=1)
    run(reshard, tmp_path / "old", tmp_path / "new", "--tp", "2")
    assert snapshot(tmp_path / "new") == snapshot(tmp_path / "today")
    to_hugging_face(old, 10**9).write(tmp_path / "hf", jobs=1)
    assert sorted(snapshot(tmp_path / "hf")) == ["config.json", "model.safetensors"]  # of a run, the weights
    after = load_file(tmp_path / "hf/model.safetensors")
    assert all(np.array_equal(after[n].view(torch.uint16).numpy(), bits) for n, bits in held["weights"].items())
    # Pieces whose last axis is the same are still compared.
    norm = next(s for s in old.stored() if s.name.endswith("mlp_norm.weight"))
    entry = old.files[old.location("master", norm)[0]].entries[norm.name]
    for tp in range(4):
        flip(tmp_path / "old" / path_of("master", str(norm.where).replace("tp0", f"tp{tp}")), entry.start)
    assert reshard.main([str(tmp_path / "old"), str(tmp_path / "refused")]) == 1
    assert norm.name in capsys.readouterr().err


# -- what it costs

SCRIPT = """
import sys, threading, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from megacore.tools import convert, inspect, reshard
most, done = 0, threading.Event()
def watch():
    global most
    while not done.is_set():
        line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
        most = max(most, int(line.split()[1]))
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
for command, *arguments in {runs!r}:
    assert {{"convert": convert, "inspect": inspect, "reshard": reshard}}[command].main(arguments) == 0
done.set(); thread.join()
heavy = {{"torch", "transformers", "safetensors", "pydantic", "omegaconf", "matplotlib", "tqdm"}} & set(sys.modules)
print(most, ",".join(sorted(heavy)))
"""


def in_a_process(*runs: Sequence[object]) -> tuple[int, str]:
    """(most KiB that were not the file cache's, heavy modules that were imported)."""
    script = SCRIPT.format(root=str(ROOT), runs=[[*map(str, run)] for run in runs])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    kib, heavy = done.stdout.splitlines()[-1].split(" ")
    return int(kib), heavy


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


@linux
@pytest.mark.quick
def test_moving_bytes_imports_nothing_heavy(tmp_path: Path) -> None:
    """Nor does looking at them."""
    runs: list[Sequence[object]] = []
    for name, section in (("llama", LLAMA), ("gpt2", GPT2)):
        hugging_face_folder(tmp_path / name / "hf", section)
        hf, a, b, back = (tmp_path / name / folder for folder in ("hf", "a", "b", "back"))
        runs += [
            ("convert", hf, a, "--tp", "2", "--dtype", "bfloat16"),
            ("reshard", a, b, "--pp", "2"),
            ("inspect", b, "--tensors", "--check", "--diff", hf),
            ("convert", b, back, "--to", "hf"),
        ]
    assert in_a_process(*runs)[1] == ""
    assert in_a_process(("convert", hf, tmp_path / "wide", "--dtype", "float32"))[1].startswith("torch")


def peak(folder: Path, section: Section) -> int:
    """Most KiB of memory of its own that a process takes to convert, reshard and export a model."""
    hugging_face_folder(folder / "hf", section)
    hf, a, b, back = (folder / name for name in ("hf", "a", "b", "back"))
    most, _ = in_a_process(
        ("convert", hf, a, "--tp", "2", "--pp", "2", "--jobs", "2"),
        ("reshard", a, b, "--tp", "4", "--jobs", "2"),
        ("convert", b, back, "--to", "hf", "--jobs", "2"),
    )
    size = (folder / "hf/model.safetensors").stat().st_size
    shutil.rmtree(folder)
    print(f"{size >> 20} MiB: peak {most} KiB")
    return most


@pytest.mark.in_turn(4)
@linux
@pytest.mark.parametrize("base", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_memory_does_not_grow_with_the_model(base: Section, tmp_path: Path) -> None:
    """4 times the tensors' size takes the same; GPT-2's transposed matrices too."""

    def scaled(width: int) -> Section:
        if base is LLAMA:
            return {**LLAMA, "hidden_size": 256 * width, "intermediate_size": 704, "vocab_size": 20_001, "head_dim": 32}
        return {**GPT2, "n_embd": 256 * width, "n_inner": 1024, "vocab_size": 20_001}

    small, large = peak(tmp_path / "small", scaled(1)), peak(tmp_path / "large", scaled(4))
    assert large < small + 8 * 1024  # KiB; the models differ by 60 MiB and more


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    before = snapshot(tmp_path)
    run(convert, tmp_path / "hf", tmp_path / "c", "--tp", "2", "--dry-run")
    said = capsys.readouterr().out
    assert snapshot(tmp_path) == before
    run(convert, tmp_path / "hf", tmp_path / "c", "--tp", "2")
    sizes: Sequence[int] = [tensor_file(tmp_path / "c", tp=i).stat().st_size for i in range(2)]
    whole = sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file() and path.name != INDEX)
    assert all(f"{size:,} bytes" in said for size in (*sizes, whole))


def test_what_is_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    told = []
    for options in (["--dry-run"], []):
        run(convert, tmp_path / "hf", tmp_path / "c", "--tp", "2", "--json", *options)
        told.append(json.loads(capsys.readouterr().out))
        assert told[-1].pop("written") == (not options) == (tmp_path / "c").exists()
    dry, done = told
    assert dry == done
    assert {each["path"]: each["bytes"] for each in done["files"]} == {
        str(path.relative_to(tmp_path / "c")): path.stat().st_size for path in (tmp_path / "c").rglob("*.safetensors")
    }
