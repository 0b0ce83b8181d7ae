"""`megacore report`: one file of HTML about runs, which any browser shows without a network: their curves beside each
other, what differs in their configs, what befell them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megacore.run_report import report
from megacore.say import err, say
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.publish import replace_file


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="megacore report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="the folder of a run, its out; several")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the file (report.html in the first folder)")
    given = parser.parse_args(argv)
    target = given.to or given.runs[0] / "report.html"
    try:
        made = report(given.runs).encode()
        replace_file(target, made)
    except (StoreError, OSError) as error:
        err(error)
        return 1
    say(f"{target}: a report of {', '.join(map(str, given.runs))}, {len(made):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
