"""Completion in a shell, by argcomplete: commands, their options, recipes and the keys of recipes."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

ASKED = "_ARGCOMPLETE"
"""The variable by which a shell asks: from which word on it means the program."""


def complete(commands: Mapping[str, tuple[str, str]]) -> None:
    """Print what may stand where the cursor is, and end this process.

    A command makes its parser when it is called: it is called as far as that.
    """
    import argcomplete

    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    _, *words = typed.split()
    parser = argparse.ArgumentParser(prog="megacore")
    parser.add_argument("command", choices=commands)
    if (len(words) < 2 and not (words and typed.endswith(" "))) or words[0] not in commands:
        argcomplete.autocomplete(parser)

    def ask(made: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        for action in made._actions:
            if action.dest == "overrides":
                action.completer = _keys  # type: ignore[attr-defined]
            elif action.dest == "recipe":
                action.completer = _recipes  # type: ignore[attr-defined]
        argcomplete.autocomplete(made)

    os.environ[ASKED] = "2"  # the command stands for the program
    for method in ("parse_args", "parse_intermixed_args"):
        setattr(argparse.ArgumentParser, method, ask)
    importlib.import_module(commands[words[0]][0]).main([])


def _keys(**_: Any) -> list[str]:
    from megacore.config import SECTIONS

    return [f"{name}.{each.name}=" for name, section in SECTIONS.items() for each in fields(section)]


def _recipes(prefix: str, **_: Any) -> list[str]:
    import argcomplete

    from megacore.recipe import recipes

    return [*recipes(), *argcomplete.FilesCompleter(("yaml", "yml"))(prefix)]
