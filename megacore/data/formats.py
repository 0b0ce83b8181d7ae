"""The formats of examples: the keys that each is recognised by, and how a row of it becomes turns or bare text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megacore.say import brief
from megacore.store.io.strict_json import kind_of, text_problem

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPEAKERS = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    "human": "user",
    "function_call": "assistant",
}
"""{who a turn is ``from``: its role}; what a ``function_call`` says is a call or a list of them, as JSON."""
WEIGHT = "weight"
"""The field of a message that is 0 where a turn of the assistant is not to be learned."""
TRAINED, UNTRAINED = "trained", "untrained"
"""In the place of a role: bare text, that no template writes."""
MARK = "<image>"
"""The place of an image in a text, of chats that name their images beside their messages."""
_IMAGES, _FILES = ("images", "image"), ("path", "url", "image")
"""The keys of a row that names them so, and of a part of a message that is one."""
_RATED = "which are ratings, and there is no training on them here"


@dataclass(frozen=True)
class Format:
    """A format of rows. ``needs``: the keys that it is recognised by; ``turns``: (role, keys) of each turn: what the
    keys say, with a blank line between them; one that says nothing is left out. Without any, the first key holds a list
    of messages. ``also``: keys that may be there too; ``not_read``: (a key that says more of the text than would be
    read, the way out) of each; ``refused``: why it is not trained on; empty if it is."""

    name: str
    needs: tuple[str, ...]
    turns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    also: tuple[str, ...] = ()
    not_read: tuple[tuple[str, str], ...] = ()
    refused: str = ""

    def __str__(self) -> str:
        known = all(key in self.name for key in self.needs)
        return self.name if known else f"{self.name} ({', '.join(self.needs)})"


_KWARGS = ("chat_template_kwargs", "leave them out")
FORMATS = (
    Format(
        "chosen and rejected",
        ("chosen", "rejected"),
        also=("prompt", "tools"),
        not_read=(
            _KWARGS,
            ("system", "make it the first message of the prompt"),
            ("images", "preferences are of text alone"),
            *((key, f"name it by data.map={{prompt: {key}}}") for key in ("question", "instruction", "input", "query")),
        ),
        refused="which are preferences: learn from both by preference.loss=dpo (or ipo, simpo, orpo), or what was "
        "chosen by data.map={messages: chosen}, or {completion: chosen}",
    ),
    Format(
        "rated completions", ("completion", "label"), refused=f"{_RATED}: keep the good completions, without the label"
    ),
    Format("messages", ("messages",), also=("tools",), not_read=(("system", "make it the first message"), _KWARGS)),
    Format("ShareGPT", ("conversations",), also=("system", "tools"), not_read=(_KWARGS,)),
    Format(
        "Alpaca",
        ("instruction", "output"),
        (("system", ("system",)), ("user", ("instruction", "input")), ("assistant", ("output",))),
        also=("input", "system"),
        not_read=(("history", "write it as messages"),),
    ),
    Format(
        "prompt and completion",
        ("completion",),
        ((UNTRAINED, ("prompt",)), (TRAINED, ("completion",))),
        also=("prompt",),
    ),
    Format(
        "text", ("text",), ((TRAINED, ("text",)),), not_read=(("prompt", "name what answers the prompt 'completion'"),)
    ),
)
"""In this order: of rows that have the keys of several, the first one counts."""
PREFERENCES = FORMATS[0]
IN_TURNS = ("role", "content", "from", "value")
"""Keys of a message."""
KEYS = tuple(dict.fromkeys([key for each in FORMATS for key in (*each.needs, *each.also)] + [*IN_TURNS]))
"""All keys that are read."""


class BadExample(ValueError):
    """An example that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Example:
    """A chat, with the tools that it has, or bare text in parts (text, whether it is learned)."""

    messages: Sequence[Message] = ()
    tools: list[Any] | None = None
    parts: Sequence[tuple[str, bool]] = ()


@dataclass(frozen=True)
class ImageFile:
    """An image of a chat. ``where``: what names it there."""

    path: Path
    where: str


def renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row, and the turns in it, under the keys that are read here: `names` is {one of these: the row's}. What
    has none of the row's keys is as it was. Raises BadExample: it has some of them alone."""
    if not names:
        return row
    outer = {ours: theirs for ours, theirs in names.items() if ours not in IN_TURNS}
    inner = {ours: theirs for ours, theirs in names.items() if ours in IN_TURNS}
    needed = [theirs for ours, theirs in outer.items() if ours not in ("input", "system", "tools")]
    missing = [theirs for theirs in needed if row.get(theirs) is None]
    if missing and len(missing) < len(needed):
        raise BadExample(f"has no {missing[0]!r}, which data.map names: it names {', '.join(map(repr, needed))}")
    found = row if missing else _renamed(row, outer)
    lists = {key: value for key, value in found.items() if inner and isinstance(value, list)}
    turns = {
        key: [_renamed(turn, inner) if isinstance(turn, Mapping) else turn for turn in lists[key]] for key in lists
    }
    return {**found, **turns}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    there = {ours: theirs for ours, theirs in names.items() if theirs in values}
    kept = {key: value for key, value in values.items() if key not in there and key not in there.values()}
    return kept | {ours: values[theirs] for ours, theirs in there.items()}


def format_of(row: Mapping[str, Any]) -> Format:
    """Return the format of a row. Raises BadExample: it has none; the message names the nearest."""
    found = next((each for each in FORMATS if all(row.get(key) is not None for key in each.needs)), None)
    if found is None:
        raise BadExample(_unknown(tuple(key[:_LONG] for key, value in row.items() if value is not None)[:_LOOKED_AT]))
    return found


def has_images(row: Mapping[str, Any], parts: bool) -> bool:
    """Return whether a row is a chat with images, or, with ``parts``, with contents in parts as these have."""
    turns = next((turns for key in ("messages", "conversations") if isinstance(turns := row.get(key), list)), [])
    said = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    kinds = [part.get("type") for each in said if isinstance(each, list) for part in each if isinstance(part, Mapping)]
    in_parts = any(isinstance(each, list) for each in said) if parts else "image" in kinds
    return in_parts or bool(turns and any(row.get(key) for key in _IMAGES))


def images_of(messages: Sequence[Message]) -> tuple[ImageFile, ...]:
    """Return the images of the messages of an example, in their order."""
    in_parts = [(number, said) for number, each in enumerate(messages, 1) if isinstance(said := each["content"], list)]
    named = ((number, key, part) for number, parts in in_parts for part in parts for key in _named(part))
    return tuple(ImageFile(Path(part[key]), f"message {number}: {key} {part[key]}") for number, key, part in named)


def _named(part: Mapping[str, Any]) -> list[str]:
    """Return the keys by which a part names an image. Tables have all keys in each, most of them null."""
    return [key for key in _FILES if part["type"] == "image" and part.get(key) is not None]


def example(row: Mapping[str, Any], folder: Path | None = None) -> Example:
    """Return what a row holds. ``folder``: that which images are named from, where chats may have some; None: they may
    not. Raises BadExample: it is no example."""
    kind = format_of(row)
    if kind.refused:
        raise BadExample(f"has {' and '.join(map(repr, kind.needs))}, {kind.refused}")
    present = _read(row, kind)
    tools = _tools(present.get("tools")) if "tools" in kind.also else None
    if not kind.turns:
        return Example(_listed(present, kind, folder), tools)
    if all(isinstance(present.get(key), list) for key in ("prompt", "completion")) and kind.turns[0][0] == UNTRAINED:
        before, after = (_messages(present[key], key) for key in ("prompt", "completion"))
        asked = [{**each, WEIGHT: 0} if each["role"] == "assistant" else each for each in before]  # not learned
        return Example([*asked, *after], _tools(present.get("tools")))
    turns = [(role, _joined(present, keys, kind)) for role, keys in kind.turns]
    if kind.turns[-1][0] == TRAINED:
        return Example(parts=[(text, role == TRAINED) for role, text in turns])
    return Example([{"role": role, "content": text} for role, text in turns if text or role != "system"])


def _read(row: Mapping[str, Any], kind: Format) -> dict[str, Any]:
    """Return what a row has that is not null. BadExample if that has more of the text than would be read."""
    present = {key: value for key, value in row.items() if value is not None}
    for key, way_out in kind.not_read:
        if present.get(key):
            raise BadExample(f"has {key!r} beside {kind.needs[0]!r}, which is not read: {way_out}")
    return present


def preference(row: Mapping[str, Any]) -> list[Example]:
    """Return the prompt of a pair, the prompt with what was chosen, and the prompt with what was rejected. Where the
    row has no prompt, it is what both begin with: messages, or characters. Raises BadExample: the row is no pair."""
    missing = [key for key in PREFERENCES.needs if row.get(key) is None]
    if missing:
        keys = ", ".join(repr(key[:_LONG]) for key, value in islice(row.items(), _LOOKED_AT) if value is not None)
        raise BadExample(
            f"has {keys or 'no keys'}, and no {' and no '.join(map(repr, missing))}: preferences are "
            "pairs, whose keys a recipe names as in data.map={chosen: KEY, rejected: KEY}"
        )
    present = _read(row, PREFERENCES)
    prompt, *answers = (present.get(key) for key in ("prompt", *PREFERENCES.needs))
    if not any(isinstance(each, list) for each in answers):
        said = None if prompt is None else text_of(prompt, "the prompt")
        begin, *ends = _parted(said, *map(text_of, answers, PREFERENCES.needs))
        return [Example(parts=[(text, False)]) for text in (begin, *(begin + end for end in ends))]
    chats = [*map(_messages, answers, PREFERENCES.needs)]
    if isinstance(prompt, str) and all(chat[0]["role"] == "user" and chat[0]["content"] == prompt for chat in chats):
        prompt = None  # which the chats begin with
    before, *behind = _parted(None if prompt is None else _messages(prompt, "the prompt"), *chats)
    for key, chat in zip(PREFERENCES.needs, behind, strict=True):
        if chat[-1]["role"] != "assistant":
            raise BadExample(
                f"{key} ends with the {chat[-1]['role']}, not with the assistant, of whom it is to be learned"
            )
    tools = _tools(present.get("tools"))
    messages = (before, *([*before, *chat] for chat in behind))
    return [Example([{key: turn[key] for key in turn if key != WEIGHT} for turn in chat], tools) for chat in messages]


Said = TypeVar("Said", str, list[Message])


def _parted(prompt: Said | None, chosen: Said, rejected: Said) -> tuple[Said, Said, Said]:
    """Return the prompt, which is what both answers begin with where there is none, and the answers behind it."""
    if prompt is None:
        differ = (index for index, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
        end = next(differ, -1)
        if end > 0 and chosen[end - 1] == " ":
            end -= 1  # a blank before the answers is theirs, as of most tokens
        if end < 0:
            end = min(len(chosen), len(rejected)) - 1
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    if not prompt:
        raise BadExample(
            "has no prompt: give 'prompt', or begin 'chosen' and 'rejected' with the same messages or text"
        )
    for key, answer in zip(PREFERENCES.needs, (chosen, rejected), strict=True):
        if not answer:
            raise BadExample(f"the {key} answer is empty")
    if chosen == rejected:
        raise BadExample("the chosen and the rejected answer are the same")
    return prompt, chosen, rejected


def _joined(present: Mapping[str, Any], keys: Sequence[str], kind: Format) -> str:
    texts = {key: text_of(present.get(key, ""), key) for key in keys}
    if keys[0] in kind.needs and not any(map(str.strip, texts.values())):
        raise BadExample(f"the {keys[0]} is empty")
    return "\n\n".join(text for text in texts.values() if text)


def _listed(present: Mapping[str, Any], kind: Format, folder: Path | None) -> list[Message]:
    messages = _messages(present[kind.needs[0]], kind.needs[0], folder is not None)
    if "system" in kind.also and present.get("system"):
        if messages[0]["role"] == "system":
            raise BadExample(f"has 'system' beside {kind.needs[0]!r} that begin with one of their own: leave one out")
        messages = [{"role": "system", "content": text_of(present["system"], "system")}, *messages]
    if folder is None:
        return messages
    key = next((key for key in _IMAGES if present.get(key)), None)
    messages = messages if key is None else _marked(messages, key, present[key])
    return [_placed(f"message {number}", each, folder) for number, each in enumerate(messages, 1)]


# -- what is none


_LOOKED_AT, _LONG = 20, 50  # keys of a row, and characters of one
_CLOSE = 0.75


@lru_cache(maxsize=64)
def _unknown(keys: tuple[str, ...]) -> str:
    """Return why a row with these keys is of no format, and which one is nearest."""
    has = f"has {', '.join(map(brief, map(repr, keys))) or 'no keys'}"
    plain = {key.casefold(): key for key in keys}

    def meant(key: str) -> str | None:
        return key if key in keys else next((plain[near] for near in get_close_matches(key, plain, 1, _CLOSE)), None)

    def nearness(kind: Format) -> tuple[int, int]:
        return (sum(meant(key) is not None for key in (*kind.needs, *kind.also)), -len(kind.needs))

    nearest = max((each for each in FORMATS if not each.refused), key=nearness)
    if not nearness(nearest)[0]:
        known = ", ".join(str(each) for each in FORMATS if not each.refused)
        return f"{has}, of no format ({known}): name its keys as in data.map={{prompt: KEY, completion: KEY}}"
    names = {key: meant(key) or "KEY" for key in nearest.needs if key not in keys}
    said = ", ".join(f"{ours}: {theirs}" for ours, theirs in names.items())
    return f"{has}, no {' and no '.join(map(repr, names))}: the nearest format is {nearest}, by data.map={{{said}}}"


# -- what a row says


def text_of(value: object, what: str) -> str:
    problem = text_problem(value, what)
    if problem is not None:
        raise BadExample(problem)
    return str(value)


def _messages(value: object, key: str, parts: bool = False) -> list[Message]:
    if not isinstance(value, list):
        raise BadExample(f"{key} is {kind_of(value)}, not a list")
    if not value:
        raise BadExample("has no messages")
    return [_message(f"message {number}", message, parts) for number, message in enumerate(value, start=1)]


def _marked(messages: Sequence[Message], key: str, images: object) -> list[Message]:
    """Return messages with images in the places that their texts mark."""
    files = [images] if isinstance(images, str) else images
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise BadExample(f"{key} is {kind_of(images)}, not the names of files")
    contents = [each["content"] for each in messages]
    texts = [content.split(MARK) if isinstance(content, str) else [] for content in contents]
    if (marks := sum(len(pieces) - 1 for pieces in texts if pieces)) != len(files) or not all(texts):
        raise BadExample(f"{key} names {len(files)} images, and the texts of its messages have {marks} {MARK}")
    left, made = iter(files), list[Message]()
    for message, (first, *more) in zip(messages, texts, strict=True):
        said = [[{"type": "image", "image": next(left)}, {"type": "text", "text": text}] for text in more]
        parts = [{"type": "text", "text": first}, *(part for pair in said for part in pair)]
        parts = [part for part in parts if part.get("text") != ""]
        made.append({**message, "content": parts} if more else message)
    return made


def _placed(name: str, message: Message, folder: Path) -> Message:
    """Return a message in parts, whose images have paths that hold anywhere. Templates that write images would leave
    out in silence what is no list of parts."""
    content, parts = message["content"], list[Mapping[str, Any]]()
    for given in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        part = {key: value for key, value in given.items() if value is not None}
        for key in _named(part):
            file = part[key].removeprefix("file://")
            if "://" in file or file.startswith("data:"):
                raise BadExample(f"{name}: {key} {brief(file)} is no file here: save it as one, and name that")
            if message["role"] == "assistant":
                raise BadExample(f"{name}: the assistant says an image, which is not learned")
            part[key] = str(folder / file)
        parts.append(part)
    return {**message, "content": parts}


def _part(name: str, part: object, images: bool) -> str:
    """Return the text of a part of a message; of an image, none."""
    if not isinstance(part, dict):
        raise BadExample(f"{name} is {kind_of(part)}, not an object")
    if (kind := part.get("type")) not in (known := ("text", "image") if images else ("text",)):
        raise BadExample(f"{name} has the type {brief(repr(kind))}: choose {' or '.join(known)}")
    if kind == "text":
        return text_of(part.get("text"), f"the text of {name}")
    named = _named(part)
    if len(named) != 1 or not isinstance(part[named[0]], str):
        raise BadExample(f"{name} names no image: give it one file as {', '.join(_FILES)}")
    return ""


def _message(name: str, value: object, parts: bool = False) -> Message:
    if not isinstance(value, dict):
        raise BadExample(f"{name} is {kind_of(value)}, not an object")
    message = {key: each for key, each in value.items() if each is not None}
    if "role" not in message and "from" in message:
        message = _spoken(name, message)
    role, calls = message.get("role"), message.get("tool_calls")
    if role not in ROLES:
        keys = "" if "role" in message else f", no 'role' and no 'from' among {brief(', '.join(map(repr, message)))}"
        raise BadExample(f"{name} has the role {brief(repr(role))}{keys}: choose from {', '.join(ROLES)}")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise BadExample(f"{name}: tool_calls is {kind_of(calls)}, not a list of objects")
    if "content" not in message and calls:
        message["content"] = ""
    content: Any = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"part {number} of {name}", each, parts) for number, each in enumerate(content, 1))
        message = message if parts else {**message, "content": content}
    content = text_of(content, f"the content of {name}")
    if role == "assistant" and not calls and not content.strip():
        raise BadExample(f"{name}: the assistant says nothing")
    if (weight := message.get(WEIGHT, 1)) not in (0, 1):
        raise BadExample(f"{name} has the {WEIGHT} {brief(weight)}: choose 1, or 0 for a turn that does not count")
    return message


def _spoken(name: str, turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn of ``from`` and ``value`` as a message."""
    speaker = turn.pop("from")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise BadExample(f"{name} is from {brief(repr(speaker))}: choose from {', '.join(SPEAKERS)}")
    said = text_of(turn.pop("value", None), f"the value of {name}")
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": said, **turn}
    return {"role": "assistant", "tool_calls": list(_calls(name, said)), **turn}


def _calls(name: str, said: str) -> Iterator[dict[str, Any]]:
    try:
        found = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise BadExample(f"the value of {name} is no function call in JSON: {brief(str(error))}") from error
    for call in found if isinstance(found, list) else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadExample(f"the value of {name} is no function call: it needs a 'name' and 'arguments'")
        yield {"type": "function", "function": call}


def _tools(value: object) -> list[Any] | None:
    """Return a list of JSON schemas; tables often hold it as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadExample(f"tools is text that is not JSON: {error}") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadExample(f"tools is {kind_of(value)}, not a list of objects")
    return value
