"""`megacore watch`: where runs stand, shown anew every few seconds in a terminal, until all their steps are done.

It reads what `megacore status` reads, on a disk that a cluster shares too, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.text import Text

from megacore import exits
from megacore.say import err, harmless
from megacore.store.io.strict_json import StoreError
from megacore.tools.options import command_parser
from megacore.tools.status import RunState


def main(argv: Sequence[str]) -> int:
    parser = command_parser("watch", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="the folder of a run, its out; several")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="the seconds from one look to the next (2)"
    )
    given = parser.parse_args(argv)
    try:
        with Live(auto_refresh=False) as live:
            while True:
                states = [RunState.of(out) for out in given.runs]
                live.update(Group(*map(_panel, states)), refresh=True)
                if all(state.is_done and state.holder is None for state in states):
                    return exits.DONE
                time.sleep(max(0.1, given.every))
    except StoreError as error:
        err(error)
        return exits.FAILED
    except KeyboardInterrupt:
        return exits.DONE


def _panel(state: RunState) -> RenderableType:
    """Return a run as it is shown."""
    about, *lines = state.lines()
    step = state.training["step"] if state.training else 0
    shown: list[RenderableType] = [Text(harmless("\n".join(lines)))]
    if state.steps is not None:
        shown.insert(0, Padding(ProgressBar(total=state.steps, completed=step), 0))
    return Panel(Group(*shown), title=Text(harmless(about.split(maxsplit=1)[1])), title_align="left")
