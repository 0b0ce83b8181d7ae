"""`megacore generate`: what a model says after a prompt, computed by the parallel model.

For checking a checkpoint or a Hugging Face folder, not for serving: docs/generate.md names what to serve with.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megacore.inference.answers import Answer, Decoding, Prompts
from megacore.say import err, say_data, write_out
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.folder import WeightFolder
from megacore.tools import folders, processes
from megacore.tools.options import command_parser, count, number, share

_temperature = number("a number above 0; leave it out for the most likely token", lambda value: 0 < value < math.inf)


def main(argv: Sequence[str]) -> int:
    parser = command_parser("generate", __doc__)
    processes.add_model(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a text to go on with; repeatable"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one on each line")
    parser.add_argument("--chat", action="store_true", help="put each prompt as a question, by the chat template")
    parser.add_argument("--system", metavar="TEXT", help="what the system message of a chat says")
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="after each prompt (128)")
    parser.add_argument("--batch", type=count, default=8, metavar="N", help="prompts computed at a time (8)")
    parser.add_argument("--json", action="store_true", help="print an object for each prompt, one on each line")
    add_decoding(parser)
    processes.add_mesh(parser)
    arguments = parser.parse_args(argv)
    return folders.program(lambda parsed: run(parsed, argv), arguments)


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how a token is chosen, and whether some are drafted."""
    group = parser.add_argument_group("sampling", "Without --temperature each token is the most likely one.")
    group.add_argument("--temperature", type=_temperature, metavar="T", help="1 samples by the model's probabilities")
    group.add_argument("--top-k", type=count, metavar="K", help="among the K most likely tokens")
    group.add_argument("--top-p", type=share, metavar="P", help="among the likely tokens that make up P together")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (0)")
    parser.add_argument(
        "--draft",
        type=count,
        default=0,
        metavar="N",
        help="tokens that the model's layers for further ones draft at a time: the same text in fewer steps (none)",
    )


def run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    job, (prompts, how) = processes.check(arguments, partial(_prepare, arguments))
    if job.lacks_ranks:
        return processes.start("megacore.tools.main", ["generate", *given], job.shape.world)
    answers, started, first = prompts.answers(), time.perf_counter(), job.here.rank == 0
    with processes.loaded(job, arguments) as model:
        loaded = time.perf_counter()
        page = Page(answers, shown=first and not arguments.json, echo=not arguments.chat)
        for number, more in how.answer(model, answers):
            page.add(number, more)
    if first:
        for answer in answers if arguments.json else ():
            say_data(answer.data())
        seconds, count = time.perf_counter() - loaded, sum(len(answer.ids) for answer in answers)
        speed = f"{count:,} tokens in {seconds:.1f} s, {count / seconds:,.1f} per second"
        drafts, forwards = (sum(getattr(each, name) for each in answers) for name in ("drafts", "forwards"))
        if how.draft:
            kept = (count - forwards) / max(1, drafts)
            speed += f", {count / forwards:.2f} a forward, {kept:.0%} of {drafts:,} drafts kept"
        err(f"{speed} (loaded in {loaded - started:.1f} s)")
    return 0


def _prepare(arguments: argparse.Namespace, folder: WeightFolder) -> tuple[Prompts, Decoding]:
    """Return the prompts, and how they are answered. Raises StoreError: everything that is wrong with them."""
    texts = folders.prompts(arguments)
    if not texts:
        raise StoreError("there is no prompt: give --prompt TEXT, or --prompts FILE with one on each line")
    numbers = arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed
    how = Decoding(arguments.max_new_tokens, *numbers, arguments.batch, arguments.draft)
    how.check(folder, arguments.cp)
    return Prompts.of(folder, texts, chat=arguments.chat, system=arguments.system), how


# -- answers


class Page:
    """The answers in the order of the prompts, the first that has not ended as it grows. ``echo``: whether each stands
    behind its prompt."""

    def __init__(self, answers: Sequence[Answer], shown: bool, echo: bool) -> None:
        self._answers, self._shown, self._echo, self._at = answers, shown, echo, 0
        self._begin()

    def add(self, number: int, more: str) -> None:
        """Take note of more text of an answer."""
        if number == self._at:
            self._print(more)
        while self._at < len(self._answers) and self._answers[self._at].ended:
            self._print("\n")
            self._at += 1
            self._begin()

    def _begin(self) -> None:
        if self._at < len(self._answers):
            answer = self._answers[self._at]
            self._print(("\n" if self._at else "") + (answer.prompt.text if self._echo else "") + answer.text)

    def _print(self, text: str) -> None:
        if self._shown:
            write_out(text)
