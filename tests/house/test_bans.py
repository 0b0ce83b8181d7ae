"""What could follow a link, run a stranger's code or print one's text stands in one module, where it is done right.

What the name of a module tells is banned by the linter (pyproject.toml); this knows methods and modes.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from graph import FILES, ROOT

METHODS = {
    "from_pretrained": "megacore.data.pretrained",
    "write_text": "megacore.store.tensor_files.publish",
    "write_bytes": "megacore.store.tensor_files.publish",
    "touch": "megacore.store.tensor_files.publish",
}
"""{method: the module that does instead what it is for}."""
MODES = re.compile(r"(?=.*[wa+])[rwatb+]{1,3}")
"""Of open() and the like: all that write, but for "x", which makes a file or fails."""
COPIES = {"copy", "copy2", "copyfile", "copytree", "move"}
FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT"}

FOLDERS = {"AdaptedFolder", "Checkpoint", "HuggingFace", "Merged", "SafetensorsFolder"}
"""What kind of folder it has, nobody asks: a folder does what its format takes."""

OPENING = {"megacore/store/io/files.py", "megacore/store/io/direct.py", "megacore/store/io/objects.py"}
"""The one module that opens, a second way into a file that is open already, and what opens objects."""
DEVNULL = "tools/main.py"
RANKS = ("megacore/training/", "megacore/inference/", "megacore/store/weight_folders/", "parallel/", "models/")
"""Where ranks go through the same things together."""


def bans(tree: ast.AST, path: str) -> Iterator[str]:
    for node in ast.walk(tree):
        name, owner = _name(node)
        if isinstance(node, ast.Call) and name in METHODS and path != f"{METHODS[name].replace('.', '/')}.py":
            yield f"{path}:{node.lineno}: {name}: {METHODS[name]} does it"
        elif isinstance(node, ast.Call) and name == "isinstance" and _names(node.args[1]) & FOLDERS:
            yield f"{path}:{node.lineno}: isinstance of a folder: folders.folder has what all of them can do"
        elif isinstance(node, ast.Call) and name in COPIES and owner == "shutil":
            yield f"{path}:{node.lineno}: {name} follows links: open with megacore.store.io.files"
        elif isinstance(node, ast.Call) and name in ("open", "FileIO", "fdopen") and path not in OPENING:
            given = (*node.args, *(word.value for word in node.keywords))
            values = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if any(MODES.fullmatch(value) for value in values):
                yield f"{path}:{node.lineno}: open(..., {values[-1]!r}): megacore.store.io.files and .publish write"
        elif isinstance(node, ast.For) and _is_set(node.iter) and path.startswith(RANKS):
            yield f"{path}:{node.lineno}: {ast.unparse(node.iter)}: each rank has an order of its own of it: sort it"
        elif isinstance(node, ast.Attribute) and name in FLAGS and path not in {*OPENING, DEVNULL}:
            yield f"{path}:{node.lineno}: {name}: megacore.store.io.files opens"


def _is_set(node: ast.expr) -> bool:
    """Whether an expression is a set by the look of it: strings have another order in each process."""
    if isinstance(node, ast.BinOp):
        return any(
            _is_set(side) or (isinstance(side, ast.Call) and _name(side)[0] == "keys")
            for side in (node.left, node.right)
        )
    return isinstance(node, ast.Set | ast.SetComp) or (
        isinstance(node, ast.Call) and _name(node)[0] in ("set", "frozenset")
    )


def _names(node: ast.AST) -> set[str]:
    return {_name(each)[0] for each in ast.walk(node)}


def _name(node: ast.AST) -> tuple[str, str]:
    """(name of what is called or looked up, what it belongs to)."""
    found = node.func if isinstance(node, ast.Call) else node
    if isinstance(found, ast.Attribute):
        return found.attr, found.value.id if isinstance(found.value, ast.Name) else ""
    return (found.id, "") if isinstance(found, ast.Name) else ("", "")


@pytest.mark.quick
def test_the_house_keeps_to_it() -> None:
    """And a class name has one meaning; a leading underscore makes no other name."""
    found, files = list[str](), defaultdict[str, list[str]](list)
    for path in FILES:
        name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        found += bans(tree, name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].append(name)
    found += [f"class {name} in {', '.join(places)}" for name, places in files.items() if len(places) > 1]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        'open(path, "w")',
        'open(path, mode="ab")',
        'path.open("r+")',
        'FileIO(path, "a")',
        'path.write_text("x")',
        "path.write_bytes(data)",
        "path.touch()",
        "os.open(path, os.O_RDWR)",
        "shutil.copyfile(a, b)",
        "Model.from_pretrained(folder, local_files_only=True)",
        "isinstance(found, Checkpoint | HuggingFace)",
        "for state in states.keys() - {MASTER}: pass",
    ],
)
def test_what_is_banned(text: str) -> None:
    assert len(list(bans(ast.parse(text), "megacore/training/trainer.py"))) == 1


@pytest.mark.parametrize(
    "text", ['open(path, "xb")', 'names["w"].open(1)', "path.open()", 'gzip.open(path, "rb")', "a.copy()"]
)
def test_what_is_not(text: str) -> None:
    assert not list(bans(ast.parse(text), "megacore/training/trainer.py"))
