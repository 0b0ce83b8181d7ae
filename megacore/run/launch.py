"""The commands `megacore train` and `megacore finetune`: read a recipe, check the run, start its ranks on this machine.

A recipe is read before anything that is slow to import, so that a typo is said at once.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from megacore.launcher import Node, gpus, launch, threads
from megacore.recipe import ConfigError, load, processes, recipes
from megacore.recovery.watch import HangWatch
from megacore.say import err

OPTIONS = {
    "init": "take the weights of a Hugging Face folder or a checkpoint",
    "resume": "go on with a run: a checkpoint, or auto for the newest of the run's own",
    "export": "make a Hugging Face folder of the last checkpoint",
}
"""{key of the recipe's section checkpoint: what it is for}; ``--init FOLDER`` stands for ``checkpoint.init=FOLDER``."""

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

WAY_OUT = (
    "Go on with --resume auto. Where a rank rightly takes so long, raise train.timeout, the minutes that others wait."
)


def run(command: str, given: Sequence[str]) -> int:
    """Run what `megacore COMMAND` was given on this machine -> its exit status."""
    recipe, overrides = arguments(command, given)
    try:
        config = load(recipe, overrides)
        nodes = _number("NNODES", 1, 1)
        here = _number("NPROC_PER_NODE", 1, 0) or processes(config, nodes, gpus())
        node = _node(nodes, here)
        shutdown_s = _number("SHUTDOWN_TIMEOUT", 0, 600)
        from megacore.run.check import check  # imports much, which a typo need not wait for

        check(recipe, overrides, node.world, node.processes, led=node.index > 0)
    except ConfigError as error:
        err(error)
        return 2
    environment = {**{name: os.environ.get(name, value) for name, value in VARIABLES.items()}, **threads(here)}
    name = platform.node() if nodes > 1 else ""
    hangs = HangWatch(Path(config.out), config.mesh.shape(node.world), 60 * config.train.timeout, name)
    return launch("megacore.run.train", [recipe, *overrides], node, environment, shutdown_s, WAY_OUT, hangs)


def arguments(command: str, given: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe and all of its overrides from a command's arguments; ends the process if they are unclear."""
    names = [name for name in OPTIONS if name != "export" or command == "finetune"]
    parser = argparse.ArgumentParser(prog=f"megacore {command}", allow_abbrev=False)
    parser.add_argument("recipe", help=f"a file, or one that comes along: {', '.join(recipes())}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the recipe")
    for name in names:
        metavar = "auto|CHECKPOINT" if name == "resume" else "FOLDER"
        parser.add_argument(f"--{name}", metavar=metavar, help=f"{OPTIONS[name]}: checkpoint.{name}={metavar}")
    parsed = vars(parser.parse_intermixed_args(given))
    options = [f"checkpoint.{name}={parsed[name]}" for name in names if parsed[name] is not None]
    return parsed["recipe"], [*parsed["overrides"], *options]


def _node(nodes: int, processes: int) -> Node:
    """Return the place of this machine among several, as the environment says it.

    Raises:
        ConfigError: it does not say enough.
    """
    if nodes == 1:
        return Node(processes)
    host = os.environ.get("MASTER_ADDR")
    index = _number("NODE_RANK", 0, -1)
    if host is None or not 0 <= index < nodes:
        raise ConfigError(
            [f"NNODES={nodes} also needs MASTER_ADDR, the host of node 0, and NODE_RANK, 0 to {nodes - 1} on each"]
        )
    return Node(processes, nodes, index, (host, _number("MASTER_PORT", 1, 29500)))


def _number(name: str, least: int, default: int) -> int:
    """Return the number that a variable of the environment holds.

    Raises:
        ConfigError: it is none.
    """
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError([f"{name} ({text}): must be a whole number from {least} on"])
    return int(text)
