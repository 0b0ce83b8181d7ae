"""One class name has one meaning, and docstrings are sentences."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXEMPT = ("models/", "parallel/layers/", "parallel/kernels/")
"""Rooms that are being rebuilt: to be emptied."""
TREES = {
    name: ast.parse(path.read_text())
    for package in ("megacore", "models", "parallel", "tools")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not (name := str(path.relative_to(ROOT))).startswith(EXEMPT)
}


@pytest.mark.quick
def test_a_class_name_has_one_meaning() -> None:
    """A leading underscore makes no other name."""
    files = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].append(name)
    assert not {name: places for name, places in files.items() if len(places) > 1}
