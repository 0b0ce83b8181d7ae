"""What the commands are given that they must refuse: one clear message, no target, nothing else touched."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from families import ROTATION
from tiny import GPT2, LLAMA, edit_index, hugging_face_folder, layout_of, run_checkpoint, snapshot, spread, tensor_file

from megacore.store.checkpoint import Checkpoint
from megacore.store.strict_json import StoreError
from parallel.weights.transfer import hugging_face, plan
from tools import convert, reshard

pytestmark = pytest.mark.usefixtures("not_durable")

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def given_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hf``; ``ckpt``, a run's on pp=2 x tp=2; and ``gpt2``, weights only."""
    folder = tmp_path_factory.mktemp("given")
    hugging_face_folder(folder / "hf", LLAMA)
    run_checkpoint(folder / "ckpt", LLAMA, layout_of(LLAMA, (2, 3), pp=2, tp=2))
    hugging_face_folder(folder / "gpt2-hf", GPT2)
    assert convert.main([str(folder / "gpt2-hf"), str(folder / "gpt2"), "--tp", "2"]) == 0
    return folder


@dataclass(frozen=True)
class Case:
    """What is done to the folders, the command line within them, and what the message must name."""

    command: str
    change: Change
    words: tuple[str, ...]


def nothing(folder: Path) -> None:
    pass


def case(command: str, *words: str, change: Change = nothing) -> Case:
    return Case(command, change, words)


