"""Chats as families of models write them: what the assistant generates is learned, behind what it is given."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chats import chat, write_jsonl
from family_chats import BRIEF, CALLS, FAMILY_CHATS, THOUGHTS, TURNS, Row, thought

from megacore.config import ChatConfig
from megacore.data.chat import BadExample, passages
from megacore.data.corpora import _remarks
from megacore.data.examples import Preparation
from megacore.data.model_tokenizer import ModelFiles, ModelTokenizer, Tokens
from megacore.data.text import InputError
from megacore.inference.evaluation_data import DocumentFiles
from megacore.store.companions import companions

Spelled = Callable[[str], ModelTokenizer]
CASES = [(family, name) for family, chats in FAMILY_CHATS.items() for name in chats.cases]


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Spelled:
    """The tokenizer of a family."""

    @cache
    def load(family: str) -> ModelTokenizer:
        return ModelTokenizer(FAMILY_CHATS[family].write(tmp_path_factory.mktemp(family)))

    return load


def encoded(spelling: ModelTokenizer, row: Row, train_on: Any = "assistant") -> list[Tokens]:
    return spelling.encode(passages(row, lambda: spelling.template, train_on))


def shown(spelling: ModelTokenizer, examples: Sequence[Tokens]) -> list[str]:
    """The text of each up to its last token that counts, with those that do in brackets."""
    made = []
    for ids, counted in examples:
        runs = groupby(zip(ids.tolist(), counted.tolist(), strict=True), lambda pair: pair[1])
        parts = [(counts, spelling._tokenizer.decode([token for token, _ in run])) for counts, run in runs]
        made.append("".join(f"⟦{text}⟧" if counts else text for counts, text in parts[: 2 * (len(parts) // 2)]))
    return made


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_is_learned_is_what_was_written_by_hand(spelled: Spelled, family: str, name: str) -> None:
    row, wanted = FAMILY_CHATS[family].cases[name]
    assert shown(spelled(family), encoded(spelled(family), row)) == list(wanted)
    # The last turn alone stands in the same text.
    (last,) = shown(spelled(family), encoded(spelled(family), row, "last"))
    before, _, turn = wanted[-1].rpartition("⟦")
    assert last == re.sub("[⟦⟧]", "", before) + "⟦" + turn


@pytest.mark.parametrize(("family", "name"), CASES)
def test_each_turn_is_learned_once_behind_what_transformers_gives_the_assistant(
    spelled: Spelled, family: str, name: str
) -> None:
    (messages, tools), spelling = _of(FAMILY_CHATS[family].cases[name][0]), spelled(family)
    tokenizer = spelling._tokenizer
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    examples = encoded(spelling, {"messages": messages, "tools": tools})
    if spelling.template.marks:
        for ids, counted in examples:
            last = turns[-1] if ids is examples[-1][0] else turns[0]
            theirs = tokenizer.apply_chat_template(
                messages[: last + 1], tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            assert theirs["input_ids"] == ids.tolist()
            mask = np.array(theirs["assistant_masks"], np.bool_)
            assert mask[counted].all() and (len(examples) > 1 or (mask == counted).all())
        return
    given = [ids[:start].tolist() for ids, counted in examples for start in _starts(counted)]
    assert given == [
        tokenizer.apply_chat_template(messages[:turn], tools=tools, add_generation_prompt=True, return_dict=False)
        for turn in turns
    ]
    # And what follows is what it writes of the turn, but for the token of an end that it does not write.
    for ids, _ in examples:
        text = tokenizer.decode(ids.tolist())
        whole = [tokenizer.apply_chat_template(messages[: turn + 1], tools=tools, tokenize=False) for turn in turns]
        assert any(text in (each, each + tokenizer.eos_token) for each in whole)


def _of(row: Row) -> tuple[list[dict[str, Any]], list[Any] | None]:
    return row["messages"], row.get("tools")


def _starts(counted: np.ndarray) -> list[int]:
    return (np.flatnonzero(np.diff(counted.astype(int)) == 1) + 1).tolist()


def test_a_turn_that_is_rewritten_to_the_same_length_is_another_one(tmp_path: Path) -> None:
    made = FAMILY_CHATS["glm-4"]
    new = "('new: ' if loop.last and m.role == 'assistant' else 'old: ')"
    rewrites = made.template.replace("'|>\n' + m", f"'|>\n' + {new} + m")
    spelling = ModelTokenizer(replace(made, template=rewrites).write(tmp_path))
    assert shown(spelling, encoded(spelling, TURNS)) == [
        "[gMASK]<sop><|user|>\nold: hi<|assistant|>⟦\nnew: hello<|endoftext|>⟧",
        "[gMASK]<sop><|user|>\nold: hi<|assistant|>\nold: hello<|user|>\nold: and?<|assistant|>"
        "⟦\nnew: so<|endoftext|>⟧",
    ]


# -- what a template refuses, and what it passes over


@pytest.mark.parametrize("family", [family for family, chats in FAMILY_CHATS.items() if chats.refused])
def test_what_a_template_refuses_is_told_in_its_words(spelled: Spelled, family: str) -> None:
    for words, messages in FAMILY_CHATS[family].refused.items():
        with pytest.raises(BadExample) as error:
            encoded(spelled(family), {"messages": [*messages, *chat("and?", "so")]})
        assert str(error.value) == f"the chat template fails: {words}"


def test_a_row_that_a_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    folder = FAMILY_CHATS["gemma"].write(tmp_path / "model")
    files = ModelFiles(companions(folder, folder), {"model_type": "gemma"}, 400)
    path = write_jsonl(tmp_path / "chats.jsonl", TURNS, BRIEF, "", TURNS)
    with pytest.raises(InputError) as error:
        Preparation(path, tmp_path / "examples", ChatConfig(), 64, files).examples()
    assert "1 bad line(s)" in str(error.value)
    assert f"{path}, line 2: the chat template fails: System role not supported" in str(error.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (CALLS, "the example has tools, and the chat template writes nothing of them"),
        ({**CALLS, "tools": None}, "message 2 has tool_calls, and"),
        ({**THOUGHTS, "tools": None, "messages": THOUGHTS["messages"][:2]}, "message 2 has reasoning_content, and"),
    ],
)
def test_what_is_to_be_learned_and_the_template_does_not_write_is_named(spelled: Spelled, row: Row, words: str) -> None:
    """Else the assistant learns to say nothing where it was to call a tool."""
    if row is CALLS:
        row = {**row, "messages": [message for message in row["messages"] if "tool_calls" not in message]}
    with pytest.raises(BadExample) as error:
        encoded(spelled("phi-4"), row)
    assert str(error.value).startswith(words) and "set chat.template to one that does" in str(error.value)


def test_a_prompt_that_begins_a_thought_which_the_turn_has_not_is_named(tmp_path: Path) -> None:
    """As where a template leaves out the thoughts of all turns, the last among them."""
    made = FAMILY_CHATS["phi-4"]
    opens = made.template.replace("assistant<|im_sep|>", "assistant<|im_sep|><think>")
    spelling = ModelTokenizer(replace(made, template=opens).write(tmp_path))
    for train_on in ("assistant", "last"):
        with pytest.raises(BadExample, match=r"message 4: .* when they are to be answered.* by \{% generation %\}"):
            encoded(spelling, TURNS, train_on)


def test_a_template_that_marks_earlier_turns_otherwise_is_named(spelled: Spelled) -> None:
    row = {"messages": [*chat("hi"), thought("a greeting", "hello"), thought("what", "so")]}
    with pytest.raises(BadExample, match="message 3: the chat template marks the turns before it otherwise"):
        encoded(spelled("marked-thoughts"), row)


@pytest.mark.parametrize("form", ["list", "folder"])
def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path, form: str) -> None:
    made, plain = FAMILY_CHATS["qwen2.5"], FAMILY_CHATS["stablelm"].template
    folder = replace(made, template=plain).write(tmp_path)
    if form == "list":
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": made.template}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(made.template)
    files = ModelFiles(companions(folder, folder), {"model_type": "qwen2"}, 400)
    with files.folder() as copied:
        spelling = ModelTokenizer(copied)
    assert shown(spelling, encoded(spelling, CALLS)) == list(made.cases["calls"][1])
    assert shown(spelling, encoded(spelling, TURNS)) == [
        "<|user|>\nhi<|im_end|>\n<|assistant|>\n⟦hello<|im_end|>⟧\n<|user|>\nand?<|im_end|>\n<|assistant|>\n⟦so<|im_end|>⟧"
    ]


def test_mistrals_own_file_of_a_tokenizer_is_one(tmp_path: Path) -> None:
    made = FAMILY_CHATS["mistral"]
    vocab = [{"rank": byte, "token_bytes": b64encode(bytes([byte])).decode()} for byte in range(256)]
    special = [{"rank": rank, "token_str": token} for rank, token in enumerate(["<unk>", *made.special.split()])]
    config = {"pattern": ".", "default_vocab_size": 256 + len(special), "default_num_special_tokens": len(special)}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": made.begin, "eos_token": made.end}))
    (tmp_path / "chat_template.jinja").write_text(made.template)
    files = dict(companions(tmp_path, tmp_path))
    with ModelFiles(files, {"model_type": "mistral"}, 400).folder() as folder:
        spelling = ModelTokenizer(folder)
    del files["tokenizer_config.json"]
    with ModelFiles(files, {"model_type": "mistral"}, 400).folder():
        pass
    assert shown(spelling, encoded(spelling, BRIEF)) == list(made.cases["brief"][1])


# -- files of chats


def test_chats_that_are_several_examples_are_counted_and_said(tmp_path: Path) -> None:
    made = FAMILY_CHATS["qwen3"]
    folder = made.write(tmp_path / "model")
    files = ModelFiles(companions(folder, folder), {"model_type": "qwen3"}, 400)
    path = write_jsonl(tmp_path / "chats.jsonl", TURNS, {"messages": chat("hi", "hello")}, THOUGHTS)
    found = Preparation(path, tmp_path / "examples", ChatConfig(), 400, files).examples()
    spelling = ModelTokenizer(folder)
    wanted = [text for name in made.cases for text in made.cases[name][1]]
    wanted.insert(2, wanted[0])
    examples = [(ids.astype(np.int64), counted) for ids, counted in map(found.example, range(found.count))]
    assert shown(spelling, examples) == wanted
    assert (found.facts.examples, found.facts.split, found.facts.skipped) == (5, 2, 0)
    assert found.chats.tolist() == [0, 0, 1, 2, 2]
    # One that is dropped is none that the next goes on from.
    long = {"messages": [*chat("hi"), thought("so long " * 99, "hello"), *chat("and?", "so")]}
    path = write_jsonl(tmp_path / "long.jsonl", TURNS, long)
    short = Preparation(path, tmp_path / "examples", ChatConfig(too_long="drop"), 99, files).examples()
    assert short.facts.dropped == 1 and short.chats.tolist() == [0, 0, 1]
    assert (
        _remarks("chats", found.facts, 400)[1]
        == "  2 chats are several examples, as the template rewrites what is past"
    )


def test_an_evaluation_reads_all_examples_of_a_chat(tmp_path: Path) -> None:
    folder = FAMILY_CHATS["qwen3"].write(tmp_path / "model")
    weights = SimpleNamespace(
        companions=lambda: companions(folder, folder), raw={}, config=SimpleNamespace(vocab_size=400)
    )
    texts: Any = SimpleNamespace(folder=weights)
    path = write_jsonl(tmp_path / "chats.jsonl", THOUGHTS)
    found = list(DocumentFiles([path], 400, texts, "text", "assistant").documents())
    spelling = ModelTokenizer(folder)
    assert shown(spelling, [(each.tokens, each.counted) for each in found]) == list(
        FAMILY_CHATS["qwen3"].cases["thoughts"][1]
    )
