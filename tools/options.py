"""What the options of commands have in common: their parser, and the numbers that they take. Little is imported."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable


def command_parser(command: str, about: str | None, allow_abbrev: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command, whose help begins and ends with the docstring of its module: its first paragraph
    stands above the options, and the others below."""
    first, _, others = (about or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"megacore {command}", description=first, epilog=others, allow_abbrev=allow_abbrev
    )


def number(words: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return what reads a number, of which a test holds; the words say which numbers these are."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return value

    return read


above_0 = number("a number above 0", lambda value: 0 < value < math.inf)
from_0 = number("a number from 0 on", lambda value: 0 <= value < math.inf)
share = number("a share, above 0 and up to 1", lambda value: 0 < value <= 1)


def count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    return tuple(count(part) for part in text.split(","))
