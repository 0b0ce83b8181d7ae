"""``parallel`` and ``models`` are short names of ``megacore.parallel`` and ``megacore.models``: the same modules.

Megacore itself uses the long names alone, so a package of the user's own with a short name is in nobody's way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_SHORT = ("parallel", "models")


def share(short: str) -> None:
    """Make a package that was imported by its short name the one with the long name."""
    sys.modules[short] = import_module(f"megacore.{short}")
    if not any(isinstance(finder, _ShortNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShortNames())


class _ShortNames(MetaPathFinder):
    """A finder of the modules inside of packages that were imported by their short names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        short, dot, _ = fullname.partition(".")
        if not dot or short not in _SHORT or sys.modules.get(short) is not sys.modules.get(f"megacore.{short}"):
            return None
        return ModuleSpec(fullname, _SameModule())


class _SameModule(Loader):
    """A loader that gives the module of the long name, and leaves it as it is."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"megacore.{spec.name}")
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
