"""Objects of somebody's own code, by import path: ``package.module:name``. No torch."""

from __future__ import annotations

import importlib
import re
import sys

from megacore.parallel.enum_errors import nearest

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_<][\w.<>]*")
_GIVEN: dict[str, object] = {}
"""Objects that this process has been given from Python: such a one need not be importable."""


class ImportPathError(ValueError):
    """There is nothing at an import path, or its module cannot be imported."""


def is_import_path(text: str) -> bool:
    """Return whether a text is an import path; a file of such a name is meant by ``./NAME``."""
    return _PATH.fullmatch(text) is not None


def imported(path: str) -> object:
    """Return the object at an import path.

    Raises:
        ImportPathError: there is none; the message has the path, the module search path and the way out.
    """
    if path in _GIVEN:
        return _GIVEN[path]
    if not is_import_path(path):
        raise ImportPathError(f"{path} is no import path: write it as package.module:name")
    module, _, names = path.partition(":")
    try:
        found: object = importlib.import_module(module)
    except Exception as error:  # whatever the module does when it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ImportPathError(
                f"{path}: there is no module {error.name} in the search path ({', '.join(filter(None, sys.path))}): "
                "install its package (pip install -e FOLDER), or name the folder that it is in by PYTHONPATH"
            ) from error
        raise ImportPathError(f"{path}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for name in names.split("."):
        if not hasattr(found, name):
            where = getattr(sys.modules[module], "__file__", None) or module
            raise ImportPathError(f"{path}: {where} has no {names}{nearest(name, dir(found))}")
        found = getattr(found, name)
    return found


def path_of(given: object) -> str:
    """Return the import path by which :func:`imported` finds an object in this process; a recipe can have it.

    It is that of the class of what has no name of its own, such as a data set.
    """
    named = given if hasattr(given, "__qualname__") else type(given)
    path = f"{named.__module__}:{named.__qualname__}"
    _GIVEN[path] = given
    return path
