"""Faults, and the copy of the tree in which they are seeded.

A fault is found by the names of functions and by what their code says, wherever it stands and however it is laid out:
code may move within its function, functions within their file, and to another one.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES, TESTS = ("megacore", "models", "parallel", "tools"), ("tests",)


class Stale(Exception):
    """A fault whose place or test is not there any more, or tests that fail without it."""


@dataclass(frozen=True)
class Edit:
    """A change of one function.

    Args:
        place: The end of its dotted name, as much of it as makes it the only one: ``counted_tokens``,
            ``Decoder.chunk``, ``step.evaluate``. A class or a module is a place as well.
        before: What its code says exactly once: an expression, or statements that follow each other. Blanks, line
            breaks, quotes and needless parentheses do not count.
        after: What it becomes; statements that become nothing are left out.
    """

    place: str
    before: str
    after: str


@dataclass(frozen=True)
class Fault:
    """A mistake, and who should see it. ``name``: in words; ``edits``: that make it; ``tests``: one of them must fail,
    by the end of its dotted name as a place, with ``[parameters]`` or all of them."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


# -- names


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: a file below the root, and the names that lead there inside of it."""

    file: str
    inside: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        """With its dots."""
        return ".".join((*Path(self.file).with_suffix("").parts, *self.inside))


def find(name: str, folders: tuple[str, ...] = PACKAGES) -> Definition:
    """The one definition whose dotted name ends so. Raises Stale: there is none, or more than one."""
    files = (file for file, names in _names(folders).items() if names.issuperset(name.split(".")))
    found = [each for file in files for each in _definitions(file) if f".{each.name}".endswith(f".{name}")]
    if len(found) != 1:
        names = " and ".join(each.name for each in found) or "nothing"
        raise Stale(f"{name}: names {names} in {', '.join(folders)}")
    return found[0]


@cache
def _names(folders: tuple[str, ...]) -> Mapping[str, set[str]]:
    """{file: what dotted names of its definitions are made of}, so that few have to be parsed."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): re.findall(r"\b(?:class|def) +(\w+)", path.read_text()) for path in paths}
    return {file: {*Path(file).with_suffix("").parts, *names} for file, names in found.items()}


@cache
def _definitions(file: str) -> Sequence[Definition]:
    return [Definition(file, inside) for inside, _ in _walk(_parsed((ROOT / file).read_text()))]


@cache
def _parsed(source: str) -> ast.Module:
    """Nobody changes it."""
    return ast.parse(source)


