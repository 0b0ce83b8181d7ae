"""The error of what cannot be read or written as asked."""

from __future__ import annotations

from megacore.parallel import limits


class StoreError(ValueError):
    """A file or folder that cannot be read or written as asked; of a long message, the middle is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(limits.cut(message))
