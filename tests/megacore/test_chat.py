"""Of a chat the loss counts what the assistant generates, to the token, whatever the template; bad rows say why."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import FAMILIES, SPECIAL, chat, write_tokenizer

from megacore.data.chat import BadExample, TrainOn, passages
from megacore.data.model_tokenizer import ModelFiles, ModelTokenizer, counts
from megacore.data.text import InputError

CHATS = {
    "one": chat("what is an axis?", "a name, with a size"),
    "three": chat("hi", "hello  there", "and?", "weights: ünïcode 🙂🙂", "more", "\tx\n\n  y", system="speak well"),
    "blanks": chat("  hi \n", "  two  blanks  around  ", "and", "\n\nlines\n\n"),
    "spelled": chat("user", "assistant", "assistant", "user"),
    "trailing": [*chat("hi", "hello", "and", "so"), {"role": "user", "content": "not answered"}],
    "left-alone": [*chat("hi", "hello"), *chat("more", "text")],
}


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of a family."""

    @cache
    def load(family: str, trim: bool = False) -> ModelTokenizer:
        made = FAMILIES[family]
        return ModelTokenizer(write_tokenizer(tmp_path_factory.mktemp(family), made.template, made.end, trim))

    return load


def counted_texts(
    tokenizer: ModelTokenizer, row: dict[str, Any], train_on: TrainOn = "assistant"
) -> list[tuple[str, str]]:
    """(all of the text, what counts of it) of each example that a row makes, from the tokens."""
    encoded = tokenizer.encode(passages(row, lambda: tokenizer.template, train_on))
    decode = tokenizer._tokenizer.decode
    return [(decode(ids.tolist()), decode(ids[counted].tolist())) for ids, counted in encoded]


def counted_text(tokenizer: ModelTokenizer, row: dict[str, Any], train_on: TrainOn = "assistant") -> tuple[str, str]:
    """That of a row that makes one."""
    (found,) = counted_texts(tokenizer, row, train_on)
    return found


@pytest.mark.parametrize("trim", [False, True], ids=["", "trim"])
@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_assistant_generates_counts_and_nothing_else(spelled: Any, family: str, name: str, trim: bool) -> None:
    messages, tokenizer, made = CHATS[name], spelled(family, trim), FAMILIES[family]
    answered = messages[:-1] if messages[-1]["role"] == "user" else messages
    turns = [index for index, message in enumerate(answered) if message["role"] == "assistant"]
    wanted = []
    for last in turns if made.alone else turns[-1:]:
        pieces = list(made.pieces(answered[: last + 1]))
        counts = [piece for piece, counted in pieces if counted][-1 if made.alone else 0 :]
        wanted.append(tuple(made.closed("".join(each)) for each in ([piece for piece, _ in pieces], counts)))
    assert counted_texts(tokenizer, {"messages": messages}) == wanted
    _, last_turn = counted_text(tokenizer, {"messages": messages}, "last")
    assert last_turn == made.closed(counts[-1])
    every = "".join(piece for piece, _ in made.pieces(messages))
    every = made.closed(every) if messages == answered or family == "ending" else every
    _, whole = counted_text(tokenizer, {"messages": messages}, "all")
    assert whole == every.removeprefix(next((token for token in SPECIAL if every.startswith(token)), "Question"[:1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_of_weight_0_is_not_learned(spelled: Any, family: str) -> None:
    """It stands in the text of the turns after it, as those that count do."""
    messages, tokenizer = CHATS["three"], spelled(family)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

    def weighted(weights: dict[int, int]) -> dict[str, Any]:
        return {"messages": [m | ({"weight": weights[n]} if n in weights else {}) for n, m in enumerate(messages)]}

    others, plain = dict.fromkeys(turns, 0), {"messages": messages}
    only_last, only_first = others | {turns[-1]: 1}, others | {turns[0]: 1}
    last = counted_texts(tokenizer, plain, "last")
    assert counted_texts(tokenizer, weighted(only_last)) == last
    assert counted_texts(tokenizer, weighted(only_last), "last") == last
    cut = {"messages": messages[: turns[0] + 1]}
    assert counted_texts(tokenizer, weighted(only_first)) == counted_texts(tokenizer, cut)
    assert counted_texts(tokenizer, weighted({turns[0]: 1}), "all") == counted_texts(tokenizer, plain, "all")
    with pytest.raises(BadExample, match=r"has no counted turn of the assistant \(all have the weight 0\)"):
        passages(weighted(others), lambda: tokenizer.template, "assistant")
    with pytest.raises(BadExample, match="a turn has the weight 0, and all tokens count"):
        passages(weighted(only_last), lambda: tokenizer.template, "all")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_inference(spelled: Any, family: str) -> None:
    """What transformers makes of the chat, up to the last token that counts; and what it marks, where it can."""
    tokenizer, messages = spelled(family), CHATS["three"]
    ids, counted = tokenizer.encode(passages({"messages": messages}, lambda: tokenizer.template, "assistant"))[-1]
    if family == "plain":  # whose template ends no turn
        ids, counted = ids[:-1], counted[:-1]
    theirs = tokenizer._tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=family == "marks"
    )
    assert theirs["input_ids"] == ids.tolist()
    if family == "marks":
        assert theirs["assistant_masks"] == counted.astype(int).tolist()


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


@pytest.mark.parametrize("tools", [[{"name": "warmth"}], '[{"name": "warmth"}]', None, "", []])
def test_tools_and_calls(tmp_path: Path, tools: object) -> None:
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path, CALLING, "<|im_end|>"))
    text, counted = counted_text(tokenizer, {"messages": CALLED, "tools": tools})
    assert text.startswith("<|system|>warmth<|end|>\n<|im_start|>user" if tools else "<|im_start|>user")
    assert counted == '<|user|>warmth({"unit": "C"})<|/head|><|im_end|>21 degrees<|im_end|>'


