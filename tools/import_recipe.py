"""`megacore import`: a recipe of another project's config, and what became of each of its keys.

It reads DeepSpeed's JSON, the file of `accelerate config` for FSDP, axolotl's YAML, and the arguments of Megatron-LM in
a script or a file. What would change the run and is not here is refused, and nothing is written, unless it is ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megacore.foreign.accelerate import ACCELERATE
from megacore.foreign.axolotl import AXOLOTL
from megacore.foreign.deepspeed import DEEPSPEED
from megacore.foreign.megatron import MEGATRON, arguments
from megacore.foreign.rules import AccountRow, Given, Project, account, recipe_of
from megacore.parallel import limits
from megacore.recipe import ConfigError, load
from megacore.recipe_yaml import flat, read_yaml, write_yaml
from megacore.say import brief, err, say
from megacore.store.io.strict_json import StoreError, read_file
from megacore.store.tensor_files.publish import replace_file
from megacore.tools.options import command_parser, count
from megacore.tools.tables import table

PROJECTS: Mapping[str, Project] = {
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "axolotl": AXOLOTL,
    "megatron": MEGATRON,
}
_SIGNS = {"distributed_type": "accelerate", "fsdp_config": "accelerate", "base_model": "axolotl"}
"""{a key that only one of them has: whose it is}."""


def main(argv: Sequence[str]) -> int:
    parser = command_parser("import", __doc__)
    parser.add_argument("file", type=Path, help="the config")
    parser.add_argument("--from", dest="project", choices=PROJECTS, help="whose it is; told by its keys by default")
    parser.add_argument("--gpus", type=count, metavar="N", help="devices that it ran on, which batches depend on")
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="leave out a key; repeatable")
    parser.add_argument("--out", type=Path, metavar="RECIPE", help="the recipe to write; it is printed by default")
    given = parser.parse_args(argv)
    try:
        return _run(given)
    except (StoreError, ConfigError, OSError) as error:
        err(error)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and os.path.lexists(arguments.out):
        raise StoreError(f"{arguments.out} is there already: choose another --out")
    name, given = _read(arguments.file, arguments.project)
    if unknown := [key for key in arguments.ignore if key not in given]:
        raise StoreError(f"{arguments.file} has no {', '.join(unknown)} to ignore")
    rows = account(PROJECTS[name], {k: v for k, v in given.items() if k not in arguments.ignore}, arguments.gpus)
    refused = [row for row in rows if row.verdict.refused]
    err(f"{arguments.file}, of {PROJECTS[name].name}: {len(given):,} keys\n{_told(rows)}")
    if refused:
        keys = ", ".join(row.key for row in refused)
        raise StoreError(f"no recipe was made: {keys}: change them there, or leave them out by --ignore KEY")
    recipe = recipe_of(rows)
    load(recipe)  # or say what is wrong with the values
    text = f"# Of {arguments.file.name}, by megacore import\n{write_yaml(recipe)}"
    if arguments.out is None:
        say(text.rstrip())
        return 0
    replace_file(arguments.out, text.encode())
    say(f"{arguments.out}: a recipe, {len(text.encode()):,} bytes")
    return 0


def _read(file: Path, named: str | None) -> tuple[str, Given]:
    """Return whose a config is, and its keys. Raises StoreError: it cannot be read, or it is not known whose it is."""
    text = read_file(file, limit=limits.RECIPE).decode(errors="replace")
    if named == "megatron" or (named is None and "--num-layers" in text):
        return "megatron", arguments(text)
    try:
        tree = json.loads(text) if file.suffix == ".json" else read_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise StoreError(f"{file} is no JSON or YAML that can be read: {brief(str(error))}") from error
    if not isinstance(tree, dict) or not tree:
        raise StoreError(f"{file} has no keys")
    sign = next((project for key, project in _SIGNS.items() if key in tree), None)
    name = named or sign or ("deepspeed" if file.suffix == ".json" else None)
    if name is None:
        raise StoreError(f"{file}: it is not clear whose config it is: say --from {', '.join(PROJECTS)}")
    return name, flat(tree)


def _told(rows: Sequence[AccountRow]) -> str:
    """Return what became of the keys: of what is carried or refused in a table, of the others by the reason."""
    shown = [row for row in rows if row.verdict.keys or row.verdict.refused]
    shown.sort(key=lambda row: row.verdict.refused)
    lines = [table(("key", "value", "becomes"), [(row.key, _value(row), _becomes(row)) for row in shown])]
    reasons = dict.fromkeys(row.verdict.remark for row in rows if row not in shown)
    for reason in reasons:
        keys = ", ".join(row.key for row in rows if row not in shown and row.verdict.remark == reason)
        wrapped = textwrap.TextWrapper(110, "  ", "    ", break_long_words=False, break_on_hyphens=False)
        lines += ["", *wrapped.wrap(f"{reason}: {keys}")]
    return "\n".join(lines)


def _value(row: AccountRow) -> str:
    text = brief(row.value)
    return text if row.given else f"({text})"


def _becomes(row: AccountRow) -> str:
    verdict = row.verdict
    if verdict.refused:
        return f"REFUSED: {verdict.remark}"
    keys = ", ".join(f"{key}={_spelled(value)}" for key, value in verdict.keys.items())
    remarks = "; ".join(each for each in (verdict.remark, "" if row.given else "left out: the default there") if each)
    return f"{keys}{f' ({remarks})' if remarks else ''}"


def _spelled(value: Any) -> str:
    return brief(json.dumps(value) if isinstance(value, dict | list | bool | None) else str(value))
