"""One class name has one meaning."""

import ast
from collections import defaultdict

import pytest
from graph import FILES, ROOT


@pytest.mark.quick
def test_a_class_name_has_one_meaning() -> None:
    """A leading underscore makes no other name."""
    files = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert not {name: places for name, places in files.items() if len(places) > 1}
