"""`megacore config` and `megacore models`: docs/config.md and docs/zoo.md are what they print."""

from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megacore.config import SECTIONS
from megacore.models.registry import FAMILIES, configure, family, presets
from megacore.models.wrappers import SAME, WRAPPERS
from megacore.tools import config, models

DOCS = Path(__file__).parents[2] / "docs"
KEYS = [f"\n- `{section}.{each.name}`: " for section, kind in SECTIONS.items() for each in fields(kind)]
ZOO = [*(f"\n| {family} |" for family in FAMILIES), *(name for name in presets() if not name.endswith("-tiny"))]

Capture = pytest.CaptureFixture[str]


@pytest.mark.quick
@pytest.mark.parametrize(("command", "page", "names"), [(config, "config", KEYS), (models, "zoo", ZOO)])
def test_the_page_is_what_is_printed(command: ModuleType, page: str, names: list[str], capsys: Capture) -> None:
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    anew = f"print it anew: megacore {command.__name__.rpartition('.')[2]} > docs/{page}.md"
    assert printed == (DOCS / f"{page}.md").read_text(), anew
    assert not [name for name in names if name not in printed]


@pytest.mark.quick
def test_readme_and_changelog_count_the_families() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    mixtures = sum(_has_experts(name) for name in FAMILIES)
    assert f"[{len(FAMILIES)} families](docs/zoo.md)" in readme and f"{mixtures} with [experts](docs/moe.md)" in readme
    assert f"Models: {len(FAMILIES)} families ([the zoo]" in (DOCS.parent / "CHANGELOG.md").read_text()


@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="the list is of one version")
def test_every_causal_model_of_transformers_is_carried_or_has_a_reason() -> None:
    """A type that a later version adds is to be carried, or to be listed with what it wants."""
    listed = [name for names in models.NOT_CARRIED.values() for name in names.split(", ")]
    carried = {*FAMILIES, *WRAPPERS, *SAME}
    assert len(listed) == len({*listed}) and carried.isdisjoint(listed)
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - carried <= {*listed} <= {*CONFIG_MAPPING}


def test_one_section_or_one_key(capsys: Capture) -> None:
    assert config.main(["optimizer"]) == 0
    assert "AdamW" in (said := capsys.readouterr().out) and "`optimizer.lr`" in said and "`train.steps`" not in said
    assert config.main(["optimizer.lr"]) == 0
    key = "- `optimizer.lr`: a number, above 0; `0.0003` by default. The highest learning rate; `schedule` moves it.\n"
    assert capsys.readouterr().out == key
    assert config.main(["optimizer.rl"]) == 2
    assert capsys.readouterr().err == "a recipe has no optimizer.rl: did you mean 'optimizer.lr'?\n"


def test_one_family_or_one_preset(capsys: Capture) -> None:
    assert models.main(["gpt2"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].startswith("gpt2: 124,439,808 parameters (layer 12, vocab 50,257, ")
    assert models.main(["gpt2-xl"]) == 0
    assert capsys.readouterr().out.startswith("gpt2-xl: 1,557,611,200 parameters")
    assert models.main(["gpt2-x1"]) == 2
    assert capsys.readouterr().err == "there is no family or preset 'gpt2-x1': did you mean 'gpt2-xl'?\n"


def test_what_is_special_is_read_off() -> None:
    biases = "biases (attn.qkv, attn.out, mlp.up, mlp.down)"
    gpt2 = [biases, "no gate", "learned positions", "tied head", "LayerNorm", "gelu_new"]
    assert models.special(configure({"preset": "gpt2"})) == gpt2
    llama = ["shared keys and values", "tied head", "llama3 rope"]
    assert models.special(configure({"preset": "llama-3.2-1b"})) == llama


def _has_experts(name: str) -> bool:
    return any(configure({"preset": preset}).anatomy.routing is not None for preset in family(name).presets)
