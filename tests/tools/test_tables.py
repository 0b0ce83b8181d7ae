"""Tables for people: no line is wider than a terminal, whatever is in them, and nothing that they say is lost."""

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore import tools
from megacore.tools import main, tables

RECIPES = Path(__file__).parents[2] / "launch/recipes"
LARGE, SMALL = (str(RECIPES / f"llama-{name}.yaml") for name in ("3.1-70b", "3.2-1b"))


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_in_a_pipe_a_row_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert tables.table(("a", "b"), [("x " * 99, "y " * 99)]).count("\n") == 1


def test_a_table_that_is_narrow_enough_stays_as_it_is() -> None:
    shown = tables.table({"part": "", "s": ",.2f", "": ""}, [("products", 1234.5, "a b"), ("waits", 2.0, "")])
    assert shown == "  part             s\n  products  1,234.50  a b\n  waits         2.00"


def test_long_texts_take_several_lines() -> None:
    keys = "mesh.tp=4 memory.recompute=[" + ",".join(["selective"] * 12) + "] " + "zero.shard=optimizer " * 6
    shown = tables.table(("s", "overrides", "of"), [("1.25", keys, "x"), ("2.50", "mesh.tp=8", "y")]).splitlines()
    assert max(map(len, shown)) <= tables.WIDTH
    assert (shown[1].split()[0], shown[1].split()[-1]) == ("1.25", "x") and shown[1].endswith("selective,  x")
    assert shown[-1].split() == ["2.50", "mesh.tp=8", "y"]
    assert "".join("".join([shown[1][8:-3], *shown[2:-1]]).split()) == "".join(keys.split())


def test_columns_without_room_stand_below_beside_the_first() -> None:
    ranks = [f"{2**each:,} ranks" for each in range(14)]
    shown = tables.table(("of a step", *ranks), [("products", *("7,504.9 (94%)" for _ in ranks))])
    parts = [part.splitlines() for part in shown.split("\n\n")]
    assert [[line.split()[0] for line in part] for part in parts] == [["of", "products"]] * 3
    assert max(len(line) for part in parts for line in part) <= tables.WIDTH and shown.count("7,504.9 (94%)") == 14


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_in_it(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 12)

    def cell() -> str:
        return " ".join("".join(draw.choices("ab.,/", k=draw.randint(1, 60))) for _ in range(draw.randint(0, 6)))

    rows = [[cell() for _ in range(size)] for _ in range(3)]
    shown = tables.table([f"h{at}" for at in range(size)], rows)
    assert all(len(line) <= tables.WIDTH for line in shown.splitlines())
    wanted = sum(len(text) for row in rows for text in ("".join(each.split()) for each in row[1:]))
    parts = shown.count("h0")
    wanted += parts * sum(len("".join(row[0].split())) for row in rows) + parts * 2
    assert len("".join(shown.split())) == wanted + sum(len(f"h{at}") for at in range(1, size))


@pytest.mark.parametrize(
    "command",
    [
        ["plan", LARGE],
        ["plan", SMALL, "--fit", "GPU=a100-40"],
        ["plan", SMALL, "--world", "8,16,32,64,128", "--weak"],
        ["plan", str(RECIPES / "experts.yaml"), "--imbalance", "2"],
        ["schedule", "--stages", "4", "--microbatches", "8", "--chunks", "2"],
        ["context", "--documents", "900,60,64", "--cp", "4"],
        ["import", "FILE"],
    ],
    ids=lambda words: " ".join(words).replace(f"{RECIPES}/", ""),
)
def test_the_tables_of_commands(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them makes its tables in one place."""
    found, file = list[str](), tmp_path / "ds.json"
    keys = {"train_batch_size": 32, "zero_optimization": {"stage": 3, "overlap_comm": True}, "bf16": {"enabled": True}}
    file.write_text(json.dumps(keys))

    def table(*arguments: Any) -> str:
        found.append(tables.table(*arguments))
        return found[-1]

    for name in ("context", "import_recipe", "plan", "scaling", "schedule"):
        monkeypatch.setattr(importlib.import_module(f"{tools.__name__}.{name}"), "table", table)
    assert main.main([str(file) if each == "FILE" else each for each in command]) == 0 and found
    assert max(len(line) for each in found for line in each.splitlines()) <= tables.WIDTH