def test_a_marked_turn_may_have_several_parts_and_the_last_turn_keeps_all_of_its_own(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}"
        "{%- generation -%}{{ m.content.split('/')[0] }}{%- endgeneration -%}{{ '||' }}"
        "{% generation %}{{ m.content.split('/')[-1] + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    tokenizer, row = ModelTokenizer(write_tokenizer(tmp_path, template)), {"messages": chat("hi", "a/b", "and", "c/d")}
    assert counted_text(tokenizer, row)[1] == "ab</s>cd</s>"
    assert counted_text(tokenizer, row, "last")[1] == "cd</s>"


# -- prompts with completions, and texts


def test_of_a_prompt_and_completion_the_completion_and_its_end_count(spelled: Any) -> None:
    tokenizer = spelled("chatml")
    row = {"prompt": "Q: two? ", "completion": "A: three", "messages": None}
    assert counted_text(tokenizer, row) == ("<s>Q: two? A: three<|im_end|>", "A: three<|im_end|>")
    assert counted_text(tokenizer, row, "all")[1] == "Q: two? A: three<|im_end|>"
    # A token that holds characters of both counts: what completes the prompt is all there.
    assert counted_text(tokenizer, {"prompt": "the", "completion": "re"})[1] == "ere<|im_end|>"


def test_of_a_text_all_counts_but_its_first_token(spelled: Any) -> None:
    tokenizer = spelled("chatml")
    assert counted_text(tokenizer, {"text": "plain text"}) == ("<s>plain text<|im_end|>", "plain text<|im_end|>")
    assert counted_text(tokenizer, {"text": "ended<|im_end|>"})[0] == "<s>ended<|im_end|>"


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
        ({}, "has no keys: needs 'messages', 'prompt' and 'completion', or 'text'"),
        ({"chat": [], "id": 3, "text": None}, "has 'chat', 'id': needs 'messages'"),
        ({"messages": "hi"}, "messages is a str, not a list"),
        ({"messages": []}, "has no messages"),
        ({"messages": ["hi"]}, "message 1 is a str, not an object"),
        (message(role="bot", content="x"), "message 2 has the role 'bot': choose from system,"),
        (message(content="x"), "message 2 has the role None"),
        (message(role=["user"], content="x"), "message 2 has the role ['user']"),
        (message(role="assistant"), "the content of message 2 is null, not text"),
        (message(role="assistant", content=[{"text": "x"}]), "the content of message 2 is a list, not text"),
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
        ({"prompt": "x", "text": "y"}, "has 'prompt' and 'text': name what answers the prompt 'completion'"),
        ({"prompt": "x", "completion": ""}, "the completion is empty"),
        ({"prompt": ["x"], "completion": "y"}, "prompt is a list, not text"),
        ({"prompt": "x", "completion": 3}, "completion is a int, not text"),
        ({"text": ""}, "the text is empty"),
        ({"text": 3}, "text is a int, not text"),
    ],
)
def test_bad_rows_say_why(spelled: Any, row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadExample) as error:
        passages(row, lambda: spelled("chatml").template, "assistant")
    assert words in str(error.value)


def test_a_prompt_that_does_not_lead_to_the_turn_is_named(tmp_path: Path) -> None:
    template = FAMILIES["chatml"].template.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>think' }}")
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path, template, "<|im_end|>"))
    choices: tuple[TrainOn, ...] = ("assistant", "last")
    for train_on in choices:
        with pytest.raises(BadExample, match=r"message 2: the chat template writes the messages before it otherwise"):
            counted_texts(tokenizer, {"messages": chat("hi", "hello")}, train_on)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template fails: roles must alternate"),
        ("{{ messages[0].nothing.there }}", "the chat template fails: "),
        ("{% for m in messages %}{{ m.content", "the chat template fails: "),
    ],
)
def test_a_template_that_fails_is_a_bad_row(tmp_path: Path, template: str, words: str) -> None:
    tokenizer = ModelTokenizer(write_tokenizer(tmp_path, template))
    with pytest.raises(BadExample) as error:
        counted_text(tokenizer, {"messages": chat("hi", "hello")})
    assert words in str(error.value)


def test_what_is_wrong_with_the_tokenizer_is_no_rows_fault(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template: set chat\.template"):
        counted_text(ModelTokenizer(write_tokenizer(tmp_path / "bare", None)), {"messages": chat("hi", "hello")})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the model's tokenizer cannot be loaded"):
        ModelTokenizer(tmp_path / "broken")
    with (
        pytest.raises(InputError, match="none is there: start from a folder that has it"),
        ModelFiles({}, {}, 3).folder(),
    ):
        pass
