"""Chats as families of models write them (``chat_families.json``), and a small tokenizer to go with each.

Rows are named there. A family has a template in its format, the tokens of its tokenizer, and of some rows the examples
that they become: the assistant has generated what stands in ⟦ ⟧, which is what the loss counts. ``all`` is where all
tokens count, and ``refused`` has messages that the template raises at, by its words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacore.config import ChatConfig
from megacore.data.examples import ExampleFiles, Examples, Preparation
from megacore.data.model_tokenizer import ModelFiles
from megacore.store.tensor_files.companions import companions

Message = dict[str, Any]
Row = dict[str, Any]

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
    text: str = TEXT,
) -> Path:
    """A byte-level BPE of `text` that begins bare texts with `begin`. With `trim` a token's characters are without
    blanks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([text], trainer)
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    first = []
    if begin is not None:
        token = (begin, fast.token_to_id(begin))
        first = [processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[token])]
    if first or trim:
        blanks = [processors.ByteLevel(trim_offsets=True)] if trim else []
        fast.post_processor = processors.Sequence([*blanks, *first])
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


def model_files(folder: Path, kind: str = "llama", vocabulary: int = 500) -> ModelFiles:
    """The files that examples need of a model's folder."""
    return ModelFiles(companions(folder, folder), {"model_type": kind}, vocabulary)


def prepared(source: ExampleFiles | Path, folder: Path, out: Path, length: int = 900, **rules: Any) -> Examples:
    """Examples of a file or of several, with the tokenizer in a folder."""
    files = source if isinstance(source, ExampleFiles) else ExampleFiles(str(source), [source])
    return Preparation(files, out, ChatConfig(**rules), length, model_files(folder)).examples()


@dataclass(frozen=True)
class Family:
    """See the module. stops: the tokens at which generating ends, of its generation_config.json."""

    template: str
    end: str
    cases: Mapping[str, Sequence[str]]
    special: Sequence[str] = tuple(SPECIAL)
    begin: str | None = "<s>"
    stops: Sequence[str] = ()
    all: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Family:
        template = tree["template"]
        return cls(**{**tree, "template": template if isinstance(template, str) else "\n".join(template)})

    def write(self, folder: Path, trim: bool = False) -> Path:
        """Such a tokenizer."""
        return write_tokenizer(folder, self.template, self.end, trim, self.special, self.begin, self.stops)


_KNOWN = json.loads(Path(__file__).with_name("chat_families.json").read_text("utf-8"))
ROWS: Mapping[str, Row] = _KNOWN["rows"]
FAMILIES: Mapping[str, Family] = {name: Family.of(tree) for name, tree in _KNOWN["families"].items()}
