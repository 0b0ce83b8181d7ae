"""The import graph of the packages. `python tests/house/graph.py` prints it, room by room."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"tools": 5, "megacore": 4, "models": 3, "parallel": 2}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in FILES}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions and for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else node.module


def ours(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def room(name: str) -> str:
    """Return the folder that a module lies in, as a package."""
    return module(MODULES[name].parent / "__init__.py")


@cache
def arrows() -> dict[str, set[str]]:
    """Return {room: other rooms that it imports from}."""
    reached: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for name, path in MODULES.items():
        reached[room(name)] |= {room(other) for _, other in imports(path) if ours(other)} - {room(name)}
    return reached


def counts() -> Counter[str]:
    """Return {package: arrows that leave its rooms}."""
    return sum((Counter({name.partition(".")[0]: len(others)}) for name, others in arrows().items()), Counter())


if __name__ == "__main__":
    for name, others in arrows().items():
        print(f"{name:24} -> {', '.join(sorted(others)) or '-'}")
    print(", ".join(f"{package}: {count} arrows" for package, count in counts().items()))
