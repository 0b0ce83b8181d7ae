"""The pages are true: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
_LINK = re.compile(r"(`?)(?P<text>[^]`]*)\1\]\((?P<path>[^)#\s]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.finditer(page.read_text()):
        if not link["path"].startswith("http"):
            assert (page.parent / link["path"]).exists(), f"{page.name} leads to {link['path']}"


def test_the_walk_names_what_stands_in_each_file() -> None:
    links = [link for link in _LINK.finditer((ROOT / "docs/a_step.md").read_text()) if link["path"].endswith(".py")]
    for link in links:
        code = (ROOT / "docs" / link["path"]).read_text()
        assert re.search(rf"^ *(class|def) {link['text']}\b", code, re.MULTILINE), (
            f"no {link['text']} in {link['path']}"
        )
    assert len(links) > 40