def _walk(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    """(the names that lead there, node) of a module and of all classes and functions in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield inside, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # holds none of them
            continue
        name = (child.name,) if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ()
        yield from _walk(child, inside + name)


def node_id(test: str) -> str:
    """A test's name as pytest takes it."""
    name, bracket, parameters = test.partition("[")
    found = find(name, TESTS)
    return "::".join((found.file, *found.inside)) + bracket + parameters


# -- edits


def edited(source: str, inside: tuple[str, ...], edit: Edit) -> str:
    """The source with the edit. The statement of the module that holds its place is made anew from what it says: its
    comments are gone. Raises Stale: what is to be changed is not there exactly once, or what comes of it is the same or
    no code."""
    lines = source.split("\n")
    start, end = 0, len(lines)
    if inside:
        named = (node for node in _parsed(source).body if getattr(node, "name", inside[0]) == inside[0])
        outer = next(node for node in named if any(names == inside for names, _ in _walk(ast.Module([node], []))))
        start = min(node.lineno for node in (outer, *getattr(outer, "decorator_list", ()))) - 1
        end = outer.end_lineno or 0
    tree = ast.parse("\n".join(lines[start:end]))
    (place,) = (node for names, node in _walk(tree) if names == inside)
    before, after = ast.parse(edit.before).body, ast.parse(edit.after).body
    match before, after:
        case [ast.Expr(old)], [ast.Expr(new)]:
            count = _replace_expression(place, old, new)
        case _:
            count = _replace_statements(place, before, after)
    if count != 1:
        raise Stale(f"{edit.place}: says {count} times instead of once: {edit.before!r}")
    if [*map(ast.dump, before)] == [*map(ast.dump, after)]:
        raise Stale(f"{edit.place}: {edit.after!r} changes nothing")
    faulty = ast.unparse(tree)
    try:
        compile(faulty, edit.place, "exec")
    except SyntaxError as error:
        raise Stale(f"{edit.place}: {edit.after!r}: {error}") from error
    return "\n".join([*lines[:start], faulty, *lines[end:]])


def _replace_expression(place: ast.AST, before: ast.expr, after: ast.expr) -> int:
    """How often it was there."""
    wanted, count = ast.dump(before), 0

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            nonlocal count
            if isinstance(node, ast.expr) and ast.dump(node) == wanted:
                count += 1
                return after
            return self.generic_visit(node)

    Replace().visit(place)
    return count


def _replace_statements(place: ast.AST, before: Sequence[ast.stmt], after: Sequence[ast.stmt]) -> int:
    """How often they were there, one after the other."""
    wanted, count = [ast.dump(each) for each in before], 0
    for node in list(ast.walk(place)):
        for _, block in ast.iter_fields(node):
            if not isinstance(block, list) or not all(isinstance(each, ast.stmt) for each in block):
                continue
            said = [ast.dump(each) for each in block]
            for start in reversed(range(len(block) - len(before) + 1)):
                if said[start : start + len(before)] == wanted:
                    count += 1
                    block[start : start + len(before)] = after or [ast.Pass()]
    return count


def seeded(fault: Fault, root: Path = ROOT) -> dict[str, str]:
    """{file: its source with the fault}, of the tree or of a copy. Raises Stale: what :func:`find` and :func:`edited`
    raise."""
    made: dict[str, str] = {}
    for edit in fault.edits:
        place = find(edit.place)
        source = made.get(place.file) or (root / place.file).read_text()
        made[place.file] = edited(source, place.inside, edit)
    return made


# -- the copy


LEAST_S, MOST_S, TIMES = 15, 120, 3


def patience(output: str) -> int:
    """How many seconds the pool waits for ranks with a fault: what hangs is caught as well, and need not be waited for
    as long as the pool does, but several times as long as the slowest part of a test took without a fault."""
    slowest = max(map(float, re.findall(r"^([\d.]+)s (?:setup|call)", output, re.MULTILINE)), default=0.0)
    return min(max(LEAST_S, round(TIMES * slowest)), MOST_S)


@contextmanager
def copied(files: Iterable[str]) -> Iterator[Path]:
    """A copy of what the tests need, with some files made anew from what they say, as :func:`edited` does."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in (*PACKAGES, *TESTS, "benchmarks"):
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for file in files:
            (folder / file).write_text(ast.unparse(ast.parse((ROOT / file).read_text())))
        yield folder


def run_tests(folder: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """(pytest's exit status, its output)."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *options]
    # Python tells stale bytecode by whole seconds and the size: faults can be quicker.
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, *map(node_id, tests)],
        cwd=folder,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=300 + 5 * len(tests),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def caught_by(folder: Path, fault: Fault) -> str | None:
    """The first test that fails with the fault; None if it survives."""
    faulty = seeded(fault, folder)
    before = {file: (folder / file).read_text() for file in faulty}
    _write(folder, faulty)
    try:
        status, output = run_tests(folder, fault.tests, "-x")
    finally:
        _write(folder, before)
    if status == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status != 1 or found is None:
        raise Stale(f"{fault.name}: pytest ended with status {status}:\n{output}")
    return found[1].removeprefix("tests/")


def _write(folder: Path, sources: Mapping[str, str]) -> None:
    for file, source in sources.items():
        (folder / file).write_text(source)


def check(faults: Sequence[Fault]) -> int:
    """Seed each fault, print the table -> how many survive. Raises Stale: faults cannot be seeded, or their tests fail
    without them; once all others are in the table."""
    survived, stale = 0, list[Stale]()
    with copied({file for fault in faults for file in seeded(fault)}) as folder:
        start = time.perf_counter()
        tests = sorted({test for fault in faults for test in fault.tests})
        status, output = run_tests(folder, tests, "--durations=1")
        if status:
            raise Stale(f"without any fault pytest ends with status {status}:\n{output}")
        print(f"{len(tests)} tests pass without a fault ({time.perf_counter() - start:.0f} s)", flush=True)
        with (folder / find("tests.pool", TESTS).file).open("a") as pool:
            pool.write(f"\nTIMEOUT_S = {patience(output)}\n")
        width = max(len(fault.name) for fault in faults)
        for fault in faults:
            start = time.perf_counter()
            try:
                catcher = caught_by(folder, fault) or "SURVIVES"
            except Stale as error:
                stale.append(error)
                catcher = "STALE"
            survived += catcher == "SURVIVES"
            seconds = time.perf_counter() - start
            print(f"{fault.name:<{width}}  {catcher}  ({seconds:.0f} s)", flush=True)
    print(f"{len(faults) - survived - len(stale)} of {len(faults)} faults are caught")
    if stale:
        raise Stale("\n".join(map(str, stale)))
    return survived
