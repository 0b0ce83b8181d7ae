"""`megacore inspect`: what it says of folders, that two in different layouts are equal, every kind of difference."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import one_in, random_model, small
from hub import change, converted, flip, of_a_run, save
from safetensors.torch import load_file, save_file

from megacore import pictures
from megacore.data.corpus import Corpus
from megacore.data.indexed import IndexedWriter
from megacore.models.config import active_parameters
from megacore.store.weight_folders.audit import fingerprints
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import convert, evaluate, inspect, reshard, verify

Capture = pytest.CaptureFixture[str]


def data(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    """(exit status, what --json prints)."""
    capsys.readouterr()
    status = inspect.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def text(capsys: Capture, *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    status = inspect.main([*map(str, arguments)])
    return status, capsys.readouterr().out


@pytest.fixture(scope="module", params=one_in(14))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder and checkpoints of it in several layouts; not to be written to."""
    root = tmp_path_factory.mktemp(request.param)
    hf = save(request.param, root / "hf")
    made = {"hf": hf, "1x1": converted(hf, root / "1x1"), "2x3": converted(hf, root / "2x3", "--tp", "2", "--pp", "3")}
    made["4x1"] = converted(hf, root / "4x1", "--tp", "4")
    assert reshard.main([str(made["2x3"]), str(root / "chunks"), "--tp", "1", "--pp", "1", "--chunks", "2"]) == 0
    return made | {"chunks": root / "chunks"}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a run leaves it, with moments; not to be written to."""
    root = tmp_path_factory.mktemp("left")
    states = {"weights": save("llama", root / "a"), "exp_avg": save("llama", root / "b", seed=1)}
    return of_a_run(states, root / "run", tp=2, pp=3)


# -- what it says


def test_the_facts_of_a_run(left: Path, capsys: Capture) -> None:
    status, facts = data(capsys, left)
    model = random_model(small("llama"))
    assert status == 0
    assert facts["format"] == "megacore" and facts["family"] == "llama" and facts["step"] == 7
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["mesh"] == {"pp": 3, "ep": 1, "tp": 2} and sum(facts["layers_per_stage"]) == 3
    assert facts["states"] == ["weights", "exp_avg"] and facts["training"]["consumed_samples"] == 56
    on_disk = {str(f.relative_to(left)): f.stat().st_size for f in left.rglob("*.safetensors")}
    assert {file["path"]: file["bytes"] for file in facts["files"]} == on_disk
    assert facts["bytes"] == sum(on_disk.values())
    assert facts["tensors"] is facts["check"] is facts["diff"] is None
    _, shown = text(capsys, left)
    for word in ("pp=3 x ep=1 x tp=2", "consumed samples", "0.125", "exp_avg", "float32", *on_disk):
        assert word in shown


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_picture_shows_what_each_rank_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, chunks: int
) -> None:
    states = ("weights", "master", "exp_avg", "exp_avg_sq")
    made = {state: save("llama", tmp_path / state, n, num_hidden_layers=4) for n, state in enumerate(states)}
    split = of_a_run(made, tmp_path / "run", tp=2, pp=2)
    given = [split, tmp_path / "made", "--pp", 2, "--tp", 2, "--chunks", chunks]
    assert reshard.main([*map(str, given)]) == 0
    figures, picture = list[Any](), tmp_path / "ranks.svg"

    def keep(figure: Any, path: Path) -> None:
        figures.append(figure)
        pictures.save(figure, path)

    monkeypatch.setattr(inspect, "save", keep)
    assert text(capsys, tmp_path / "made", "--picture", picture)[0] == 0
    assert all(word in picture.read_text() for word in ("<svg", "pp=1 tp=0", "MB on disk", "tp splits"))
    bars, layers = figures[0].axes
    names = [f"pp{pp}-ep0-tp{tp}" for pp in range(2) for tp in range(2)]
    found = {each.get_label(): [bar.get_width() * 1e6 for bar in each] for each in bars.containers}
    size = {state: [(tmp_path / f"made/{state}/{name}.safetensors").stat().st_size for name in names] for state in made}
    moments = [sum(both) for both in zip(size["exp_avg"], size["exp_avg_sq"], strict=True)]
    want = {"weights": size["weights"], "masters": size["master"], "moments": moments}
    assert {name: pytest.approx(each) for name, each in want.items()} == found
    (drawn,) = layers.collections
    first, second = (
        ([0, 0, None, None], [None, None, 0, 0]) if chunks == 1 else ([0, None, 1, None], [None, 0, None, 1])
    )
    assert drawn.get_array().tolist() == [first, first, second, second]
    assert inspect.main([str(made["weights"]), "--picture", str(picture)]) == 1
    assert "--picture draws the ranks of a checkpoint" in capsys.readouterr().err


def test_it_says_how_virtual_stages_are_placed(tmp_path: Path, capsys: Capture) -> None:
    """The layers of a list belong to other stages in a V."""
    loop, v = converted(save("llama", tmp_path / "hf"), tmp_path / "loop", "--chunks", "2"), tmp_path / "v"
    shutil.copytree(loop, v)
    index = json.loads((v / "index.json").read_text())
    (v / "index.json").write_text(json.dumps({**index, "version": 4, "placement": "v"}))
    for folder, placement, said in ((loop, "loop", "2 chunks each; "), (v, "v", "2 chunks each, in a V; ")):
        assert data(capsys, folder)[1]["placement"] == placement and said in text(capsys, folder)[1]


def test_where_there_are_experts_it_says_how_many_parameters_a_token_meets(tmp_path: Path, capsys: Capture) -> None:
    path = save("mixtral", tmp_path / "a")
    config = HuggingFace.open(path).config
    _, facts = data(capsys, path)
    assert facts["active"] == active_parameters(config) < facts["parameters"]
    assert f"{facts['parameters']:,} parameters ({facts['active']:,} active)" in text(capsys, path)[1]


def test_what_a_folder_says_does_nothing_to_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    path = of_a_run({"weights": save("llama", tmp_path / "a")}, tmp_path / "run", tp=1, pp=1)
    evil = "\x1b[2J\nSound: every tensor is what it was\x9b"
    trainer = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps({**trainer, evil: 1, "note": evil}))
    (path / "tokenizer").mkdir(exist_ok=True)
    (path / f"tokenizer/LICENSE{evil}").touch()
    status, shown = text(capsys, path)
    assert status == 0 and all(char.isprintable() or char == "\n" for char in shown)
    assert shown.count(r"\nSound: every tensor") == 3 and "\nSound" not in shown
    assert data(capsys, path)[1]["training"]["note"] == evil


def test_the_facts_of_a_hugging_face_folder(tmp_path: Path, capsys: Capture) -> None:
    path = save("gpt2", tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    mask = tensors["transformer.wpe.weight"].clone()
    save_file({**tensors, "transformer.h.1.attn.bias": mask}, path / "model.safetensors", {"format": "pt"})
    _, facts = data(capsys, path)
    assert facts["format"] == "hugging_face" and facts["tied"] is True
    assert facts["ignored"] == ["transformer.h.1.attn.bias"]
    assert facts["mesh"] is facts["step"] is facts["training"] is None
    assert facts["dtypes"] == {"weights": {"float32": len(tensors)}}
    assert "transformer.h.1.attn.bias" in text(capsys, path)[1]


def test_tensors(folders: dict[str, Path], capsys: Capture) -> None:
    _, of_ours = data(capsys, folders["2x3"], "--tensors")
    _, of_theirs = data(capsys, folders["hf"], "--tensors")
    tensors = load_file(folders["hf"] / "model.safetensors")
    named = [name for tensor in of_ours["tensors"] for name in tensor["hugging_face"]]
    assert {*named} == tensors.keys()
    parts = Counter(named)  # of which each layer has one where a tensor holds those of all
    for ours, theirs in zip(of_ours["tensors"], of_theirs["tensors"], strict=True):
        assert {k: ours[k] for k in ("name", "pattern", "shape", "hugging_face")} == {
            k: theirs[k] for k in ("name", "pattern", "shape", "hugging_face")
        }
        assert np.prod(ours["shape"]) == sum(tensors[name].numel() // parts[name] for name in ours["hugging_face"])
        assert ours["fingerprints"]["weights"] and not theirs["fingerprints"]["weights"]
        for shard in ours["shards"]:
            held = load_file(folders["2x3"] / shard["file"])[shard["tensor"]]
            assert list(held.shape) == shard["shape"] and held.nbytes == shard["bytes"]
        assert [shard["tensor"] for shard in theirs["shards"]] == theirs["hugging_face"]
    _, shown = text(capsys, folders["2x3"], "--tensors")
    for tensor in of_ours["tensors"]:
        (line,) = (line for line in shown.splitlines() if line.split()[:1] == [tensor["name"]])
        assert tensor["pattern"] in line and all(v in line for v in tensor["fingerprints"]["weights"].values())


# -- two folders


@pytest.mark.in_turn(12)
def test_every_layout_equals_every_other(folders: dict[str, Path], capsys: Capture) -> None:
    for one in folders.values():
        for other in folders.values():
            status, facts = data(capsys, one, "--diff", other)
            assert status == 0 and facts["diff"]["equal"] and facts["diff"]["pieces"] == [], (one, other)
    assert "Equal" in text(capsys, folders["2x3"], "--diff", folders["hf"])[1]


def test_fingerprints_from_bytes_are_those_that_were_stored(folders: dict[str, Path]) -> None:
    checkpoint, hf = Checkpoint.open(folders["2x3"]), HuggingFace.open(folders["hf"])
    stored = checkpoint.fingerprints("weights")
    assert fingerprints(checkpoint, "weights", 2) == stored
    assert fingerprints(hf, "weights", 2) == stored


@pytest.mark.parametrize("other", ["hf", "checkpoint"])
def test_one_element_differs(other: str, tmp_path: Path, capsys: Capture) -> None:
    hf = save("llama", tmp_path / "hf")
    target = converted(hf, tmp_path / "target", "--tp", "2", "--pp", "3")
    change(hf / "model.safetensors", "model.layers.1.self_attn.k_proj.weight", lambda k: k[5, 3].add_(1e-6))
    changed = hf if other == "hf" else converted(hf, tmp_path / "changed", "--tp", "4")
    status, facts = data(capsys, target, "--diff", changed)
    (found,) = facts["diff"]["pieces"]
    assert status == 1 and not facts["diff"]["equal"]
    assert (found["name"], found["label"], found["what"]) == ("layers.1.attn.qkv.weight", "k", "values")
    status, shown = text(capsys, changed, "--diff", target)
    assert status == 1 and "layers.1.attn.qkv.weight (k): values" in shown


@pytest.mark.parametrize(
    ("fields", "config", "what"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters", None),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps", None),
        ({"intermediate_size": 20}, "intermediate_size", "shape"),
        ({"num_hidden_layers": 2}, "num_hidden_layers", "presence"),
    ],
    ids=["rope", "eps", "width", "depth"],
)
def test_configs_differ(fields: dict[str, Any], config: str, what: str | None, tmp_path: Path, capsys: Capture) -> None:
    one, other = save("llama", tmp_path / "one"), save("llama", tmp_path / "other", **fields)
    status, facts = data(capsys, one, "--diff", other)
    assert status == 1 and list(facts["diff"]["config"]) == [config]
    kinds = {piece["what"] for piece in facts["diff"]["pieces"]}
    assert what in kinds if what else not kinds
    assert f"config: {config} is" in text(capsys, one, "--diff", other)[1]


def test_dtypes_differ(tmp_path: Path, capsys: Capture) -> None:
    hf = save("gpt2", tmp_path / "hf")
    narrow = converted(hf, tmp_path / "narrow", "--dtype", "bfloat16")
    status, facts = data(capsys, narrow, "--diff", hf)
    assert status == 1
    assert {(p["what"], *p["both"]) for p in facts["diff"]["pieces"]} == {("dtype", "bfloat16", "float32")}


def test_states_and_steps_differ(tmp_path: Path, capsys: Capture) -> None:
    hf, moments = save("llama", tmp_path / "hf"), save("llama", tmp_path / "moments", seed=1)
    both = {"weights": hf, "exp_avg": moments}
    one = of_a_run(both, tmp_path / "one", tp=2, pp=1)
    other = of_a_run({"weights": hf}, tmp_path / "other", tp=1, pp=3, step=8)
    status, facts = data(capsys, other, "--diff", one)
    assert status == 1 and facts["diff"]["states"] == {"exp_avg": 1} and facts["diff"]["step"] == [8, 7]
    assert facts["diff"]["pieces"] == []
    assert f"only {one} has exp_avg" in text(capsys, other, "--diff", one)[1]
    # A Hugging Face folder could not have them.
    assert data(capsys, one, "--diff", hf)[0] == 0
    # The moments are compared too.
    moved = of_a_run({"weights": hf, "exp_avg": hf}, tmp_path / "moved", tp=1, pp=1)
    status, facts = data(capsys, one, "--diff", moved)
    assert status == 1 and {piece["state"] for piece in facts["diff"]["pieces"]} == {"exp_avg"}


# -- damage


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize(
    ("state", "tensor", "element", "label"),
    [
        ("weights", "layers.0.attn.qkv.weight", 0, "q"),
        ("weights", "layers.0.attn.qkv.weight", 16 * 16 - 1, "v"),
        ("weights", "layers.0.mlp.up.weight", 16 * 24 - 1, "up"),
        ("exp_avg", "layers.0.mlp.down.weight", 5, ""),
        ("exp_avg", "layers.0.mlp_norm.weight", 15, ""),
    ],
)
def test_a_flipped_bit(
    state: str, tensor: str, element: int, label: str, bit: int, left: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = shutil.copytree(left, tmp_path / "run")
    file = f"{state}/pp0-ep0-tp1.safetensors"
    flip(path / file, tensor, element, bit)
    status, facts = data(capsys, path, "--check")
    (found,) = facts["check"]
    assert status == 1 and (found["file"], found["tensor"], found["label"]) == (file, tensor, label)
    status, shown = text(capsys, path, "--check")
    assert status == 1 and f"{file}: {tensor}" in shown and "Sound" not in shown


def test_padding_is_checked_too(tmp_path: Path, capsys: Capture) -> None:
    path = converted(save("llama", tmp_path / "hf"), tmp_path / "run", "--tp", "4")
    flip(path / "weights/pp0-ep0-tp3.safetensors", "embed.weight", 11 * 16 - 1, 3)  # row 43 of 44
    status, facts = data(capsys, path, "--check")
    (found,) = facts["check"]
    assert status == 1 and found["tensor"] == "embed.weight" and "padding" in found["reason"]


def test_replicas_that_differ_though_each_is_as_it_was_written(tmp_path: Path, capsys: Capture) -> None:
    hf = save("llama", tmp_path / "hf")
    path, name = converted(hf, tmp_path / "run", "--tp", "2"), "layers.1.attn_norm.weight"
    file = "weights/pp0-ep0-tp1.safetensors"
    change(path / file, name, lambda norm: norm[3].add_(1))
    _, facts = data(capsys, path, "--check")
    value = facts["check"][0]["reason"].split()[3].rstrip(",")
    index = json.loads((path / "index.json").read_text())
    index["files"][file]["fingerprints"][name][""] = value
    (path / "index.json").write_text(json.dumps(index))
    status, facts = data(capsys, path, "--check")
    (found,) = facts["check"]
    assert status == 1 and (found["file"], found["tensor"]) == (file, name) and "replica" in found["reason"]
    assert inspect.main([str(path), "--diff", str(hf)]) == 1
    assert "replicas of the same elements differ" in capsys.readouterr().err


# -- what is no model, and what stands for one


def test_token_files_are_shown(tmp_path: Path, capsys: Capture) -> None:
    for name in ("corpus", "other"):
        with IndexedWriter(tmp_path / name, 50) as writer:
            writer.write([1, 2, 3])
            writer.write([4, 5])
    Corpus("corpus", 2, 5, 21, 4.2, 50, None, 1.5, 0, 0).write(tmp_path)
    for given in ("corpus", "corpus.bin", "corpus.idx"):
        status, shown = text(capsys, tmp_path / given)
        assert status == 0 and f"{tmp_path / 'corpus'}: a token file" in shown
        assert "5 in 2 documents, as uint16" in shown and "vocabulary  50, unigram entropy 1.5000" in shown
    status, facts = data(capsys, tmp_path)
    assert status == 0 and facts["format"] == "tokens"
    assert [each["path"] for each in facts["files"]] == [str(tmp_path / name) for name in ("corpus", "other")]
    assert [each["tokens"] for each in facts["files"]] == [5, 5] and facts["files"][1]["corpus"] is None
    (tmp_path / "corpus.idx").write_bytes(b"not an index")
    for arguments, words in (([], "it is no index"), (["--check"], "are for weights")):
        assert inspect.main([str(tmp_path), *arguments]) == 1
        assert words in capsys.readouterr().err
    # Where weights are looked for, a token file's data is no pickle.
    assert convert.main([str(tmp_path), str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert "a token file has tokens to train on" in shown and "pickle" not in shown


@pytest.mark.parametrize(
    "said", ["[]", "{}", "null", "{", "[" * 9999, {"tokens": "x"}, {"vocabulary": -1}, {"name": 1}]
)
def test_a_corpus_json_that_is_none(said: str | dict[str, object], tmp_path: Path, capsys: Capture) -> None:
    corpus = Corpus("a", 1, 2, 3, 1.5, 10, None, 0.5, 0, 0)
    with IndexedWriter(tmp_path / "a", 10) as writer:
        writer.write(np.array([1, 2]))
    (tmp_path / "corpus.json").write_text(said if isinstance(said, str) else json.dumps({**asdict(corpus), **said}))
    assert inspect.main([str(tmp_path / "a")]) == 1
    assert "corpus.json" in capsys.readouterr().err


def test_a_runs_folder_stands_for_its_newest_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    hf, run = save("llama", tmp_path / "hf"), tmp_path / "run"
    states = dict.fromkeys(("weights", "exp_avg", "exp_avg_sq"), hf)
    older, newer = (of_a_run(states, run / "checkpoints" / f"step-{n:08d}", tp=1, pp=1, step=n) for n in (7, 9))
    said = f"{run}: taking its newest checkpoint, {newer}\n"
    for folder in (run, run / "checkpoints"):
        status, facts = data(capsys, folder)
        assert (status, facts["step"]) == (0, 9)
    assert text(capsys, older)[1].startswith(f"{older}: a checkpoint")
    commands: list[tuple[Callable[[list[str]], int], list[object]]] = [
        (inspect.main, [run, "--diff", newer]),
        (inspect.main, [newer, "--diff", run]),
        (convert.main, [run, run / "hf", "--to", "hf"]),
        (verify.main, [run, run / "hf"]),
        (reshard.main, [run, tmp_path / "tp2", "--tp", 2]),
        (evaluate.main, [run, "--data", tmp_path / "corpus"]),
    ]
    with IndexedWriter(tmp_path / "corpus", 40) as writer:
        writer.write([1, 2, 3])
    for main, arguments in commands:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 0, main
        assert capsys.readouterr().err.startswith(said), main
