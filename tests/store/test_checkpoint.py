"""Checkpoints: what is written is read, and everything but the tensors' bytes is checked when one is opened."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import (
    GPT2,
    LLAMA,
    TRAINER,
    Section,
    edit_index,
    hugging_face_folder,
    layout_of,
    random_bits,
    run_checkpoint,
    snapshot,
)

from megacore.models.registry import configure
from megacore.parallel.weights.fingerprint import fingerprint
from megacore.parallel.weights.layout import Coordinates, Layout, MeshShape
from megacore.parallel.weights.transfer import hugging_face, strided, whole_name
from megacore.store.io.strict_json import StoreError, parse_json, read_json
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import STATES, FileRecord, Index, file_name, on_disk, read_index
from megacore.tools import convert

pytestmark = pytest.mark.usefixtures("not_durable")

SPLIT = {"pp": 2, "tp": 4}


@pytest.fixture(scope="module", params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    section: Section = request.param
    folder = tmp_path_factory.mktemp("made") / "c"
    run_checkpoint(folder, section, layout_of(section, (1, 1, 1, 2), **SPLIT))
    return Checkpoint.open(folder)


@pytest.mark.quick
def test_what_is_in_it(made: Checkpoint) -> None:
    assert made.index.states == STATES and made.index.step == 7
    assert made.trainer == json.loads(TRAINER)
    assert made.layout.mesh == MeshShape(**SPLIT) and made.layout.layers == (1, 1, 1, 2) and made.layout.chunks == 2
    assert made.config.to_hugging_face() == made.index.raw
    files = {file_name(state, Coordinates(pp=pp, tp=tp)) for state in STATES for pp in range(2) for tp in range(4)}
    assert set(made.index.files) == files
    assert {name for name, digest in snapshot(made.path).items() if digest} == {*files, "index.json", "trainer.json"}
    assert made.companions() == {}


def test_the_index_is_read_as_it_was_written(made: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(made.index.to_json())
    again = read_index(tmp_path / "index.json")
    assert again.to_json() == made.index.to_json()
    assert again.layout.schema.sizes == made.layout.schema.sizes
    kept = ("name", "pattern", "at", "hf")
    for one, two in zip(again.layout.schema.params, made.layout.schema.params, strict=True):
        assert all(getattr(one, field) == getattr(two, field) for field in kept)
    assert again.files == made.index.files and again.raw == made.index.raw


def test_its_layout_is_that_of_the_files(made: Checkpoint) -> None:
    """Data and context parallel ranks do not show."""
    layout = Layout(made.layout.schema, MeshShape(pp=2, dp=3, cp=2, tp=4), made.layout.layers)
    disk = on_disk(layout)
    assert (disk.mesh, disk.layers) == (made.layout.mesh, made.layout.layers)


def test_reading_is_by_sight_only(made: Checkpoint) -> None:
    for state in STATES:
        read = made.read(state)
        for stored in made.stored():
            dtype, bits = read(stored)
            assert dtype == made.dtype(state, stored) == ("BF16" if state == "weights" else "F32")
            assert bits.shape == stored.shape and not bits.flags.writeable
    stored = next(made.stored())
    assert np.shares_memory(made.read("weights")(stored)[1], made.read("weights")(stored)[1])


@pytest.mark.parametrize("state", STATES)
def test_fingerprints_are_those_of_the_logical_pieces(made: Checkpoint, state: str) -> None:
    """As computed from whole tensors: no layout is in them."""
    config = made.config
    bits = random_bits(config, "BF16" if state == "weights" else "F32", STATES.index(state))
    wanted = {}
    for stored in hugging_face(config.schema):
        sentence = config.schema[stored.param].sentence
        for label, piece in stored.pieces.items():
            axes = sentence.piece_axes(label)
            array = strided(bits[stored.name], piece).transpose([piece.axes.index(axis) for axis in axes])
            wanted[whole_name(config.schema, stored), label] = fingerprint(array, axes, dict.fromkeys(axes, 0))
    assert made.fingerprints(state) == wanted


def test_replicas_that_were_recorded_as_different(tmp_path: Path) -> None:
    run_checkpoint(tmp_path / "c", LLAMA, layout_of(LLAMA, tp=2))
    name = file_name("exp_avg", Coordinates(tp=1))
    edit_index(tmp_path / "c", lambda t: t["files"][name]["fingerprints"].update({"norm.weight": {"": "0" * 16}}))
    opened = Checkpoint.open(tmp_path / "c")
    assert opened.fingerprints("master")
    with pytest.raises(StoreError, match=r"exp_avg: replicas of the same elements differ: norm.weight in pp0-ep0-tp1"):
        opened.fingerprints("exp_avg")


def test_more_damage_than_a_screen_holds(tmp_path: Path) -> None:
    run_checkpoint(tmp_path / "c", LLAMA, layout_of(LLAMA, (1,) * 5, pp=5, tp=4))
    for state in STATES:
        for file in (tmp_path / "c" / state).iterdir():
            file.write_bytes(b"")
    with pytest.raises(StoreError, match="and 80 more") as caught:
        Checkpoint.open(tmp_path / "c")
    assert len(str(caught.value).splitlines()) == 22


def test_without_a_run(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "hf", LLAMA)
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "c")]) == 0
    opened = Checkpoint.open(str(tmp_path / "c"))
    assert opened.trainer is None and opened.index.step is None and opened.index.states == ("weights",)
    names = ["LICENSE", "additional_chat_templates/tool.jinja", "tokenizer.json"]
    assert sorted(opened.companions()) == names
    assert all(each.path == tmp_path / "c/tokenizer" / name for name, each in opened.companions().items())


def test_the_index_says_the_same_for_the_same(tmp_path: Path) -> None:
    config = configure(LLAMA)
    layout = layout_of(LLAMA)
    records = {name: FileRecord(1, {}) for name in ("weights/b", "weights/a")}
    one, two = (
        Index(config.to_hugging_face(), layout, ("weights",), None, dict(items))
        for items in (records.items(), reversed(records.items()))
    )
    assert one.to_json() == two.to_json()
    tree = json.loads(one.to_json())
    assert tree["format"] == "megacore" and tree["version"] == 1
    assert tree["parameters"][0] == {
        "name": "embed.weight",
        "pattern": "vocab embed",
        "at": "first",
        "hf": "model.embed_tokens.weight",
        "hf_pattern": "vocab embed",
    }


# -- JSON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1,}', "not JSON"),
        (b'"\x00"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"NaN", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"-Infinity", "-Infinity"),
        (b"1e400", "range of a float"),
        (b"9" * 4000, "64 bits"),
        (b"18446744073709551616", "64 bits"),
        (b"-9223372036854775809", "64 bits"),
        (b'{"a": 1, "a": 1}', "'a' stands twice"),
        (b'[{"x": {"b": 1, "c": 2, "b": 3, "c": 4}}]', "'b', 'c' stands twice"),
        (b'{"a": 1, "\\u0061": 1}', "'a' stands twice"),
    ],
)
def test_what_is_no_json(text: bytes, words: str) -> None:
    with pytest.raises(StoreError, match="here") as caught:
        parse_json(text, "here")
    assert words in str(caught.value) and len(str(caught.value)) < 200


def test_what_is_json() -> None:
    text = b'{"a": [1, -1, 1.5, 1e-400, true, null, "\\u00e9", {}], "b": 18446744073709551615}'
    assert parse_json(text, "here") == {"a": [1, -1, 1.5, 0.0, True, None, "é", {}], "b": 2**64 - 1}


def test_a_config_may_have_no_bound(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[0.0, Infinity]")
    assert read_json(tmp_path / "config.json") == [0.0, {"__float__": "Infinity"}]
    for name, text in (("config.json", "NaN"), ("config.json", "-Infinity"), ("other.json", "Infinity")):
        (tmp_path / name).write_text(text)
        with pytest.raises(StoreError, match=f"{text} is not JSON"):
            read_json(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b" " * 101)
    for path, words in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "no file"),
        (tmp_path / "large", "more than 100"),
        (tmp_path / ("x" * 300), "too long"),
        (Path("/dev/zero"), "no file"),
    ):
        with pytest.raises(StoreError, match=words):
            read_json(path, limit=100)
