"""The commands `megacore train` and `megacore finetune`: read a recipe, check the run, start its ranks on this machine.

A recipe is read before anything that is slow to import, so that a typo is said at once. One agent looks after the ranks
of a machine (:mod:`megacore.recovery.agent`), on one machine and on many.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megacore import exits
from megacore.config import Config
from megacore.incidents import Incident
from megacore.launcher.node import Job, Node
from megacore.launcher.processes import IMPORTS, prepare, threads
from megacore.launcher.signals import noted
from megacore.launcher.temporary_folder import compiled, temporary_folder
from megacore.rank import BEGAN
from megacore.recipe import ConfigError, changed, load, processes, recipes
from megacore.resources import gpus
from megacore.say import brief, err, outlive, say

if TYPE_CHECKING:  # which imports much
    from megacore.recovery.hang_report import HangReport
    from megacore.training.resume import Setup

OPTIONS = {
    "init": ("MODEL", "take the weights of a Hugging Face folder, a model of its hub or a checkpoint"),
    "resume": ("auto|CHECKPOINT", "go on with a run: a checkpoint, or auto for the newest of the run's own"),
    "export": ("FOLDER", "make a Hugging Face folder of the last checkpoint"),
}
"""{key of the recipe's section checkpoint: what it takes and is for}; ``--init MODEL`` is ``checkpoint.init=MODEL``."""

# On a CPU, activations are large allocations that come and go each step. glibc would map and unmap each, and the kernel
# would zero its pages each time: keep them in the heap instead.
#
# Tensor, data and pipeline parallel messages each have a CUDA stream. With fewer hardware queues than streams a message
# that waits could hold up the kernels that it waits for. So could the first use of a kernel, were it loaded only then:
# that waits for the device. And so does memory that is freed because what is free is in pieces, none large enough:
# segments that expand are not in pieces.
VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of the environment of each rank, where it does not say otherwise."""

MODULE = "megacore.training"
"""The module that each rank runs."""
PRELOADED = ("megacore.training.main", "megacore.recovery.protection")
"""The modules that it imports, which a rank that is started again does not import again."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Job):
    """A run, as this machine is to take part in it; layouts: {number of nodes: more overrides}, where it may change."""

    config: Config
    layouts: Mapping[int, Sequence[str]]

    def arguments(self, nodes: int, again: bool) -> list[str]:
        """Return the arguments of a rank; one that was started before goes on from the newest of its own checkpoints.
        Raises ConfigError: the recipe cannot be read any more."""
        from megacore.training.resume import overrides_of_restart  # imports much

        recipe, *overrides = [*self.given, *self.layouts.get(nodes, ())]
        return [recipe, *(overrides_of_restart(recipe, overrides) if again else overrides)]

    def watch(self, folder: Path, nodes: int, report: Callable[[Incident], object]) -> HangReport:
        from megacore.recovery.hang_report import HangReport

        config, world = self.config, nodes * self.node.processes
        shape = changed(config, self.layouts.get(nodes, ())).mesh.shape(world)
        name = platform.node() if nodes > 1 else ""
        return HangReport(Path(config.out), folder, shape, name, report, 60 * config.train.timeout)


def run(command: str, given: Sequence[str]) -> int:
    """Run what `megacore COMMAND` was given on this machine -> its exit status."""
    recipe, overrides, dry = arguments(command, given)
    try:
        if dry:
            return _dry_run(command, recipe, overrides)
        with noted() as arrived:
            outlive()
            return _launched(_checked(command, recipe, overrides)[0], arrived)
    except ConfigError as error:
        err(error)
        return exits.MISUSED


def _dry_run(command: str, recipe: str, overrides: list[str]) -> int:
    """Check a run and say what it would do -> exit status. Raises ConfigError: all that is wrong."""
    try:
        with temporary_folder() as folder:
            job, setup = _checked(command, recipe, overrides, folder)
            from megacore.training.dry_run import outlook

            say(outlook(setup, job.node.world, job.node.processes))
        return exits.DONE
    except KeyboardInterrupt:
        return exits.of_signal(signal.SIGINT)


def _checked(
    command: str, recipe: str, overrides: list[str], prepared: Path | None = None
) -> tuple[TrainingJob, Setup]:
    """Return the run that a command describes, with nothing wrong that can be known before it starts; ``prepared``: as
    of :func:`~megacore.training.check.check`. Raises ConfigError: all that is wrong."""
    if _number("RESTART_COUNT", 0, 0):
        from megacore.training.resume import overrides_of_restart

        overrides = overrides_of_restart(recipe, overrides)
    config = load(recipe, overrides)
    least, most = nodes_of(os.environ.get("NNODES") or "1")
    here = _number("NPROC_PER_NODE", 1, 0) or processes(config, most, gpus())
    node = Node(here)
    if most > 1:
        index, master = _several(least, most)
        node = Node(here, most, index, master, least)
    shutdown_s = _number("SHUTDOWN_TIMEOUT", 0, 600)
    compiling = {"TORCHINDUCTOR_CACHE_DIR": str(compiled(Path(config.out)))} if config.train.compile else {}
    variables = {name: os.environ.get(name, value) for name, value in (VARIABLES | compiling).items()}
    environment = {**variables, **threads(here), **node.network, BEGAN: str(time.time())}
    if prepared is None:
        prepare((*IMPORTS, *PRELOADED), environment)  # which imports while this process checks
    layouts = _layouts(config, least, most, here)
    from megacore.training.check import check  # imports much, which a typo need not wait for

    first, later = [*overrides, *layouts.get(most, ())], node.index > 0
    goes_on, finetunes = later and bool(layouts), command == "finetune"
    setup = check(
        recipe, first, node.world, here, another_looks=later, goes_on=goes_on, finetunes=finetunes, prepared=prepared
    )
    # The ranks take the commits that were fetched here, whatever the hub has by then.
    pinned: list[str] = []
    if setup.config.checkpoint.init != config.checkpoint.init:
        pinned.append(f"checkpoint.init={setup.config.checkpoint.init}")
    if setup.config.data != config.data:
        given = asdict(setup.config.data)
        pinned += [f"data.{key}={json.dumps(given[key])}" for key in ("train", "validation")]
    job = TrainingJob(
        MODULE,
        [recipe, *overrides, *pinned],
        node,
        environment,
        shutdown_s,
        config.recovery.max_restarts,
        Path(config.out),
        config=config,
        layouts=layouts,
    )
    return job, setup


def _launched(job: TrainingJob, arrived: list[int]) -> int:
    """Run the ranks of this machine -> exit status. Raises ConfigError: the nodes cannot meet."""
    from megacore.recovery.agent import Agent, heed
    from megacore.recovery.rendezvous import OneNode, SeveralNodes, secret_of

    node, out = job.node, Path(job.config.out)
    with temporary_folder() as folder:
        if node.master is None:
            meeting = OneNode()
        else:
            patience_s = 60 * job.config.train.timeout
            meeting = SeveralNodes(node, secret_of(out), patience_s, lambda: heed(arrived))
        status = Agent(job, meeting, folder, arrived).launch()
    with suppress(OSError):
        (out / f"drain-{platform.node()}").unlink(missing_ok=True)  # this node may come again
    return status


def _layouts(config: Config, least: int, most: int, processes: int) -> Mapping[int, Sequence[str]]:
    """Return {number of nodes: the overrides by which a recipe fits them}, where the number may change. Raises
    ConfigError: no layout fits some of them, or there is no model."""
    if least == most:
        return {}
    from megacore.planning.layout_choice import overrides_of_nodes  # imports much
    from megacore.training.resume import model_alone

    return overrides_of_nodes(config, model_alone(config), least, most, processes)


def arguments(command: str, given: Sequence[str]) -> tuple[str, list[str], bool]:
    """Return the recipe, all of its overrides and whether nothing is to be started, from a command's arguments; ends
    the process if they are unclear."""
    names = [name for name in OPTIONS if name != "export" or command == "finetune"]
    parser = argparse.ArgumentParser(prog=f"megacore {command}", allow_abbrev=False)
    parser.add_argument("recipe", help=f"a file, or one that comes along: {', '.join(recipes())}")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="of the recipe")
    for name in names:
        metavar, told = OPTIONS[name]
        parser.add_argument(f"--{name}", metavar=metavar, help=f"{told}: checkpoint.{name}={metavar}")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, say what would be done, and start and write nothing"
    )
    known = ("-h", "--help", "--dry-run", *(f"--{name}" for name in names))
    for each in given:
        option = each.partition("=")[0]
        if option.startswith("-") and option not in known:
            parser.error(f"there is no option {brief(option)}{_meant(each, known)}")
    parsed = vars(parser.parse_intermixed_args(given))
    options = [f"checkpoint.{name}={parsed[name]}" for name in names if parsed[name] is not None]
    return parsed["recipe"], [*parsed["overrides"], *options], parsed["dry_run"]


