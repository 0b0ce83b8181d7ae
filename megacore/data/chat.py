"""Examples as text: a chat, a prompt with its completion or plain text, and which of its characters the loss counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megacore.data.text import kind_of, text_problem
from megacore.say import brief

TrainOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]
"""Characters [start, stop)."""
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], list[Any] | None, bool], tuple[str, list[Span]]]
"""(messages, tools, whether the assistant is prompted at the end) -> text, what the template marks as generated."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
WEIGHT = "weight"
"""The field of a message that is 0 where a turn of the assistant is not to be learned."""
LEARNED = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""The keys of what the assistant says beside its content."""
_WRITTEN = "what the chat template writes"


class BadExample(ValueError):
    """An example that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Passage:
    """A text, and the spans of it that count. templated: whether a chat template has written it, special tokens
    included; ends: whether the tokenizer's token of the end follows, which counts."""

    text: str
    spans: list[Span]
    templated: bool
    ends: bool


@dataclass(frozen=True)
class Template:
    """A chat template, and what is known of its tokens. marks: whether it marks what the assistant generates, by
    ``{% generation %}``; special: tokens that are more than text, as they are spelled; end: the one that ends a text,
    "" if there is none; stops: those at which generating ends."""

    render: Render
    marks: bool
    special: tuple[str, ...]
    end: str
    stops: tuple[str, ...]


def passages(row: Mapping[str, Any], template: Callable[[], Template], train_on: TrainOn) -> list[Passage]:
    """Return the example in a row: its `messages` (and `tools`), its `prompt` and `completion`, or its `text`.

    Messages after the assistant's last are left out, as nothing of them is learned, unless all tokens count. A chat is
    several passages where the template rewrites what is past: each counted turn stands in one of them, once, behind
    the text that the assistant is given when it generates that turn.

    Raises:
        BadExample: it is none.
    """
    present = {key: value for key, value in row.items() if value is not None}
    _nothing_is_passed_over(present)
    if "messages" in present:
        return _chat(_messages(present["messages"]), _tools(present.get("tools")), template(), train_on)
    if "completion" in present:
        prompt, completion = (_text(present.get(key, ""), key) for key in ("prompt", "completion"))
        if not completion:
            raise BadExample("the completion is empty")
        start = 0 if train_on == "all" else len(prompt)
        spans = [(start, len(prompt) + len(completion))]
        return [Passage(prompt + completion, spans, templated=False, ends=True)]
    if "text" in present:
        text = _text(present["text"], "text")
        if not text:
            raise BadExample("the text is empty")
        return [Passage(text, [(0, len(text))], templated=False, ends=True)]
    keys = ", ".join(map(repr, present)) or "no keys"
    raise BadExample(f"has {keys}: needs 'messages', 'prompt' and 'completion', or 'text'")


# -- what a row says


def _nothing_is_passed_over(present: Mapping[str, Any]) -> None:
    """Raise BadExample where a row says more of its text than would be read; of other things it may say anything."""
    if "messages" in present:
        for key, way_out in (("system", "make it the first message"), ("chat_template_kwargs", "leave them out")):
            if present.get(key):
                raise BadExample(f"has {key!r} beside 'messages', which is not read: {way_out}")
    elif present.get("prompt") and present.get("text") and "completion" not in present:
        raise BadExample("has 'prompt' and 'text': name what answers the prompt 'completion'")


def _text(value: object, what: str) -> str:
    problem = text_problem(value, what)
    if problem is not None:
        raise BadExample(problem)
    return str(value)


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list):
        raise BadExample(f"messages is {kind_of(value)}, not a list")
    if not value:
        raise BadExample("has no messages")
    return [_message(f"message {number}", message) for number, message in enumerate(value, start=1)]


