"""Prompts as tokens, and the answers to them as text that grows: what `megacore generate` and its Python door share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.inference.texts import Stream, Texts
from megacore.models.config import ModelConfig
from megacore.store.io.errors import StoreError, below_1
from megacore.store.io.strict_json import short
from megacore.store.weight_folders.folder import WeightFolder

if TYPE_CHECKING:  # what is wrong with a prompt is said without waiting for torch
    from megacore.models.assemble import Model


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user gave it, and its tokens."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Prompts:
    """Prompts for a model: its tokenizer, the prompts in their order, and the tokens that end an answer."""

    texts: Texts
    given: tuple[Prompt, ...]
    stops: frozenset[int]

    @classmethod
    def of(
        cls, folder: WeightFolder, given: Sequence[str], *, chat: bool = False, system: str | None = None
    ) -> Prompts:
        """Return some texts as the model reads them; chat, system: as of :func:`megacore.generate`. Raises StoreError:
        everything that is wrong with them."""
        folder.check_predicts()
        if not given:
            raise StoreError("there is no prompt")
        if isinstance(given, str) or not all(isinstance(each, str) for each in given):
            raise StoreError(f"the prompts are {short(given)}: give a list of texts, even of one")
        if system is not None and not chat:
            raise StoreError("`system` is the first message of a chat: give `chat` too")
        texts = Texts.of(folder)
        first = [] if system is None else [{"role": "system", "content": system}]
        prompts = [
            Prompt(text, texts.chat([*first, {"role": "user", "content": text}]) if chat else texts.encode(text))
            for text in given
        ]
        if wrong := [problem for prompt in prompts for problem in problems_of(prompt, folder.path, folder.config)]:
            raise StoreError("\n".join(wrong))
        return cls(texts, tuple(prompts), texts.stops())

    def answers(self) -> list[Answer]:
        """Return the answers to them, empty yet."""
        return [Answer(prompt, Stream(self.texts.decode, prompt.ids), self.stops) for prompt in self.given]


def problems_of(prompt: Prompt, path: Path, config: ModelConfig) -> Iterator[str]:
    """Yield why a model cannot read a prompt."""
    shown, longest, vocabulary = repr(prompt.text[:40]), config.max_positions, config.vocab_size
    if not prompt.ids:
        yield f"the prompt {shown} has no tokens"
    elif max(prompt.ids) >= vocabulary:
        yield (
            f"{path}: the tokenizer makes {max(prompt.ids)} of a token of {shown}, and the model's vocabulary "
            f"has {vocabulary}: the tokenizer is another model's"
        )
    if longest is not None and len(prompt.ids) > longest:
        yield f"the prompt {shown} has {len(prompt.ids):,} tokens, and the model {longest:,} positions: shorten it"


@dataclass
class Answer:
    """The answer to a prompt so far: its tokens, and the text of them that is certain."""

    prompt: Prompt
    stream: Stream
    stops: frozenset[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    forwards: int = 0
    drafts: int = 0

    def add(self, token: int, last: bool, drafts: int | None = 0) -> str:
        """Add a token, the last one or not -> the text that is now certain. ``drafts``: how many the forward of the
        model was given that it is of, if it is the first one of it."""
        if drafts is not None:
            self.forwards, self.drafts = self.forwards + 1, self.drafts + drafts
        self.ids.append(token)
        self.ended = last
        more = self.stream.add(token) + (self.stream.end() if last else "")
        self.text += more
        return more

    def data(self) -> dict[str, object]:
        """Return what ``megacore generate --json`` prints of it."""
        ended = "stop" if self.ids[-1] in self.stops else "length"
        return {"prompt": self.prompt.text, "text": self.text, "tokens": self.ids, "ended": ended}


@dataclass
class Conversation:
    """A conversation with a model, which its chat template writes. ``messages``: what was said so far, a system message
    first if there is one."""

    texts: Texts
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, model: Model, text: str, how: Decoding) -> Iterator[str]:
        """Yield the answer to what the user says next as it becomes certain; both are part of the conversation once it
        has ended. Raises StoreError: the model has no chat template, or too few positions for all of it."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = Prompt(text, self.texts.chat(asked))
        if wrong := [*problems_of(prompt, self.texts.path, model.config)]:
            raise StoreError("\n".join(wrong))
        answer = Answer(prompt, Stream(self.texts.decode, prompt.ids), self.texts.stops())
        # Random numbers go by the seed and the prompt, which is the first one in each turn.
        for _, more in replace(how, seed=how.seed + len(asked)).answer(model, [answer]):
            yield more
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]


@dataclass(frozen=True)
class Decoding:
    """The way in which answers are made: the arguments of :func:`megacore.generate` that say so. Raises StoreError: all
    numbers that are out of range, or are of sampling where there is none."""

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    batch: int = 8
    draft: int = 0

    def __post_init__(self) -> None:
        problems = below_1(max_new_tokens=self.max_new_tokens, batch=self.batch, top_k=self.top_k)
        if self.draft < 0:
            problems.append(f"`draft={self.draft}`: choose how many tokens are drafted at a time, 0 for none")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            problems.append(f"`temperature={self.temperature}`: choose one above 0, or none for the most likely token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"`top_p={self.top_p}`: choose a number above 0 and up to 1")
        if self.temperature is None:
            sampling = {"top_k": self.top_k, "top_p": self.top_p}
            given = [name for name, value in sampling.items() if value is not None]
            problems += [f"`{name}` is of sampling: give `temperature` too, 1 for the model's own" for name in given]
        if problems:
            raise StoreError("\n".join(problems))

    def check(self, folder: WeightFolder, cp: int) -> None:
        """Raise StoreError: this model, over so many ranks of cp, makes no drafts, and they are asked for."""
        if self.draft and not folder.config.mtp_layers:
            raise StoreError(
                f"`draft={self.draft}`: {folder.path} has no layers that predict further tokens: leave it out"
            )
        if self.draft and cp > 1:
            raise StoreError(f"`draft={self.draft}` with cp={cp}: drafts are made of whole sequences: choose cp=1")

    def answer(self, model: Model, answers: Sequence[Answer]) -> Iterator[tuple[int, str]]:
        """Yield (number of the answer, the text that it has more of) for each new token, until all have ended.

        Every rank of the model's mesh iterates to the end.
        """
        from megacore.inference.generation import Ending, generate
        from megacore.inference.sampling import Greedy, Sampling

        sampling = Sampling(self.temperature or 1.0, self.top_k, self.top_p or 1.0, self.seed)
        choose = Greedy() if self.temperature is None else sampling
        stops = frozenset[int]().union(*(answer.stops for answer in answers))
        ending = Ending(stops, self.max_new_tokens, model.config.max_positions)
        prompts = [answer.prompt.ids for answer in answers]
        for step in generate(model, prompts, choose, ending, self.batch, self.draft):
            for new in step:
                yield new.prompt, answers[new.prompt].add(new.token, new.last, new.drafts)
