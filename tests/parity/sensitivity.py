"""Is the suite able to fail?  ``python tests/parity/sensitivity.py [--only NAME ...] [--list]``

A table of mistakes that people make, faults.yaml. Each is seeded in a copy of the tree, and the part of the suite runs
that should see it. Prints which test caught it; the exit status is 1 if one survives, and 2 if a place or a test is not
there any more, so that the table stays honest, or if a test fails without any fault.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from seeding import Edit, Fault, Stale, check


def read(path: Path) -> Iterator[Fault]:
    """Yield the faults of a table. One without ``after`` leaves code out."""
    table = yaml.safe_load(path.read_text())

    def test(name: str) -> str:
        short, bracket, parameters = name.partition("[")
        return table["tests"].get(short, short) + bracket + parameters

    def edit(said: Mapping[str, Any]) -> Edit:
        return Edit(said["place"], said["before"], said.get("after", ""))

    for said in table["faults"]:
        tests = [said["test"]] if isinstance(said["test"], str) else said["test"]
        yield Fault(said["name"], tuple(map(edit, said.get("edits", [said]))), tuple(map(test, tests)))


FAULTS = tuple(read(Path(__file__).with_name("faults.yaml")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="faults whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the faults and seed none")
    arguments = parser.parse_args()
    chosen = [each for each in FAULTS if any(word in each.name for word in arguments.only or [""])]
    if not chosen:
        parser.error(f"no fault has {arguments.only} in its name; --list prints them")
    if arguments.list:
        print("\n".join(f"{each.name} ({', '.join(edit.place for edit in each.edits)})" for each in chosen))
        return 0
    try:
        return 1 if check(chosen) else 0
    except Stale as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
