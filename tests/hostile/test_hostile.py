"""Hostile inputs through the real commands: a result or a sentence; nothing runs, leaks, or is touched outside."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import ground
import pytest
from cases import CASES, OPEN, OUTSIDE, Case
from damage import TARGETS, damage
from runner import SECONDS, SECRET, Done, Runner, runner
from turns import ROTATION


@pytest.fixture(scope="module")
def commands() -> Iterator[Runner]:
    with runner() as made:
        yield made


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "work"
    ground.build(folder)
    return folder


def prepare(sound: Path, folder: Path) -> Path:
    """A copy of what is sound, beside what no command has any business with."""
    shutil.copytree(sound, folder / "work", symlinks=True)
    (folder / "outside").mkdir()
    (folder / "outside/secret.txt").write_text(OUTSIDE)
    return folder / "work"


def check(folder: Path, done: Done, spoken: bool = False) -> None:
    """What holds of any command, whatever it is given; ``spoken``: what it says is not all ours."""
    said = (done.out + done.error).decode()
    assert done.seconds < SECONDS and done.status in (0, 1, 2), (done.status, done.seconds, said[-2000:])
    assert "Traceback" not in said, said[-3000:]
    ours = "" if spoken else said
    strange = {each for each in ours if not each.isprintable() and each not in "\n\t\r"}
    assert not strange, (strange, said[:2000])
    assert len(said) < 20_000, f"{len(said):,} characters: {said[:2000]}"
    assert SECRET not in said and OUTSIDE not in said, said[:2000]
    assert sorted(os.listdir(folder)) == ["outside", "stderr", "stdout", "work"]
    assert os.listdir(folder / "outside") == ["secret.txt"]
    assert (folder / "outside/secret.txt").read_text() == OUTSIDE
    for file in (folder / "work").rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**24:
            content = file.read_bytes()
            assert SECRET.encode() not in content and OUTSIDE.encode() not in content, file


def parameters() -> Iterator[object]:
    for name, case in CASES.items():
        marks = [pytest.mark.xfail(strict=True, reason=f"item {OPEN[name]}")] if name in OPEN else []
        yield pytest.param(case, id=name, marks=marks)


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("case", [*parameters()])
def test_a_hostile_input_ends_in_a_result_or_a_sentence(
    case: Case, sound: Path, commands: Runner, tmp_path: Path
) -> None:
    work = prepare(sound, tmp_path)
    case.change(work)
    done = commands.run(case.command.split(), work)
    check(tmp_path, done, spoken=case.command.startswith("generate"))
    said = (done.out + done.error).decode()
    assert case.sound or done.status, said
    for word in case.says:
        assert word in said, said[:3000]


def test_the_corpus_is_one() -> None:
    assert len(CASES) >= 120 and set(OPEN) <= set(CASES)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "command",
    [
        "convert hf made",
        "convert ckpt made --to hf",
        "reshard ckpt made",
        "inspect hf",
        "verify ckpt hf",
        "generate hf --chat --prompt few --max-new-tokens 2",
        "evaluate hf --data data/texts.jsonl --data data/tokens --data data/chats.jsonl",
        "tokenize data/texts.jsonl --out made --tokenizer hf --workers 1",
        "merge_tokens parts",
        "plan recipe.yaml",
        "pretrain recipe.yaml",
        "pretrain tuning.yaml",
        "pretrain recipe.yaml train.steps=8 checkpoint.resume=state",
    ],
)
def test_what_is_sound_succeeds(command: str, sound: Path, commands: Runner, tmp_path: Path) -> None:
    """So that a hostile input fails of what is hostile in it."""
    done = commands.run(command.split(), prepare(sound, tmp_path))
    check(tmp_path, done)
    assert done.status == 0, done.error.decode()


# -- random damage: what it finds becomes a line of the corpus

SEEDS, BATCH = 288, 24
"""Of each rotation; some 10 seconds of one core."""
GRID = 20_000
"""Half an hour of one core."""


def attempt(seed: int, sound: Path, commands: Runner, folder: Path) -> None:
    rng = random.Random(seed)
    name = rng.choice(sorted(TARGETS))
    command, work = rng.choice(TARGETS[name]), prepare(sound, folder)
    (work / name).write_bytes(damage(name, (work / name).read_bytes(), rng))
    try:
        # What is printed as it stands has its cases in the corpus, and until they pass it is no find.
        spoken = command.startswith("generate") or "11" in OPEN.values()
        check(folder, commands.run(command.split(), work), spoken)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {command} with another {name}: {str(error)[:3000]}") from error


@pytest.mark.in_turn(20)
@pytest.mark.parametrize("first", range(ROTATION * SEEDS, (ROTATION + 1) * SEEDS, BATCH))
def test_random_damage_ends_in_a_result_or_a_sentence(
    first: int, sound: Path, commands: Runner, tmp_path: Path
) -> None:
    for seed in range(first, first + BATCH):
        attempt(seed, sound, commands, tmp_path / str(seed))


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1000 + GRID, 500))
def test_much_random_damage(first: int, sound: Path, commands: Runner, tmp_path: Path) -> None:
    for seed in range(first, first + 500):
        attempt(seed, sound, commands, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
