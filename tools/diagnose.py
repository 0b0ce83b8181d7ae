"""`megacore diagnose`: where the time of a run's steps goes, and what would make them shorter.

It reads the steps that `log.trace` has recorded. The parts are means over all ranks, and add up to a step; where a rank
waits for another, what that one does counts. Those of 15 % of a step or more stand out, with what a step would take
less without them. Beside them stands the plan of the run, and with --against another run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megacore.config import Config
from megacore.devices import DEVICES, device_of
from megacore.models.config import ModelConfigError
from megacore.planning.traffic import traffic
from megacore.recipe import ConfigError, load
from megacore.say import brief, err, say
from megacore.store.io.strict_json import StoreError
from megacore.tools.options import command_parser
from megacore.tools.scaling import RunScale, told
from megacore.tools.tables import table
from megacore.training import metrics
from megacore.training.advice import LEAST, advise
from megacore.training.diagnosis import BUBBLE, PRODUCTS, StepSplit, axes_of, split
from megacore.training.planned_parts import ABOVE, StepPlan, by_the_plan, name_of
from megacore.training.schedule_gaps import actions
from megacore.training.traces import TracedStep, files, read_trace


@dataclass(frozen=True)
class TracedRun:
    """A run that has recorded some of its steps. ``others``: numbers of steps that do not count, for the run has gone
    on with other ranks or another schedule; ``loads``: of each rank along ep, the rows that its experts were sent, over
    the mean; ``plan``: the run on paper; None where it can't be, with the reason."""

    out: Path
    config: Config
    steps: tuple[TracedStep, ...]
    others: tuple[int, ...]
    found: StepSplit
    loads: tuple[float, ...]
    plan: StepPlan | None
    unplanned: str

    @classmethod
    def of(cls, out: Path, gpu: str | None = None) -> TracedRun:
        """Read a run; those of its steps count that are spread as the last one is, and of several not the first one of
        the run, in which much happens once. Raises ConfigError: its config cannot be read; StoreError: there is no run,
        it has recorded no step, or what it has cannot be read; ScheduleError: a trace has no whole schedule;
        ValueError: there is no such device."""
        if not (recipe := out / "config.yaml").exists():
            raise StoreError(f"{out} is not the folder of a run: it has no {recipe.name}")
        if gpu is not None:
            device_of(gpu)  # one that is unknown is no reason to leave out the plan
        config = load(recipe)
        steps = [read_trace(path) for path in files(out)]
        if not steps:
            raise StoreError(f"{out} has recorded no step: train with log.trace=50, say")
        last = steps[-1]
        alike = [each for each in steps if (each.mesh, each.schedule) == (last.mesh, last.schedule)]
        others = tuple(each.step for each in steps if each not in alike)
        counted = tuple(each for each in alike if each.step > 1 or len(alike) == 1)
        loads, plan, reason = _loads(out, counted), None, ""
        try:
            plan = StepPlan.of(config, last, gpu, _peak(out))
        except (ModelConfigError, ValueError) as error:
            reason = str(error)
        return cls(out, config, counted, others, split(counted, config, loads), loads, plan, reason)

    @property
    def microbatches(self) -> int:
        """Those of a rank in a step."""
        return 1 + max(each.microbatch for _, each in actions(self.steps[-1].of(0)))

    @property
    def world(self) -> int:
        return self.steps[-1].mesh.world

    @property
    def step_tokens(self) -> int:
        """Those of a step, on all ranks."""
        return self.config.batch.global_size * self.config.data.sequence_length

    @property
    def tokens(self) -> int:
        """Those of a microbatch."""
        return self.config.batch.micro_size * self.config.data.sequence_length


def main(argv: Sequence[str]) -> int:
    parser = command_parser("diagnose", __doc__)
    parser.add_argument("run", type=Path, metavar="OUT", help="the folder of a run, its out")
    parser.add_argument("--against", type=Path, metavar="OUT", help="another run, of another scale, say: beside it")
    known = f"{', '.join(DEVICES)}, or a measured FILE.json"
    parser.add_argument("--gpu", metavar="NAME", help=f"what the plan is for, if not what the trace names: {known}")
    given = parser.parse_args(argv)
    try:
        run = TracedRun.of(given.run, given.gpu)
        other = TracedRun.of(given.against, given.gpu) if given.against else None
        say("\n".join(_against(run, other) if other else _one(run)))
    except (ConfigError, StoreError, ValueError) as error:
        err(error)
        return 1
    return 0


