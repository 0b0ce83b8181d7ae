"""Examples as text: a chat, a prompt with its completion or plain text, and which of its characters the loss counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megacore.data.formats import (
    WEIGHT,
    BadExample,
    Example,
    ImageFile,
    Message,
    example,
    images_of,
    preference,
    text_of,
)

TrainOn = Literal["assistant", "last", "all"]
Span = tuple[int, int]
"""Characters [start, stop)."""
Render = Callable[[Sequence[Message], list[Any] | None, bool], tuple[str, list[Span]]]
"""(messages, tools, whether the assistant is prompted at the end) -> text, what the template marks as generated."""

LEARNED = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""The keys of what the assistant says beside its content."""
_WRITTEN = "what the chat template writes"


@dataclass(frozen=True)
class Passage:
    """A text, and the spans of it that count. templated: whether a chat template has written it, special tokens
    included; ends: whether the tokenizer's token of the end follows, which counts; images: those that its marks stand
    for."""

    text: str
    spans: list[Span]
    templated: bool
    ends: bool
    images: tuple[ImageFile, ...] = ()


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


def passages(
    row: Mapping[str, Any], template: Callable[[], Template], train_on: TrainOn, folder: Path | None = None
) -> list[Passage]:
    """Return the example in a row, whatever its format; ``folder`` is that of
    :func:`~megacore.data.formats.example`.

    Messages after the assistant's last are left out, as nothing of them is learned, unless all tokens count. A chat is
    several passages where the template rewrites what is past: each counted turn stands in one of them, once, behind the
    text that the assistant is given when it generates that turn. Raises BadExample: it is none.
    """
    said = example(row, folder)
    if said.messages:
        return _chat(said.messages, said.tools, template(), train_on)
    text, at, spans = "".join(part for part, _ in said.parts), 0, list[Span]()
    for part, trained in said.parts:
        if trained or train_on == "all":
            spans.append((at, at + len(part)))
        at += len(part)
    return [Passage(text, spans, templated=False, ends=True)]


def of_pair(row: Mapping[str, Any], template: Callable[[], Template]) -> list[Passage]:
    """Return the prompt of a row of preferences, and the prompt with each of its answers; what of them counts is told
    by their tokens. Raises BadExample: it is no pair."""
    prompt, *answered = preference(row)
    return [_written(prompt, True, template), *(_written(each, False, template) for each in answered)]


def _written(said: Example, is_prompt: bool, template: Callable[[], Template]) -> Passage:
    if not said.messages:
        return Passage("".join(part for part, _ in said.parts), [], templated=False, ends=not is_prompt)
    text = text_of(template().render(said.messages, said.tools, is_prompt)[0], _WRITTEN)
    if said.tools and not is_prompt and _same(text, said.messages, None, template()):
        raise BadExample(_unwritten("the pair", "tools"))
    return Passage(text, [], templated=True, ends=False)


# -- what the template makes of a chat


def _chat(messages: Sequence[Message], tools: list[Any] | None, template: Template, train_on: TrainOn) -> list[Passage]:
    """Return the chat up to the last turn of the assistant, and to each that no later text has as it is generated."""
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [index for index in spoken if messages[index].get(WEIGHT, 1)]
    messages = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages]
    made: list[Passage] = []
    if train_on == "all":
        if turns != spoken:
            raise BadExample(f"a turn has the {WEIGHT} 0, and all tokens count: choose another chat.train_on")
        text = text_of(template.render(messages, tools, False)[0], _WRITTEN)
        ends = turns[-1:] == [len(messages) - 1] and _closed(text, 0, template) is None
        made.append(Passage(text, [(0, len(text))], templated=True, ends=ends, images=images_of(messages)))
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
    """Return a chat that ends with a turn of the assistant, of which this turn counts. It is what the template marks of
    it, or all from the end of what prompts it to the token that ends the turn."""
    *before, message = messages
    images = images_of(messages)
    text, marked = template.render(messages, tools, False)
    text_of(text, _WRITTEN)
    said = message.get("content")
    lost = isinstance(said, str) and said.strip() not in text
    if lost and _same(text, [*before, {**message, "content": ""}], tools, template):
        raise BadExample(
            f"message {len(messages)}: the chat template writes nothing of its content: set chat.template to one that "
            "does"
        )
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
        return Passage(text, marked[len(known) :], templated=True, ends=False, images=images)
    prompt, _ = template.render(before, tools, True)
    if not text.startswith(prompt):
        raise BadExample(
            f"message {len(messages)}: the chat template writes the messages before it otherwise when they are to be "
            "answered, so that what the assistant generates cannot be told: set chat.template to one that marks it by "
            "{% generation %}"
        )
    stop = _closed(text, len(prompt), template)
    span = len(prompt), len(text) if stop is None else stop
    return Passage(text, [span], templated=True, ends=stop is None, images=images)


def _same(text: str, messages: Sequence[Message], tools: list[Any] | None, template: Template) -> bool:
    """Return whether the template writes a text of messages; what it refuses, it reads."""
    try:
        return template.render(messages, tools, False)[0] == text
    except BadExample:
        return False


def _within(later: str, turn: Passage, template: Template) -> list[Span] | None:
    """Return what the assistant generates in a turn, in a text that goes on after it; None if it reads otherwise there.
    A template may write a turn otherwise once messages follow (without its thoughts), or what is before it (the words
    of the system in the last message of the user). What the assistant does not generate it must not learn."""
    # At the end of a chat a template may put a token of the end after the one that ends the turn.
    if template.marks:
        spans = turn.spans
        if not spans or later.startswith(turn.text[: spans[-1][1]]):
            return spans
        *spans, last = spans
        text = turn.text[: spans[-1][1]] if spans and turn.text[slice(*last)] == template.end else ""
        return spans if _closed(text, 0, template) is not None and later.startswith(text) else None
    ((start, _),) = turn.spans
    text = turn.text.rstrip()
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