def _message(name: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise BadExample(f"{name} is {kind_of(value)}, not an object")
    message = {key: each for key, each in value.items() if each is not None}
    role, calls = message.get("role"), message.get("tool_calls")
    if role not in ROLES:
        raise BadExample(f"{name} has the role {role!r}: choose from {', '.join(ROLES)}")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise BadExample(f"{name}: tool_calls is {kind_of(calls)}, not a list of objects")
    if "content" not in message and calls:
        message["content"] = ""
    content = _text(message.get("content"), f"the content of {name}")
    if role == "assistant" and not calls and not content.strip():
        raise BadExample(f"{name}: the assistant says nothing")
    if (weight := message.get(WEIGHT, 1)) not in (0, 1):
        raise BadExample(f"{name} has the {WEIGHT} {brief(weight)}: choose 1, or 0 for a turn that does not count")
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
        raise BadExample(f"tools is {kind_of(value)}, not a list of objects")
    return value


# -- what the template makes of a chat


def _chat(messages: list[Message], tools: list[Any] | None, template: Template, train_on: TrainOn) -> list[Passage]:
    """Return the chat up to the last turn of the assistant, and to each that no later text has as it is generated."""
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [index for index in spoken if messages[index].get(WEIGHT, 1)]
    messages = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
    made: list[Passage] = []
    if train_on == "all":
        if turns != spoken:
            raise BadExample(f"a turn has the {WEIGHT} 0, and all tokens count: choose another chat.train_on")
        text = _text(template.render(messages, tools, False)[0], _WRITTEN)
        ends = turns[-1:] == [len(messages) - 1] and _closed(text, 0, template) is None
        made.append(Passage(text, [(0, len(text))], templated=True, ends=ends))
    elif turns:
        messages = messages[: turns[-1] + 1]
        for turn in reversed(turns) if train_on == "assistant" else turns[-1:]:
            ended = _turn(messages[: turn + 1], tools, template)
            shared = _within(made[-1].text, ended, template) if made else None
            if shared is None:
                made.append(ended)
            else:
                made[-1].spans[:0] = shared
    else:
        whose = f"counted turn of the assistant (all have the {WEIGHT} 0)" if spoken else "turn of the assistant"
        raise BadExample(f"has no {whose}, and nothing else counts")
    if tools and _same(made[0].text, messages, None, template):
        raise BadExample(_unwritten("the example", "tools"))
    return made[::-1]


def _turn(messages: list[Message], tools: list[Any] | None, template: Template) -> Passage:
    """Return a chat that ends with a turn of the assistant, of which this turn counts.

    It is what the template marks of it, or all from the end of what prompts it to the token that ends the turn.
    """
    *before, message = messages
    text, marked = template.render(messages, tools, False)
    _text(text, _WRITTEN)
    for key in LEARNED:
        if message.get(key):
            others = {each: value for each, value in message.items() if each != key}
            if _same(text, [*before, others], tools, template):
                raise BadExample(_unwritten(f"message {len(messages)}", key))
    if template.marks:
        earlier = any(each["role"] == "assistant" for each in before)
        known = template.render(before, tools, False)[1] if earlier else []
        if marked[: len(known)] != known:
            raise BadExample(
                f"message {len(messages)}: the chat template marks the turns before it otherwise when it follows, so "
                "that what the assistant generates cannot be told: set chat.template to another one"
            )
        return Passage(text, marked[len(known) :], templated=True, ends=False)
    prompt, _ = template.render(before, tools, True)
    if not text.startswith(prompt):
        raise BadExample(
            f"message {len(messages)}: the chat template writes the messages before it otherwise when they are to be "
            "answered, so that what the assistant generates cannot be told: set chat.template to one that marks it by "
            "{% generation %}"
        )
    stop = _closed(text, len(prompt), template)
    return Passage(text, [(len(prompt), len(text) if stop is None else stop)], templated=True, ends=stop is None)


def _same(text: str, messages: Sequence[Message], tools: list[Any] | None, template: Template) -> bool:
    """Return whether the template writes a text of messages; what it refuses, it reads."""
    try:
        return template.render(messages, tools, False)[0] == text
    except BadExample:
        return False


def _within(later: str, turn: Passage, template: Template) -> list[Span] | None:
    """Return what the assistant generates in a turn, in a text that goes on after it; None if it reads otherwise there.

    A template may write a turn otherwise once messages follow (without its thoughts), or what is before it (the words
    of the system in the last message of the user). What the assistant does not generate it must not learn.
    """
    if template.marks:
        return turn.spans if later.startswith(turn.text[: turn.spans[-1][1] if turn.spans else 0]) else None
    ((start, _),) = turn.spans
    text = turn.text.rstrip()
    # At the end of a chat a template may put a token of the end after the one that ends the turn.
    for until in (text, text.removesuffix(template.end)):
        stop = _closed(until, start, template)
        if stop is not None and later.startswith(until[:stop]):
            return [(start, stop)]
    if not later.startswith(text):
        return None
    # The token that begins the next turn is the one that ends this one, where generating stops there.
    rest = later[len(text) :].lstrip()
    token = next((token for token in template.stops if rest.startswith(token)), None)
    return None if token is None else [(start, len(later) - len(rest) + len(token))]


def _closed(text: str, start: int, template: Template) -> int | None:
    """Return where a turn that begins at `start` ends with a special token, without blanks after it; None if not."""
    stripped = text.rstrip()
    return len(stripped) if len(stripped) > start and stripped.endswith(template.special) else None


def _unwritten(where: str, key: str) -> str:
    return (
        f"{where} has {key}, and the chat template writes nothing of them: set chat.template to one that does, or take "
        "them out of the data"
    )