def _one(run: TracedRun) -> Iterator[str]:
    found, total = run.found, run.found.seconds
    yield f"{_name(run)}: {1e3 * total:,.1f} ms a step"
    rows = [(x.name, f"{1e3 * x.seconds:,.1f}", f"{x.seconds / total:.1%}", x.about) for x in found.parts]
    yield table(("part", "ms", "share", ""), rows)
    yield from _planned(run)
    yield ""
    for each in found.findings:
        said = f"{each.name} {each.about}".strip()
        yield f"What stands out: {said}  (without it a step would take {each.gain / total:.0%} less)"
    if not found.findings:
        yield "What stands out: none"
    advice = advise(found, run.steps[-1], run.config, run.plan, run.loads) if found.findings else []
    if not advice:
        yield "Advice: none"
    yield from (f"Advice: {each.overrides}  (a step would take {each.gain:.0%} less)" for each in advice)


def _planned(run: TracedRun) -> Iterator[str]:
    """Yield the parts beside those of the plan, and what takes longer."""
    if run.plan is None:
        yield f"\nNo plan of it: {run.unplanned}"
        return
    cluster = run.plan.cluster
    yield (
        f"\nBeside the plan, on {brief(run.steps[-1].device)} of {cluster.tflops:,.3g} TFLOP/s: MFU {_mfu(run)}; "
        "what is left of the share of products, and all other shares, are what it loses"
    )
    measured, planned = by_the_plan(run.found), run.plan.parts
    rows = []
    for name in [name for name in planned if name in measured or planned[name]]:
        took, meant = measured.get(name, 0.0), planned[name]
        rows.append((name, *(f"{1e3 * each:,.1f}" for each in (took, meant)), f"{took / meant:.2f}" if meant else "-"))
    yield table(("part", "ms", "planned", "times"), rows)
    slower = max(1.0, measured[PRODUCTS] / planned[PRODUCTS])
    for name, meant in planned.items():
        took, least = measured.get(name, 0.0), ABOVE * meant * (slower if name == BUBBLE else 1.0)
        if took >= LEAST * run.found.seconds and took > least:
            times = f"{took / meant:,.1f} times what is planned" if meant else "none are planned"
            told = "; ".join(filter(None, (f"{name}: {times}", _reached(name, took, run.plan))))
            yield f"Above {ABOVE:g} times the plan: {told}"


def _reached(name: str, seconds: float, plan: StepPlan) -> str:
    """Return the speed of messages that have taken so long beside that of the device, and where they go."""
    mesh, axes = plan.setting.layout.mesh, axes_of(name)
    if not axes:
        return ""
    rows = ([x for x in traffic(plan.setting, stage) if x.axis == axes[0]] for stage in range(mesh.pp))
    said = [f"{axes[0]} crosses nodes of {plan.cluster.device.per_node} ranks"] if plan.crosses(*axes) else []
    if most := max(rows, key=lambda row: sum(x.sent for x in row)):
        speed, there = sum(x.sent for x in most) / seconds, plan.cluster.bandwidth(mesh, axes[0], most[0].kind)
        said.insert(0, f"they reach {speed / 1e9:,.3g} GB/s of {there / 1e9:,.3g}")
    return ": ".join(said)


def _mfu(run: TracedRun) -> str:
    return f"{run.plan.mfu(run.found.seconds):.1%}" if run.plan else "-"


