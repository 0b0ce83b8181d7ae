"""`megacore train`, whose ranks are those of :mod:`live_rank`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from unittest.mock import patch

from tools.main import main

_plain = importlib.import_module


def imported(name: str) -> ModuleType:
    """The module of the command, once the signals are heeded."""
    command = _plain("megacore.launcher.command")
    command.MODULE = "live_rank"  # type: ignore[attr-defined]
    return _plain(name)


if __name__ == "__main__":
    with patch("importlib.import_module", imported):
        sys.exit(main())
