"""What the commands are given that they must refuse: one clear message, no target, nothing else touched."""

import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_folders import CASES, CONVERT, EXPORT, RESHARD, build
from damage import damage_bytes, damage_tree, places
from tiny import snapshot
from turns import ROTATION

from megacore.parallel.weights.transfer import hugging_face, plan
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import convert, inspect, reshard

pytestmark = pytest.mark.usefixtures("not_durable")

MAINS = {"convert": convert.main, "reshard": reshard.main, "inspect": inspect.main}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    build(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is sound, where the commands run."""
    made = shutil.copytree(sound, tmp_path / "here")
    monkeypatch.chdir(made)
    return made


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


def call(line: str) -> int:
    """The exit status of a command line."""
    command, *arguments = line.split()
    try:
        with within(20):
            return MAINS[command](arguments)
    except SystemExit as error:  # argparse
        assert isinstance(error.code, int)
        return error.code


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    case.change(folder)
    before = snapshot(folder.parent)
    capsys.readouterr()
    assert call(case.command) in (1, 2)
    said = capsys.readouterr()
    assert all(word in said.err for word in case.words), said.err
    assert not said.out and "Traceback" not in said.err and "\x1b" not in said.err
    assert len(said.err) < 6000 and len(said.err.splitlines()) <= 22, said.err
    assert snapshot(folder.parent) == before


@pytest.mark.quick
@pytest.mark.parametrize(
    "command",
    sorted(
        {CONVERT, RESHARD, EXPORT}
        | {case.command for name, case in CASES.items() if name.startswith(("parts-", "shards-", "gpt2-", "experts-o"))}
    ),
)
def test_what_the_cases_start_from_is_good(command: str, folder: Path) -> None:
    """It is the change of a case that is refused."""
    assert call(command) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "locked").mkdir(mode=0o555)
    assert call("convert hf locked/target") == 1
    assert "Permission denied" in capsys.readouterr().err


def test_companions_that_are_links_are_followed_and_others_left(folder: Path) -> None:
    """Links within the folder. A folder or a pipe of such a name is none of ours to read."""
    for at in ("hf", "ckpt/tokenizer"):
        (folder / at).mkdir(exist_ok=True)
        (folder / at / "blob").write_text("words")
        (folder / at / "vocab.json").symlink_to("blob")
        (folder / at / "merges.txt").mkdir()
        os.mkfifo(folder / at / "vocab.txt")
    assert call("convert hf a") == 0
    assert call("reshard ckpt b") == 0
    assert call("convert b c --to hf") == 0
    for at in ("a/tokenizer", "b/tokenizer", "c"):
        assert (folder / at / "vocab.json").read_text() == "words" and not (folder / at / "vocab.json").is_symlink()
        assert not any((folder / at / name).exists() for name in ("merges.txt", "vocab.txt", "blob"))


def test_no_code_travels(folder: Path) -> None:
    code = {"auto_map": {"AutoTokenizer": ["stranger--code.T", None]}, "attn_implementation": "stranger/kernel"}
    files = {"init_inputs": ["/etc/passwd"], "vocab_file": "/etc/passwd", "fast_tokenizer_files": ["x"]}
    settings = {"eos_token": "é", "model_max_length": 10**30}  # as transformers writes where there is no limit
    for at in ("hf", "ckpt/tokenizer"):
        (folder / at).mkdir(exist_ok=True)
        coded = {**settings, "auto_map": code["auto_map"]} | files
        (folder / at / "tokenizer_config.json").write_text(json.dumps(coded))
        for name in ("code.py", "adapter_model.bin", "README.md"):
            (folder / at / name).write_text("boom()")
    (folder / "ckpt/tokenizer/adapter_config.json").write_text("{}")
    (folder / "ckpt/tokenizer/config.json").write_text("{}")
    config = json.loads((folder / "hf/config.json").read_text())
    (folder / "hf/config.json").write_text(json.dumps(config | code))
    assert call("convert hf a") == 0
    assert call("convert a b --to hf") == 0
    assert call("convert ckpt c --to hf") == 0
    for at in ("a/tokenizer", "b", "c"):
        assert json.loads((folder / at / "tokenizer_config.json").read_text()) == settings
        assert not {"code.py", "adapter_model.bin", "adapter_config.json"} & {*os.listdir(folder / at)}
    for at in ("b", "c"):
        made = json.loads((folder / at / "config.json").read_text())
        assert not code.keys() & made.keys() and made["model_type"] == config["model_type"]


def test_many_jobs(folder: Path) -> None:
    assert call("convert hf target --jobs 999999999") == 0


# -- fuzz


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
@pytest.mark.parametrize("source", ["ckpt", "gpt2", "spread"])
def test_fuzz_the_index(kind: str, source: str, folder: Path) -> None:
    """6 x 350 damaged indexes, others with another rotation: an error in words, or a checkpoint that is one."""
    path, dice, seen = folder / source / "index.json", random.Random(f"{kind} {source} {ROTATION}"), Counter[str]()
    raw = path.read_bytes()
    tree = json.loads(raw)
    first = next(name for name in tree["files"] if source != "spread" or "ranges" in tree["files"][name])
    few = {first: tree["files"][first]}  # else nothing but fingerprints would change
    paths = list(places({**tree, "files": few, "parameters": tree["parameters"][:3]}))
    paths = [p for p in paths if "fingerprints" not in p] * 3 + paths
    for _ in range(350):
        content = json.dumps(damage_tree(tree, dice, paths)).encode() if kind == "tree" else damage_bytes(raw, dice)
        path.write_bytes(content)
        try:
            with within(5):
                consistent(Checkpoint.open(folder / source))
            seen["opened"] += 1
        except StoreError as error:
            assert str(error)
            seen["refused"] += 1
        except BaseException:
            print(content[:4000])
            raise
    print(f"{sum(seen.values())} indexes: {dict(seen)}")
    assert seen["refused"] > 150
