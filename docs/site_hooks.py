"""What the site has beside the pages of this folder: the README as its first page, and the API from the docstrings.

mkdocs calls these functions by their names (mkdocs.yml). Pages lead to files of the checkout, which are no part of the
site: there such a link becomes what it is called.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*|[A-Z]+(?:\.md)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links stay on the site: those that lead out of it become what they are called."""
    return _OUTSIDE.sub(r"\1", markdown.replace("](../README.md", "](index.md"))


def _api() -> str:
    """Return a page of what `megacore` and `parallel` offer by name."""
    parts = ["# Functions and classes", "This page says what each name takes, gives and raises."]
    for package in ("megacore", "parallel"):
        parts += [f"## {package}", *(f"::: {module}.{name}" for name, module in sorted(_public(package).items()))]
    return "\n\n".join(parts)


def _public(package: str) -> dict[str, str]:
    """Return {name: module} of a package's `_PUBLIC`, without importing it."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            if isinstance(target, ast.Name) and target.id == "_PUBLIC":
                found: dict[str, str] = ast.literal_eval(node.value)
                return found
    raise LookupError(f"{package} has no _PUBLIC")
