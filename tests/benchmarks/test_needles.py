"""The benchmark of needles: what transformers finds most likely, and the same on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import loaded, random_model, small
from pool import Pool
from transformers import AutoTokenizer

from benchmarks import needles as command
from benchmarks.needles import Needles, found
from megacore.data import tokenizer
from megacore.inference.evaluation_data import DocumentFiles
from megacore.inference.model_loader import model_from
from megacore.inference.perplexity import Excerpt
from megacore.inference.texts import Texts
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.loss import Objective
from megacore.parallel.layers.scores import most_likely
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.conversions.formats import open_folder

NEEDLES = Needles((160, 201), 3, 4, seed=5)
SENTENCE = "The quiet harbour has a sun, the magic number of a city is 12. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "hf"
    random_model(small("llama", vocab_size=290, max_position_embeddings=256), 0).save_pretrained(made)
    tokenizer.train([SENTENCE], 290, made)
    (tmp_path / "text.txt").write_text(SENTENCE * 40)
    return made


def prompts(folder: Path) -> list[Excerpt]:
    texts = Texts.of(open_folder(folder))
    return NEEDLES.windows(texts, DocumentFiles([folder.parent / "text.txt"], 290, texts, "text", "all").documents())


def easy(windows: list[Excerpt], likely: list[torch.Tensor]) -> list[Excerpt]:
    """Half of the answers become what the model finds most likely, for a model of random weights finds nothing."""
    for number, (window, best) in enumerate(zip(windows, likely, strict=True)):
        if number % 3:
            at = window.labels != IGNORE
            window.labels[at] = best.numpy()[at]
            if number % 3 == 2 and number % 2:  # all but one token
                window.labels[-1] = (window.labels[-1] + 1) % 290
    return windows


def table(folder: Path, shape: MeshShape | None, windows: list[Excerpt]) -> list[list[float]]:
    model = model_from(open_folder(folder), Mesh.create(shape) if shape else Mesh.single(), torch.float64)
    return found(model, NEEDLES, windows)


@pytest.mark.in_turn(3, 0)
def test_needles_are_found_where_transformers_finds_them(folder: Path, pool: Pool) -> None:
    model = loaded(folder)
    windows = prompts(folder)
    with torch.no_grad():
        likely = [model(torch.from_numpy(window.tokens)[None]).logits[0].argmax(-1) for window in windows]
    windows = easy(windows, likely)
    hits = [
        bool((best.numpy() == window.labels)[window.labels != IGNORE].all())
        for window, best in zip(windows, likely, strict=True)
    ]
    wanted = [[sum(hits[at : at + 4]) / 4 for at in range(start, start + 12, 4)] for start in (0, 12)]
    assert 0 < sum(hits) < len(hits)
    assert table(folder, None, windows) == wanted
    for shape in (MeshShape(tp=2, pp=2), MeshShape(cp=2, dp=2)):
        for seen in pool.run(4, table, folder, shape, windows):
            assert seen == wanted


def test_a_prompt_is_text_with_a_fact_at_its_depth(folder: Path) -> None:
    words: Any = AutoTokenizer.from_pretrained(folder)
    for number, window in enumerate(prompts(folder)):
        length, share = (160, 201)[number // 12], (0, 0.5, 1)[number // 4 % 3]
        assert len(window.tokens) + 1 == length and set(window.sums) == {number}
        answer = words.decode(window.labels[window.labels != IGNORE])
        text = words.decode(window.tokens)
        fact = text.index("\n\nThe magic number of ")
        assert f"is{answer}.\n\n" in text and int(answer) >= 10_000
        assert (text + words.decode(window.labels[-1:])).endswith(f"? {text[fact + 2 :].partition('.')[0]}")
        around = len(words(text[:fact])["input_ids"]), len(words(text[fact:].split("\n\n")[2])["input_ids"])
        assert abs(around[0] - share * sum(around)) <= 2


def test_equals_go_to_the_lower_id() -> None:
    objective = Objective(Mesh.single().tp, 5)
    logits = torch.tensor([[1.0, 3, 3, 0, 2, 9], [4, 4, 4, 4, 4, 9]])
    for label, wanted in ((0, [0, 1]), (1, [1, 0]), (2, [0, 0]), (4, [0, 0])):
        assert most_likely(objective, logits, torch.full((2,), label)).tolist() == wanted


def test_the_command_tells_and_draws(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "needles.png"
    given = [str(folder), "--data", str(text), "--lengths", "160,200", "--depths", "2", "--needles", "1"]
    assert command.main([*given, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lengths"] == [160, 200] and data["depths"] == [0, 1] and len(data["found"]) == 2
    assert command.main([*given, "--picture", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["depth", "160", "200"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    text.write_text(SENTENCE)
    assert command.main(given) == 1
    assert "--lengths 200: its text takes" in capsys.readouterr().err
    for lengths, said in (("8", "a fact and its question take"), ("257", "the model has 256 positions: choose up to")):
        assert command.main([*given[:3], "--lengths", lengths]) == 1
        assert f"--lengths {lengths}: {said}" in capsys.readouterr().err
