"""The commands `megacore train` and `megacore finetune`: read a recipe, check the run, start its ranks on this machine.

A recipe is read before anything that is slow to import, so that a typo is said at once. A run that a fault has ended is
launched again, as often as :mod:`megacore.recovery.policy` has it.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacore import checkpoints, exits
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.launcher import Node, gpus, launch, pause, threads
from megacore.rank import BEGAN
from megacore.recipe import ConfigError, load, processes, recipes
from megacore.recovery import incidents
from megacore.recovery.events import Event
from megacore.recovery.policy import Budgets, Decision, Incident, decide
from megacore.recovery.straggler import Stragglers
from megacore.recovery.watch import HangWatch
from megacore.say import brief, err
from megacore.store.checkpoint import TRAINER
from megacore.store.strict_json import StoreError, read_json

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

BACKOFF_S = 1.0
LONGEST_S = 60.0
"""The seconds before a restart, which double for each further one that no step lay between, and the most."""


def run(command: str, given: Sequence[str]) -> int:
    """Run what `megacore COMMAND` was given on this machine -> its exit status."""
    recipe, overrides = arguments(command, given)
    try:
        if _number("RESTART_COUNT", 0, 0):
            from megacore.run.resume import again

            overrides = again(recipe, overrides)
        config = load(recipe, overrides)
        nodes = _number("NNODES", 1, 1)
        here = _number("NPROC_PER_NODE", 1, 0) or processes(config, nodes, gpus())
        node = _node(nodes, here)
        shutdown_s = _number("SHUTDOWN_TIMEOUT", 0, 600)
        from megacore.run.check import check  # imports much, which a typo need not wait for

        check(recipe, overrides, node.world, node.processes, led=node.index > 0)
    except ConfigError as error:
        err(error)
        return exits.MISUSED
    environment = {**{name: os.environ.get(name, value) for name, value in VARIABLES.items()}, **threads(here)}
    environment[BEGAN] = str(time.time())
    answers, more = _Answers(config, node), list[str]()
    name = platform.node() if nodes > 1 else ""
    while True:
        faults, answers.began, answers.refused = list[Event](), time.time(), None
        given = [recipe, *overrides, *more]
        shape = config.mesh.shape(node.world)
        slow = Stragglers(shape, lambda event: answers.to(replace(event, node=node.index, at=time.time())))
        hangs = HangWatch(Path(config.out), shape, 60 * config.train.timeout, name, slow=slow)
        # Who waits in NCCL is not freed by what frees those that wait in gloo.
        alone = nodes == 1 and config.train.device_type(gpus()) == "cpu"
        recovery = answers if config.recovery.in_place and alone else None
        status = launch(
            "megacore.run.train", given, node, environment, shutdown_s, WAY_OUT, faults.append, recovery, hangs
        )
        if not faults:  # well, or it has said why not, or a signal has ended it
            return status
        decision = answers.refused or answers.to(faults[0])
        if decision.action != "restart":
            return decision.status_on(node.index)
        if ended := pause(min(LONGEST_S, BACKOFF_S * 2**answers.in_vain)):
            return exits.of_signal(ended)
        more = [f"checkpoint.resume={AUTO}"]


class _Answers:
    """The answers to what befalls a run, of which each next one depends on those before it."""

    def __init__(self, config: Config, node: Node) -> None:
        self._config, self._node, self._out = config, node, Path(config.out)
        self.began = time.time()
        """The time when the launch began."""
        self.refused: Decision | None = None
        """The answer to the fault that has not been recovered from in place."""
        self.in_vain = -1
        """The faults in a row, after the first of them, that no further step lay between."""
        self._life = uuid.uuid4().hex[:8]
        self._history = list[Incident]()
        if config.checkpoint.resume is not None:
            try:
                self._history += incidents.read(self._out)
            except StoreError as error:
                err(error)

    def refuses(self, event: Event) -> str:
        """Return why a fault is not recovered from in place; nothing where it is."""
        decision = self.to(event, in_place=True)
        if decision.action in ("rebuild", "replace"):
            return ""
        self.refused = decision
        return decision.reason

    def went_on(self, step: int) -> None:
        """Add to the incidents of the run that it goes on after a step."""
        try:
            incidents.went_on(self._out, step, time.time())
        except StoreError as error:  # what they cost is not known then: no reason to end
            err(error)

    def to(self, fault: Event, in_place: bool = False) -> Decision:
        """Decide about a fault, tell it and write it down.

        Args:
            fault: The fault.
            in_place: Whether ranks may be replaced while the others live.
        """
        event = self._located(fault, self.began) if fault.step is None else fault
        last = self._history[-1].event.step if self._history else None
        self.in_vain = self.in_vain + 1 if event.step is None or event.step == last else 0
        decision = decide(event, self._history, self._budgets(in_place))
        incident = Incident(event, decision, self._life)
        if self._node.index == 0:
            try:
                incident = incidents.write(self._out, event, decision, self._life)
            except StoreError as error:
                err(error)
        self._history.append(incident)
        way_out = ""
        if decision.action == "end":
            status = decision.status_on(self._node.index)
            way_out = f"; ends with status {status}: {exits.MEANING[status][1]}"
        err(f"{_told(event)} -> {decision.action}: {decision.reason}{way_out}")
        return decision

    def _budgets(self, in_place: bool) -> Budgets:
        """Return the means of the launch. What begins elsewhere cannot go on before it has a checkpoint of its own."""
        section, nodes = self._config.checkpoint, self._node.nodes
        own = section.resume in (None, AUTO) or bool(checkpoints.complete(checkpoints.folder_of(self._out)))
        return Budgets(
            self._life,
            max_restarts=self._config.recovery.max_restarts,
            in_place=in_place,
            max_recoveries=self._config.recovery.max_recoveries,
            resumable=section.on and own,
            nodes=nodes,
            least_nodes=nodes,
        )

    def _located(self, fault: Event, began: float) -> Event:
        """Return a fault with the step that was being done, as far as the files of the run tell."""
        from megacore.run import metrics  # imports much

        path = self._out / metrics.METRICS
        try:
            if not path.exists() or path.stat().st_mtime < began:  # no rank has come so far as to open it
                return replace(fault, phase="start")
            step = max((record["step"] for record in metrics.newest(path)), default=0) + 1
            return replace(fault, step=step, samples=self._samples(step))
        except (OSError, StoreError) as error:
            err(error)
            return fault

    def _samples(self, step: int) -> tuple[int, int] | None:
        """Return the samples [first, end) of a step."""
        from megacore.run.progress import Progress  # imports much

        progress, steps = Progress(), checkpoints.complete(checkpoints.folder_of(self._out))
        if steps:
            path = steps[max(steps)] / TRAINER
            progress = Progress.read(read_json(path, path.parent), path)
        elif self._config.checkpoint.resume not in (None, AUTO):
            return None
        first, end = (progress.at(each, self._config).samples for each in (step - 1, step))
        return first, end


def _told(event: Event) -> str:
    """Return an event in a few words."""
    who = "" if event.rank is None else f" rank {event.rank}"
    at = "before the first step" if event.phase == "start" else f"at step {event.step}" if event.step else ""
    return f"{event.kind.replace('_', ' ')}{who} {at} ({brief(event.detail)})".replace("  ", " ")


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