def _against(run: TracedRun, other: TracedRun) -> Iterator[str]:
    """Yield the parts of two runs beside each other: first those that must differ, for the runs do, with the reason
    and what they come to of it by the plan; the rest is more than that."""
    for each, before in ((run, ""), (other, "against ")):
        yield f"{before}{_name(each)}: {1e3 * each.found.seconds:,.1f} ms a step, MFU {_mfu(each)}"
    yield told(*(RunScale(x.world, x.step_tokens, x.found.seconds) for x in (run, other)))
    own, theirs = ({each.name: each.seconds for each in x.found.parts} for x in (run, other))
    names = dict.fromkeys([*own, *theirs])
    reasons = {name: _reason(name, run, other) for name in names}
    rest = {name: own.get(name, 0.0) - _expected(name, run, other) for name in names}
    rows = []
    for name in sorted(names, key=lambda name: (not reasons[name], -abs(rest[name]))):
        both = [each.get(name, 0.0) for each in (own, theirs)]
        shares = (f"{x / y.found.seconds:.1%}" for x, y in zip(both, (run, other), strict=True))
        times = (f"{1e3 * each:,.1f}" for each in (*both, _expected(name, run, other)))
        rows.append((name, *times, f"{round(1e3 * rest[name], 1) + 0.0:+,.1f}", *shares, reasons[name]))
    yield table(("part", "ms", "against", "of itself", "rest", "share", "against", "what is other"), rows)


def _expected(part: str, run: TracedRun, other: TracedRun) -> float:
    """Return the seconds that a part of a run has of itself: those of the other run, times what the plan has of it here
    over what it has there. The bubble is simulated with what was measured, so all of it is."""
    seconds = {x.name: x.seconds for x in other.found.parts}.get(part, 0.0)
    if part == BUBBLE:
        return {x.name: x.seconds for x in run.found.parts}.get(part, 0.0)
    if run.plan is None or other.plan is None:
        return seconds
    here, there = (x.plan.parts.get(name_of(part), 0.0) for x in (run, other) if x.plan)
    return seconds * here / there if there else seconds


def _reason(part: str, run: TracedRun, other: TracedRun) -> str:
    """Return why a part differs of itself between two runs; nothing where it should not."""
    (mesh, step), (theirs, last) = ((x.steps[-1].mesh, x.steps[-1]) for x in (run, other))
    numbers = dict[str, tuple[int, int]]()
    if part == BUBBLE:
        numbers = {"stages": (mesh.pp, theirs.pp)}
    elif axes := axes_of(part):
        numbers = {"ranks": (mesh.size(axes), theirs.size(axes)), "nodes": (_nodes(step, axes), _nodes(last, axes))}
    if part in (BUBBLE, PRODUCTS) or axes_of(part):
        numbers |= {"microbatches": (run.microbatches, other.microbatches)}
    if part == PRODUCTS or axes_of(part):
        numbers |= {"tokens of a microbatch": (run.tokens, other.tokens),
                    "ranks that hold the model": (mesh.pp * mesh.tp, theirs.pp * theirs.tp)}  # fmt: skip
    return ", ".join(f"{here:,} {what}, not {there:,}" for what, (here, there) in numbers.items() if here != there)


def _nodes(step: TracedStep, axes: Sequence[str]) -> int:
    """Return the nodes that a group along these axes lies on."""
    return len({rank // (step.per_node or step.mesh.world) for rank in step.mesh.along(0, *axes)})


def _name(run: TracedRun) -> str:
    mesh, steps = run.steps[-1].mesh, ", ".join(str(each.step) for each in run.steps)
    if run.others:
        steps += f"; not {', '.join(map(str, run.others))}, of another layout"
    sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS if mesh[dim] > 1) or "one rank"
    return f"{run.out} ({sizes}, {run.microbatches} microbatches; steps {steps})"


def _peak(out: Path) -> float | None:
    """Return the TFLOP/s against which a run has measured its utilisation."""
    records = [each for each in metrics.newest(out / metrics.METRICS) if each.get("mfu")]
    return records[-1]["tflops_per_device"] / records[-1]["mfu"] if records else None


def _loads(out: Path, steps: Sequence[TracedStep]) -> tuple[float, ...]:
    """Return, of each rank along ep, the rows that its experts were sent in the newest step that is told, over the mean
    of all: the mean of the layers."""
    told, ep = metrics.newest(out / metrics.EXPERTS), steps[-1].mesh.ep
    lines = [each for each in told if each["step"] in {step.step for step in steps}] or told
    if ep == 1 or not lines:
        return ()
    layers = [
        [sum(row[rank * len(row) // ep : (rank + 1) * len(row) // ep]) for rank in range(ep)]
        for row in lines[-1]["counts"]
    ]
    return tuple(fmean(ep * rows[rank] / max(sum(rows), 1) for rows in layers) for rank in range(ep))
