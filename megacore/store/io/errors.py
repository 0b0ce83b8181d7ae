"""The error of what cannot be read or written as asked."""

from __future__ import annotations

from megacore.parallel import limits


class StoreError(ValueError):
    """A file or folder that cannot be read or written as asked; of a long message, the middle is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(limits.cut(message))


def below_1(**numbers: int | None) -> list[str]:
    """Return what is wrong with arguments that are to be whole numbers from 1 on; None stands for one not given."""
    return [
        f"`{name}={value}`: choose a whole number from 1 on"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
