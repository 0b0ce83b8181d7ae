"""`megacore config`: every key of a recipe is explained, and docs/config.md is what it prints."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from megacore.config import SECTIONS
from megacore.tools import config

PAGE = Path(__file__).parents[2] / "docs" / "config.md"

Capture = pytest.CaptureFixture[str]


@pytest.mark.quick
def test_the_page_is_what_is_printed(capsys: Capture) -> None:
    assert config.main([]) == 0
    page = capsys.readouterr().out
    assert page == PAGE.read_text(), "print it anew: megacore config > docs/config.md"
    for section, kind in SECTIONS.items():
        for each in fields(kind):
            assert f"\n- `{section}.{each.name}`: " in page


def test_one_section_or_one_key(capsys: Capture) -> None:
    assert config.main(["optimizer"]) == 0
    assert "AdamW" in (said := capsys.readouterr().out) and "`optimizer.lr`" in said and "`train.steps`" not in said
    assert config.main(["optimizer.lr"]) == 0
    said = capsys.readouterr().out
    assert (
        said
        == "- `optimizer.lr`: a number, above 0; `0.0003` by default. The highest learning rate; `schedule` moves it.\n"
    )
    assert config.main(["optimizer.rl"]) == 2
    assert capsys.readouterr().err == "a recipe has no optimizer.rl: did you mean 'optimizer.lr'?\n"