def index(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: edit_index(folder / "ckpt", change)


LONG = "k" * 3 * 10**6


def put(value: object, *path: str | int) -> Change:
    """A value in the place of another one in the index."""

    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return index(change)


def drop(*path: str | int) -> Change:
    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        del tree[path[-1]]

    return index(change)


def text(name: str, change: Callable[[bytes], bytes]) -> Change:
    def write(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return write


def replace(old: str, new: str) -> Change:
    def change(raw: bytes) -> bytes:
        assert raw.count(old.encode()) >= 1, old
        return raw.replace(old.encode(), new.encode(), 1)

    return text("ckpt/index.json", change)


def header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file; its data stays."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    tree = json.loads(raw[8 : 8 + length])
    change(tree)
    new = json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def same_size(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The same, and the index's size with it."""
    header(path, change)
    name = str(path.relative_to(path.parents[1]))
    edit_index(path.parents[1], lambda tree: tree["files"][name].update(bytes=path.stat().st_size))


def exchange(one: Path, two: Path) -> None:
    middle = one.with_name("middle")
    one.rename(middle)
    two.rename(one)
    middle.rename(two)


def rename_tensor(tree: dict[str, Any]) -> None:
    tree["layers.0.attn.other.weight"] = tree.pop("layers.0.attn.out.weight")


def reshape(tree: dict[str, Any]) -> None:
    tree["layers.0.attn.out.weight"]["shape"].reverse()


def as_integers(tree: dict[str, Any]) -> None:
    tree["layers.0.attn.out.weight"]["dtype"] = "I16"


NOTHING = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def fewer_layers(tree: dict[str, Any]) -> None:
    tree["config"]["num_hidden_layers"] = tree["sizes"]["layer"] = 4
    tree["layers_per_stage"] = [2, 2]


def many_layers(count: int) -> Change:
    def change(tree: dict[str, Any]) -> None:
        tree["config"]["num_hidden_layers"] = tree["sizes"]["layer"] = count
        tree["layers_per_stage"] = [2, count - 2]

    return index(change)


def huge(axis: str, field: str) -> Change:
    def change(tree: dict[str, Any]) -> None:
        tree["config"][field] = tree["sizes"][axis] = 10**18

    return index(change)


def parameter(field: str, value: str) -> Change:
    return put(value, "parameters", 0, field)


RECORD = "weights/pp0-ep0-tp0.safetensors"
OUT = "layers.0.attn.out.weight"

INDEX: Mapping[str, tuple[Change, tuple[str, ...]]] = {
    "empty": (text("ckpt/index.json", lambda raw: b""), ("index.json", "not JSON")),
    "half": (text("ckpt/index.json", lambda raw: raw[: len(raw) // 2]), ("index.json", "not JSON")),
    "not-utf-8": (text("ckpt/index.json", lambda raw: b"\xff" + raw), ("index.json", "not JSON")),
    "utf-16": (text("ckpt/index.json", lambda raw: raw.decode().encode("utf-16")), ("index.json", "not JSON")),
    "list": (text("ckpt/index.json", lambda raw: b"[]"), ("index.json", "not an object")),
    "null": (text("ckpt/index.json", lambda raw: b"null"), ("index.json", "not an object")),
    "two-objects": (text("ckpt/index.json", lambda raw: raw + raw), ("index.json", "not JSON")),
    "nested": (text("ckpt/index.json", lambda raw: b'{"a":' * 100_000), ("index.json", "not JSON")),
    "nested-value": (put(json.loads("[" * 900 + "]" * 900), "step"), ("index.json", "nested")),
    "nan": (replace('"step": 7', '"step": NaN'), ("NaN",)),
    "infinity": (replace('"step": 7', '"step": -Infinity'), ("Infinity",)),
    "endless-number": (replace('"step": 7', f'"step": {"7" * 5000}'), ("64 bits",)),
    "float-overflow": (replace('"step": 7', '"step": 1e999'), ("1e999",)),
    "duplicate-key": (replace('"step": 7', '"step": 7, "step": 8'), ("'step'", "twice")),
    "duplicate-file": (replace('"mesh": {', '"files": {}, "mesh": {'), ("'files'", "twice")),
    "other-format": (put("megatron", "format"), ("format", "megatron")),
    "format-not-text": (put(1, "format"), ("format",)),
    "later-version": (put(3, "version"), ("version 3", "reads 1 and 2")),
    "version-true": (put(True, "version"), ("version",)),
    "version-text": (put("1", "version"), ("version",)),
    **{
        f"no-{key}": (drop(key), (key,))
        for key in (
            "format",
            "version",
            "step",
            "config",
            "parameters",
            "sizes",
            "mesh",
            "layers_per_stage",
            "states",
            "files",
        )
    },
    **{
        f"{key}-is-{kind}": (put(value, key), (key,))
        for key in ("config", "parameters", "sizes", "mesh", "layers_per_stage", "states", "files")
        for kind, value in (("null", None), ("text", "x"), ("number", 3))
    },
    "config-empty": (put({}, "config"), ("model_type",)),
    "config-unknown-family": (put("bert", "config", "model_type"), ("bert",)),
    "config-family-is-a-list": (put(["llama"], "config", "model_type"), ("model_type",)),
    "config-unknown-field": (put(4.0, "config", "logit_scale"), ("logit_scale",)),
    "config-text-for-a-number": (put("6", "config", "hidden_size"), ("hidden_size",)),
    "config-negative": (put(-5, "config", "num_hidden_layers"), ("num_hidden_layers",)),
    "config-of-another-size": (put(14, "config", "vocab_size"), ("sizes", "14")),
    "config-of-another-tying": (put(True, "config", "tie_word_embeddings"), ("head.weight",)),
    "config-of-another-family": (
        lambda f: edit_index(f / "ckpt", lambda t: t.update(config=index_of(f / "gpt2")["config"])),
        ("sizes",),
    ),
    "layers-10**18": (many_layers(10**18), ("tensors",)),
    "layers-10**7": (many_layers(10**7), ("tensors",)),
    "vocabulary-10**18": (huge("vocab", "vocab_size"), ("embed.weight",)),
    "hidden-10**18": (huge("embed", "hidden_size"), ("norm.weight",)),
    "mlp-10**18": (huge("mlp", "intermediate_size"), ("layers.0.mlp",)),
    "fewer-layers": (index(fewer_layers), ("also holds layers.4",)),
    "size-missing": (drop("sizes", "mlp"), ("mlp",)),
    "size-zero": (put(0, "sizes", "embed"), ("sizes",)),
    "size-negative": (put(-6, "sizes", "embed"), ("sizes",)),
    "size-fraction": (put(6.0, "sizes", "embed"), ("sizes",)),
    "size-too-many": (put(3, "sizes", "colour"), ("sizes", "colour")),
    "mesh-missing": (drop("mesh", "tp"), ("mesh",)),
    "mesh-more": (put(1, "mesh", "dp"), ("mesh",)),
    "mesh-zero": (put(0, "mesh", "tp"), ("mesh",)),
    "mesh-10**18": (put(10**18, "mesh", "tp"), ("mesh",)),
    "mesh-other-than-files": (put(4, "mesh", "tp"), ("mesh", "files")),
    "mesh-transposed": (
        index(lambda t: t.update(mesh={"pp": 4, "ep": 1, "tp": 1}, layers_per_stage=[2, 1, 1, 1])),
        ("files",),
    ),
    "mesh-of-experts": (put({"pp": 2, "ep": 2, "tp": 1}, "mesh"), ("no experts to spread",)),
    "stages-sum": (put([2, 2], "layers_per_stage"), ("layers",)),
    "stages-zero": (put([5, 0], "layers_per_stage"), ("layers_per_stage",)),
    "stages-negative": (put([6, -1], "layers_per_stage"), ("layers_per_stage",)),
    "stages-odd": (put([2, 2, 1], "layers_per_stage"), ("3 virtual stages",)),
    "stages-exchanged": (put([3, 2], "layers_per_stage"), ("layers.2", "lacks")),
    "stages-interleaved": (put([1, 1, 1, 2], "layers_per_stage"), ("layers.1", "lacks")),
    "states-unknown": (put(["weights", "master", "exp_avg", "momentum"], "states"), ("momentum",)),
    "states-without-weights": (put(["master", "exp_avg", "exp_avg_sq"], "states"), ("states",)),
    "states-twice": (put(["weights", "weights", "master", "exp_avg"], "states"), ("states",)),
    "states-fewer": (put(["weights"], "states"), ("files",)),
    "states-of-objects": (put([{}, "weights", "master", []], "states"), ("states",)),
    "step-negative": (put(-1, "step"), ("step",)),
    "step-text": (put("7", "step"), ("step",)),
    "step-10**30": (replace('"step": 7', f'"step": {10**30}'), ("64 bits",)),
    "files-empty": (put({}, "files"), ("files",)),
    "file-unnamed": (drop("files", RECORD), ("files",)),
    "file-outside": (
        index(lambda t: t["files"].update({"../x.safetensors": t["files"].pop(RECORD)})),
        ("names the files", "../x"),
    ),
    "file-absolute": (
        index(lambda t: t["files"].update({"/etc/passwd": t["files"].pop(RECORD)})),
        ("names the files", "/etc/passwd"),
    ),
    "file-size": (put(8, "files", RECORD, "bytes"), (RECORD, "not 8")),
    "file-size-negative": (put(-8, "files", RECORD, "bytes"), (RECORD,)),
    "file-size-text": (put("8", "files", RECORD, "bytes"), ("bytes",)),
    "file-null": (put(None, "files", RECORD), (RECORD,)),
    "fingerprints-none": (drop("files", RECORD, "fingerprints"), ("fingerprints",)),
    "fingerprints-list": (put([], "files", RECORD, "fingerprints"), ("fingerprints",)),
    "fingerprint-missing": (drop("files", RECORD, "fingerprints", OUT), (OUT,)),
    "fingerprint-of-no-piece": (put({"q": "0" * 16}, "files", RECORD, "fingerprints", OUT), (OUT,)),
    "fingerprint-number": (put({"": 7}, "files", RECORD, "fingerprints", OUT), (OUT, "16 hex")),
    "fingerprint-short": (put({"": "ab"}, "files", RECORD, "fingerprints", OUT), (OUT, "16 hex")),
    "fingerprint-not-hex": (put({"": "0x" + "0" * 14}, "files", RECORD, "fingerprints", OUT), (OUT, "16 hex")),
    "fingerprint-newline": (put({"": "0" * 16 + "\n"}, "files", RECORD, "fingerprints", OUT), (OUT, "16 hex")),
    "fingerprint-list": (put(["0" * 16], "files", RECORD, "fingerprints", OUT), (OUT, "16 hex")),
    "fingerprint-other": (put({"": "0" * 16}, "files", RECORD, "fingerprints", OUT), (OUT, "fingerprints")),
    "parameters-empty": (put([], "parameters"), ("embed.weight",)),
    "parameter-null": (put(None, "parameters", 0), ("parameter",)),
    "parameter-missing": (drop("parameters", 0), ("embed.weight",)),
    "parameter-twice": (index(lambda t: t["parameters"].append(t["parameters"][0])), ("twice",)),
    "parameter-without-a-name": (drop("parameters", 0, "name"), ("name",)),
    "pattern-not-text": (put(["vocab", "embed"], "parameters", 0, "pattern"), ("pattern",)),
    "pattern-unbalanced": (parameter("pattern", "(vocab embed"), ("never closed",)),
    "pattern-strange": (parameter("pattern", "vocab * embed"), ("'*'",)),
    "pattern-unlabelled": (parameter("pattern", "(vocab + embed)"), ("label",)),
    "pattern-empty": (parameter("pattern", ""), ("embed.weight",)),
    "pattern-nested": (parameter("pattern", "(" * 50_000 + "vocab" + ")" * 50_000), ("sentence",)),
    "pattern-exponential": (parameter("pattern", "(a: + b:)" * 40), ("sentence",)),
    "pattern-exponential-of-hf": (parameter("hf_pattern", "(a: + b:)" * 40), ("sentence",)),
    "pattern-of-another-axis": (parameter("pattern", "vocab colour"), ("colour",)),
    "pattern-of-two-split-axes": (parameter("pattern", "vocab heads"), ("embed.weight",)),
    "pattern-of-fewer-axes": (parameter("pattern", "vocab"), ("embed.weight",)),
    "name-attribute": (parameter("name", "{layer.__class__}"), ("{layer.__class__}",)),
    "name-attribute-chain": (parameter("name", "{layer.__class__.__init__.__globals__}"), ("__globals__",)),
    "name-index": (parameter("name", "{0}"), ("'0'",)),
    "name-field-width": (parameter("name", "{layer:>1000000000}"), (":>1000000000",)),
    "name-unknown-axis": (parameter("name", "{colour}.weight"), ("colour",)),
    "name-open-brace": (parameter("name", "embed.{weight"), ("embed.{weight",)),
    "name-outside": (parameter("name", "../../embed.weight"), ("../../embed.weight",)),
    "name-control-characters": (parameter("name", "embed.\u001b[2Jweight"), ("weight",)),
    "hf-attribute": (parameter("hf", "{0.__class__}"), ("hf='{0.__class__}'", "names no tensors")),
    "hf-width": (parameter("hf", "{layer:>1000000000}"), (":>1000000000",)),
    "hf-unknown-axis": (parameter("hf", "{colour}.weight"), ("embed.weight", "'colour' has no size")),
    "hf-control-characters": (parameter("hf", "\x1b[2J"), ("hf='\\x1b[2J'",)),
    "at-unknown": (parameter("at", "middle"), ("middle",)),
    "at-empty": (parameter("at", ""), ("at=''",)),
    "at-blank": (parameter("at", "  "), ("at='  '",)),
    "at-the-other-end": (parameter("at", "last"), ("embed.weight",)),
}


def index_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return content


def on(name: str, change: Callable[[Path], object], state: str = "weights", **place: int) -> Change:
    return lambda folder: change(tensor_file(folder / name, state, **place))


def edit_config(change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "hf/config.json").read_text())
        change(content)
        (folder / "hf/config.json").write_text(json.dumps(content))

    return edit


def instead(make: Callable[[Path], object]) -> Change:
    """Something else in the place of a file."""

    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def move_into_target(folder: Path) -> None:
    (folder / "outer").mkdir()
    (folder / "hf").rename(folder / "outer/hf")


def foreign_partial(folder: Path) -> None:
    (folder / ".target.partial").mkdir()
    (folder / ".target.partial/precious").write_text("mine")


def leading_out(name: str) -> Change:
    """A file of a folder is moved out of it, and a link there leads to it."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        (folder / name).rename(folder / "secret")
        (folder / name).symlink_to(folder / "secret")

    return change


def folder_leading_out(folder: Path) -> None:
    (folder / "ckpt/weights").rename(folder / "weights")
    (folder / "ckpt/weights").symlink_to("../weights")


def large_companion(folder: Path) -> None:
    with open(folder / "hf/LICENSE", "wb") as file:
        file.truncate(2**30)


def link_inside(folder: Path) -> None:
    (folder / "inside").symlink_to(folder / "ckpt")


FILES: Mapping[str, tuple[Change, tuple[str, ...]]] = {
    "missing": (on("ckpt", lambda file: file.unlink()), (RECORD,)),
    "state-missing": (lambda f: shutil.rmtree(f / "ckpt/weights"), (RECORD, "tp1")),
    "folder-in-place": (on("ckpt", instead(Path.mkdir)), (RECORD, "folder")),
    "pipe-in-place": (on("ckpt", instead(os.mkfifo)), (RECORD, "pipe")),
    "dangling-link": (on("ckpt", instead(lambda file: file.symlink_to("nowhere"))), (RECORD, "nowhere")),
    "empty": (on("ckpt", lambda file: file.write_bytes(b"")), (RECORD, "0 bytes")),
    "truncated": (on("ckpt", lambda file: os.truncate(file, file.stat().st_size - 2)), (RECORD, "truncated")),
    "longer": (on("ckpt", lambda file: os.truncate(file, file.stat().st_size + 2)), (RECORD,)),
    "pickle": (on("ckpt", lambda file: file.write_bytes(b"\x80\x04" + bytes(90))), (RECORD, "pickle")),
    "header-of-10**18": (on("ckpt", lambda file: file.write_bytes(struct.pack("<Q", 10**18) + bytes(9))), (RECORD,)),
    "another-name": (on("ckpt", lambda file: same_size(file, rename_tensor)), (OUT, "layers.0.attn.other.weight")),
    "tensor-more": (
        on("ckpt", lambda file: same_size(file, lambda t: t.update(x=NOTHING))),
        (RECORD, "also holds x"),
    ),
    "another-shape": (on("ckpt", lambda file: same_size(file, reshape)), (OUT, "[8, 6]")),
    "integers": (on("ckpt", lambda file: same_size(file, as_integers)), (OUT, "I16")),
    "of-the-other-stage": (
        lambda f: exchange(tensor_file(f / "ckpt"), tensor_file(f / "ckpt", pp=1)),
        ("lacks", "embed.weight"),
    ),
    "of-the-other-rank": (
        lambda f: exchange(tensor_file(f / "ckpt"), tensor_file(f / "ckpt", tp=1)),
        ("weights:", "layers.0.attn.qkv.weight (k)", "fingerprints"),
    ),
    "of-another-state": (
        lambda f: exchange(tensor_file(f / "ckpt"), tensor_file(f / "ckpt", "master")),
        (RECORD, "bytes"),
    ),
    "trainer-missing": (lambda f: (f / "ckpt/trainer.json").unlink(), ("trainer.json", "step 7")),
    "trainer-empty": (text("ckpt/trainer.json", lambda raw: b""), ("trainer.json", "not JSON")),
    "trainer-half": (text("ckpt/trainer.json", lambda raw: raw[:20]), ("trainer.json", "not JSON")),
    "trainer-list": (text("ckpt/trainer.json", lambda raw: b"[7]"), ("trainer.json", "object")),
    "trainer-step-2**62": (index(lambda t: t.update(step=2**62)), ("trainer.json has step 7", str(2**62))),
    "trainer-without-a-step": (
        text("ckpt/trainer.json", lambda raw: b'{"lr": 1}'),
        ("trainer.json has step None, index.json 7",),
    ),
    "trainer-step-7.0": (text("ckpt/trainer.json", lambda raw: b'{"step": 7.0}'), ("trainer.json has step 7.0",)),
    "trainer-of-no-run": (put(None, "step"), ("trainer.json has step 7, index.json None",)),
    "trainer-nested": (
        text("ckpt/trainer.json", lambda raw: b'{"step": 7, "recipe": ' + b'{"a":' * 60 + b"1" + b"}" * 61),
        ("trainer.json", "nested"),
    ),
    "trainer-nan": (text("ckpt/trainer.json", lambda raw: b'{"lr": NaN}'), ("trainer.json", "NaN")),
    "trainer-twice": (text("ckpt/trainer.json", lambda raw: b'{"step": 1, "step": 2}'), ("trainer.json", "twice")),
    "trainer-folder": (
        lambda f: instead(Path.mkdir)(f / "ckpt/trainer.json"),
        ("trainer.json",),
    ),
    "trainer-pipe": (
        lambda f: instead(os.mkfifo)(f / "ckpt/trainer.json"),
        ("trainer.json",),
    ),
    "index-pipe": (lambda f: instead(os.mkfifo)(f / "ckpt/index.json"), ("index.json",)),
    "index-folder": (lambda f: instead(Path.mkdir)(f / "ckpt/index.json"), ("index.json",)),
}

EXPORT, RESHARD, CONVERT = "convert ckpt target --to hf", "reshard ckpt target --tp 4", "convert hf target"

ARGUMENTS: Mapping[str, Case] = {
    # -- splits
    "tp-does-not-divide": case(f"{CONVERT} --tp 3", "heads (8)", "tp=3", "choose tp from 1, 2, 4, 8"),
    "tp-all-problems": case(f"{CONVERT} --tp 3 --pp 6", "heads (8)", "kv (2)", "5 layers"),
    "tp-does-not-divide-kv": case(f"{RESHARD} --tp 3", "heads (8)", "kv (2)"),
    "tp-zero": case(f"{CONVERT} --tp 0", "--tp", "'0'"),
    "tp-negative": case(f"{CONVERT} --tp -2", "--tp"),
    "tp-text": case(f"{CONVERT} --tp two", "--tp", "'two'"),
    "tp-fraction": case(f"{CONVERT} --tp 2.0", "--tp", "'2.0'"),
    "tp-huge": case(f"{CONVERT} --tp {10**8}", "heads (8)"),
    "tp-endless": case(f"{CONVERT} --tp {'9' * 5000}", "--tp"),
    "pp-more-than-layers": case(f"{CONVERT} --pp 6", "6", "5 layers"),
    "pp-huge": case(f"{RESHARD} --pp {10**8}", "5 layers"),
    "chunks-more-than-layers": case(f"{RESHARD} --pp 2 --chunks 3", "2 x 3 = 6", "5 layers"),
    "ep-without-experts": case(f"{CONVERT} --ep 2", "ep=2", "no experts", "set ep=1"),
    "ep-without-experts-reshard": case(f"{RESHARD} --ep 4", "ep=4", "no experts", "set ep=1"),
    "etp-without-experts": case(f"{CONVERT} --tp 2 --etp 2", "etp=2", "no experts", "set etp=1"),
    "etp-of-hf": case(f"{EXPORT} --etp 2", "leave out --tp, --pp, --ep, --etp"),
    "stages-too-few": case(f"{CONVERT} --pp 2 --layers-per-stage 5", "--layers-per-stage", "2 x 1 = 2"),
    "stages-too-many": case(f"{CONVERT} --pp 2 --layers-per-stage 1,1,3", "3 numbers"),
    "stages-sum": case(f"{CONVERT} --pp 2 --layers-per-stage 2,2", "adds up to 4", "5 layers"),
    "stages-zero": case(f"{CONVERT} --pp 2 --layers-per-stage 5,0", "--layers-per-stage"),
    "stages-gap": case(f"{CONVERT} --pp 2 --layers-per-stage 2,,3", "--layers-per-stage"),
    "stages-text": case(f"{RESHARD} --pp 2 --layers-per-stage all", "--layers-per-stage", "'all'"),
    "all-layout-problems-at-once": case(f"{CONVERT} --tp 3 --ep 2 --pp 6", "heads (8)", "ep=2", "5 layers"),
    # -- other arguments
    "shard-size-nonsense": case(f"{EXPORT} --max-shard-size huge", "'huge'", "5GB"),
    "shard-size-negative": case(f"{EXPORT} --max-shard-size=-5GB", "'-5GB'"),
    "shard-size-zero": case(f"{EXPORT} --max-shard-size 0", "'0'"),
    "shard-size-unit": case(f"{EXPORT} --max-shard-size 5GX", "'5GX'"),
    "dtype-unknown": case(f"{CONVERT} --dtype float8", "float8"),
    "to-unknown": case("convert hf target --to gguf", "gguf"),
    "jobs-zero": case(f"{CONVERT} --jobs 0", "--jobs"),
    "unknown-option": case(f"{RESHARD} --dtype float32", "--dtype"),
    "no-target": case("convert hf", "target"),
    "no-arguments": case("reshard", "source", "target"),
    # -- sources
    "hf-to-hf": case("convert hf target --to hf", "hf is a Hugging Face folder already"),
    "checkpoint-without-to": case("convert ckpt target --tp 2", "megacore reshard", "--to hf"),
    "reshard-of-hf": case("reshard hf target", "Hugging Face folder", "megacore convert"),
    "source-missing": case("convert nowhere target", "nowhere is not a folder"),
    "source-missing-reshard": case("reshard nowhere target", "nowhere is not a folder"),
    "source-a-file": case("convert hf/config.json target", "config.json is not a folder"),
    "source-empty": case("convert empty target", "config.json", change=lambda f: (f / "empty").mkdir()),
    "source-name-too-long": case(f"convert {'x' * 300} target", "too long"),
    # -- targets
    "target-exists": case("convert hf gpt2", "gpt2", "exists", "choose another name"),
    "target-a-file": case("reshard ckpt hf/config.json", "config.json", "exists"),
    "target-is-source": case("convert hf hf", "hf"),
    "target-is-source-reshard": case("reshard ckpt ckpt/../ckpt", "ckpt"),
    "target-in-source": case("convert hf hf/target", "lies in", "hf"),
    "target-in-source-deep": case("reshard ckpt ckpt/tokenizer/a/b", "lies in", "ckpt"),
    "target-in-source-by-a-link": case("reshard ckpt inside/target", "lies in", "ckpt", change=link_inside),
    "target-in-source-dry": case("reshard ckpt ckpt/target --dry-run", "lies in", "ckpt"),
    "source-in-target": case("convert outer/hf outer", "outer", "exists", change=move_into_target),
    "target-under-a-file": case("convert hf hf/config.json/target", "config.json"),
    "target-name-too-long": case(f"convert hf {'x' * 300}", "too long"),
    "partial-of-someone-else": case(RESHARD, ".target.partial", "remove it", change=foreign_partial),
    # -- companions
    "companion-of-another-folder": case(CONVERT, "LICENSE: leads to", "secret", change=leading_out("hf/LICENSE")),
    "template-of-another-folder": case(
        CONVERT, "x.jinja: leads to", "secret", change=leading_out("hf/additional_chat_templates/x.jinja")
    ),
    "config-of-another-folder": case(CONVERT, "config.json: leads to", "secret", change=leading_out("hf/config.json")),
    "own-companion-of-another-folder": case(
        EXPORT, "LICENSE: leads to", "secret", change=leading_out("ckpt/tokenizer/LICENSE")
    ),
    "index-of-another-folder": case(EXPORT, "index.json: leads to", "secret", change=leading_out("ckpt/index.json")),
    "weights-of-another-folder": case(EXPORT, "leads to", "outside of", change=folder_leading_out),
    "large-companion": case(CONVERT, "LICENSE has 1073741824 bytes", change=large_companion),
    # -- a Hugging Face folder
    "hf-config-missing": case(CONVERT, "config.json", change=lambda f: (f / "hf/config.json").unlink()),
    "hf-config-pipe": case(CONVERT, "config.json", change=lambda f: instead(os.mkfifo)(f / "hf/config.json")),
    "hf-weights-missing": case(CONVERT, "model.safetensors", change=lambda f: (f / "hf/model.safetensors").unlink()),
    "hf-long-key": case(CONVERT, "unknown field 'kk", "k [...] k", change=edit_config(lambda c: c.update({LONG: 1}))),
    "hf-long-number": case(CONVERT, "not of type int", change=edit_config(lambda c: c.update(vocab_size=LONG))),
    "hf-unknown-field": case(CONVERT, "logit_scale", change=edit_config(lambda c: c.update(logit_scale=2.0))),
    "hf-truncated": case(CONVERT, "truncated", change=text("hf/model.safetensors", lambda raw: raw[:-2])),
    "hf-shapes": case(CONVERT, "embed_tokens.weight", "[13, 6]", change=edit_config(lambda c: c.update(vocab_size=14))),
}  # fmt: skip

CASES: Mapping[str, Case] = {
    **{f"index-{name}-reshard": Case(RESHARD, *of) for name, of in INDEX.items()},
    **{f"index-{name}-export": Case(EXPORT, *of) for name, of in INDEX.items()},
    **{f"file-{name}-reshard": Case(RESHARD, *of) for name, of in FILES.items()},
    **{f"file-{name}-export": Case(EXPORT, *of) for name, of in FILES.items()},
    **ARGUMENTS,
}
MAINS = {"convert": convert.main, "reshard": reshard.main}


class Hang(BaseException):
    """Nobody catches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """No hang."""

    def stop(*_: object) -> None:
        raise Hang(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(line: str, folder: Path) -> int:
    """The exit status of a command line whose first two words are paths within a folder."""
    command, *arguments = line.split()
    paths = [str(folder / word) if not word.startswith("-") else word for word in arguments[:2]]
    try:
        with within(20):
            return MAINS[command]([*paths, *arguments[2:]])
    except SystemExit as error:  # argparse
        assert isinstance(error.code, int)
        return error.code


def kinds(folder: Path) -> dict[str, str]:
    """What lies where; contents are compared where that does not block."""
    return {name: "" if (folder / name).is_fifo() else digest for name, digest in snapshot(folder).items()}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, given_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, here = tmp_path / "here", CASES[name]
    shutil.copytree(given_folders, folder)
    here.change(folder)
    before, around = kinds(folder), sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert call(here.command, folder) in (1, 2)
    said = capsys.readouterr().err
    for word in here.words:
        assert word in said, said
    assert "Traceback" not in said and "\x1b" not in said
    assert len(said) < 6000 and len(said.splitlines()) <= 22, said
    assert kinds(folder) == before
    assert sorted(tmp_path.iterdir()) == around


@pytest.mark.quick
@pytest.mark.parametrize("command", [CONVERT, RESHARD, EXPORT])
def test_what_the_cases_start_from_is_good(command: str, given_folders: Path, tmp_path: Path) -> None:
    """It is the change of a case that is refused."""
    shutil.copytree(given_folders, tmp_path / "here")
    assert call(command, tmp_path / "here") == 0


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_cannot_be_written(
    given_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(given_folders, tmp_path / "here")
    (tmp_path / "here/locked").mkdir(mode=0o555)
    assert call("convert hf locked/target", tmp_path / "here") == 1
    assert "Permission denied" in capsys.readouterr().err


def test_companions_that_are_links_are_followed_and_others_left(given_folders: Path, tmp_path: Path) -> None:
    """Links within the folder. A folder or a pipe of such a name is none of ours to read."""
    folder = tmp_path / "here"
    shutil.copytree(given_folders, folder)
    for at in ("hf", "ckpt/tokenizer"):
        (folder / at).mkdir(exist_ok=True)
        (folder / at / "blob").write_text("words")
        (folder / at / "vocab.json").symlink_to("blob")
        (folder / at / "merges.txt").mkdir()
        os.mkfifo(folder / at / "vocab.txt")
    assert call("convert hf a", folder) == 0
    assert call("reshard ckpt b", folder) == 0
    assert call("convert b c --to hf", folder) == 0
    for at in ("a/tokenizer", "b/tokenizer", "c"):
        assert (folder / at / "vocab.json").read_text() == "words" and not (folder / at / "vocab.json").is_symlink()
        assert not any((folder / at / name).exists() for name in ("merges.txt", "vocab.txt", "blob"))


def test_no_code_travels(given_folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(given_folders, folder)
    code = {"auto_map": {"AutoTokenizer": ["stranger--code.T", None]}, "attn_implementation": "stranger/kernel"}
    files = {"init_inputs": ["/etc/passwd"], "vocab_file": "/etc/passwd", "fast_tokenizer_files": ["x"]}
    settings = {"eos_token": "é", "model_max_length": 10**30}  # as transformers writes where there is no limit
    for at in ("hf", "ckpt/tokenizer"):
        (folder / at).mkdir(exist_ok=True)
        (folder / at / "tokenizer_config.json").write_text(
            json.dumps({**settings, "auto_map": code["auto_map"]} | files)
        )
        for name in ("code.py", "adapter_model.bin", "README.md"):
            (folder / at / name).write_text("boom()")
    (folder / "ckpt/tokenizer/adapter_config.json").write_text("{}")
    (folder / "ckpt/tokenizer/config.json").write_text("{}")
    config = json.loads((folder / "hf/config.json").read_text())
    (folder / "hf/config.json").write_text(json.dumps(config | code))
    assert call("convert hf a", folder) == 0
    assert call("convert a b --to hf", folder) == 0
    assert call("convert ckpt c --to hf", folder) == 0
    for at in ("a/tokenizer", "b", "c"):
        assert json.loads((folder / at / "tokenizer_config.json").read_text()) == settings
        assert not {"code.py", "adapter_model.bin", "adapter_config.json"} & {*os.listdir(folder / at)}
    for at in ("b", "c"):
        made = json.loads((folder / at / "config.json").read_text())
        assert not code.keys() & made.keys() and made["model_type"] == config["model_type"]


def test_many_jobs(given_folders: Path, tmp_path: Path) -> None:
    shutil.copytree(given_folders, tmp_path / "here")
    assert call("convert hf target --jobs 999999999", tmp_path / "here") == 0


# -- fuzz

VALUES: Sequence[Any] = (
    None, True, False, 0, 1, 2, 3, -1, 5, 10**18, 2**63, 1.5, -0.0, 1e300, "", "x", "weights", "{layer.__class__}",
    "{0}", "..", "/", "embed", "vocab embed", "(q: embed + k: mlp)", "(a: + b:)" * 9, "x" * 10_000, "\x00", "\ud800",
    "٣", [], {}, [1], ["weights"], {"": "0" * 16}, {"a": {"b": []}}, [[[[[[]]]]]], "0" * 16, "first last",
    "layers.{layer}.x",
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All paths in a JSON tree; of the many files and fingerprints not more than of everything else."""
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutate(tree: Any, dice: random.Random, paths: Sequence[tuple[Any, ...]]) -> Any:
    """A copy with a few things replaced, lost, doubled, renamed or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        *way, last = dice.choice(paths)
        here = tree
        try:
            for key in way:
                here = here[key]
            value = here[last]
        except (KeyError, IndexError, TypeError):  # gone already
            continue
        if isinstance(here, str):
            continue
        match dice.randrange(7):
            case 0 | 1 | 2:
                here[last] = copy.deepcopy(dice.choice(VALUES))
            case 3:
                del here[last]
            case 4 if isinstance(here, list):
                here.insert(last, copy.deepcopy(value))
            case 4 | 5 if isinstance(here, dict):
                here[dice.choice([*here, "x", "", "{layer}", str(last) + "s"])] = here.pop(last)
            case _ if isinstance(value, int) and not isinstance(value, bool):
                here[last] = value + dice.choice([-1, 1, 1000])
            case _:
                here[last] = copy.deepcopy(dice.choice([*here.values()] if isinstance(here, dict) else here))
    return tree


def garble(raw: bytes, dice: random.Random) -> bytes:
    """A few bytes flipped, lost, inserted or repeated."""
    made = bytearray(raw)
    for _ in range(dice.choice([1, 1, 2, 5])):
        at = dice.randrange(len(made))
        match dice.randrange(5):
            case 0:
                made[at] ^= 1 << dice.randrange(8)
            case 1:
                del made[at : at + dice.choice([1, 1, 10, 1000])]
            case 2:
                made[at:at] = dice.choice(
                    [b"9", b"0", b'"', b"{", b"[", b",", b"\xff", b"\\u", b"e9", b"-", b"NaN", b"\0"]
                )
            case 3:
                made[at:at] = made[at : at + dice.choice([1, 20, 300])]
            case _:
                made[at] = dice.randrange(256)
    return bytes(made)


def consistent(checkpoint: Checkpoint) -> None:
    """What opens can be used."""
    for state in checkpoint.index.states:
        assert checkpoint.fingerprints(state)
        for stored in checkpoint.stored(state):
            dtype, bits = checkpoint.read(state)(stored)
            assert dtype == checkpoint.dtype(state, stored) and bits.shape == stored.shape
        assert list(plan(checkpoint.schema, checkpoint.stored(state), hugging_face(checkpoint.schema)))
    assert checkpoint.config.schema.parameters == checkpoint.layout.schema.parameters


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", ["tree", "bytes"])
@pytest.mark.parametrize("source", ["ckpt", "gpt2", "parts"])
def test_fuzz_the_index(kind: str, source: str, given_folders: Path, tmp_path: Path) -> None:
    """6 x 350 damaged indexes, others with another rotation: an error in words, or a checkpoint that is one."""
    if source == "parts":
        spread(given_folders / "ckpt", tmp_path / "c", replicas=3)
    else:
        shutil.copytree(given_folders / source, tmp_path / "c")
    path, dice, seen = tmp_path / "c/index.json", random.Random(f"{kind} {source} {ROTATION}"), Counter[str]()
    raw = path.read_bytes()
    tree = json.loads(raw)
    first = next(name for name in tree["files"] if source != "parts" or "ranges" in tree["files"][name])
    few = {first: tree["files"][first]}  # else nothing but fingerprints would change
    paths = list(places({**tree, "files": few, "parameters": tree["parameters"][:3]}))
    paths = [p for p in paths if "fingerprints" not in p] * 3 + paths
    for _ in range(350):
        content = json.dumps(mutate(tree, dice, paths)).encode() if kind == "tree" else garble(raw, dice)
        path.write_bytes(content)
        try:
            with within(5):
                consistent(Checkpoint.open(tmp_path / "c"))
            seen["opened"] += 1
        except StoreError as error:
            assert str(error)
            seen["refused"] += 1
        except BaseException:
            print(content[:4000])
            raise
    print(f"{sum(seen.values())} indexes: {dict(seen)}")
    assert seen["refused"] > 150
