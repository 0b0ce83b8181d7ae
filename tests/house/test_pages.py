"""The pages are true: what they name is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
_LINK = re.compile(r"(`?)(?P<text>[^]`]*)\1\]\((?P<path>[^)#\s]+)(#[^)]*)?\)")


def test_links_lead_somewhere() -> None:
    links = [(page, link["path"]) for page in PAGES for link in _LINK.finditer(page.read_text())]
    assert not [
        f"{page.name} leads to {path}"
        for page, path in links
        if not path.startswith("http") and not (page.parent / path).exists()
    ]


def test_the_site_has_all_pages() -> None:
    named = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")} | {"index.md", "api.md"}


def test_every_page_begins_with_what_it_is_for_and_a_command_or_code() -> None:
    heads = {
        page.name: page.read_text().partition("\n## ")[0]
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    }
    assert not [page for page, head in heads.items() if not re.match(r"# .+\n\n[A-Z`].+\n", head)]
    assert not [
        page for page, head in heads.items() if not re.search(r"^(```| {4}\S)|`(megacore|torchrun) ", head, re.M)
    ]


def test_the_walk_names_what_stands_in_each_file() -> None:
    links = [link for link in _LINK.finditer((ROOT / "docs/a_step.md").read_text()) if link["path"].endswith(".py")]
    for link in links:
        code = (ROOT / "docs" / link["path"]).read_text()
        assert re.search(rf"^ *(class|def) {link['text']}\b", code, re.MULTILINE), (
            f"no {link['text']} in {link['path']}"
        )
    assert len(links) > 40
