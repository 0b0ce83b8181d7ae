"""Pipeline schedules as data, and a simulator that proves them. Integers only: no torch, no process group.

A schedule says, for each stage (a pipeline rank), which actions it runs in which order. Its chunks of the model are
virtual stages (``parallel.virtual_stages``): data visits v = 0, 1, ..., chunks * stages - 1 on its way forward and
returns the same way. Within a chunk every schedule here runs microbatches in ascending order, forward and backward,
so gradients are summed in the same order whichever schedule is chosen.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from megacore.parallel.enum_errors import IN_GROUPS, Placement
from megacore.parallel.virtual_stages import stage_of, virtual_stage

Kind = Literal["F", "B", "I", "W"]
Direction = Literal["forward", "backward"]
RECEIVE, SEND = "receive", "send"
"""The names of waits for messages between stages, where they are recorded."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one stage: run the forward ("F") or the backward ("B") of a chunk on a microbatch, or the two halves
    of the backward: input gradients ("I"), for which the stage before waits, and weight gradients ("W").

    ``beside``: whether it runs interleaved with the action after it: where one of the two would wait for messages of
    experts, the other computes. Together they are one step: it begins when both can, and ends when both have.
    """

    kind: Kind
    chunk: int
    microbatch: int
    beside: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        return f"{self.kind}({self.chunk},{self.microbatch}){'+' * self.beside}"


def F(chunk: int, microbatch: int) -> Action:
    """Return the forward of a chunk on a microbatch."""
    return Action("F", chunk, microbatch)


def B(chunk: int, microbatch: int) -> Action:
    """Return the backward of a chunk on a microbatch."""
    return Action("B", chunk, microbatch)


def I(chunk: int, microbatch: int) -> Action:  # noqa: E743
    """Return the input gradients of a chunk on a microbatch."""
    return Action("I", chunk, microbatch)


def W(chunk: int, microbatch: int) -> Action:
    """Return the weight gradients of a chunk on a microbatch."""
    return Action("W", chunk, microbatch)


Schedule = tuple[tuple[Action, ...], ...]  # the actions of each stage, in order


class ScheduleError(ValueError):
    """A schedule that no pipeline can run: an action is missing, repeated, or never becomes ready."""


class Deadlock(ScheduleError):
    """Every unfinished stage waits for an action that another one has not run."""


# -- the schedules


def gpipe(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965), chunk after chunk.

    Keeps the activations of every microbatch. Bubble (stages - 1) / (chunks * microbatches) from ``stages``
    microbatches on.
    """
    _check_sizes(stages, chunks, microbatches)
    forwards = [F(chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    backwards = [B(chunk, m) for chunk in reversed(range(chunks)) for m in range(microbatches)]
    return tuple(tuple(forwards + backwards) for _ in range(stages))


def one_f_one_b(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return one forward, one backward in turn (PipeDream-flush, Narayanan et al. 2021, arXiv 2006.09503). One chunk a
    stage.

    Stage s first runs the stages - 1 - s forwards that the stages behind it need before the first gradient can come
    back, so it never keeps more than stages - s activations. Bubble (stages - 1) / microbatches, as GPipe's.
    """
    _check_one_chunk(chunks, "1f1b", "interleaved")
    return interleaved(stages, chunks, microbatches)


def interleaved(stages: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """Return interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473) for any number of microbatches.

    The stages take the microbatches in groups; a group goes through all chunks before the next one starts. A group
    smaller than ``stages`` would leave stages waiting for the group to come round (and can even deadlock a 1F1B order),
    so the microbatches are spread over microbatches // stages groups that differ by at most one: exactly ``stages``
    each when that divides, and never fewer unless there are fewer in all. The bubble is then (stages - 1) / (chunks *
    microbatches) from ``stages`` microbatches on, divisible or not. With larger groups, of at most ``group``, a message
    has more time until it is used, and a stage holds (chunks - 1) microbatches more for each one more of a group.
    """
    return _in_groups(stages, chunks, microbatches, _warmups(stages, chunks, microbatches, group), group)


def overlapped(stages: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """Return interleaved 1F1B whose forwards and backwards run two by two, each pair of different microbatches: where
    one waits for messages of experts, the other computes (as in DualPipe, DeepSeek-AI 2024, arXiv 2412.19437).

    A pair gives its activation and its gradient together, so that both need two actions a hop to the end and back, and
    a backward is never paired with what it waits for: stage s keeps one microbatch of a chunk more than in
    ``interleaved``, and of one chunk stages - s more than in ``1f1b``. The bubble is theirs.
    """
    warmups = _warmups(stages, chunks, microbatches, group, ahead=1)
    return tuple(
        tuple(replace(action, beside=action.kind == "F" and at >= warmup) for at, action in enumerate(row))
        for row, warmup in zip(_in_groups(stages, chunks, microbatches, warmups, group), warmups, strict=True)
    )


def forward_only(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return the forwards of ``interleaved`` alone, for evaluation: nothing is kept for a backward."""
    _check_sizes(stages, chunks, microbatches)
    groups = _groups(stages, microbatches)
    forwards = tuple(F(chunk, m) for group in groups for chunk in range(chunks) for m in group)
    return (forwards,) * stages


def zb_h1(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose backward is split. One chunk a stage.

    Stage s is s microbatches behind with weight gradients, so that all stages hold as many microbatches as the first
    does: stages. Bubble (stages - 1) / (3 microbatches) where input and weight gradients take as long as a forward.
    """
    _check_one_chunk(chunks, "zb-h1", "zb-interleaved")
    return zb_interleaved(stages, chunks, microbatches)


def zb_interleaved(stages: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """Return interleaved 1F1B whose backward is split: stage s is s chunks behind with weight gradients.

    No stage holds more than the first one of ``interleaved`` does. Bubble (stages - 1) / (3 chunks * microbatches) from
    ``stages`` microbatches on, where input and weight gradients take as long as a forward.
    """
    whole = interleaved(stages, chunks, microbatches, group)
    return tuple(_weights_behind(row, stage) for stage, row in enumerate(whole))


def zb_v(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return ZB-V (Qi et al. 2024, arXiv 2405.15362): a split backward on two chunks a stage that are placed in a V.

    What a stage has of the beginning of the model waits long for its gradients, and what it has of the end a short
    time, so all stages hold the same: 2 * stages chunks, as much as the first stage of 1F1B. Bubble (stages - 1) / (6
    microbatches) from 2 * stages - 1 microbatches on, where input and weight gradients take as long as a forward.
    """
    _check_sizes(stages, chunks, microbatches)
    _check_two_chunks(chunks, "zb-v")
    return tuple(_there_and_back(stages, stage, microbatches) for stage in range(stages))


def dualpipe_v(stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return DualPipe cut in half (DeepSeek-AI 2024, arXiv 2412.19437; DualPipeV in the repository of the paper):
    chunks placed as in ``zb_v``, whose forwards and backwards run two by two, as in ``overlapped``.

    All backwards are split, and weight gradients come right behind a pair: so the stage before has what a pair gives
    that much earlier than where it has whole backwards, as published. Those of the last backwards fill the time until
    others come. All stages hold 2 * stages + 1 chunks; the bubble is that of ``zb_v`` from 2 * stages microbatches on,
    where no messages are hidden.
    """
    _check_sizes(stages, chunks, microbatches)
    _check_two_chunks(chunks, "dualpipe-v")
    return tuple(_in_pairs(stages, stage, microbatches) for stage in range(stages))


Builder = Callable[[int, int, int], Schedule]
SCHEDULES: dict[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "overlapped": overlapped,
    "zb-h1": zb_h1,
    "zb-interleaved": zb_interleaved,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}


def builder(name: str, group: int | None) -> Builder:
    """Return one of ``SCHEDULES``, with groups of at most so many microbatches. Raises ValueError: it has none."""
    if group is None:
        return SCHEDULES[name]
    if name not in IN_GROUPS:
        raise ValueError(
            f"{name} has no groups of microbatches: leave out group={group}, or choose {', '.join(IN_GROUPS)}"
        )
    return partial(SCHEDULES[name], group=group)  # type: ignore[call-arg]


def ordered(order: Schedule) -> Builder:
    """Return what gives a schedule in place of one of ``SCHEDULES``, for its own sizes alone."""

    def build(stages: int, chunks: int, microbatches: int) -> Schedule:
        own = len(order), *(1 + max(getattr(each, name) for each in order[0]) for name in ("chunk", "microbatch"))
        if own != (stages, chunks, microbatches):
            raise ValueError(
                f"the order is one of {own[0]} stages, {own[1]} chunks and {own[2]} microbatches, not of {stages}, "
                f"{chunks} and {microbatches}"
            )
        return order

    return build


_Part = tuple[Kind, int]
"""A kind of actions of a chunk."""


class _NumberedRow(list[Action]):
    """A row that numbers the microbatches of its actions. Of fewer than fill it, it is that of as many less what
    belongs to those that are not there."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches, self.done = microbatches, Counter[_Part]()

    def run(self, *parts: _Part, times: int = 1, beside: bool = False) -> None:
        """Add actions; ``beside``: the first one runs beside the second."""
        for at, part in enumerate(parts * times):
            if self.done[part] < self.microbatches:
                # A backward is of an earlier microbatch than the forward beside it.
                self.append(Action(*part, self.done[part], beside and at % len(parts) == 0))
            self.done[part] += 1


def _there_and_back(stages: int, stage: int, microbatches: int) -> tuple[Action, ...]:
    """Return the row of a stage in :func:`zb_v`."""
    row = _NumberedRow(microbatches)
    run, done = row.run, row.done
    behind, enough = stages - stage, max(microbatches, 2 * stages - 1)
    there: tuple[_Part, ...] = (("I", 0), ("W", 0))
    back: tuple[_Part, ...] = (("F", 1), ("I", 1), ("W", 1))
    run(("F", 0), times=2 * behind - 1)
    run(("F", 1), ("F", 0), times=stage)
    run(*back, times=behind)
    while done["F", 0] < enough:
        run(("F", 0), *there, *back)
    run(*there, *back, times=done["F", 0] - done["F", 1])
    # No stage waits for weight gradients: they fill the time until the last input gradients come.
    run(("I", 0), ("I", 1), times=stage)
    run(*there, times=behind)
    run(("W", 1), times=done["I", 1] - done["W", 1])
    run(("W", 0), times=done["I", 0] - done["W", 0])
    return tuple(row)


def _in_pairs(stages: int, stage: int, microbatches: int) -> tuple[Action, ...]:
    """Return the row of a stage in :func:`dualpipe_v`, in the steps of its repository."""
    row = _NumberedRow(microbatches)
    run, done = row.run, row.done
    behind, enough = stages - 1 - stage, max(microbatches, 2 * stages)
    there: tuple[_Part, ...] = (("I", 0), ("W", 0))
    back: tuple[_Part, ...] = (("I", 1), ("W", 1))
    run(("F", 0), times=2 * behind)
    run(("F", 0), ("F", 1), times=stage + 1)
    run(*back, ("F", 1), times=behind)
    while done["F", 0] < enough:
        # The last stage has just begun with chunk 1, which the first pair of the others waits for.
        run(("F", 0), *back, beside=behind > 0 or done["I", 1] > 0)
        run(("F", 1), *there, beside=True)
    for _ in range(behind):
        run(*back)
        run(("F", 1), *there, beside=True)
    late = deque[_Part]()
    for number in range(2 * (stage + 1)):
        part = back if number % 2 == 0 else there
        run(part[0])
        late.append(part[1])
        if number <= stage:
            run(late.popleft())
    for _ in range(behind):
        run(late.popleft(), there[0])
        late.append(there[1])
    run(*late)
    return tuple(row)


def _weights_behind(row: tuple[Action, ...], behind: int) -> tuple[Action, ...]:
    """Return a row with split backwards, of which each weight gradient comes so many of them later."""
    split, waiting = list[Action](), deque[Action]()
    for action in row:
        if action.kind == "F":
            split.append(action)
            continue
        split.append(I(action.chunk, action.microbatch))
        waiting.append(W(action.chunk, action.microbatch))
        if len(waiting) > behind:
            split.append(waiting.popleft())
    return (*split, *waiting)


def _in_groups(stages: int, chunks: int, microbatches: int, warmups: list[int], group: int | None) -> Schedule:
    """Return 1F1B whose stages start with so many forwards; microbatches go through all chunks group by group."""
    groups = _groups(stages, microbatches, group)
    forwards = [F(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    backwards = [B(chunk, m) for group in groups for chunk in reversed(range(chunks)) for m in group]
    return tuple(_alternate(forwards, backwards, warmup) for warmup in warmups)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return tuple(row + backwards[len(forwards) - warmup :])


def _groups(stages: int, microbatches: int, group: int | None = None) -> list[range]:
    """Return consecutive microbatches in groups of at least ``stages``, as even as can be: as many as there can be, or
    as few of at most ``group`` as there can be."""
    if group is not None and group < stages:
        raise ValueError(
            f"a group of {group} microbatches comes round before {stages} stages have had it: choose group={stages} or "
            "more"
        )
    count = max(1, min(microbatches // stages, -(-microbatches // (group or stages))))
    bounds = [-(-microbatches * group // count) for group in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _warmups(stages: int, chunks: int, microbatches: int, group: int | None, ahead: int = 0) -> list[int]:
    """Return the number of forwards before the first pair of a forward and a backward of each stage in 1F1B.

    With one chunk: one for each stage behind it. With several, the last stage needs a whole group through all chunks
    but the last, and a stage before it two more for each hop to the end: its activation travels there and the gradient
    back, and meanwhile later chunks wait for its forwards. With ``ahead`` the two of a pair run as one, so that it is
    two for one chunk too, and all stages are so many ahead.
    """
    _check_sizes(stages, chunks, microbatches)
    largest = max(map(len, _groups(stages, microbatches, group)))
    hops = 1 if chunks == 1 and not ahead else 2
    return [(chunks - 1) * largest + hops * (stages - 1 - stage) + ahead for stage in range(stages)]


def _check_sizes(stages: int, chunks: int, microbatches: int) -> None:
    for name, size in (("stages", stages), ("chunks", chunks), ("microbatches", microbatches)):
        if size < 1:
            raise ValueError(f"a schedule cannot have {name}={size}: stages, chunks and microbatches start at 1")


def _check_two_chunks(chunks: int, name: str) -> None:
    if chunks != 2:
        raise ValueError(f"{name} runs two chunks per stage, there and back, not chunks={chunks}: choose chunks=2")


def _check_one_chunk(chunks: int, name: str, other: str) -> None:
    if chunks != 1:
        raise ValueError(f"{name} runs one chunk per stage, not chunks={chunks}: choose {other}, or chunks=1")


# -- the simulator


@dataclass(frozen=True)
class Cost:
    """What one chunk of a stage takes for one microbatch.

    Args:
        forward, inputs, weights: The times of its forward, of its input gradients and of its weight gradients; a
            backward that is not split takes the last two together.
        send: The time of a message from it to another stage.
        kept: The bytes that its forward leaves for its input gradients.
        waiting: The bytes that these leave for its weight gradients.
        exchange, exchange_back: The parts of its forward and of its backward in which it waits for messages of
            experts, and the action beside it computes.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    send: float = 0.0
    kept: float = 1
    waiting: float = 1
    exchange: float = 0.0
    exchange_back: float = 0.0

    def time(self, kind: Kind) -> float:
        """Return the time of an action."""
        return {"F": self.forward, "B": self.inputs + self.weights, "I": self.inputs, "W": self.weights}[kind]

    def waits(self, kind: Kind) -> float:
        """Return the part of it in which an action that runs beside this one computes."""
        return self.exchange if kind == "F" else self.exchange_back


Costs = Sequence[Sequence[Cost]]
"""Of each stage, those of each chunk."""


class TimedAction(NamedTuple):
    """An action and the time when it ran: [start, end), in the units of the costs."""

    action: Action
    start: float
    end: float


class Bytes(NamedTuple):
    """What a stage holds: for input gradients to come, and for weight gradients to come."""

    kept: float
    waiting: float


@dataclass(frozen=True)
class Timeline:
    """The times of a simulated schedule.

    ``spans``: per stage, its actions in order with their times. ``held``: per stage, what it holds after each of them;
    nothing where there is no backward.
    """

    spans: tuple[tuple[TimedAction, ...], ...]
    held: tuple[tuple[Bytes, ...], ...]

    @property
    def total(self) -> float:
        """The time when the last action ended."""
        return max(row[-1].end for row in self.spans)

    @property
    def peaks(self) -> tuple[Bytes, ...]:
        """The most that each stage holds after an action."""
        return tuple(max(row, key=sum) for row in self.held)

    @property
    def bubble(self) -> float:
        """Idle time over busy time, all stages together: 0 would be a pipeline that never waits."""
        busy = sum(span.end - span.start for row in self.spans for span in row)
        return (self.total * len(self.spans) - busy) / busy


def dependencies(
    action: Action, stage: int, stages: int, chunks: int, back: Kind = "B", placement: Placement = "loop"
) -> tuple[tuple[int, Action], ...]:
    """Return the (stage, action) pairs that must have ended before ``stage`` can run ``action``; ``back`` is the kind
    of action that gives input gradients."""
    chunk, m = action.chunk, action.microbatch
    virtual, last = virtual_stage(stage, chunk, stages, placement), chunks * stages - 1

    def of(kind: Kind, virtual: int) -> tuple[int, Action]:
        return stage_of(virtual, stages, placement), Action(kind, virtual // stages, m)

    if action.kind == "F":
        return (of("F", virtual - 1),) if virtual > 0 else ()
    if action.kind == "W":
        return ((stage, I(chunk, m)),)
    own = (stage, F(chunk, m))
    return (own, of(back, virtual + 1)) if virtual < last else (own,)


def simulate(schedule: Schedule, costs: Costs | Cost = Cost(), placement: Placement = "loop") -> Timeline:
    """Run a schedule on paper, each stage strictly in its order and with unlimited buffers.

    ``costs`` are those of every chunk of every stage, or one for all. Raises ``ScheduleError`` if an action is missing
    or repeated (the sizes are the largest chunk and microbatch that occur) and ``Deadlock``, with what every stage
    waits for, if the schedule cannot end.
    """
    stages, chunks = len(schedule), _check_complete(schedule)
    if isinstance(costs, Cost):
        costs = [[costs] * chunks] * stages
    back = _back(schedule)
    end: dict[tuple[int, Action], float] = {}
    spans: list[list[TimedAction]] = [[] for _ in schedule]
    blocked: dict[tuple[int, Action], list[int]] = {}  # the stages that wait for this action
    steps, at = [steps_of(row) for row in schedule], [0] * stages
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        done = spans[stage]
        while at[stage] < len(steps[stage]):
            step = steps[stage][at[stage]]
            needed = [need for each in step for need in dependencies(each, stage, stages, chunks, back, placement)]
            missing = next((need for need in needed if need not in end), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(stage)
                break
            start = done[-1].end if done else 0.0
            for source, before in needed:
                sent = costs[source][before.chunk].send if source != stage else 0.0
                start = max(start, end[source, before] + sent)
            done += _timed(step, start, costs[stage])
            at[stage] += 1
            for action in step:
                end[stage, action] = done[-1].end
                ready.extend(blocked.pop((stage, action), ()))
    if blocked:
        waits = sorted((stage, need) for need, waiting in blocked.items() for stage in waiting)
        lines = [
            f"stage {s} cannot run {schedule[s][len(spans[s])]!r} before stage {t} has run {a!r}" for s, (t, a) in waits
        ]
        raise Deadlock("the schedule deadlocks: " + "; ".join(lines))
    return Timeline(tuple(map(tuple, spans)), tuple(map(_held, schedule, costs)))


def steps_of(row: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    """Return the actions of a stage as it runs them: each alone, or with the one that it runs beside."""
    starts = [at for at in range(len(row)) if at == 0 or not row[at - 1].beside]
    return [row[start:stop] for start, stop in pairwise([*starts, len(row)])]


def _timed(step: tuple[Action, ...], start: float, costs: Sequence[Cost]) -> Iterator[TimedAction]:
    """Yield the actions of a step with their times; of a pair, each with its part of the time of both."""
    own = [(costs[action.chunk].time(action.kind), costs[action.chunk].waits(action.kind)) for action in step]
    whole, hidden = sum(time for time, _ in own), 0.0
    if len(own) == 2:
        (first, waits), (second, others) = own
        hidden = min(waits, second - others) + min(others, first - waits)
    for action, (time, _) in zip(step, own, strict=True):
        end = start + time * (1 - hidden / whole if hidden else 1)
        yield TimedAction(action, start, end)
        start = end


def _back(schedule: Schedule) -> Kind:
    """Return the kind of the actions of a schedule that give input gradients."""
    return "I" if any(action.kind == "I" for action in schedule[0]) else "B"


def _check_complete(schedule: Schedule) -> int:
    """Return the number of chunks of a schedule in which every stage runs every forward once, and all backwards, whole
    or split, or none."""
    actions = [action for row in schedule for action in row]
    if not actions:
        raise ScheduleError("the schedule is empty: it needs at least one stage with one action")
    chunks = 1 + max(action.chunk for action in actions)
    microbatches = 1 + max(action.microbatch for action in actions)
    kinds = {action.kind for action in actions}
    halves: set[Kind] = {"I", "W"} if kinds & {"I", "W"} else kinds & {"B"}
    pairs = [(chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    expected = {Action(kind, *pair) for pair in pairs for kind in {"F", *halves}}
    for stage, row in enumerate(schedule):
        found = set(row)
        for problem, culprits in (("lacks", expected - found), ("must not run", found - expected)):
            if culprits:
                raise ScheduleError(
                    f"stage {stage} {problem} {sorted(map(repr, culprits))} "
                    f"in a schedule of {chunks} chunks and {microbatches} microbatches"
                )
        if len(row) != len(found):
            repeated = sorted({repr(action) for action in row if row.count(action) > 1})
            raise ScheduleError(f"stage {stage} runs {repeated} more than once: every action runs exactly once")
    return chunks


def check_order(order: Schedule, like: Schedule, placement: Placement = "loop") -> None:
    """Raise ScheduleError, which says what is wrong and where, unless each stage runs the actions of another schedule
    in some order: the microbatches of each chunk ascend, so that gradients are summed as they always are, and it ends.
    """
    for stage, (row, known) in enumerate(zip(order, like, strict=True)):
        counts, own = Counter(row), set(known)
        for action in known:
            if action not in counts:
                raise ScheduleError(f"stage {stage} lacks {action!r}")
        latest: dict[tuple[Kind, int], int] = {}
        for at, action in enumerate(row):
            what = f"stage {stage}, action {at}: {action!r}"
            if action not in own:
                raise ScheduleError(f"{what} is not one of the schedule")
            if counts[action] > 1:
                raise ScheduleError(f"{what} is there {counts[action]} times")
            before = latest.get((action.kind, action.chunk), -1)
            if before > action.microbatch:
                raise ScheduleError(
                    f"{what} comes after microbatch {before}: those of a chunk ascend, so that gradients are summed in "
                    "one order"
                )
            latest[action.kind, action.chunk] = action.microbatch
    simulate(order, placement=placement)


def _held(row: tuple[Action, ...], costs: Sequence[Cost]) -> tuple[Bytes, ...]:
    """Return what a stage holds after each of its actions."""
    if all(action.kind == "F" for action in row):
        return (Bytes(0, 0),) * len(row)
    kept = waiting = 0.0
    held = list[Bytes]()
    for action in row:
        cost = costs[action.chunk]
        kept += {"F": cost.kept, "W": 0}.get(action.kind, -cost.kept)
        waiting += {"I": cost.waiting, "W": -cost.waiting}.get(action.kind, 0)
        held.append(Bytes(kept, waiting))
    return tuple(held)


# -- the communication plan


class Message(NamedTuple):
    """An activation (forward) or input gradient (backward) of a microbatch, for this chunk of the receiving stage."""

    chunk: int
    microbatch: int


class Request(NamedTuple):
    """A request of a stage to a neighbour: for a message, on one of the two channels that lead to it."""

    direction: Direction
    message: Message


def _last(schedule: Schedule) -> int:
    """Return the last virtual stage."""
    return max(action.chunk for row in schedule for action in row) * len(schedule) + len(schedule) - 1


def sent_after(action: Action, stage: int, stages: int, last: int, placement: Placement) -> Request | None:
    """Return what a stage sends to another one after an action, if anything; ``last``: the last virtual stage.

    The forward channel leads from stage s to (s + 1) % stages, the backward channel to (s - 1) % stages. In a loop the
    one carries the outputs of forwards, the other input gradients; in a V, of odd chunks, the other way round. Each is
    a FIFO of its own: with two stages both channels of a stage lead to the same peer and are still two. A stage sends
    itself nothing; its chunks hand over locally.
    """
    virtual = virtual_stage(stage, action.chunk, stages, placement)
    to = virtual + {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
    if to == virtual or not 0 <= to <= last or stage_of(to, stages, placement) == stage:
        return None
    ahead = (to > virtual) != (placement == "v" and action.chunk % 2 == 1)
    return Request("forward" if ahead else "backward", Message(to // stages, action.microbatch))


def requests(schedule: Schedule, placement: Placement = "loop") -> tuple[tuple[tuple[Request, ...], ...], ...]:
    """Return the requests that each stage makes of its neighbours after 0, 1, 2, ... of its actions.

    It is what they send between two actions of the stage, in one order of the actions of all stages, that of
    :func:`simulate`. So a stage may wait before each of its actions for all that it has sent and asked for: what this
    depends on comes before the action, on every stage. If it asked earlier, it might wait for what itself has yet to
    run; if it asked later, its neighbour might wait for it to ask.
    """
    stages, last = len(schedule), _last(schedule)
    spans = simulate(schedule, placement=placement).spans
    starts = [[row[at - (at > 0 and row[at - 1].action.beside)].start for at in range(len(row))] for row in spans]
    # What two send that run beside each other, they may send when both have ended, and so they count as run at once.
    order = sorted((start, stage, at) for stage, row in enumerate(starts) for at, start in enumerate(row))
    asked: list[list[list[Request]]] = [[[] for _ in range(len(row) + 1)] for row in schedule]
    run = [0] * stages
    for _, stage, at in order:
        run[stage] += 1
        sent = sent_after(schedule[stage][at], stage, stages, last, placement)
        if sent:
            target = (stage + (1 if sent.direction == "forward" else -1)) % stages
            asked[target][run[target]].append(sent)
    return tuple(tuple(tuple(after) for after in row) for row in asked)


# -- the drawing


def draw(schedule: Schedule, placement: Placement = "loop") -> str:
    """Return a text Gantt chart, one row per stage; a forward is one cell wide, a backward two or, split, one and
    one, and dots are idle.

    ``F3`` is the forward of microbatch 3; with several chunks ``F3b`` is that of chunk 1 (a, b, c, ...). ``F3+`` runs
    beside what follows it.
    """
    several = any(action.chunk for row in schedule for action in row)
    timeline = simulate(schedule, placement=placement)
    width = 1 + max(len(_label(span.action, several)) for row in timeline.spans for span in row)
    lines = []
    for stage, row in enumerate(timeline.spans):
        cells = ["." + " " * (width - 1)] * round(timeline.total)
        for action, start, end in row:
            cells[round(start)] = _label(action, several).ljust(width)
            cells[round(start) + 1 : round(end)] = ["-" * (width - 1) + " "] * (round(end - start) - 1)
        lines.append(f"stage {stage} | " + "".join(cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, several_chunks: bool) -> str:
    chunk = chr(ord("a") + action.chunk) if several_chunks else ""
    return f"{action.kind}{action.microbatch}{chunk}{'+' * action.beside}"
