"""`megacore diagnose`: where the time of a run's steps goes, and what would make them shorter.

It reads the steps that `log.trace` has recorded. The parts are means over all ranks, and add up to a step; where a rank
waits for another, what that one does counts. Those of 15 % of a step or more stand out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megacore.config import Config
from megacore.devices import CPU_TFLOPS, SMALL_CPU
from megacore.models.config import ModelConfigError
from megacore.models.registry import configure
from megacore.planning.recipe_setting import setting_of
from megacore.planning.step_time import Cluster, estimate
from megacore.recipe import ConfigError, load
from megacore.say import err, say
from megacore.store.io.strict_json import StoreError
from megacore.tools.tables import table
from megacore.training.advice import advise
from megacore.training.diagnosis import BUBBLE, PRODUCTS, StepSplit, split
from megacore.training.schedule_gaps import actions
from megacore.training.traces import TracedStep, files, read_trace


@dataclass(frozen=True)
class TracedRun:
    """A run that has recorded some of its steps; ``others`` are numbers of steps that do not count, for the run has
    gone on with other ranks or another schedule."""

    out: Path
    config: Config
    steps: tuple[TracedStep, ...]
    others: tuple[int, ...]
    found: StepSplit

    @classmethod
    def of(cls, out: Path) -> TracedRun:
        """Read a run; those of its steps count that are spread as the last one is, and of several not the first one of
        the run, in which much happens once.

        Raises:
            ConfigError: its config cannot be read.
            StoreError: it has recorded no step, or what it has cannot be read.
            ScheduleError: a trace has no whole schedule.
        """
        config = load(out / "config.yaml")
        steps = [read_trace(path) for path in files(out)]
        if not steps:
            raise StoreError(f"{out} has recorded no step: train with log.trace=50, say")
        last = steps[-1]
        alike = [each for each in steps if (each.mesh, each.schedule) == (last.mesh, last.schedule)]
        others = tuple(each.step for each in steps if each not in alike)
        counted = tuple(each for each in alike if each.step > 1 or len(alike) == 1)
        return cls(out, config, counted, others, split(counted, config, _recomputed(config, last)))

    @property
    def microbatches(self) -> int:
        """Those of a rank in a step."""
        return 1 + max(each.microbatch for _, each in actions(self.steps[-1].of(0)))

    @property
    def tokens(self) -> int:
        """Those of a microbatch."""
        return self.config.batch.micro_size * self.config.data.sequence_length


def main(argv: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="megacore diagnose", description=about, epilog=more)
    parser.add_argument("run", type=Path, metavar="OUT", help="the folder of a run, its out")
    parser.add_argument("--against", type=Path, metavar="OUT", help="another run, of another scale, say: beside it")
    given = parser.parse_args(argv)
    try:
        run = TracedRun.of(given.run)
        say("\n".join(_against(run, TracedRun.of(given.against)) if given.against else _one(run)))
    except (ConfigError, StoreError, ValueError) as error:
        err(error)
        return 1
    return 0


def _one(run: TracedRun) -> Iterator[str]:
    found, total = run.found, run.found.seconds
    yield f"{_name(run)}: {1e3 * total:,.1f} ms a step"
    rows = [(x.name, f"{1e3 * x.seconds:,.1f}", f"{x.seconds / total:.1%}", x.about) for x in found.parts]
    yield table(("part", "ms", "share", ""), rows)
    largest = [f"{each.name} {each.about}".strip() for each in found.findings]
    yield f"\nWhat stands out: {'; '.join(largest) or 'none'}"
    advice = advise(found, run.steps[-1], run.config) if largest else []
    if not advice:
        yield "Advice: none"
    for each in advice:
        yield f"Advice: {each.overrides}  (a step would take {each.gain:.0%} less)"


def _against(run: TracedRun, other: TracedRun) -> Iterator[str]:
    """Yield the parts of two runs beside each other: first those that must differ, for the runs do, with the reason."""
    yield f"{_name(run)}: {1e3 * run.found.seconds:,.1f} ms a step"
    yield f"against {_name(other)}: {1e3 * other.found.seconds:,.1f} ms a step"
    own, theirs = ({each.name: each.seconds for each in x.found.parts} for x in (run, other))
    names = dict.fromkeys([*own, *theirs])
    more = {name: own.get(name, 0.0) - theirs.get(name, 0.0) for name in names}
    reasons = {name: _reason(name, run, other) for name in names}
    rows = []
    for name in sorted(names, key=lambda name: (not reasons[name], -abs(more[name]))):
        both = (f"{1e3 * each.get(name, 0.0):,.1f}" for each in (own, theirs))
        rows.append((name, *both, f"{1e3 * more[name]:+,.1f}", reasons[name]))
    yield table(("part", "ms", "against", "more", "changed of itself"), rows)


def _reason(part: str, run: TracedRun, other: TracedRun) -> str:
    """Return why a part differs of itself between two runs; nothing where it should not."""
    mesh, theirs = run.steps[-1].mesh, other.steps[-1].mesh
    if part == BUBBLE:
        numbers = {"stages": (mesh.pp, theirs.pp), "microbatches": (run.microbatches, other.microbatches)}
    elif part == PRODUCTS:
        numbers = {"tokens of a microbatch": (run.tokens, other.tokens),
                   "microbatches": (run.microbatches, other.microbatches),
                   "ranks that hold the model": (mesh.pp * mesh.tp, theirs.pp * theirs.tp)}  # fmt: skip
    else:
        dims = [dim for dim in part.split(" ")[1:] if dim in mesh.DIMS]
        numbers = {"ranks": (math.prod(mesh[dim] for dim in dims), math.prod(theirs[dim] for dim in dims))}
    return ", ".join(f"{here:,} {what}, not {there:,}" for what, (here, there) in numbers.items() if here != there)


def _name(run: TracedRun) -> str:
    mesh, steps = run.steps[-1].mesh, ", ".join(str(each.step) for each in run.steps)
    if run.others:
        steps += f"; not {', '.join(map(str, run.others))}, of another layout"
    sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS if mesh[dim] > 1) or "one rank"
    return f"{run.out} ({sizes}, {run.microbatches} microbatches; steps {steps})"


def _recomputed(config: Config, step: TracedStep) -> float:
    """Return the share of recomputation in what a run computes, by the plan; 0 where it cannot be planned."""
    if config.memory.recompute == "none":
        return 0.0
    try:
        kind: Literal["cpu", "cuda"] = "cuda" if "device" in step.ranks[0] else "cpu"
        setting = setting_of(config, configure(config.model), step.mesh.world, kind)
    except ModelConfigError:  # of a checkpoint that names no family
        return 0.0
    planned = estimate(setting, Cluster(SMALL_CPU, CPU_TFLOPS))
    return planned.recompute / (planned.compute + planned.recompute)


if __name__ == "__main__":
    sys.exit(main())
