"""Of a chat the loss counts what the assistant generates, to the token, whatever the template; bad rows say why."""

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
from chats import FAMILIES, ROWS, Row, chat, model_files, prepared, write_jsonl, write_tokenizer

from megacore.data.chat import BadExample, TrainOn, passages
from megacore.data.corpora import _remarks
from megacore.data.model_tokenizer import ModelFiles, ModelTokenizer, Tokens, counts
from megacore.data.text import InputError
from megacore.inference.evaluation_data import DocumentFiles
from megacore.inference.texts import _TransformersTokenizer
from megacore.store.tensor_files.companions import companions

Spelled = Callable[..., ModelTokenizer]
CASES = [(family, name) for family, made in FAMILIES.items() for name in made.cases]
GENERAL = [family for family, made in FAMILIES.items() if "three" in made.cases]
"""Those of all rows that are chats and nothing more."""


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Spelled:
    """The tokenizer of a family."""

    @cache
    def load(family: str, trim: bool = False) -> ModelTokenizer:
        return ModelTokenizer(FAMILIES[family].write(tmp_path_factory.mktemp(family), trim))

    return load


def encoded(tokenizer: ModelTokenizer, row: Row, train_on: TrainOn = "assistant") -> list[Tokens]:
    return tokenizer.encode(passages(row, lambda: tokenizer.template, train_on))


