"""Examples as text: a chat, a prompt with its completion or plain text, and which of its characters the loss counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TrainOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]
"""Characters [start, stop)."""
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], list[Any] | None, bool], tuple[str, list[Span]]]
"""(messages, tools, whether the assistant is prompted at the end) -> text, what the template marks as generated."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class BadExample(ValueError):
    """An example that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Passage:
    """A text, the spans of it that count, and whether it is one that a chat template has written."""

    text: str
    spans: list[Span]
    templated: bool


@dataclass(frozen=True)
class Template:
    """A chat template, and what is known of its tokens.

    Args:
        render: Writes messages.
        marks: Whether it marks what the assistant generates, by ``{% generation %}``.
        special: Tokens that are more than text, as they are spelled.
        end: The one that ends a text, "" if there is none.
    """

    render: Render
    marks: bool
    special: tuple[str, ...]
    end: str


def passage(row: Mapping[str, Any], template: Callable[[], Template], train_on: TrainOn) -> Passage:
    """Return the example in a row: its `messages` (and `tools`), its `prompt` and `completion`, or its `text`.

    Messages after the assistant's last are left out, as nothing of them is learned, unless all tokens count.

    Raises:
        BadExample: it is none.
    """
    present = {key: value for key, value in row.items() if value is not None}
    if "messages" in present:
        return _chat(_messages(present["messages"]), _tools(present.get("tools")), template(), train_on)
    if "completion" in present:
        prompt, completion = (_text(present.get(key, ""), key) for key in ("prompt", "completion"))
        if not completion:
            raise BadExample("the completion is empty")
        start = 0 if train_on == "all" else len(prompt)
        return Passage(prompt + completion, [(start, len(prompt) + len(completion))], templated=False)
    if "text" in present:
        text = _text(present["text"], "text")
        if not text:
            raise BadExample("the text is empty")
        return Passage(text, [(0, len(text))], templated=False)
    keys = ", ".join(map(repr, present)) or "no keys"
    raise BadExample(f"has {keys}: needs 'messages', 'prompt' and 'completion', or 'text'")


# -- what a row says


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BadExample(f"{what} is {_kind(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadExample(f"{what} has the lone surrogate {value[error.start]!r} at {error.start}") from error
    return value


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list):
        raise BadExample(f"messages is {_kind(value)}, not a list")
    if not value:
        raise BadExample("has no messages")
    return [_message(f"message {number}", message) for number, message in enumerate(value, start=1)]


def _message(name: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise BadExample(f"{name} is {_kind(value)}, not an object")
    message = {key: each for key, each in value.items() if each is not None}
    role, calls = message.get("role"), message.get("tool_calls")
    if role not in ROLES:
        raise BadExample(f"{name} has the role {role!r}: choose from {', '.join(ROLES)}")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise BadExample(f"{name}: tool_calls is {_kind(calls)}, not a list of objects")
    if "content" not in message and calls:
        message["content"] = ""
    content = _text(message.get("content"), f"the content of {name}")
    if role == "assistant" and not calls and not content.strip():
        raise BadExample(f"{name}: the assistant says nothing")
    return message


def _tools(value: object) -> list[Any] | None:
    """Return a list of JSON schemas; tables often hold it as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise BadExample(f"tools is text that is not JSON: {error}") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadExample(f"tools is {_kind(value)}, not a list of objects")
    return value


# -- what the template makes of a chat


def _chat(messages: list[Message], tools: list[Any] | None, template: Template, train_on: TrainOn) -> Passage:
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "all":
        text, _ = template.render(messages, tools, False)
        return Passage(_text(text, "what the chat template writes"), [(0, len(text))], templated=True)
    if not turns:
        raise BadExample("has no turn of the assistant, and nothing else counts")
    messages = messages[: turns[-1] + 1]
    text, marked = template.render(messages, tools, False)
    _text(text, "what the chat template writes")
    if train_on == "last":
        turns = turns[-1:]
    if not template.marks:
        spans = [_turn(text, messages, turn, tools, template) for turn in turns]
    elif train_on == "last":
        spans = marked[len(template.render(messages[:-1], tools, False)[1]) :] if len(messages) > 1 else marked
    else:
        spans = marked
    return Passage(text, spans, templated=True)


def _turn(text: str, messages: Sequence[Message], turn: int, tools: list[Any] | None, template: Template) -> Span:
    """Return what the assistant writes in a turn, from the end of what prompts it to the token that ends the turn.

    The text of the messages before it, with the prompt, ends where the turn begins; that of the messages up to it
    ends where the turn does.
    """
    prompt, _ = template.render(messages[:turn], tools, True)
    if not text.startswith(prompt):
        raise BadExample(_ambiguous(turn, "the messages before it", "when they are to be answered"))
    start = len(prompt)
    if turn == len(messages) - 1:
        return start, _closed(text, start, len(text), template)
    until, _ = template.render(messages[: turn + 1], tools, False)
    for stop in _ends(until, template.end):
        if stop > start and text.startswith(until[:stop]):
            return start, _closed(text, start, stop, template)
    if unchanged := _as_it_stands(text, start, messages[turn], template):
        return start, unchanged
    raise BadExample(_ambiguous(turn, "it", "when other messages follow"))


def _ambiguous(turn: int, what: str, when: str) -> str:
    return (
        f"message {turn + 1}: the chat template writes {what} otherwise {when}, so that what the assistant generates "
        "cannot be told: set chat.train_on=last, or a chat.template that marks it by {% generation %}"
    )


def _ends(text: str, end: str) -> Iterator[int]:
    """Yield the lengths of a text without what a template may put at the end of a chat alone: blanks, the token of the
    end."""
    yield len(text)
    stripped = text.rstrip()
    yield len(stripped)
    if end and stripped.endswith(end):
        yield len(stripped) - len(end)
        yield len(stripped.removesuffix(end).rstrip())


def _closed(text: str, start: int, stop: int, template: Template) -> int:
    """Return where a turn ends within [start, stop): without the blanks after its last special token."""
    stripped = text[start:stop].rstrip()
    return start + len(stripped) if stripped.endswith(template.special) else stop


def _as_it_stands(text: str, start: int, message: Message, template: Template) -> int | None:
    """Return where a turn ends that begins with its content, unchanged but for blanks around it, and a special
    token."""
    content = message["content"].strip()
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    if not content or message.get("tool_calls") or not text.startswith(content, begin):
        return None
    rest = text[begin + len(content) :].lstrip()
    token = next((token for token in template.special if rest.startswith(token)), None)
    return None if token is None else len(text) - len(rest) + len(token)
