"""`megacore schedule`: what the stages of a pipeline do when: the bubble of each schedule, and what its stages hold.

Times are counted in forwards of a whole stage, what is held in what such a forward of one microbatch leaves. Those of a
recipe on a cluster are told by `megacore plan`; what became of them in a run, by --trace. With --search it makes an
order for the times of a recipe's stages and the memory of its devices, and writes it for `pipeline.order`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from megacore.parallel.pipeline.schedules import SCHEDULES, Cost, Kind, Schedule, Timeline, builder, draw, simulate
from megacore.parallel.virtual_stages import placement_of
from megacore.pictures import FORMATS, pyplot, save
from megacore.say import err, say
from megacore.store.io.strict_json import StoreError
from megacore.tools import folders, schedule_search
from megacore.tools.options import command_parser, count, from_0
from megacore.tools.tables import table
from megacore.training.schedule_gaps import ComparedSchedule
from megacore.training.traces import read_trace

_COLORS: Mapping[Kind, str] = {"F": "#4878d0", "B": "#956cb4", "I": "#6acc64", "W": "#ee854a"}
_WIDEST = 200
"""Characters of a line up to which a schedule is drawn in the terminal."""
_SIZES = "stages", "microbatches", "chunks", "group", "times", "send"
GAPS = 5
"""The gaps of a traced step that are told."""


def main(argv: Sequence[str]) -> int:
    parser = command_parser("schedule", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SCHEDULES)}; all that fit by default")
    parser.add_argument("--stages", type=count, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=count, metavar="M", help="of a step")
    parser.add_argument("--chunks", type=count, metavar="V", help="of each stage (1)")
    parser.add_argument(
        "--group", type=count, metavar="G", help="microbatches at most that take all chunks in turn (P)"
    )
    parser.add_argument(
        "--times",
        type=_times,
        metavar="F,I,W",
        help="of a forward, of input gradients and of weight gradients (1,1,1); 1,2,1 recomputes in full",
    )
    parser.add_argument("--send", type=from_0, metavar="X", help="time of a message between stages (0)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a step that log.trace has recorded: its schedule, what became of it, and the five largest gaps",
    )
    schedule_search.add_options(parser)
    parser.add_argument("--picture", type=_picture, metavar="FILE", help=f"draw it: {', '.join(FORMATS)}")
    try:
        return _run(parser.parse_intermixed_args(argv))
    except (ValueError, OSError, StoreError) as error:
        err(error)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.search is None) != (arguments.to is None):
        raise ValueError("--search RECIPE and --to FILE go together: give both")
    if arguments.search is not None:
        if given := [*_given(arguments), *["--picture"] * bool(arguments.picture)]:
            raise ValueError(f"--search has the sizes and times of its recipe: leave out {', '.join(given)}")
        schedule_search.run(arguments)
        return 0
    if arguments.trace is not None:
        return _compare(arguments)
    if arguments.stages is None or arguments.microbatches is None:
        raise ValueError("a schedule takes --stages and --microbatches, or --trace of a run")
    stages, chunks, microbatches = arguments.stages, arguments.chunks or 1, arguments.microbatches
    if unknown := [name for name in arguments.names if name not in SCHEDULES]:
        raise ValueError(f"there is no schedule {unknown[0]}: choose from {', '.join(SCHEDULES)}")
    made, refused = dict[str, Schedule](), list[str]()
    for name in arguments.names or SCHEDULES:
        try:
            made[name] = builder(name, arguments.group)(stages, chunks, microbatches)
        except ValueError as error:
            refused.append(str(error))
    if arguments.names and refused:
        raise ValueError("\n".join(refused))
    forward, inputs, weights = (time / chunks for time in arguments.times or (1.0, 1.0, 1.0))
    cost = Cost(forward, inputs, weights, arguments.send or 0.0, kept=1 / chunks, waiting=1 / chunks)
    timelines = {name: simulate(schedule, cost, placement_of(name)) for name, schedule in made.items()}
    if len(made) == 1 and cost == Cost(1 / chunks, 1 / chunks, 1 / chunks, 0.0, 1 / chunks, 1 / chunks):
        ((name, schedule),) = made.items()
        drawn = draw(schedule, placement_of(name))
        if max(map(len, drawn.splitlines())) <= _WIDEST:
            say(f"{drawn}\n")
    head = "schedule", "time", "bubble", "held by the first stage", "by the last", "for W at most"
    say(table(head, [_row(name, timeline) for name, timeline in timelines.items()]))
    if refused:
        say("\n" + "\n".join(refused))
    if arguments.picture:
        _draw(timelines, arguments.picture)
        folders.drawn(arguments.picture)
    return 0


def _given(arguments: argparse.Namespace) -> list[str]:
    """Return which of the options of sizes and times are given, of which a recipe and a traced step have their own."""
    return [f"--{name}" for name in _SIZES if getattr(arguments, name) is not None]


def _compare(arguments: argparse.Namespace) -> int:
    """Say what became of the schedule of a traced step."""
    if given := [*arguments.names, *_given(arguments)]:
        raise ValueError(f"--trace has its own schedule and times: leave out {', '.join(given)}")
    traced = read_trace(arguments.trace)
    found = ComparedSchedule.last(traced)
    planned, real = found.planned, found.real
    stages, ranks = len(found.ranks), ", ".join(map(str, found.ranks))
    clocks = f"{1e6 * max(traced.errors):,.0f} us"
    say(f"Step {traced.step}, {traced.schedule} of {stages} stages (ranks {ranks}); clocks to {clocks}")
    both = {"planned, of the medians of its actions": planned, "real": real}
    rows = [(name, f"{1e3 * each.total:,.1f}", f"{100 * each.bubble:.1f}%") for name, each in both.items()]
    say(table(("schedule", "ms", "bubble"), rows))
    gaps = []
    for each in found.gaps(GAPS):
        times = (f"{1e3 * seconds:,.1f}" for seconds in (each.took, each.planned, each.seconds))
        gaps.append((str(each.stage), repr(each.action), *times, each.reason))
    say("\nThe largest gaps: what took a stage longer than planned, in or before an action")
    say(table(("stage", "at", "ms", "planned", "more", "why"), gaps))
    if arguments.picture:
        _draw({"planned": planned, "real": real}, arguments.picture, "seconds")
        folders.drawn(arguments.picture)
    return 0


def _row(name: str, timeline: Timeline) -> tuple[str, ...]:
    first, *_, last = map(sum, (*timeline.peaks[:1], *timeline.peaks))
    waiting = max(held.waiting for row in timeline.held for held in row)
    bubble = f"{100 * timeline.bubble:.1f}%"
    return name, f"{timeline.total:.2f}", bubble, f"{first:.2f}", f"{last:.2f}", f"{waiting:.2f}"


def _draw(timelines: Mapping[str, Timeline], picture: Path, unit: str = "forwards of a stage") -> None:
    """Draw what the stages do, a panel for each schedule, and below it what each of them holds."""
    plots, stages = pyplot(), len(next(iter(timelines.values())).spans)
    heights = [height for _ in timelines for height in (max(1.0, 0.32 * stages), 0.9)]
    longest = max(timeline.total for timeline in timelines.values())
    figure, axes = plots.subplots(
        len(heights),
        1,
        sharex=True,
        figsize=(12, 0.7 + 1.15 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    for (name, timeline), above, below in zip(timelines.items(), axes[::2], axes[1::2], strict=True):
        chunks = 1 + max(span.action.chunk for span in timeline.spans[0])
        for stage, row in enumerate(timeline.spans):
            for action, start, end in row:
                shade = 1 - 0.6 * action.chunk / chunks
                above.barh(stage, end - start, left=start, color=_COLORS[action.kind], alpha=shade, edgecolor="white")
                if (end - start) / longest > 0.012:
                    above.text((start + end) / 2, stage, action.microbatch, ha="center", va="center", fontsize=7)
        for stage in sorted({0, stages - 1}):
            ends = [0.0, *(span.end for span in timeline.spans[stage])]
            below.step(ends, [0.0, *map(sum, timeline.held[stage])], where="post", label=f"stage {stage}")
        above.set(title=f"{name}: bubble {100 * timeline.bubble:.1f} %", ylabel="stage", yticks=range(stages))
        above.invert_yaxis()
        below.set(ylabel="held", ylim=(0, None), xlim=(0, longest))
        below.legend(loc="lower center", fontsize=7, frameon=False, ncols=2)
    figure.align_ylabels()
    axes[-1].set_xlabel(f"time, in {unit}")
    legend = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
    there = {span.action.kind for timeline in timelines.values() for row in timeline.spans for span in row}
    bars = [plots.Rectangle((0, 0), 1, 1, color=_COLORS[kind]) for kind in _COLORS if kind in there]
    names = [legend[kind] for kind in _COLORS if kind in there]
    figure.legend(bars, names, loc="outside upper right", ncols=len(bars), frameon=False, fontsize=8)
    save(figure, picture)


def _times(text: str) -> tuple[float, ...]:
    found = tuple(map(from_0, text.split(",")))
    if len(found) != 3 or min(found) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not F,I,W, three numbers above 0")
    return found


def _picture(text: str) -> Path:
    if (path := Path(text)).suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is no name that ends in {' or '.join(FORMATS)}")
    return path