def marked(tokenizer: ModelTokenizer, examples: Sequence[Tokens]) -> list[str]:
    """The text of each up to its last token that counts, with those that do in brackets."""
    made = []
    for ids, counted in examples:
        runs = groupby(zip(ids.tolist(), counted.tolist(), strict=True), lambda pair: pair[1])
        parts = [(counts, tokenizer._tokenizer.decode([token for token, _ in run])) for counts, run in runs]
        made.append("".join(f"⟦{text}⟧" if counts else text for counts, text in parts[: 2 * (len(parts) // 2)]))
    return made


def learned(tokenizer: ModelTokenizer, row: Row, train_on: TrainOn = "assistant") -> list[str]:
    return marked(tokenizer, encoded(tokenizer, row, train_on))


@pytest.mark.parametrize("trim", [False, True], ids=["", "trim"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_the_assistant_generates_counts_and_nothing_else(
    spelled: Spelled, family: str, name: str, trim: bool
) -> None:
    tokenizer, row, wanted = spelled(family, trim), ROWS[name], FAMILIES[family].cases[name]
    assert learned(tokenizer, row) == wanted
    # The last turn alone stands in the same text.
    before, _, turn = wanted[-1].rpartition("⟦")
    assert learned(tokenizer, row, "last") == [re.sub("[⟦⟧]", "", before) + "⟦" + turn]
    if name in FAMILIES[family].all:
        assert learned(tokenizer, row, "all") == [FAMILIES[family].all[name]]


@pytest.mark.parametrize("family", GENERAL)
def test_a_turn_of_weight_0_is_not_learned(spelled: Spelled, family: str) -> None:
    """It stands in the text of the turns after it, as those that count do."""
    messages, tokenizer = ROWS["three"]["messages"], spelled(family)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

    def weighted(weights: dict[int, int]) -> Row:
        return {"messages": [m | ({"weight": weights[n]} if n in weights else {}) for n, m in enumerate(messages)]}

    others, plain = dict.fromkeys(turns, 0), {"messages": messages}
    only_last, only_first = weighted(others | {turns[-1]: 1}), weighted(others | {turns[0]: 1})
    last = learned(tokenizer, plain, "last")
    assert learned(tokenizer, only_last) == learned(tokenizer, only_last, "last") == last
    assert learned(tokenizer, only_first) == learned(tokenizer, {"messages": messages[: turns[0] + 1]})
    assert learned(tokenizer, weighted({turns[0]: 1}), "all") == learned(tokenizer, plain, "all")
    with pytest.raises(BadExample, match=r"has no counted turn of the assistant \(all have the weight 0\)"):
        passages(weighted(others), lambda: tokenizer.template, "assistant")
    with pytest.raises(BadExample, match="a turn has the weight 0, and all tokens count"):
        passages(only_last, lambda: tokenizer.template, "all")


CALLING = (
    "{% if tools %}{{ '<|system|>' + (tools | map(attribute='name') | join(',')) + '<|end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<|user|>' + c.name + '(' + c.arguments | tojson + ')<|/head|>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLED = [
    {"role": "user", "content": "how warm is it?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "warmth", "arguments": {"unit": "C"}}]},
    {"role": "tool", "content": "21"},
    {"role": "assistant", "content": "21 degrees", "tool_calls": None},
]


def test_tools_and_calls(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path, CALLING, "<|im_end|>"))
    for tools in ([{"name": "warmth"}], '[{"name": "warmth"}]', None, "", []):
        (text,) = learned(tokenizer, {"messages": CALLED, "tools": tools})
        assert text.startswith("<|system|>warmth<|end|>\n<|im_start|>user" if tools else "<|im_start|>user")
        wanted = ['<|user|>warmth({"unit": "C"})<|/head|><|im_end|>', "21 degrees<|im_end|>"]
        assert re.findall("⟦(.*?)⟧", text) == wanted


def test_a_marked_turn_may_have_several_parts_and_the_last_turn_keeps_all_of_its_own(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}"
        "{%- generation -%}{{ m.content.split('/')[0] }}{%- endgeneration -%}{{ '||' }}"
        "{% generation %}{{ m.content.split('/')[-1] + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    tokenizer, row = ModelTokenizer(write_tokenizer(tmp_path, template)), {"messages": chat("hi", "a/b", "and", "c/d")}
    first, last = "user:hi\nassistant:⟦a⟧||⟦b</s>⟧\n", "user:and\nassistant:⟦c⟧||⟦d</s>⟧"
    assert learned(tokenizer, row) == [first + last]
    assert learned(tokenizer, row, "last") == [re.sub("[⟦⟧]", "", first) + last]


def test_a_marked_token_behind_the_last_turn_makes_no_examples_of_the_turns(tmp_path: Path) -> None:
    """As of TRL's template for Phi-3. Where it is all that ends a turn, the turns before the last one lack it."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
        "{% endif %}"
    )
    row = {"messages": chat("hi", "a", "and", "b")}
    first, last = "<|user|>hi<|assistant|>⟦a<|end|>\n⟧", "<|user|>and<|assistant|>⟦b<|end|>\n</s>⟧"
    assert learned(ModelTokenizer(write_tokenizer(tmp_path / "two", template)), row) == [first + last]
    bare = ModelTokenizer(write_tokenizer(tmp_path / "one", template.replace("<|end|>\n", "")))
    assert learned(bare, row) == [
        "<|user|>hi<|assistant|>⟦a</s>⟧",
        "<|user|>hi<|assistant|>a<|user|>and<|assistant|>⟦b</s>⟧",
    ]


def test_a_template_that_writes_parts_alone_is_given_texts_as_parts(tmp_path: Path) -> None:
    """As those of models that also see, which leave a text out that is all of a content."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
    )
    folder = write_tokenizer(tmp_path, template, "<|im_end|>")
    tokenizer, row = ModelTokenizer(folder), {"messages": chat("hi", "hello", "and", "so", system="be kind")}
    prompt = "<|im_start|>system:be kind<|im_end|><|im_start|>user:hi<|im_end|><|im_start|>assistant:"
    more = "<|im_start|>user:and<|im_end|><|im_start|>assistant:"
    assert learned(tokenizer, row) == [f"{prompt}⟦hello<|im_end|>⟧{more}⟦so<|im_end|>⟧"]
    asked = _TransformersTokenizer(folder).chat(row["messages"][:2])
    assert asked is not None and tokenizer._tokenizer.decode(asked) == prompt
    silent = ModelTokenizer(write_tokenizer(tmp_path / "silent", template.replace("part.text", "'...'"), "<|im_end|>"))
    with pytest.raises(BadExample, match="message 5: the chat template writes nothing of its content: set chat"):
        encoded(silent, row)


# -- prompts with completions, and texts


def test_of_prompts_and_texts_what_follows_and_its_end_count(spelled: Spelled) -> None:
    tokenizer = spelled("chatml")
    row = {"prompt": "Q: two? ", "completion": "A: three", "messages": None}
    assert learned(tokenizer, row) == ["<s>Q: two? ⟦A: three<|im_end|>⟧"]
    assert learned(tokenizer, row, "all") == ["<s>⟦Q: two? A: three<|im_end|>⟧"]
    # A token that holds characters of both counts: what completes the prompt is all there.
    assert learned(tokenizer, {"prompt": "the", "completion": "re"}) == ["<s>th⟦ere<|im_end|>⟧"]
    assert learned(tokenizer, {"text": "plain text"}) == ["<s>⟦plain text<|im_end|>⟧"]
    assert learned(tokenizer, {"text": "ended<|im_end|>"}) == ["<s>⟦ended<|im_end|>⟧"]


def test_a_token_counts_where_it_holds_a_character_that_does() -> None:
    offsets = np.array([[0, 0], [0, 3], [3, 6], [6, 6], [7, 9], [9, 9], [9, 10], [0, 0]])
    assert counts(offsets, [(4, 7)]).tolist() == [False, False, True, True, False, False, False, False]
    assert counts(offsets, [(0, 1), (8, 10)]).tolist() == [False, True, False, False, True, True, True, False]
    # A token of blanks whose characters a tokenizer has left out: those since the token before it.
    blanks = np.array([[0, 3], [6, 6], [6, 7]])
    assert counts(blanks, [(2, 6)]).tolist() == [True, True, False]
    assert counts(blanks, [(6, 7)]).tolist() == [False, False, True]


# -- what is wrong, in words


def message(**values: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}, values]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "has no keys, of no format (messages, ShareGPT (conversations), Alpaca (instruction, output), prompt"),
        ({"chat": [], "id": 3, "text": None}, "has 'chat', 'id', of no format (messages, "),
        ({"messages": "hi"}, "messages is a str, not a list"),
        ({"messages": []}, "has no messages"),
        ({"messages": ["hi"]}, "message 1 is a str, not an object"),
        (message(role="bot", content="x"), "message 2 has the role 'bot': choose from system,"),
        (message(content="x"), "message 2 has the role None"),
        (message(role=["user"], content="x"), "message 2 has the role ['user']"),
        (message(role="assistant"), "the content of message 2 is null, not text"),
        (message(role="assistant", content={"text": "x"}), "the content of message 2 is a dict, not text"),
        (message(role="assistant", content=[{"text": "x"}]), "part 1 of message 2 has the type None: choose text"),
        (message(role="user", content=[{"type": "image"}]), "part 1 of message 2 has the type 'image': choose text"),
        (message(role="assistant", content=" \n"), "message 2: the assistant says nothing"),
        (message(role="assistant", content="", tool_calls=[]), "message 2: the assistant says nothing"),
        (message(role="assistant", content="x", tool_calls="f()"), "message 2: tool_calls is a str"),
        (message(role="assistant", content="x", tool_calls=["f()"]), "not a list of objects"),
        (message(role="assistant", content="a\ud800"), "the content of message 2 has the lone surrogate"),
        (message(role="user", content="x"), "has no turn of the assistant"),
        ({**message(role="assistant", content="x"), "tools": "[f"}, "tools is text that is not JSON"),
        ({**message(role="assistant", content="x"), "tools": "{}"}, "tools is a dict, not a list of objects"),
        (message(role="assistant", content="x", weight=0.5), "message 2 has the weight 0.5: choose 1, or 0"),
        ({**message(role="assistant", content="x"), "system": "be brief"}, "has 'system' beside 'messages'"),
        ({**message(role="assistant", content="x"), "chat_template_kwargs": {"a": 1}}, "has 'chat_template_kwargs'"),
        ({"prompt": "x", "text": "y"}, "has 'prompt' beside 'text', which is not read: name what answers the"),
        ({"prompt": "x", "completion": ""}, "the completion is empty"),
        ({"prompt": ["x"], "completion": "y"}, "prompt is a list, not text"),
        ({"prompt": "x", "completion": 3}, "completion is a int, not text"),
        ({"text": ""}, "the text is empty"),
        ({"text": 3}, "text is a int, not text"),
    ],
)
def test_bad_rows_say_why(spelled: Spelled, row: Row, words: str) -> None:
    with pytest.raises(BadExample) as error:
        passages(row, lambda: spelled("chatml").template, "assistant")
    assert words in str(error.value)


CALLLESS = {**ROWS["calls"], "messages": [m for m in ROWS["calls"]["messages"] if "tool_calls" not in m]}
THOUGHT = ROWS["two-thoughts"]["messages"]


@pytest.mark.parametrize(
    ("family", "row", "words"),
    [
        # Else the assistant learns to say nothing where it was to call a tool.
        ("phi-4", CALLLESS, "the example has tools, and the chat template writes nothing of them: set chat.template"),
        ("phi-4", {**ROWS["calls"], "tools": None}, "message 2 has tool_calls, and the chat template writes nothing"),
        ("phi-4", {"messages": THOUGHT[:2]}, "message 2 has reasoning_content, and the chat template writes nothing"),
        (
            "marked-thoughts",
            {"messages": [*THOUGHT[:2], THOUGHT[3]]},
            "message 3: the chat template marks the turns before it otherwise",
        ),
        *(
            (family, {"messages": [*messages, *chat("and?", "so")]}, f"the chat template fails: {words}")
            for family, made in FAMILIES.items()
            for words, messages in made.refused.items()
        ),
    ],
)
def test_what_a_template_refuses_or_passes_over_is_told(spelled: Spelled, family: str, row: Row, words: str) -> None:
    with pytest.raises(BadExample) as error:
        encoded(spelled(family), row)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        # As where a template leaves out the thoughts of all turns, the last among them.
        (
            FAMILIES["phi-4"].template.replace("assistant<|im_sep|>", "assistant<|im_sep|><think>"),
            r"message 4: .* when they are to be answered.* by \{% generation %\}",
        ),
        ("{{ messages[0].nothing.there }}", "the chat template fails: "),
        ("{% for m in messages %}{{ m.content", "the chat template fails: "),
    ],
)
def test_a_template_that_fails_is_a_bad_row(tmp_path: Path, template: str, words: str) -> None:
    tokenizer = ModelTokenizer(replace(FAMILIES["phi-4"], template=template).write(tmp_path))
    choices: tuple[TrainOn, ...] = ("assistant", "last")
    for train_on in choices:
        with pytest.raises(BadExample, match=words):
            encoded(tokenizer, ROWS["turns"], train_on)


