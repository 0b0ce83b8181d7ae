"""`megacore train`, whose ranks are those of :mod:`live_rank`."""

import importlib
import signal
import sys
from types import ModuleType
from unittest.mock import patch

from megacore.tools.main import main

_plain = importlib.import_module


def imported(name: str, package: str | None = None) -> ModuleType:
    """The module of the command, once the signals are heeded."""
    module = _plain(name, package)
    if name == "megacore.tools.train":
        _plain("megacore.launcher.command").MODULE = "live_rank"  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the session may run under nohup, and what is ignored stays so
    with patch("importlib.import_module", imported):
        sys.exit(main())
