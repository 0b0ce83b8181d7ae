"""Names of the Hugging Face hub in the place of folders, with a server on localhost in the place of the hub."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, World
from tiny import LLAMA, hugging_face_folder

from megacore.store.io.hub import HubName

STRANGE = {
    "modeling_own.py": b"raise SystemExit('code of the hub')",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"another format",
    "onnx/model.onnx": b"another",
    "README.md": b"# a card",
    "LICENSE.py": b"code",
}
"""Files beside a model's, none of which is asked for."""
OWN = {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", "additional_chat_templates/tool.jinja"}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Those of a model, and strange ones."""
    source = tmp_path / "source"
    hugging_face_folder(source, LLAMA)
    return {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()} | STRANGE


@pytest.fixture
def serving(world: World) -> Iterator[str]:
    with world.hub.serving() as url:
        yield url


def one_line(said: str) -> str:
    lines = said.strip().splitlines()
    assert len(lines) == 1, said
    return lines[0]


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/there").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/model@v1").mkdir()
    for name in (
        "runs/there",
        "runs/mistyped",
        "here",
        "/abs/olute",
        "../up",
        "a/b/c",
        "own/model@v1",
        "a/b@",
        "./a/b",
    ):
        assert HubName.of(name) is None, name
    assert HubName.of("org/Model-1.5B_x") == HubName("org/Model-1.5B_x")
    assert HubName.of("own/model@refs/pr/3") == HubName("own/model", "refs/pr/3")
    assert not HubName("a/b", "main").is_pinned and HubName("a/b", "0123456789" * 4).is_pinned


@pytest.mark.in_turn(6, 0)
def test_what_is_needed_is_fetched_once(world: World, files: dict[str, bytes]) -> None:
    """The second time the hub is asked for nothing but its newest commit; the third time it is gone."""
    commit = world.hub.push("own/model", files)
    with world.hub.serving():
        status, said = world.run("inspect", "own/model", HF_TOKEN=TOKEN)
        assert status == 0 and f"own/model: taking own/model@{commit}" in said
        assert sorted(world.hub.fetched) == sorted(OWN) and all(given for _, _, given in world.hub.asked)
        world.hub.asked.clear()
        assert world.run("inspect", "own/model")[0] == 0
        assert [path for _, path, _ in world.hub.asked] == ["/api/models/own/model/revision/main"]
        world.hub.asked.clear()
        assert world.run("inspect", f"own/model@{commit}")[0] == 0 and not world.hub.asked
    assert world.cached("own/model") == OWN
    assert world.run("convert", "own/model", "made", "--tp", "2")[0] == 0
    assert world.run("inspect", "made", "--diff", f"own/model@{commit}", HF_HUB_OFFLINE="1")[0] == 0
    written = [path for path in world.folder.rglob("*") if path.is_file()]
    assert len(written) > 20 and not [path for path in written if TOKEN.encode() in path.read_bytes()]


def test_a_folder_of_this_name_goes_first(world: World, files: dict[str, bytes], serving: str) -> None:
    hugging_face_folder(world.folder / "own/model", LLAMA)
    assert world.run("inspect", "own/model")[0] == 0 and not world.hub.asked
    status, said = world.run("inspect", "own/mistyped")
    assert status == 1 and not world.hub.asked
    assert one_line(said) == (
        "own/mistyped is not a folder, and own is one here: name a model of the Hugging Face hub by own/mistyped@main"
    )


@pytest.mark.in_turn(6, 1)
def test_shards_by_their_index_and_no_other_format(world: World, files: dict[str, bytes], serving: str) -> None:
    whole = files.pop("model.safetensors")
    index = b'{"weight_map": {"lm_head.weight": "model-[1].safetensors"}}'
    world.hub.push("own/sharded", {**files, "model.safetensors.index.json": index, "model-[1].safetensors": whole})
    status, said = world.run("inspect", "own/sharded")
    assert status == 1 and "model.safetensors.index.json does not name tensors of model-[1].safetensors" in said
    assert world.hub.fetched.count("model-[1].safetensors") == 1 and not {*STRANGE} & {*world.hub.fetched}
    world.hub.push("own/lacking", {**files, "model.safetensors.index.json": index})
    status, said = world.run("inspect", "own/lacking")
    assert status == 1 and "model.safetensors.index.json names files that are not there: model-[1].safetensors" in said
    # Where there are both, the single file counts, as in a folder.
    world.hub.asked.clear()
    world.hub.push("own/both", {**files, "model.safetensors.index.json": index, "model.safetensors": whole})
    assert world.run("inspect", "own/both")[0] == 0 and "model-[1].safetensors" not in world.hub.fetched


def without(*names: str) -> Callable[[dict[str, bytes]], object]:
    return lambda files: [files.pop(name) for name in names]


REFUSED: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "pickles": (
        without("model.safetensors", "consolidated.safetensors"),
        r"but pytorch_model\.bin: a pickle can run code when it is read",
    ),
    "no-config": (without("config.json"), r"has no config\.json, and is no model in Hugging Face's format"),
    "family": (
        lambda files: files.update({"config.json": b'{"model_type": "own"}'}),
        r"cannot be used:\n- config\.json: .*'own'",
    ),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_used_is_refused_before_its_weights_come(
    world: World, files: dict[str, bytes], serving: str, what: str
) -> None:
    change, says = REFUSED[what]
    change(files)
    commit = world.hub.push("own/model", files)
    status, said = world.run("inspect", "own/model")
    assert status == 1 and re.search(rf"own/model@{commit} .*{says}", said, re.DOTALL), said
    assert not [name for name in world.hub.fetched if name.endswith((".bin", ".safetensors", ".py"))]


