"""`megacore report`: one file of HTML about runs, which any browser shows without a network: their curves beside each
other, what differs in their configs, what befell them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megacore.say import err, say
from megacore.store.io.strict_json import StoreError
from megacore.tools.options import command_parser
from megacore.training.run_report import PAGE, write


def main(argv: Sequence[str]) -> int:
    parser = command_parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="the folder of a run, its out; several")
    parser.add_argument("--to", type=Path, metavar="FILE", help=f"the file ({PAGE} in the first folder)")
    given = parser.parse_args(argv)
    target = given.to or given.runs[0] / PAGE
    try:
        size = write(given.runs, target)
    except (StoreError, OSError) as error:
        err(error)
        return 1
    say(f"{target}: a report of {', '.join(map(str, given.runs))}, {size:,} bytes")
    return 0