def test_what_is_wrong_with_the_tokenizer_is_no_rows_fault(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template: set chat\.template"):
        encoded(ModelTokenizer(write_tokenizer(tmp_path / "bare", None)), ROWS["turns"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the model's tokenizer cannot be loaded"):
        ModelTokenizer(tmp_path / "broken")
    missing = pytest.raises(InputError, match="none is there: start from a folder that has it")
    with missing, ModelFiles({}, {}, 3).folder():
        pass


@pytest.mark.parametrize("form", ["list", "folder"])
def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path, form: str) -> None:
    made, plain = FAMILIES["qwen2.5"], FAMILIES["stablelm"].template
    folder = replace(made, template=plain).write(tmp_path)
    if form == "list":
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": made.template}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(made.template)
    with model_files(folder, "qwen2").folder() as copied:
        tokenizer = ModelTokenizer(copied)
    assert learned(tokenizer, ROWS["calls"]) == made.cases["calls"]
    (wanted,) = FAMILIES["stablelm"].cases["turns"]
    assert learned(tokenizer, ROWS["turns"]) == [wanted.replace("<|endoftext|>", "<|im_end|>")]


def test_mistrals_own_file_of_a_tokenizer_is_one(tmp_path: Path) -> None:
    made = FAMILIES["mistral"]
    vocab = [{"rank": byte, "token_bytes": b64encode(bytes([byte])).decode()} for byte in range(256)]
    special = [{"rank": rank, "token_str": token} for rank, token in enumerate(["<unk>", *made.special])]
    config = {"pattern": ".", "default_vocab_size": 256 + len(special), "default_num_special_tokens": len(special)}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": made.begin, "eos_token": made.end}))
    (tmp_path / "chat_template.jinja").write_text(made.template)
    files = dict(companions(tmp_path, tmp_path))
    with ModelFiles(files, {"model_type": "mistral"}, 400).folder() as folder:
        tokenizer = ModelTokenizer(folder)
    del files["tokenizer_config.json"]
    with ModelFiles(files, {"model_type": "mistral"}, 400).folder():
        pass
    assert learned(tokenizer, ROWS["brief"]) == made.cases["brief"]


# -- files of chats


def test_a_row_that_a_template_refuses_is_named_with_its_line(tmp_path: Path) -> None:
    folder = FAMILIES["gemma"].write(tmp_path / "model")
    path = write_jsonl(tmp_path / "chats.jsonl", ROWS["turns"], ROWS["brief"], "", ROWS["turns"])
    with pytest.raises(InputError) as error:
        prepared(path, folder, tmp_path / "examples", 64)
    assert "1 bad line(s)" in str(error.value)
    assert f"{path}, line 2: the chat template fails: System role not supported" in str(error.value)


def test_chats_that_are_several_examples_are_counted_and_said(tmp_path: Path) -> None:
    made = FAMILIES["qwen3"]
    folder = made.write(tmp_path / "model")
    tokenizer = ModelTokenizer(folder)
    rows = ROWS["turns"], {"messages": chat("hi", "hello")}, ROWS["thoughts"]
    path = write_jsonl(tmp_path / "chats.jsonl", *rows)
    found = prepared(path, folder, tmp_path / "examples", 400)
    wanted = [text for name in made.cases for text in made.cases[name]]
    wanted.insert(2, wanted[0])
    examples = [(ids.astype(np.int64), counted) for ids, counted in map(found.example, range(found.count))]
    assert marked(tokenizer, examples) == wanted
    assert (found.facts.examples, found.facts.split, found.facts.skipped) == (5, 2, 0)
    assert found.chats.tolist() == [0, 0, 1, 2, 2]
    said = "  2 chats are several examples, as the template rewrites what is past"
    assert _remarks("chats", found.facts, 400)[1] == said
    # One that is dropped is none that the next goes on from.
    thought = {"role": "assistant", "content": "hello", "reasoning_content": "so long " * 99}
    long = {"messages": [*chat("hi"), thought, *chat("and?", "so")]}
    path = write_jsonl(tmp_path / "long.jsonl", ROWS["turns"], long)
    short = prepared(path, folder, tmp_path / "examples", 99, too_long="drop")
    assert short.facts.dropped == 1 and short.chats.tolist() == [0, 0, 1]
    # An evaluation reads all of them, too.
    path = write_jsonl(tmp_path / "thoughts.jsonl", ROWS["thoughts"])
    files: Any = SimpleNamespace(files=model_files(folder))
    read = DocumentFiles([path], 400, files, "text", "assistant").documents()
    assert marked(tokenizer, [(each.tokens, each.counted) for each in read]) == made.cases["thoughts"]