def _meant(option: str, known: Sequence[str]) -> str:
    """Return what may have been meant by an option that there is none of."""
    import difflib

    if "." in option:
        return f": keys of the recipe have no dashes before them ({brief(option.lstrip('-'))})"
    alike = difflib.get_close_matches(option[:100], known, n=1)
    return f": did you mean {alike[0]}?" if alike else ""


def _several(least: int, most: int) -> tuple[int, tuple[str, int]]:
    """Return the place of this machine among several, as the environment says it -> its number, and the host and the
    port of the first one. Raises ConfigError: it does not say enough."""
    host, index = os.environ.get("MASTER_ADDR"), _number("NODE_RANK", 0, -1)
    if least < most:
        if host is None:
            raise ConfigError([f"NNODES={least}:{most} also needs MASTER_ADDR, the host of the node with NODE_RANK=0"])
        index = index if index >= 0 else most  # one of those that come and go
    elif host is None or not 0 <= index < most:
        raise ConfigError(
            [f"NNODES={most} also needs MASTER_ADDR, the host of node 0, and NODE_RANK, 0 to {most - 1} on each"]
        )
    return index, (host, _number("MASTER_PORT", 1, 29500))


def nodes_of(text: str) -> tuple[int, int]:
    """Return the least and the most nodes that NNODES says: "4", or "2:8". Raises ConfigError: it says neither."""
    least, _, most = text.partition(":")
    numbers = [int(each) for each in (least, most or least) if each.isdecimal()]
    if len(numbers) < 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError([f"NNODES ({text}): must be a whole number from 1 on, or a range LEAST:MOST"])
    return numbers[0], numbers[1]


def _number(name: str, least: int, default: int) -> int:
    """Return the number that a variable of the environment holds. Raises ConfigError: it is none."""
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError([f"{name} ({text}): must be a whole number from {least} on"])
    return int(text)
