"""A run goes on with the tokens that it was trained on, or says why not before it starts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
from engine import RECIPE, write_corpus, write_recipe

from megacore.data.corpora import Corpora
from megacore.data.indexed import IndexedDataset
from megacore.recipe import load
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.companions import Companion
from megacore.training.check import changed_data
from megacore.training.resume import Start

LETTERS = {chr(97 + i): i for i in range(26)}


class Held:
    """A checkpoint, of which only the companions are asked for."""

    def __init__(self, files: Mapping[str, Companion]) -> None:
        self.files = files

    def companions(self) -> Mapping[str, Companion]:
        return self.files


class Known:
    """Corpora, of which only the identities are asked for."""

    def __init__(self, *corpora: IndexedDataset) -> None:
        self.identities = [corpus.identity for corpus in corpora]


def tokenizer(folder: Path, vocabulary: Any, **more: Any) -> Companion:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))
    return Companion(folder / "tokenizer.json", folder)


def problems(folder: Path, held: Companion | None, **data: Any) -> list[str]:
    """Return the problems of a run over `folder`/corpus that goes on from a checkpoint with this tokenizer."""
    write_corpus(folder / "corpus")
    config = load(write_recipe(folder, RECIPE), [])
    config = replace(config, data=replace(config.data, **data))
    corpora = cast("Corpora", Known(IndexedDataset(folder / "corpus")))
    trainer = {"recipe": json.loads(json.dumps(asdict(config)))}
    source = cast("Any", Held({} if held is None else {"tokenizer.json": held}))
    return [*changed_data(Start(source, trainer), config, corpora)]


def test_ids_of_another_meaning_are_refused_and_counted(tmp_path: Path) -> None:
    """Those of unigrams and added tokens as well; without one of the two tokenizers nothing is known."""
    unigrams = tokenizer(tmp_path / "unigrams", [[letter, -0.5] for letter in LETTERS])
    assert not problems(tmp_path, unigrams)
    tokenizer(tmp_path, LETTERS, added_tokens=[{"id": 3, "content": "<|end|>"}])
    assert not problems(tmp_path, None)
    (problem,) = problems(tmp_path, unigrams)
    assert "25 of 26 tokens are alike, and 3 is '<|end|>' and was 'd'" in problem
    held = tokenizer(tmp_path / "held", LETTERS)
    tokenizer(tmp_path, LETTERS | {"y": 25, "z": 24})
    (problem,) = problems(tmp_path, held, allow_changed=True)
    assert problem == (
        f"data.train: {tmp_path / 'tokenizer.json'} is another tokenizer than the run's, {held.path}: 24 of 26 tokens "
        f"are alike, and 24 is 'z' and was 'y': make the token files by `megacore tokenize --tokenizer "
        f"{held.path.parent}`, or begin another run by checkpoint.init"
    )


@pytest.mark.parametrize(
    ("vocabulary", "more"),
    [
        (dict(reversed(LETTERS.items())), {"truncation": None}),
        (LETTERS | {"!": 26}, {}),
        (LETTERS, {"added_tokens": [{"id": 27, "content": "<|end|>"}]}),
        ([[letter, -0.5] for letter in LETTERS], {}),
        ({}, {}),
        ([], {"added_tokens": [3, {"id": "x"}]}),
        (3, {"added_tokens": None}),
    ],
)
def test_ids_that_mean_the_same_are_not(vocabulary: Any, more: dict[str, Any], tmp_path: Path) -> None:
    """However it is written, and whatever else the new one knows; of what is no tokenizer nothing is known."""
    held = tokenizer(tmp_path / "held", LETTERS)
    tokenizer(tmp_path, vocabulary, **more)
    assert not problems(tmp_path, held)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    held = tokenizer(tmp_path / "held", LETTERS)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StoreError, match=r"tokenizer.json is not JSON"):
        problems(tmp_path, held)


def test_where_a_run_begins_nothing_is_asked(tmp_path: Path) -> None:
    held = tokenizer(tmp_path / "held", LETTERS)
    tokenizer(tmp_path, LETTERS | {"y": 25, "z": 24})
    write_corpus(tmp_path / "corpus")
    config = load(write_recipe(tmp_path, RECIPE), [])
    source = cast("Any", Held({"tokenizer.json": held}))
    assert not [*changed_data(Start(source), config, cast("Corpora", Known()))]
