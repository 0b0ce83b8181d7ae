"""The commands `megacore train` and `megacore finetune`: read a recipe, check the run, start its ranks on this machine.

A recipe is read before anything that is slow to import, so that a typo is said at once. A run that a fault has ended is
launched again, as often as :mod:`megacore.recovery.policy` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megacore import checkpoints, exits
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.launcher import Node, gpus, launch, pause, threads
from megacore.rank import BEGAN
from megacore.recipe import ConfigError, changed, load, processes, recipes
from megacore.recovery import drain, incidents
from megacore.recovery.channel import OVERRIDES
from megacore.recovery.events import Event
from megacore.recovery.incidents import IncidentWriter
from megacore.recovery.members import Members
from megacore.recovery.news import Came, Gone, MembersError
from megacore.recovery.policy import ANNOUNCED, Budgets, Decision, Incident, decide
from megacore.recovery.straggler import Stragglers
from megacore.recovery.template import RankTemplate
from megacore.recovery.watch import HangWatch
from megacore.say import brief, err, outlive
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

MODULE = "megacore.training"
"""The module that each rank runs."""
IMPORTED_LATE = "torch._dynamo"
"""The module that the first optimizer of a rank imports, in a second."""

WAY_OUT = (
    "Go on with --resume auto. Where a rank rightly takes so long, raise train.timeout, the minutes that others wait."
)

BACKOFF_S = 1.0
LONGEST_S = 60.0
"""The seconds before a restart, which double for each further one that no step lay between, and the most."""


def run(command: str, given: Sequence[str]) -> int:
    """Run what `megacore COMMAND` was given on this machine -> its exit status."""
    with ExitStack() as stack:
        return _run(command, given, stack)


def _run(command: str, given: Sequence[str], stack: ExitStack) -> int:
    recipe, overrides = arguments(command, given)
    outlive()
    try:
        if _number("RESTART_COUNT", 0, 0):
            from megacore.training.resume import again

            overrides = again(recipe, overrides)
        config = load(recipe, overrides)
        least, most = nodes_of(os.environ.get("NNODES") or "1")
        # Who waits in NCCL is not freed by what frees those that wait in gloo.
        in_place = config.recovery.in_place and config.train.device_type(gpus()) == "cpu"
        if least < most and not in_place:
            raise ConfigError([f"NNODES={least}:{most}: nodes come and go on CPUs alone, with recovery.in_place=true"])
        here = _number("NPROC_PER_NODE", 1, 0) or processes(config, most, gpus())
        node = _node(least, most, here)
        shutdown_s = _number("SHUTDOWN_TIMEOUT", 0, 600)
        environment = {**{name: os.environ.get(name, value) for name, value in VARIABLES.items()}, **threads(here)}
        template = None
        if in_place and sys.platform == "linux":
            template = RankTemplate((MODULE, IMPORTED_LATE), {**os.environ, **environment})
            stack.callback(template.end)
        layouts = _layouts(config, least, most, here)
        from megacore.training.check import check  # imports much, which a typo need not wait for

        first, later = [*overrides, *layouts.get(most, ())], node.index > 0
        problems = _without_a_model(config) if command == "finetune" else []
        try:
            check(recipe, first, node.world, node.processes, led=later, goes_on=later and bool(layouts))
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        err(error)
        return exits.MISUSED
    environment[BEGAN] = str(time.time())
    nodes, given = dict.fromkeys(range(most), here), [recipe, *overrides]
    launches = _Launches(config, given, node, environment, shutdown_s, in_place, least, nodes, layouts, template)
    if node.master is None or not in_place:
        return launches.run()
    members = Members(least, most, *node.master, here, config.out, leads=node.index == 0)
    stack.callback(members.close)
    try:
        came = members.open(60 * config.train.timeout)
        launches.meet(came)
        status = launches.run(members)
        if layouts:
            drain.done(Path(config.out), platform.node())
        return status
    except MembersError as error:
        err(error)
        return error.status


def _layouts(config: Config, least: int, most: int, processes: int) -> Mapping[int, Sequence[str]]:
    """Return {number of nodes: the overrides by which a recipe fits them}, where the number may change.

    Raises:
        ConfigError: no layout fits some of them, or there is no model.
    """
    if least == most:
        return {}
    from megacore.training.layouts import overrides_of_nodes  # imports much
    from megacore.training.resume import find, model_of
    from models.config import ModelConfigError

    try:
        model = model_of(config, find(config, checked=True).source)
    except StoreError as error:
        raise ConfigError([f"checkpoint: {error}"]) from error
    except ModelConfigError as error:
        raise ConfigError([f"model: {problem}" for problem in error.problems]) from error
    return overrides_of_nodes(config, model, least, most, processes)


@dataclass
class _Launches:
    """A run on this machine, or on all nodes where this one leads them.

    Args:
        config: Its config.
        given: The arguments of each rank.
        node: The machine.
        environment: The variables of each rank.
        shutdown_s: The seconds that ranks have to end after a signal.
        in_place: Whether ranks may be replaced while the others live.
        least: The least number of nodes that it goes on with.
        nodes: {node: its processes} of those that there are.
        layouts: {number of nodes: the overrides of the recipe on them}, where it may change.
        template: Makes the ranks of each launch, where it can.
    """

    config: Config
    given: Sequence[str]
    node: Node
    environment: Mapping[str, str]
    shutdown_s: float
    in_place: bool
    least: int
    nodes: dict[int, int]
    layouts: Mapping[int, Sequence[str]]
    template: RankTemplate | None

    def __post_init__(self) -> None:
        self.answers = _Answers(self.config, self.node.index, self.nodes, self.least)

    def meet(self, came: Sequence[Came]) -> None:
        """Take note of the nodes that have come together, where this one leads them."""
        if came:
            self.nodes.clear()
            self.nodes.update((each.node, each.processes) for each in came)
            self.answers.hosts.update((each.node, each.name) for each in came)

    def run(self, members: Members | None = None) -> int:
        """Launch it, again after faults as often as they are answered so -> its exit status."""
        more = list[str]()
        while True:
            faults, self.answers.began, self.answers.refused = list[Event](), time.time(), None
            status = self._launch([*self.given, *more], faults, members)
            if not faults:  # well, or it has said why not, or a signal has ended it
                return self._ends(members, partial(_same, status))
            decision = self.answers.refused or self.answers.to(faults[0])
            if decision.action != "restart":
                return self._ends(members, decision.status_on)
            if ended := pause(min(LONGEST_S, BACKOFF_S * 2**self.answers.in_vain)):
                return self._ends(members, partial(_same, exits.of_signal(ended)))
            if members is not None and not self._meet(members):
                return self._ends(members, partial(_same, exits.RETRY))
            more = [f"checkpoint.resume={AUTO}"]

    def _launch(self, given: Sequence[str], faults: list[Event], members: Members | None) -> int:
        config, node, answers = self.config, self.node, self.answers
        shape = changed(config, self.layouts.get(len(self.nodes), ())).mesh.shape(len(self.nodes) * node.processes)

        def told(event: Event) -> None:
            event = replace(event, node=node.index, at=time.time())
            answers.to(event)
            if members is not None and not members.leads:  # who writes the incidents of all
                members.say(0, "event", event=asdict(event))

        slow = Stragglers(shape, told)
        name = platform.node() if node.nodes > 1 else ""
        hangs = HangWatch(Path(config.out), shape, 60 * config.train.timeout, name, slow=slow)
        answers.step_now = lambda: hangs.step

        def on_world(variables: Mapping[str, str]) -> None:
            mesh = changed(config, json.loads(variables[OVERRIDES])).mesh
            hangs.shape = slow.shape = mesh.shape(int(variables["WORLD_SIZE"]))

        return launch(
            MODULE,
            given,
            node,
            self.environment,
            self.shutdown_s,
            WAY_OUT,
            faults.append,
            answers if self.in_place else None,
            hangs,
            members,
            self.nodes,
            self.layouts,
            on_world if self.layouts else lambda variables: None,
            partial(drain.asked, Path(config.out), platform.node()) if self.layouts else None,
            self.template,
        )

    def _meet(self, members: Members) -> bool:
        """Wait until there are as many nodes as the run needs -> whether there are."""
        until = time.monotonic() + 60 * self.config.train.timeout
        while len(self.nodes) < self.least and (left := until - time.monotonic()) > 0:
            select.select([members], [], [], left)
            for news in members.news():
                if isinstance(news, Came):
                    self.nodes[news.node], self.answers.hosts[news.node] = news.processes, news.name
                elif isinstance(news, Gone):
                    self.nodes.pop(news.node, None)
        if lacks := len(self.nodes) < self.least:
            came = f"{len(self.nodes)} of {self.least} nodes"
            err(f"only {came} are there after {self.config.train.timeout:g} min (train.timeout)")
        return not lacks

    def _ends(self, members: Members | None, status_on: Callable[[int], int]) -> int:
        """Tell the other nodes the status that each ends with, if this one leads them -> its own."""
        self.answers.incidents.catch_up()
        if members is not None and members.leads:
            for node in self.nodes:
                members.say(node, "end", status=status_on(node))
        return status_on(self.node.index)


def _same(status: int, node: int) -> int:
    """Return a status that is the same on all nodes."""
    return status


class _Answers:
    """The answers to what befalls a run, of which each next one depends on those before it."""

    def __init__(self, config: Config, node: int, nodes: Mapping[int, int], least: int) -> None:
        self._config, self._out = config, Path(config.out)
        self._node, self._nodes, self._least = node, nodes, least
        self.began = time.time()
        """The time when the launch began."""
        self.refused: Decision | None = None
        """The answer to the fault that has not been recovered from in place."""
        self.in_vain = -1
        """The faults in a row, after the first of them, that no further step lay between."""
        self.hosts = dict[int, str]()
        """{node: the name of its host} of those that have come, where there are several."""
        self._life = uuid.uuid4().hex[:8]
        self.incidents = IncidentWriter(self._out, err)
        self.step_now: Callable[[], int] = lambda: 0
        """Returns the step that ranks of this machine are at, as far as they have told."""
        self._redone = range(0)
        """The steps that are done again, of which there are records already."""
        self._history = list[Incident]()
        if config.checkpoint.resume is not None:
            try:
                self._history += incidents.read(self._out)
            except StoreError as error:
                err(error)

    def answer(self, event: Event) -> Decision:
        """Decide about an event while ranks live, tell it and write it down."""
        if event.kind == "node_joins" and event.node is not None:
            self.hosts[event.node] = event.detail
        decision = self.to(event, in_place=True)
        if decision.action in ("end", "restart") and event.kind not in ANNOUNCED:
            self.refused = decision
        return decision

    def went_on(self, step: int | None) -> None:
        """Add to the incidents of the run that it goes on after a step, or had not stopped."""
        self.incidents.went_on(step, time.time())
        if step is None:
            return
        try:
            self._redone = range(step + 1, self._newest() + 1)
        except StoreError as error:
            err(error)

    def to(self, fault: Event, in_place: bool = False) -> Decision:
        """Decide about a fault, tell it and write it down.

        Args:
            fault: The fault.
            in_place: Whether ranks may be replaced while the others live.
        """
        event = self._located(fault, self.began) if fault.step is None else fault
        if event.node is not None:
            event = replace(event, host=self.hosts.get(event.node, ""))
        last = self._history[-1].event.step if self._history else None
        self.in_vain = self.in_vain + 1 if event.step is None or event.step == last else 0
        decision = decide(event, self._history, self._budgets(in_place, event.node))
        incident = Incident(event, decision, self._life)
        if self._node == 0:
            incident = self.incidents.write(event, decision, self._life)
        self._history.append(incident)
        way_out = ""
        if decision.action == "end":
            status = decision.status_on(self._node)
            way_out = f"; ends with status {status}: {exits.MEANING[status][1]}"
        err(f"{_told(event)} -> {decision.action}: {decision.reason}{way_out}")
        return decision

    def _budgets(self, in_place: bool, node: int | None) -> Budgets:
        """Return the means of the launch. What begins elsewhere cannot go on before it has a checkpoint of its own."""
        section = self._config.checkpoint
        own = section.resume in (None, AUTO) or bool(self._checkpoints())
        return Budgets(
            self._life,
            max_restarts=self._config.recovery.max_restarts,
            in_place=in_place,
            max_recoveries=self._config.recovery.max_recoveries,
            node_failures=self._config.recovery.node_failures,
            resumable=section.on and own,
            nodes=len(self._nodes),
            least_nodes=len(self._nodes) if node == 0 else self._least,  # without the one that leads there is no run
        )

    def _checkpoints(self) -> Mapping[int, Path]:
        """Return {step: checkpoint} of the run."""
        return checkpoints.complete(checkpoints.folder_of(self._out, self._config.checkpoint.folder))

    def _located(self, fault: Event, began: float) -> Event:
        """Return a fault with the step that was being done, as far as the files of the run tell."""
        from megacore.training.metrics import METRICS  # imports much

        path = self._out / METRICS
        try:
            if not path.exists() or path.stat().st_mtime < began:  # no rank has come so far as to open it
                return replace(fault, phase="start")
            newest = self._newest()
            step = max(newest + 1, self.step_now())  # records are seldom where log.every is large
            if self._redone and newest == self._redone[-1]:
                step = max(self.step_now(), self._redone[0])
            return replace(fault, step=step, samples=self._samples(step))
        except (OSError, StoreError) as error:
            err(error)
            return fault

    def _newest(self) -> int:
        """Return the step of the newest record, 0 where there is none."""
        from megacore.training import metrics  # imports much

        return max((record["step"] for record in metrics.newest(self._out / metrics.METRICS)), default=0)

    def _samples(self, step: int) -> tuple[int, int] | None:
        """Return the samples [first, end) of a step."""
        from megacore.training.progress import Progress  # imports much

        progress, steps = Progress(), self._checkpoints()
        if steps:
            path = steps[max(steps)] / TRAINER
            progress = Progress.read(read_json(path, path.parent), path)
        elif self._config.checkpoint.resume not in (None, AUTO):
            return None
        samples = progress.skipped_samples.samples(
            progress.at(step - 1, self._config).samples, self._config.batch.global_size
        )
        return samples[0][0], samples[-1][1]


def _told(event: Event) -> str:
    """Return an event in a few words."""
    who = "" if event.rank is None else f" rank {event.rank}"
    who += f" on {event.host}" if event.host and event.kind != "node_joins" else ""
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


def _without_a_model(config: Config) -> list[str]:
    """Return the problem of fine-tuning that would begin with random weights, if it is one."""
    section = config.checkpoint
    going_on = section.resume is not None and (
        section.resume != AUTO or checkpoints.complete(checkpoints.folder_of(Path(config.out), section.folder))
    )
    if section.init is not None or going_on:
        return []
    return [
        "finetune starts from a model that there is: name its Hugging Face folder or checkpoint by --init FOLDER "
        "(`megacore train` starts from random weights)"
    ]


def _node(least: int, most: int, processes: int) -> Node:
    """Return the place of this machine among several, as the environment says it.

    Raises:
        ConfigError: it does not say enough.
    """
    if most == 1:
        return Node(processes)
    host, index = os.environ.get("MASTER_ADDR"), _number("NODE_RANK", 0, -1)
    if least < most:
        if host is None:
            raise ConfigError([f"NNODES={least}:{most} also needs MASTER_ADDR, the host of the node with NODE_RANK=0"])
        return Node(processes, most, min(index, 1) if index >= 0 else 1, (host, _number("MASTER_PORT", 1, 29500)))
    if host is None or not 0 <= index < most:
        raise ConfigError(
            [f"NNODES={most} also needs MASTER_ADDR, the host of node 0, and NODE_RANK, 0 to {most - 1} on each"]
        )
    return Node(processes, most, index, (host, _number("MASTER_PORT", 1, 29500)))


def nodes_of(text: str) -> tuple[int, int]:
    """Return the least and the most nodes that NNODES says: "4", or "2:8".

    Raises:
        ConfigError: it says neither.
    """
    least, _, most = text.partition(":")
    numbers = [int(each) for each in (least, most or least) if each.isdecimal()]
    if len(numbers) < 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError([f"NNODES ({text}): must be a whole number from 1 on, or a range LEAST:MOST"])
    return numbers[0], numbers[1]


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
