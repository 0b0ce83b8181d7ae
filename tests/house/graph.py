"""The import graph of the packages. `python tests/house/graph.py` prints it, room by room."""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"tools": 6, "launch": 5, "megacore": 4, "models": 3, "parallel": 2}
LEFT_OUT = {
    ROOT / "launch" / "api_chats.py",  # a script that people run and change
    ROOT / "megacore" / "__main__.py",  # another name of the command, which is on the floor above
}
FILES = sorted({path for package in PACKAGES for path in (ROOT / package).rglob("*.py")} - LEFT_OUT)


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in FILES}


@cache
def imports(path: Path) -> Sequence[tuple[int, str]]:
    """(line, module) of every import, those inside functions and for type checkers included."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, _short(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                outer = _short(node.module)
                inner = _short(f"{node.module}.{alias.name}")
                yield node.lineno, inner if inner in MODULES else outer


def _short(name: str) -> str:
    """Return the name of a module by its folder at the top, which `megacore` has links to."""
    inner = name.removeprefix("megacore.")
    return inner if inner.partition(".")[0] in PACKAGES else name


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


def floors() -> dict[str, int]:
    """Return {room: the most of its modules that stand on each other}."""
    below: dict[str, set[str]] = {
        name: {other for _, other in imports(path) if other in MODULES and room(other) == room(name) != other} - {name}
        for name, path in MODULES.items()
    }

    @cache
    def height(name: str) -> int:
        return 1 + max(map(height, below[name]), default=0)

    return {each: max(height(name) for name in MODULES if room(name) == each) for each in arrows()}


def page() -> str:
    """Return docs/house.md."""
    found, heights = arrows(), floors()
    rows = []
    for name in sorted(found, key=lambda each: (-PACKAGES[each.partition(".")[0]], each)):
        says = (ast.get_docstring(ast.parse(MODULES[name].read_text())) or "").split("\n\n")[0].replace("\n", " ")
        others = ", ".join(f"`{other}`" for other in sorted(found[name])) or "nothing of ours"
        files = sum(room(each) == name for each in MODULES)
        rows.append(f"| `{name.replace('.', '/')}` | {says} | {files} | {heights[name]} | {others} |")
    return PAGE + "\n".join(rows) + "\n"


PAGE = """# The house in one picture

This page says which folder holds what, and which others it imports from. `python tests/house/graph.py` prints it, and a
test keeps it true.

```
tools        the commands
launch       scripts and recipes
megacore     the engine: training, recovery, launcher, checks, planning, inference, data, store
models       families, as tables
parallel     layers, gradients, pipelines, kernels, weights
```

Imports go down this picture and never up, and nowhere in a circle; `parallel/weights` and what else counts with
integers alone needs no torch. *Files* are those of a folder itself, *floors* the most of them that stand on each other.

| folder | what it is | files | floors | imports from |
|---|---|---|---|---|
"""


if __name__ == "__main__":
    print(page(), end="")
