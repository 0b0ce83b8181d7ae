"""`megacore chat`: a conversation with a model in the terminal, by its chat template, on one process.

Lines that are piped in are questions too. An empty line is none; Ctrl-C ends an answer, which then was never given;
Ctrl-D ends the conversation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megacore.inference.answers import Conversation, Decoding
from megacore.inference.loaded_model import ModelSetup
from megacore.inference.texts import Texts
from megacore.say import err, write_out
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.tools import folders, processes
from megacore.tools.generate import add_decoding
from megacore.tools.options import command_parser, count


def main(argv: Sequence[str]) -> int:
    parser = command_parser("chat", __doc__)
    processes.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the system message says")
    parser.add_argument("--max-new-tokens", type=count, default=1024, metavar="N", help="of an answer (1024)")
    add_decoding(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--dtype", choices=FLOATS.values(), help="to compute in; by default that of the weights")
    return folders.program(_run, parser.parse_args(argv))


def _run(given: argparse.Namespace) -> int:
    how = Decoding(given.max_new_tokens, given.temperature, given.top_k, given.top_p, given.seed, draft=given.draft)
    base: Path | None = given.base
    setup = ModelSetup.check(given.folder, base=base, dtype=given.dtype, device=given.device)
    setup.folder.check_predicts()
    how.check(setup.folder, 1)
    first = [] if given.system is None else [{"role": "system", "content": given.system}]
    talk = Conversation(Texts.of(setup.folder), first)
    talk.texts.chat([*first, {"role": "user", "content": "?"}])  # or it is no chat model, before weights are read
    with setup.load() as loaded:
        while (text := _question()) is not None:
            if not text.strip():
                continue
            try:
                for more in talk.answer(loaded.model, text, how):
                    write_out(more)
                write_out("\n")
            except StoreError as error:
                err(error)
            except KeyboardInterrupt:
                err(" (not answered)")
    return 0


def _question() -> str | None:
    """Return what the user says next; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  # input() has lines be edited, where it is there
    with suppress(EOFError):
        return input("> ")
    write_out("\n")
    return None
