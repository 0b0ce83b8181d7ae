"""`megacore ray`: train what a recipe describes on machines of a Ray cluster, which Ray Train finds and replaces."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from megacore.exits import MISUSED
from megacore.recipe import ConfigError, load
from megacore.say import err
from megacore.tools.options import command_parser


def main(argv: Sequence[str]) -> int:
    parser = command_parser("ray", __doc__, allow_abbrev=False)
    parser.add_argument("recipe", help="a file, or one that comes along")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the recipe")
    parser.add_argument("--workers", default="1", metavar="N|LEAST:MOST", help="machines; a range may shrink and grow")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks on each machine (its --gpus, else 1)")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each machine (0)")
    parser.add_argument("--failures", type=int, default=10, metavar="N", help="how often all may be started again (10)")
    parser.add_argument("--look", type=float, default=60, metavar="S", help="seconds between looks for machines (60)")
    given = parser.parse_intermixed_args(argv)
    try:
        workers = workers_of(given.workers)
        out = Path(load(given.recipe, given.overrides).out).absolute()
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(["megacore ray needs the package ray: pip install 'megacore[ray]'"])
    except ConfigError as error:
        err(error)
        return MISUSED
    from megacore.launch.ray_cluster import fit

    processes = given.processes or given.gpus or 1
    resources = {"CPU": processes, "GPU": given.gpus}
    arguments = [given.recipe, *given.overrides]
    status, said = fit(arguments, out, workers, resources, processes, given.failures, given.look)
    if status:
        err(said)
    return status


def workers_of(text: str) -> int | tuple[int, int]:
    """Return a number of machines, or the least and the most. Raises ConfigError: it is neither."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts) or int(parts[0]) > int(parts[-1]):
        raise ConfigError([f"--workers ({text}): give a number, or the least and the most (2:8)"])
    return int(text) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
