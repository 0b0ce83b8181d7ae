"""Schedules are proved here for every size a pipeline is likely to have, and the simulator against broken ones."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_flight import in_flight, takes
from stage_messages import arrivals, messages

from megacore.parallel.enum_errors import IN_GROUPS, OVERLAPPED, SPLIT_BACKWARD, V_SHAPED
from megacore.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    B,
    Bytes,
    Cost,
    Deadlock,
    Direction,
    F,
    I,
    Message,
    Schedule,
    ScheduleError,
    W,
    builder,
    draw,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    overlapped,
    simulate,
    steps_of,
    zb_h1,
    zb_interleaved,
    zb_v,
)
from megacore.parallel.virtual_stages import placement_of, virtual_stage

STAGES, CHUNKS, MICROBATCHES = range(1, 9), range(1, 5), (*range(1, 13), 16, 19, 24)


def sizes(name: str, stages: int) -> Iterator[tuple[int, int]]:
    for chunks in (chunks for chunks in CHUNKS if takes(name, chunks)):
        for microbatches in MICROBATCHES:
            yield chunks, microbatches


def parse(text: str) -> tuple[Action, ...]:
    """``"F0a B2b"`` -> (F(0,0), B(1,2)): the letters of ``draw``."""
    return tuple(Action(w[0], ord(w[2:] or "a") - ord("a"), int(w[1])) for w in text.split())  # type: ignore[arg-type]


# -- exhaustive


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", STAGES)
def test_every_size_ends_runs_everything_once_and_keeps_its_bounds(name: str, stages: int) -> None:
    for chunks, microbatches in sizes(name, stages):
        check_bounds(name, stages, chunks, microbatches)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("stages", STAGES)
def test_groups_of_any_size_do_too(name: str, stages: int) -> None:
    for chunks, microbatches in sizes(name, stages):
        for group in (stages, stages + 1, 2 * stages + 1, 24):
            check_bounds(name, stages, chunks, microbatches, group)


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 64), st.sampled_from(CHUNKS), st.integers(1, 512), st.data())
@settings(max_examples=40)
def test_large_sizes_do_too(name: str, stages: int, chunks: int, microbatches: int, data: st.DataObject) -> None:
    chunks = next(each for each in (chunks, 1, 2) if takes(name, each))
    group = data.draw(st.none() | st.integers(stages, 512)) if name in IN_GROUPS else None
    check_bounds(name, stages, chunks, min(microbatches, 6000 // (stages * chunks)), group)


@pytest.mark.grid
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_largest_does_too(name: str) -> None:
    check_bounds(name, 64, next(each for each in (3, 1, 2) if takes(name, each)), 512)


def check_bounds(name: str, stages: int, chunks: int, microbatches: int, group: int | None = None) -> None:
    case = f"{name}({stages}, {chunks}, {microbatches}, {group})"
    schedule = builder(name, group)(stages, chunks, microbatches)
    timeline = simulate(schedule, placement=placement_of(name))
    kinds = "FIW" if name in SPLIT_BACKWARD else "BF"
    everything = [(kind, c, m) for kind in kinds for c in range(chunks) for m in range(microbatches)]
    for row in schedule:
        assert sorted((a.kind, a.chunk, a.microbatch) for a in row) == everything, case
    held = in_flight(name, stages, chunks, microbatches, group)
    assert tuple(map(sum, timeline.peaks)) == held, case
    # (p-1)/(v m) from p microbatches on; below, every chunk waits for the microbatches to come round
    idle = stages - 1 + (chunks - 1) * max(0, stages - microbatches)
    whole = idle / (chunks * microbatches)
    if name in V_SHAPED:  # there and back, the first microbatch needs more than half of the stages' others
        idle = max(stages - 1, 4 * stages - 2 - 2 * microbatches)
        if name == "dualpipe-v":  # pairs need two for each stage, and of less wait as long again
            idle = max(idle, min(2 * stages - 2, 5 * stages - 1 - 2 * microbatches))
        assert timeline.bubble == pytest.approx(idle / (6 * microbatches)), case
    elif name not in SPLIT_BACKWARD:
        assert timeline.bubble == pytest.approx(whole), case
    elif microbatches >= stages:  # a third: what is idle is as long as a forward
        assert timeline.bubble == pytest.approx(whole / 3), case
    else:
        assert timeline.bubble < whole, case
    if name in SPLIT_BACKWARD - OVERLAPPED:
        assert max(held) <= in_flight("interleaved", stages, chunks, microbatches, group)[0], case


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_ascend_within_a_chunk_so_that_gradients_add_up_in_one_order(name: str) -> None:
    for stages in STAGES:
        for chunks, microbatches in sizes(name, stages):
            for row in SCHEDULES[name](stages, chunks, microbatches):
                for kind in "FBIW":
                    for chunk in range(chunks):
                        order = [a.microbatch for a in row if (a.kind, a.chunk) == (kind, chunk)]
                        assert order == sorted(order)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", [*SCHEDULES, "forward_only"])
@pytest.mark.parametrize("stages", STAGES)
def test_fifo_channels_deliver_in_the_order_of_use(name: str, stages: int) -> None:
    """Run every schedule with nothing but FIFOs between stages: what is needed next is always the head of its queue. In
    a V the queues carry outputs of one chunk and gradients of the other, of which one may wait for its use."""
    build = forward_only if name == "forward_only" else SCHEDULES[name]
    for chunks, microbatches in sizes(name, stages):
        schedule, placement = build(stages, chunks, microbatches), placement_of(name)
        last = chunks * stages - 1
        queues = {(d, s): deque(order) for s in range(stages) for d, order in arrivals(schedule, s, placement).items()}
        for stage, row in enumerate(schedule):
            for action in row if stages > 1 else ():
                virtual = virtual_stage(stage, action.chunk, stages, placement)
                there: tuple[Direction, Direction] = ("forward", "backward")
                if placement == "v" and action.chunk == 1:
                    there = ("backward", "forward")
                # By hand: chunk 0 goes to the last stage, which hands over to itself, and chunk 1 comes back.
                if placement == "v" and stage == stages - 1 and (action.kind, action.chunk) in (("F", 1), ("I", 0)):
                    continue
                if action.kind == "W" or virtual == (0 if action.kind == "F" else last):
                    continue
                queue = queues[there[action.kind != "F"], stage]
                assert placement == "v" or queue[0] == (action.chunk, action.microbatch)
                queue.remove(Message(action.chunk, action.microbatch))
        assert not any(queues.values())


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_action_starts_before_what_it_needs(name: str, stages: int) -> None:
    for chunks, microbatches in [(1, 1), (1, 5), (2, 3), (3, 7)]:
        if not takes(name, chunks):
            continue
        placement = placement_of(name)
        cost = Cost(forward=1.0, inputs=1.75, weights=1.25, send=0.25)
        timeline = simulate(SCHEDULES[name](stages, chunks, microbatches), cost, placement)
        ends = {
            (a.kind, virtual_stage(stage, a.chunk, stages, placement), a.microbatch): end
            for stage, row in enumerate(timeline.spans)
            for a, _, end in row
        }
        hop = 0.25 if stages > 1 else 0.0
        turn = stages if placement == "v" else -1  # this one is on the stage of the one before
        back = "I" if name in SPLIT_BACKWARD else "B"
        for stage, row in enumerate(timeline.spans):
            clock = 0.0
            for a, start, end in row:
                v, m = virtual_stage(stage, a.chunk, stages, placement), a.microbatch
                assert start >= clock
                if a.kind == "F" and v > 0:
                    assert start >= ends["F", v - 1, m] + hop * (v != turn)
                if a.kind == back:
                    assert start >= ends["F", v, m]
                    if v < chunks * stages - 1:
                        assert start >= ends[back, v + 1, m] + hop * (v + 1 != turn)
                if a.kind == "W":
                    assert start >= ends["I", v, m]
                assert end - start == {"F": 1.0, "B": 3.0, "I": 1.75, "W": 1.25}[a.kind]
                clock = end
        assert timeline.total == max(ends.values())


def test_costs_are_those_of_each_stage_and_chunk() -> None:
    """By hand: 1F1B of two microbatches on two stages, of which the second is slower, and its bytes of both kinds."""
    costs = [[Cost(1, 1, 1, send=0.5, kept=4, waiting=10)], [Cost(2, 3, 1, send=1, kept=2, waiting=1)]]
    whole = simulate(one_f_one_b(2, 1, 2), costs)
    # F0 ends at 1, comes at 1.5; the second stage: F0 to 3.5, B0 to 7.5, F1 to 9.5, B1 to 13.5, comes at 14.5
    assert (whole.total, whole.peaks) == (16.5, (Bytes(8, 0), Bytes(2, 0)))
    split = simulate(zb_h1(2, 1, 2), costs)
    # F0 to 3.5, I0 to 6.5, F1 to 8.5, I1 to 11.5: comes at 12.5; W0 and W1 until 13.5
    assert (split.total, split.peaks) == (14.5, (Bytes(4, 10), Bytes(2, 1)))


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16)])
def test_with_full_recomputation_half_of_the_bubble_is_left(stages: int, microbatches: int) -> None:
    """Input gradients then take two forwards; idle are as many: the forward and these, without weight gradients."""
    again = Cost(1, 2, 1)
    for chunks in (1, 2):
        bubble = simulate(zb_interleaved(stages, chunks, microbatches), again).bubble
        assert bubble == pytest.approx(2 * (stages - 1) / (4 * chunks * microbatches))
        assert simulate(interleaved(stages, chunks, microbatches), again).bubble == pytest.approx(2 * bubble)


def test_forward_only_keeps_nothing_and_waits_only_for_the_first_data() -> None:
    for stages in STAGES:
        for chunks in CHUNKS:
            for microbatches in MICROBATCHES:
                timeline = simulate(forward_only(stages, chunks, microbatches))
                assert timeline.peaks == (Bytes(0, 0),) * stages
                if microbatches >= stages:
                    assert timeline.total == chunks * microbatches + stages - 1


# -- by hand


def test_one_f_one_b_by_hand() -> None:
    assert one_f_one_b(2, 1, 3) == (parse("F0 F1 B0 F2 B1 B2"), parse("F0 B0 F1 B1 F2 B2"))
    assert one_f_one_b(3, 1, 2) == (parse("F0 F1 B0 B1"), parse("F0 F1 B0 B1"), parse("F0 B0 F1 B1"))
    assert one_f_one_b(1, 1, 2) == (parse("F0 B0 F1 B1"),)


def test_zb_h1_by_hand() -> None:
    assert zb_h1(3, 1, 3) == (
        parse("F0 F1 F2 I0 W0 I1 W1 I2 W2"),
        parse("F0 F1 I0 F2 I1 W0 I2 W1 W2"),
        parse("F0 I0 F1 I1 F2 I2 W0 W1 W2"),
    )
    assert zb_h1(1, 1, 2) == (parse("F0 I0 W0 F1 I1 W1"),)
    assert zb_interleaved(2, 2, 2) == (
        parse("F0a F1a F0b F1b I0b W0b I1b W1b I0a W0a I1a W1a"),
        parse("F0a F1a F0b I0b F1b I1b W0b I0a W1b I1a W0a W1a"),
    )


def test_overlapped_by_hand() -> None:
    assert list(map(repr, overlapped(2, 1, 4)[1])) == [
        "F(0,0)",
        "F(0,1)+",
        "B(0,0)",
        "F(0,2)+",
        "B(0,1)",
        "F(0,3)+",
        "B(0,2)",
        "B(0,3)",
    ]
    rows = parse("F0 F1 F2 F3 B0 B1 B2 B3"), parse("F0 F1 B0 F2 B1 F3 B2 B3")
    assert overlapped(2, 1, 4) == rows
    assert overlapped(2, 2, 2)[0] == parse("F0a F1a F0b F1b B0b B1b B0a B1a")
    few = overlapped(3, 1, 2)
    assert not any(action.beside for row in few[:2] for action in row), "only what is ahead of a backward is beside it"


def test_two_that_run_beside_each_other_are_one_step() -> None:
    """Each hides what it computes of what the other waits for; both begin when both can, and send at their end."""
    hides = Cost(1, 1.5, 0.5, exchange=0.25, exchange_back=1.5)
    alone = simulate(overlapped(1, 1, 3), hides)
    # F0; 3 less 0.25, which B hides, and 0.75, which are all that F computes; twice; B2
    assert alone.total == 1 + 2 * 2 + 2
    assert alone.spans[0][1].end - alone.spans[0][1].start == pytest.approx(2 / 3)
    first, last = simulate(overlapped(2, 1, 4), Cost(send=0.5)).spans
    # the last stage has F0 of 1.5 to 2.5, and two pairs; B0 comes half a unit after the first of them
    assert [each.end for each in last[:3]] == [2.5, 3.5, 5.5]
    assert (first[3].action, first[3].start) == (F(0, 3), 6.0) and first[3].action.beside


def test_zb_v_by_hand() -> None:
    assert zb_v(2, 2, 3) == (
        parse("F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a"),
        parse("F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a"),
    )


def test_dualpipe_v_by_hand() -> None:
    """Pairs are of both chunks and of different microbatches; at the end the weight gradients of a half wait."""
    first = "F0a F1a F2a F0b I0b W0b F1b F3a I1b W1b F2b I0a W0a F4a I2b W2b F3b I1a W1a I3b W3b F4b I2a W2a I4b W4b"
    last = "F0a F0b F1a F1b F2a I0b W0b F2b I0a W0a F3a I1b W1b F3b I1a W1a F4a I2b W2b F4b I2a W2a I3b W3b I3a W3a"
    assert dualpipe_v(2, 2, 5) == (parse(f"{first} I3a W3a I4a W4a"), parse(f"{last} I4b I4a W4b W4a"))
    for stages, microbatches in ((1, 4), (2, 5), (4, 3), (4, 9)):
        for stage, row in enumerate(dualpipe_v(stages, 2, microbatches)):
            pairs = [step for step in steps_of(row) if len(step) > 1]
            for one, other in pairs:
                assert (one.kind, other.kind, one.chunk + other.chunk) == ("F", "I", 1)
                assert one.microbatch > other.microbatch
            if microbatches >= 2 * stages:  # by the steps of the published schedule
                begun = 2 * (microbatches - 2 * stages + stage + 1) - (stage == stages - 1)
                assert len(pairs) == begun + stages - 1 - stage


def test_gpipe_by_hand() -> None:
    assert gpipe(2, 1, 2) == (parse("F0 F1 B0 B1"),) * 2
    assert gpipe(2, 2, 2) == (parse("F0a F1a F0b F1b B0b B1b B0a B1a"),) * 2


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 3, 8), (4, 2, 8), (4, 4, 12), (8, 2, 24)])
def test_interleaved_is_that_of_the_paper_where_stages_divide_microbatches(
    stages: int, chunks: int, microbatches: int
) -> None:
    """The k-th forward and backward of the paper's Figure 4, by counting rather than by groups."""
    total, turn = chunks * microbatches, stages * chunks
    for stage, row in enumerate(interleaved(stages, chunks, microbatches)):
        expected = []
        warmup = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
        for k in range(total + warmup):
            if k < total:
                expected.append(F(k % turn // stages, k // turn * stages + k % stages))
            if (j := k - warmup) >= 0:
                expected.append(B(chunks - 1 - j % turn // stages, j // turn * stages + j % stages))
        assert row == tuple(expected)


def test_groups_by_hand() -> None:
    """Of 10 microbatches in groups of at most 6 there are two of 5; no group has fewer than there are stages."""
    row = interleaved(2, 2, 10, 6)[1]
    assert [a.microbatch for a in row if a.kind == "F"] == [*range(5), *range(5), *range(5, 10), *range(5, 10)]
    assert row[:8] == parse("F0a F1a F2a F3a F4a F0b B0b F1b")
    assert interleaved(4, 2, 9, 5) == interleaved(4, 2, 9, 8) == interleaved(4, 2, 9)  # three of 5 would have fewer
    assert interleaved(4, 2, 9, 9)[0][:16] == interleaved(4, 2, 9, 12)[0][:16] == gpipe(4, 2, 9)[0][:16]
    with pytest.raises(ValueError, match="a group of 3 microbatches comes round before 4 stages have had it"):
        interleaved(4, 2, 9, 3)


def test_interleaved_with_one_chunk_is_one_f_one_b() -> None:
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            warmups = [min(stages - 1 - stage, microbatches) for stage in range(stages)]
            for row, warmup in zip(interleaved(stages, 1, microbatches), warmups, strict=True):
                steady = microbatches - warmup
                assert [a.kind for a in row] == ["F"] * warmup + ["F", "B"] * steady + ["B"] * warmup
            assert interleaved(stages, 1, microbatches) == one_f_one_b(stages, 1, microbatches)


def test_messages_by_hand() -> None:
    """Two stages, two chunks: the output of chunk 0 comes back to stage 0 as the input of its chunk 1."""
    schedule = interleaved(2, 2, 2)
    first = (Message(0, 0), Message(0, 1))
    second = (Message(1, 0), Message(1, 1))
    from_0 = {"forward": first + second, "backward": first}
    from_1 = {"forward": second, "backward": second + first}
    assert messages(schedule) == (from_0, from_1)
    assert arrivals(schedule, 0) == from_1
    assert arrivals(schedule, 1) == from_0


def test_messages_go_round_the_ring_and_a_single_stage_sends_none() -> None:
    one = (Message(0, 0),)
    assert [arrivals(one_f_one_b(3, 1, 1), stage) for stage in range(3)] == [
        {"forward": (), "backward": one},
        {"forward": one, "backward": one},
        {"forward": one, "backward": ()},
    ]
    two, first, last = interleaved(3, 2, 1), Message(0, 0), Message(1, 0)
    assert arrivals(two, 0) == {"forward": (last,), "backward": (last, first)}
    # Backward: of chunk 1 on stage 0, for chunk 0 here.
    assert arrivals(two, 2) == {"forward": (first, last), "backward": (first,)}
    assert messages(interleaved(1, 3, 2)) == ({"forward": (), "backward": ()},)


def test_draw() -> None:
    assert draw(one_f_one_b(2, 1, 2)).splitlines() == [
        "stage 0 | F0 F1 .  .  B0 -- .  B1 --",
        "stage 1 | .  F0 B0 -- F1 B1 -- .  .",
    ]
    assert draw(zb_h1(2, 1, 2)).splitlines() == ["stage 0 | F0 F1 .  I0 W0 I1 W1", "stage 1 | .  F0 I0 F1 I1 W0 W1"]
    assert draw(interleaved(1, 2, 1)) == "stage 0 | F0a F0b B0b --- B0a ---"


# -- broken schedules


def test_a_deadlock_names_what_every_stage_waits_for() -> None:
    early: Schedule = (parse("F0 B0 F1 B1"), parse("F0 F1 B0 B1"))
    with pytest.raises(Deadlock) as error:
        simulate(early)
    assert "stage 0 cannot run B(0,0) before stage 1 has run B(0,0)" in str(error.value)
    assert "stage 1 cannot run F(0,1) before stage 0 has run F(0,1)" in str(error.value)


def test_groups_smaller_than_the_pipeline_deadlock() -> None:
    """Why ``interleaved`` evens its groups out: the paper's order with a last group of one never ends."""
    stages, chunks, groups = 4, 4, [range(4), range(4, 5)]
    forwards = [F(c, m) for group in groups for c in range(chunks) for m in group]
    backwards = [B(c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    rows = []
    for stage in range(stages):
        warmup = 2 * (stages - 1 - stage) + (chunks - 1) * stages
        row = forwards[:warmup]
        for pair in zip(forwards[warmup:], backwards, strict=False):
            row += pair
        rows.append(tuple(row + backwards[len(forwards) - warmup :]))
    with pytest.raises(Deadlock):
        simulate(tuple(rows))


def test_missing_repeated_and_foreign_actions_are_named() -> None:
    good = one_f_one_b(2, 1, 3)
    with pytest.raises(ScheduleError, match=r"stage 1 lacks \['B\(0,2\)'\]"):
        simulate((good[0], good[1][:-1]))
    with pytest.raises(ScheduleError, match=r"stage 0 runs \['F\(0,0\)'\] more than once"):
        simulate((good[0] + (F(0, 0),), good[1]))
    with pytest.raises(ScheduleError, match=r"stage 0 must not run \['F\(0,-1\)'\]"):
        simulate((good[0] + (F(0, -1),), good[1]))
    split = zb_h1(2, 1, 2)
    with pytest.raises(ScheduleError, match=r"stage 1 lacks \['W\(0,1\)'\]"):
        simulate((split[0], split[1][:-1]))
    with pytest.raises(ScheduleError, match=r"stage 0 must not run \['B\(0,1\)'\]"):
        simulate(((*split[0], B(0, 1)), split[1]))
    with pytest.raises(Deadlock, match=r"stage 0 cannot run W\(0,0\) before stage 0 has run I\(0,0\)"):
        simulate(((F(0, 0), W(0, 0), I(0, 0)),))
    with pytest.raises(ScheduleError, match="empty"):
        simulate(())


@pytest.mark.parametrize("name", [*SCHEDULES, "forward_only"])
def test_sizes_must_be_positive(name: str) -> None:
    build = forward_only if name == "forward_only" else SCHEDULES[name]
    for wrong, arguments in [("stages=0", (0, 1, 1)), ("microbatches=-2", (1, 1, -2))]:
        with pytest.raises(ValueError, match=wrong):
            build(*arguments)


def test_errors_name_the_way_out() -> None:
    for build, other in ((one_f_one_b, "interleaved"), (zb_h1, "zb-interleaved")):
        with pytest.raises(ValueError, match=f"chunks=3: choose {other}, or chunks=1"):
            build(2, 3, 4)
    with pytest.raises(ValueError, match=r"zb-v runs two chunks .* not chunks=1: choose chunks=2"):
        zb_v(2, 1, 4)
    with pytest.raises(ValueError, match=r"dualpipe-v runs two chunks .* not chunks=3: choose chunks=2"):
        dualpipe_v(2, 3, 4)
