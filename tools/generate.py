"""`megacore generate`: what a model says after a prompt, computed by the parallel model.

For checking a checkpoint or a Hugging Face folder, not for serving: docs/generate.md names what to serve with.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.inference.texts import Stream, Texts
from megacore.say import err, say_data, write_out
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders, processes

if TYPE_CHECKING:  # --help and errors about arguments do not wait for torch
    from megacore.inference.generation import NewToken
    from megacore.inference.sampling import Choice


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="megacore generate", description=about, epilog=more)
    processes.add_model(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a text to go on with; repeatable"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one on each line")
    parser.add_argument("--chat", action="store_true", help="put each prompt as a question, by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="what the system message of a chat says")
    parser.add_argument(
        "--max-new-tokens", type=folders.count, default=128, metavar="N", help="after each prompt (128)"
    )
    parser.add_argument("--batch", type=folders.count, default=8, metavar="N", help="prompts computed at a time (8)")
    parser.add_argument("--json", action="store_true", help="print an object for each prompt, one on each line")
    group = parser.add_argument_group("sampling", "Without --temperature each token is the most likely one.")
    group.add_argument("--temperature", type=_above_0, metavar="T", help="1 samples by the model's probabilities")
    group.add_argument("--top-k", type=folders.count, metavar="K", help="among the K most likely tokens")
    group.add_argument("--top-p", type=_share, metavar="P", help="among the likely tokens that make up P together")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (0)")
    processes.add_mesh(parser)
    arguments = parser.parse_args(given)
    return folders.program(lambda parsed: run(parsed, given), arguments)


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    job, (texts, prompts, stops) = processes.ModelRun.check(arguments, partial(_prepare, arguments))
    if job.lacks_ranks:
        return processes.start("megacore.tools.main", ["generate", *given], job.shape.world)
    from megacore.inference.generation import Ending, generate

    ending = Ending(stops, arguments.max_new_tokens, job.folder.config.max_positions)
    started, first = time.perf_counter(), job.here.rank == 0
    with job.model() as model:
        loaded = time.perf_counter()
        page = Page(texts.decode, prompts, shown=first and not arguments.json, echo=not arguments.chat)
        ids = [prompt.ids for prompt in prompts]
        for step in generate(model, ids, _choice(arguments), ending, arguments.batch):
            for new in step:
                page.add(new)
    if first:
        for answer in page.answers if arguments.json else ():
            say_data(answer.data(stops))
        seconds, count = time.perf_counter() - loaded, sum(len(answer.ids) for answer in page.answers)
        speed = f"{count:,} tokens in {seconds:.1f} s, {count / seconds:,.1f} per second"
        err(f"{speed} (loaded in {loaded - started:.1f} s)")
    return 0


def _choice(arguments: argparse.Namespace) -> Choice:
    from megacore.inference.sampling import Greedy, Sampling

    if arguments.temperature is None:
        return Greedy()
    return Sampling(arguments.temperature, arguments.top_k, arguments.top_p or 1.0, arguments.seed)


# -- prompts


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user gave it, and its tokens."""

    text: str
    ids: list[int]


def _prepare(arguments: argparse.Namespace, folder: WeightFolder) -> tuple[Texts, list[Prompt], frozenset[int]]:
    """Return the tokenizer, the prompts, and the tokens that end an answer.

    Raises:
        StoreError: everything that is wrong with them.
    """
    given = [*arguments.prompt, *(folders.lines(arguments.prompts) if arguments.prompts else [])]
    problems = []
    if not given:
        problems.append("there is no prompt: give --prompt TEXT, or --prompts FILE with one on each line")
    if arguments.system is not None and not arguments.chat:
        problems.append("--system is the first message of a chat: give --chat too")
    for name in ("top_k", "top_p"):
        if getattr(arguments, name) is not None and arguments.temperature is None:
            problems.append(f"--{name.replace('_', '-')} is of sampling: give --temperature too, 1 for the model's own")
    if problems:
        raise StoreError("\n".join(problems))
    texts = Texts.of(folder)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    prompts = [
        Prompt(text, texts.chat([*system, {"role": "user", "content": text}]) if arguments.chat else texts.encode(text))
        for text in given
    ]
    if wrong := [problem for prompt in prompts for problem in _wrong(prompt, folder)]:
        raise StoreError("\n".join(wrong))
    return texts, prompts, texts.stops()


def _wrong(prompt: Prompt, folder: WeightFolder) -> Iterator[str]:
    shown, longest, vocabulary = repr(prompt.text[:40]), folder.config.max_positions, folder.config.vocab_size
    if not prompt.ids:
        yield f"the prompt {shown} has no tokens"
    elif max(prompt.ids) >= vocabulary:
        yield (
            f"{folder.path}: the tokenizer makes {max(prompt.ids)} of a token of {shown}, and the model's vocabulary "
            f"has {vocabulary}: the tokenizer is another model's"
        )
    if longest is not None and len(prompt.ids) > longest:
        yield f"the prompt {shown} has {len(prompt.ids):,} tokens, and the model {longest:,} positions: shorten it"


# -- answers


@dataclass
class Answer:
    """The answer to a prompt so far."""

    prompt: Prompt
    stream: Stream
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False

    def add(self, new: NewToken) -> str:
        """Return the text that is now certain."""
        self.ids.append(new.token)
        self.ended = new.last
        more = self.stream.add(new.token) + (self.stream.end() if new.last else "")
        self.text += more
        return more

    def data(self, stops: frozenset[int]) -> dict[str, object]:
        ended = "stop" if self.ids[-1] in stops else "length"
        return {"prompt": self.prompt.text, "text": self.text, "tokens": self.ids, "ended": ended}


class Page:
    """The answers in the order of the prompts, the first that has not ended as it grows.

    Args:
        echo: Whether each stands behind its prompt.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompts: Sequence[Prompt], shown: bool, echo: bool
    ) -> None:
        self.answers = [Answer(prompt, Stream(decode, prompt.ids)) for prompt in prompts]
        self._shown, self._echo, self._at = shown, echo, 0
        self._begin()

    def add(self, new: NewToken) -> None:
        more = self.answers[new.prompt].add(new)
        if new.prompt == self._at:
            self._print(more)
        while self._at < len(self.answers) and self.answers[self._at].ended:
            self._print("\n")
            self._at += 1
            self._begin()

    def _begin(self) -> None:
        if self._at < len(self.answers):
            answer = self.answers[self._at]
            self._print(("\n" if self._at else "") + (answer.prompt.text if self._echo else "") + answer.text)

    def _print(self, text: str) -> None:
        if self._shown:
            write_out(text)


def _above_0(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0; leave it out for the most likely token")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and up to 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error


if __name__ == "__main__":
    sys.exit(main())
