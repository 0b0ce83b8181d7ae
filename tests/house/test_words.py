"""One class name has one meaning, and docstrings are sentences, as far as their beginnings show."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from graph import FILES, ROOT

TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}
FRAGMENT = re.compile(
    "(And|As|At|After|Before|By|For|From|How|In|Of|On|That|To|Until|What|When|Where|Which|Who|With|Without) "
)
"""No sentence of ours begins with these."""
NO_VERB = re.compile(
    "(A|All|An|Any|Both|Each|Every|Everything|It|Its|No|Nobody|One|Per|Since|Some|Successive|The|Their|This|Those|"
    r"Whether|Why|\w+Error) |[({[]"
)
THIRD_PERSON = re.compile("[A-Z][a-z]+(?<!s)s ")
ARGUMENT = re.compile(r"^ +[a-z_][\w, ]*: (?:As|By|From|How|In|Of|To|What|Where|Which|With) .*", re.MULTILINE)


@pytest.mark.quick
def test_a_class_name_has_one_meaning() -> None:
    """A leading underscore makes no other name."""
    files = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name.lstrip("_")].append(name)
    assert not {name: places for name, places in files.items() if len(places) > 1}


def strings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and text of each docstring, and of the strings below fields and constants; and whether it is of a
    function, which does something, rather than of a property or a thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            acts = isinstance(node, ast.FunctionDef) and not any(
                "property" in ast.unparse(d) for d in node.decorator_list
            )
            for number, line in enumerate(node.body):
                match line:
                    case ast.Expr(ast.Constant(str() as text)):
                        yield line.lineno, text.strip(), acts and number == 0


@pytest.mark.quick
@pytest.mark.parametrize("name", TREES)
def test_docstrings_are_sentences(name: str) -> None:
    """A function's begins with a verb: "Return ...", or with the shapes that it makes of shapes, "x: [t] -> [n]"."""
    bad = list[str]()
    for line, text, acts in strings(TREES[name]):
        if FRAGMENT.match(text) or (acts and (NO_VERB.match(text) or THIRD_PERSON.match(text))):
            bad.append(f"{name}:{line}: {text.splitlines()[0]}")
        bad += [f"{name}:{line}: {found.strip()}" for found in ARGUMENT.findall(text)]
    assert not bad, "\n".join(["say it with a verb, or with the noun that it is:", *bad])
