"""The error of what cannot be read or written as asked."""

from __future__ import annotations

from collections.abc import Sequence

from megacore.parallel import limits


class StoreError(ValueError):
    """A file or folder that cannot be read or written as asked; of a long message, the middle is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(limits.cut(message))


def listed(problems: Sequence[object], most: int = 20) -> list[str]:
    """Return the first of the problems, and how many more there are."""
    return [*map(str, problems[:most]), *[f"and {len(problems) - most} more"] * (len(problems) > most)]


def below_1(**numbers: int | None) -> list[str]:
    """Return what is wrong with arguments that are to be whole numbers from 1 on; None stands for one not given."""
    return [
        f"`{name}={value}`: choose a whole number from 1 on"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
