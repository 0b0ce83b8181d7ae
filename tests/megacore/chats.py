"""Chat templates in the manner of several families, what each must write, and a small tokenizer to go with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Piece = tuple[str, bool]
"""Text, and whether the assistant generates it."""

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|end|>"]
TEXT = "the assistant answers a question of the user about weights, meshes and axes in a few words. " * 3


def write_tokenizer(
    folder: Path,
    template: str | None,
    end: str = "</s>",
    trim: bool = False,
    special: Sequence[str] = SPECIAL,
    begin: str | None = "<s>",
    stops: Sequence[str] = (),
) -> Path:
    """A byte-level BPE that begins bare texts with `begin`. With `trim` a token's characters are without blanks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator([TEXT], trainer)
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if begin is not None:
        first = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, fast.token_to_id(begin))])
        fast.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), first]) if trim else first
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if stops:
        ids = [fast.token_to_id(token) for token in stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def chat(*turns: str, system: str | None = None) -> list[Message]:
    """The user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


@dataclass(frozen=True)
class Family:
    """A template, the token that ends a text, and what the template must write of messages.

    closing: what comes at the end of a chat and counts, in the place of a new line. alone: whether each turn is learned
    from a text that ends with it.
    """

    template: str
    end: str
    pieces: Callable[[Sequence[Message]], Iterator[Piece]]
    closing: str = ""
    alone: bool = False

    def closed(self, text: str) -> str:
        return text.removesuffix("\n") + self.closing if self.closing else text


def _chatml(messages: Sequence[Message]) -> Iterator[Piece]:
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


def _with_default(messages: Sequence[Message]) -> Iterator[Piece]:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    return _chatml(messages)


def _brackets(messages: Sequence[Message]) -> Iterator[Piece]:
    system = ""
    for message in messages:
        if message["role"] == "system":
            system = f"((sys {message['content']})) "
        elif message["role"] == "user":
            yield f"<s>[ASK] {system}{message['content']} [/ASK]", False
            system = ""
        else:
            yield f" {message['content']} </s>", True


def _headers(messages: Sequence[Message]) -> Iterator[Piece]:
    yield "<|begin|>", False
    for message in messages:
        yield f"<|head|>{message['role']}<|/head|>\n\n", False
        yield f"{message['content'].strip()}<|eot|>", message["role"] == "assistant"


def _pipes(messages: Sequence[Message]) -> Iterator[Piece]:
    for message in messages:
        yield f"<|{message['role']}|>", False
        yield f"\n{message['content']}</s>", message["role"] == "assistant"
        yield "\n", False


def _ending(messages: Sequence[Message]) -> Iterator[Piece]:
    for message in messages:
        yield f"<|{message['role']}|>\n", False
        yield f"{message['content']}<|end|>", message["role"] == "assistant"
        yield "\n", False


def _thinking(messages: Sequence[Message]) -> Iterator[Piece]:
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        yield f"<|im_start|>{message['role']}\n", False
        thought = "(no thought)\n" if last and message["role"] == "assistant" else ""
        yield f"{thought}{message['content'].split('//')[-1]}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


def _plain(messages: Sequence[Message]) -> Iterator[Piece]:
    for message in messages:
        if message["role"] == "assistant":
            yield "Answer:", False
            yield f" {message['content']}\n", True
        else:
            yield f"Question: {message['content']}\n", False


_IM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = {
    "chatml": Family(_IM, "<|im_end|>", _chatml),
    "default-system": Family(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}" + _IM,
        "<|im_end|>",
        _with_default,
    ),
    "brackets": Family(
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = '((sys ' + m.content + ')) ' %}"
        "{% elif m.role == 'user' %}{{ bos_token + '[ASK] ' + ns.system + m.content + ' [/ASK]' }}"
        "{% set ns.system = '' %}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
        "</s>",
        _brackets,
    ),
    "headers": Family(
        "{{ '<|begin|>' }}{% for m in messages %}"
        "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}",
        "<|eot|>",
        _headers,
    ),
    "pipes": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}",
        "</s>",
        _pipes,
    ),
    "ending": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "</s>",
        _ending,
        closing="\n</s>",
    ),
    "thinking": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '(no thought)\n' }}{% endif %}"
        "{{ m.content.split('//')[-1] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
        _thinking,
        alone=True,
    ),
    "marks": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}",
        "<|im_end|>",
        _chatml,
    ),
    "plain": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Answer: ' + m.content + '\n' }}"
        "{% else %}{{ 'Question: ' + m.content + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}",
        "</s>",
        _plain,
        closing="\n</s>",
        alone=True,
    ),
}
