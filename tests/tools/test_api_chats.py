"""The chats about our own API: what is kept back from training is asked in another way, about the same facts."""

import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from megacore.launch import api_chats

FACTS = cache(api_chats.facts)


def make(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """{file: its lines}."""
    with patch.object(sys, "argv", ["api_chats.py", str(folder), *arguments]), patch.object(api_chats, "facts", FACTS):
        api_chats.main()
    return {path.name: path.read_text("utf-8").splitlines() for path in folder.iterdir()}


def turns(lines: list[str]) -> dict[str, str]:
    """{question: answer}, each asked once."""
    found = list[tuple[str, str]]()
    for messages in (json.loads(line)["messages"] for line in lines):
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        said = [message["content"] for message in messages]
        found += zip(said[::2], said[1::2], strict=True)
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.in_turn(3, 1)
def test_the_same_facts_asked_in_other_ways(tmp_path: Path) -> None:
    made = make(tmp_path, "--facts", "50")
    trained, kept_back = turns(made["train.jsonl"]), turns(made["validation.jsonl"])
    assert not trained.keys() & kept_back.keys()
    ways = defaultdict(list)
    for question, answer in trained.items():
        ways[answer].append(question)
    assert set(ways) == set(kept_back.values()) and len(kept_back) == 50
    assert all(len(asked) % 4 == 0 for asked in ways.values())
    assert [trained[question] for question in made["questions.txt"]] == made["answers.txt"]
    assert any(len(json.loads(line)["messages"]) > 2 for line in made["train.jsonl"])


@pytest.mark.in_turn(3, 0)
def test_pairs_prefer_the_answer_to_that_of_another_question(tmp_path: Path) -> None:
    made = make(tmp_path, "--facts", "50")
    for chats, pairs in (("train.jsonl", "pairs.jsonl"), ("validation.jsonl", "validation_pairs.jsonl")):
        known, rows = turns(made[chats]), [json.loads(line) for line in made[pairs]]
        said = [(x["prompt"][0]["content"], x["chosen"][0]["content"], x["rejected"][0]["content"]) for x in rows]
        assert {question: answer for question, answer, _ in said} == known and len(said) == len(known)
        assert all(answer != other for _, answer, other in said)


@pytest.mark.in_turn(3, 2)
def test_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    first = make(tmp_path / "a", "--facts", "30", "--seed", "3")
    assert make(tmp_path / "b", "--facts", "30", "--seed", "3") == first
    assert make(tmp_path / "c", "--facts", "30", "--seed", "4") != first


@pytest.mark.in_turn(3, 2)
def test_facts_are_those_of_the_source(tmp_path: Path) -> None:
    answers = set(turns(make(tmp_path)["validation.jsonl"]).values())
    assert "The default of `optimizer.lr` is 0.0003." in answers
    assert "`parse_size` is defined in `megacore.store.weight_folders.hugging_face_files`." in answers
    assert "Call it as `parse_size(text)`." in answers
    assert any(answer.startswith("`Publication`: A folder on its way") for answer in answers)
