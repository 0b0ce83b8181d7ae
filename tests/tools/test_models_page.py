"""`megacore models`: docs/zoo.md is what it prints, from the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.models.registry import FAMILIES, configure, presets
from megacore.tools import models

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

Capture = pytest.CaptureFixture[str]


@pytest.mark.quick
def test_the_page_is_what_is_printed(capsys: Capture) -> None:
    assert models.main([]) == 0
    page = capsys.readouterr().out
    assert page == PAGE.read_text(), "print it anew: megacore models > docs/zoo.md"
    for name in (*(f"\n| {family} |" for family in FAMILIES), *(p for p in presets() if not p.endswith("-tiny"))):
        assert name in page


def test_one_family_or_one_preset(capsys: Capture) -> None:
    assert models.main(["gpt2"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].startswith("gpt2: 124,439,808 parameters (layer 12, vocab 50,257, ")
    assert models.main(["gpt2-xl"]) == 0
    assert capsys.readouterr().out.startswith("gpt2-xl: 1,557,611,200 parameters")
    assert models.main(["gpt2-x1"]) == 2
    assert capsys.readouterr().err == "there is no family or preset 'gpt2-x1': did you mean 'gpt2-xl'?\n"


def test_what_is_special_is_read_off() -> None:
    assert models.special(configure({"preset": "gpt2"})) == [
        "biases (attn.qkv, attn.out, mlp.up, mlp.down)",
        "no gate",
        "learned positions",
        "tied head",
        "LayerNorm",
        "gelu_new",
    ]
    assert models.special(configure({"preset": "llama-3.2-1b"})) == [
        "shared keys and values",
        "tied head",
        "llama3 rope",
    ]