@pytest.mark.in_turn(6, 3)
def test_what_the_hub_refuses_is_said_in_a_line(world: World, files: dict[str, bytes], serving: str) -> None:
    for name, closed in {"none": (401, "GatedRepo"), "asked": (403, "GatedRepo"), "hidden": (401, "private")}.items():
        world.hub.push(f"own/{name}", files)
        world.hub.closed[f"own/{name}"] = closed
    gated = "is gated: ask for access at {url}/own/{name}, and log in by `hf auth login`, or set HF_TOKEN"
    absent = (
        "there is neither a folder own/{name} here nor, for this user, a model own/{name} on the hub ({url}/own/{name})"
    )
    for name, says in {"none": gated, "asked": gated, "hidden": absent, "nothing": absent}.items():
        status, said = world.run("inspect", f"own/{name}")
        assert status == 1 and says.format(url=serving, name=name) in one_line(said)
    assert world.run("inspect", "own/hidden", HF_TOKEN=TOKEN)[0] == 0
    status, said = world.run("inspect", "own/hidden@v9", HF_TOKEN=TOKEN)
    assert status == 1 and "own/hidden has no revision v9: take a branch, tag or commit of" in one_line(said)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("offline", ["1", ""], ids=["offline", "no-network"])
def test_what_is_not_in_the_cache_without_a_network(world: World, files: dict[str, bytes], offline: str) -> None:
    why = "HF_HUB_OFFLINE is set" if offline else r"\[Errno 111\] Connection refused"
    world.hub.push("own/model", files)
    with world.hub.serving():
        pass
    for name in ("own/model", f"own/model@{'0' * 40}"):
        status, said = world.run("inspect", name, HF_HUB_OFFLINE=offline)
        assert status == 1
        assert re.fullmatch(
            rf"{name} is not, or not all, in the hub's cache \({world.folder}/hf/hub\), and was not fetched \({why}\): "
            rf"`megacore inspect {name}` fetches it, with what is there already, where the hub answers",
            one_line(said),
        )


@pytest.mark.in_turn(6, 2)
def test_a_killed_download_goes_on(world: World, files: dict[str, bytes]) -> None:
    """Files that have come are not fetched again, and without a network half a model is told to be one."""
    world.hub.push("own/model", files)
    world.hub.stalls = {"model.safetensors"}
    with world.hub.serving():
        process = world.start("inspect", "own/model")
        waited = time.monotonic() + 60
        while "model.safetensors" not in world.hub.fetched and time.monotonic() < waited:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        assert world.cached("own/model") == OWN - {"model.safetensors"}
        world.hub.stalls = set()
        world.hub.asked.clear()
        status, said = world.run("inspect", "own/model", HF_HUB_OFFLINE="1")
        assert status == 1 and "is not, or not all, in the hub's cache" in one_line(said) and not world.hub.asked
        assert world.run("inspect", "own/model")[0] == 0
        assert world.hub.fetched == ["model.safetensors"]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_launcher_that_fetches_ends_it(
    world: World, files: dict[str, bytes], number: signal.Signals
) -> None:
    world.hub.push("own/model", files)
    world.hub.stalls = {"model.safetensors"}
    (world.folder / "chats.jsonl").write_text('{"text": "a"}\n')
    with world.hub.serving():
        given = ["data.train=chats.jsonl", "data.sequence_length=16"]
        process = world.start("finetune", "finetune", "--init", "own/model", *given)
        waited = time.monotonic() + 60
        while "model.safetensors" not in world.hub.fetched and time.monotonic() < waited and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        world.hub.stalls = set()
    assert process.returncode == 128 + number
    assert "was fetched: what has come stays in the hub's cache" in said and "Traceback" not in said


def test_other_problems_come_before_a_model_is_fetched(world: World, files: dict[str, bytes], serving: str) -> None:
    world.hub.push("own/model", files)
    status, said = world.run("finetune", "finetune", "--init", "own/model", "data.train=nowhere.jsonl")
    assert status == 2 and "there is no nowhere.jsonl" in said and not world.hub.asked


@pytest.mark.in_turn(6, 5)
def test_a_tokenizer_by_its_name(world: World, files: dict[str, bytes], serving: str) -> None:
    (world.folder / "a.txt").write_text("text of a file " * 99)
    common = ["--workers", "1"]
    assert world.run("tokenize", "a.txt", "--out", "trained", "--train-vocab", "280", *common)[0] == 0
    trained = world.folder / "trained"
    names = ("tokenizer.json", "tokenizer_config.json")
    world.hub.push("own/words", {**files, **{name: (trained / name).read_bytes() for name in names}}, branch="v2")
    status, said = world.run("tokenize", "a.txt", "--out", "made", "--tokenizer", "own/words@v2", *common)
    assert status == 0, said
    assert (world.folder / "made/corpus.bin").read_bytes() == (trained / "corpus.bin").read_bytes()
    assert "model.safetensors" not in world.hub.fetched and not {*STRANGE} & {*world.hub.fetched}
    for name, says in {"own/nothing": "there is neither a folder own/nothing here nor", "gpt0": "a model gpt0"}.items():
        status, said = world.run("tokenize", "a.txt", "--out", "other", "--tokenizer", name, *common)
        assert status == 1 and says in one_line(said)
