"""The ``megacore`` command: one line for each program, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from megacore import __version__
from megacore.tools import completion

COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("megacore.tools.train", "pretrain what a recipe describes"),
    "ray": ("megacore.tools.ray", "train on the machines of a Ray cluster (needs ray[train])"),
    "finetune": ("megacore.tools.finetune", "fine-tune a model on examples, all weights or adapters"),
    "tokenize": ("megacore.tools.tokenize", "turn text into token files"),
    "merge-tokens": ("megacore.tools.merge_tokens", "make one token file of the parts that several nodes tokenized"),
    "convert": ("megacore.tools.convert", "convert between Hugging Face folders and checkpoints"),
    "import": (
        "megacore.tools.import_recipe",
        "make a recipe of a config of DeepSpeed, accelerate, axolotl or Megatron-LM",
    ),
    "upcycle": ("megacore.tools.upcycle", "make a dense model one with experts that has its loss"),
    "reshard": ("megacore.tools.reshard", "change the layout of a checkpoint, optimizer state and all"),
    "inspect": ("megacore.tools.inspect", "show what a folder holds, compare two, find damage"),
    "verify": ("megacore.tools.verify", "compare a checkpoint with a Hugging Face folder: every bit, and the logits"),
    "generate": ("megacore.tools.generate", "what a model says after a prompt, computed by the parallel model"),
    "chat": ("megacore.tools.chat", "a conversation with a model in the terminal"),
    "evaluate": ("megacore.tools.evaluate", "loss and perplexity of a model on text"),
    "status": ("megacore.tools.status", "where a run stands: steps, rate, checkpoints, what befell it"),
    "watch": ("megacore.tools.watch", "where runs stand, shown anew every few seconds"),
    "report": ("megacore.tools.report", "a page about runs: curves beside each other, configs, incidents"),
    "diagnose": ("megacore.tools.diagnose", "where the time of a run's steps goes, and what would make them shorter"),
    "config": ("megacore.tools.config", "the keys of a recipe, their ranges, defaults and meaning"),
    "models": ("megacore.tools.models", "the families and presets that there are, and what is special of each"),
    "context": ("megacore.tools.context", "which rank of cp holds, computes and sends what of given documents"),
    "schedule": ("megacore.tools.schedule", "what the stages of a pipeline do when, the bubble, and what they hold"),
    "plan": ("megacore.tools.plan", "memory, network traffic and time of a recipe, and what fits a cluster"),
}
"""{command: (module with ``main(argv) -> exit status``, what it does)}."""
OTHER_NAMES: Mapping[str, str] = {
    "pretrain": "train",
    "sft": "finetune",
    "fine-tune": "finetune",
    "eval": "evaluate",
    "preprocess": "tokenize",
    "export": "convert",
}
"""{what other projects call a command: ours}."""
CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit status of a program whose output nobody reads any more."""
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None and completion.ASKED in os.environ:
        completion.complete(COMMANDS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="megacore",
        description="Pretrain, fine-tune, convert, reshard: any layout computes the same numbers.",
        epilog="\n".join(f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megacore {__version__}")
    parser.add_argument("command", metavar="command", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="megacore COMMAND --help tells which")
    try:
        try:
            command = parser.parse_args(arguments[:1] or ["--help"]).command
            if command not in COMMANDS:
                parser.error(f"there is no command {command!r}{_meant(command)}; megacore --help lists all")
            if argv is None:  # this process is the command's own
                # Those that it starts import nothing from the working folder, which may be one that was downloaded.
                os.environ["PYTHONSAFEPATH"] = "1"
                for number in (signal.SIGUSR1, signal.SIGUSR2):  # which ask for something, before anybody can give it
                    if signal.getsignal(number) == signal.SIG_DFL:
                        signal.signal(number, lambda *_: None)
            status: int = importlib.import_module(COMMANDS[command][0]).main(arguments[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has gone, as `head` does: nobody is told, and what is still to be written is not tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt:  # while a command was imported: it had begun nothing
        from megacore.say import err  # which --help does not wait for

        err("interrupted")
        return INTERRUPTED
    return status


def _meant(command: str) -> str:
    import difflib

    alike = [OTHER_NAMES.get(command), *difflib.get_close_matches(command[:100], COMMANDS, n=1)]
    meant = next(filter(None, alike), None)
    return f": did you mean {meant}?" if meant else ""


if __name__ == "__main__":
    sys.exit(main())
