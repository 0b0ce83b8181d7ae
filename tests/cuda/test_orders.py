"""Whole training steps on a simulated GPU: no race, no memory that is let go too early, and of what orders them nothing
that could be left out unnoticed."""

from __future__ import annotations

import ast
import importlib
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import steps
import yaml
from ordered_gpu import Allocate, Entry, Free, MemorySpan, OrderedGpu, RecordStream, stored
from ordered_gpu import MemoryLaunch as Launch
from orders import findings, left_out
from steps import CASES, Case
from test_trace import NAMES, in_a_process, pytestmark
from torch import Tensor

from megacore.parallel.gradients.zero import FlatParameters
from megacore.parallel.kernels.choice import has_triton
from megacore.parallel.memory.offload import HostMemory
from megacore.parallel.pipeline.run import _Run
from megacore.planning.trace.log import HOST, RecordEvent, Wait
from megacore.training.trainer import Trainer

__all__ = ["pytestmark"]

ROOT = Path(__file__).parents[2]
DRAWN = 3
PARTS = 4


def close_behind() -> AbstractContextManager[Any]:
    """So few bytes of activations may be on their way that those of a tiny model have to wait for each other."""
    return patch.object(HostMemory.__init__, "__defaults__", (16 << 10,))


def log_of(case: Case, count: int, prepare: Callable[[Trainer], None] = lambda trainer: None) -> list[Entry]:
    """What a rank asks of its GPU in some steps; offloaded states take several windows."""
    gpu = OrderedGpu()
    with close_behind():
        steps.trace(replace(case, overrides=f"{case.overrides} memory.offload_buffer=1"), count, prepare, gpu)
    gpu.let_go()
    return gpu.log


# -- races and lifetimes


def disordered(names: Sequence[str]) -> dict[str, list[str]]:
    """{case: what is not ordered in two of its steps, or what is wrong}."""
    return {name: _disordered(name) for name in names}


def _disordered(name: str) -> list[str]:
    try:
        return findings(log_of(CASES[name], 2))
    except Exception:
        return [traceback.format_exc()]


def in_order(names: Sequence[str]) -> None:
    wrong = [f"{name}: {line}" for name, lines in in_a_process(disordered, names).items() for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.in_turn(4, 1)
def test_drawn_steps_are_in_order() -> None:
    plain = [name for name, case in CASES.items() if "compile" not in case.overrides]
    in_order([*random.Random(35).sample(plain, DRAWN), "tp, async", "states in a file"])


@pytest.mark.grid
@pytest.mark.parametrize("part", range(PARTS))
def test_all_steps_are_in_order(part: int) -> None:
    in_order(NAMES[part::PARTS])


# -- waits, events and record_stream that are left out

WAITING = [name for name, case in CASES.items() if {"mesh", "host", "file"} & set(re.split(r"\W", case.overrides))]
"""Cases of which a rank waits for something."""
HARMLESS: Mapping[str, Sequence[str]] = yaml.safe_load(Path(__file__).with_name("harmless.yaml").read_text())


def alone(names: Sequence[str]) -> list[tuple[str, str, list[str], frozenset[str]]]:
    """(case, what is left out, what is found, what covers it) of all that can be left out in the second of three
    steps."""
    return [
        (name, f"{type(each.entry).__name__} {each.entry.place}", list(each.caught), each.covers)
        for name in names
        for each in left_out(log_of(CASES[name], 3), 2)
    ]


def is_caught(names: Sequence[str]) -> tuple[int, int, set[tuple[str, str]]]:
    """Leave out each that may be left out, one at a time -> how many are caught, how many are harmless, and the rows of
    the table that these need: (what, a cover of it)."""
    results = in_a_process(alone, names)
    harmless = [(name, what, covers) for name, what, found, covers in results if not found]
    unknown = {
        f"{name}: {what}: only {cover} would cover it"
        for name, what, covers in harmless
        for cover in covers or {"nobody"}
        if cover not in HARMLESS.get(what, ())
    }
    assert not unknown, "\n".join(sorted(unknown))
    needed = {(what, cover) for _, what, covers in harmless for cover in covers}
    return len(results) - len(harmless), len(harmless), needed


@pytest.mark.in_turn(6, 0)
def test_waits_that_are_left_out_are_caught() -> None:
    caught, harmless, _ = is_caught(["dp, everything on host", "tp", "1f1b, last"])
    assert caught > harmless > 0


@pytest.mark.grid
def test_all_waits_that_are_left_out_are_caught_and_the_table_has_no_row_too_many() -> None:
    parts = 4 * PARTS
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(is_caught, (WAITING[part::parts] for part in range(parts))))
    assert sum(caught for caught, _, _ in found) > sum(harmless for _, harmless, _ in found)
    stale = {(what, cover) for what, covers in HARMLESS.items() for cover in covers}.difference(
        *(needed for _, _, needed in found)
    )
    assert not stale, f"no case needs these rows of HARMLESS any more: {sorted(stale)}"


def places() -> dict[str, list[str]]:
    """{place of HARMLESS: the functions that its file has}."""
    names = {name.partition(" ")[2] for name in HARMLESS} | {name for covers in HARMLESS.values() for name in covers}
    return {name: list(functions(name.partition(":")[0])) for name in names if ":" in name}


def functions(file: str) -> Iterator[str]:
    """Yield the functions of a file by their qualified names."""

    def within(node: ast.AST, outer: str) -> Iterator[str]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                yield outer + inner.name
                between = "." if isinstance(inner, ast.ClassDef) else ".<locals>."
                yield from within(inner, outer + inner.name + between)
            else:
                yield from within(inner, outer)

    path = ROOT / file
    return within(ast.parse(path.read_text()), "") if path.exists() else iter(())


def test_rows_of_the_table_are_of_functions_that_there_are() -> None:
    """Those that no case needs any more are found on the grid."""
    gone = sorted(name for name, there in places().items() if name.partition(":")[2] not in there)
    assert not gone, f"HARMLESS has places that are gone: {gone}"


# -- that it can fail: the rules, one by one


ALL = MemorySpan(1)


def _orders(*between: Entry, second: str = "beside", writes: bool = True) -> list[str]:
    """What is found where one stream writes memory, something comes between, and a second uses it."""
    first = Launch("main", "fill", "a", writes=(ALL,))
    then = Launch(second, "use", "b", reads=(ALL,), writes=(ALL,) if writes else ())
    return findings([Allocate(1, "main"), first, *between, then])


def test_what_another_stream_uses_has_been_waited_for() -> None:
    ordered = (RecordEvent(1, "main"), Wait("beside", 1))
    assert _orders(*ordered) == _orders(*ordered, writes=False) == _orders(second="main") == []
    assert _orders() == ["use of b on beside writes what fill of a writes on main, in no order"]
    assert _orders(writes=False) == ["use of b on beside reads what fill of a writes on main, in no order"]
    assert _orders(Wait("beside", 1), RecordEvent(1, "main")), "before it is recorded, there is nothing to wait for"
    assert _orders(RecordEvent(1, "other"), Wait("beside", 1)), "of another stream"
    assert not _orders(RecordEvent(1, "main"), Wait("other", 1), RecordEvent(2, "other"), Wait("beside", 2)), (
        "through another"
    )


def test_who_only_reads_needs_no_order_but_who_writes_then_does() -> None:
    reads: list[Entry] = [Launch(stream, "look", stream, reads=(ALL,)) for stream in ("main", "beside")]
    log: list[Entry] = [Allocate(1, "main"), *reads]
    assert findings(log) == []
    assert findings([*log, Launch("main", "fill", "c", writes=(ALL,))]) == [
        "fill of c on main writes what look of beside reads on beside, in no order"
    ]


def test_who_uses_other_bytes_needs_no_order() -> None:
    log: list[Entry] = [Allocate(1, "main"), Launch("main", "fill", "a", writes=(MemorySpan(1, 0, 8),))]
    assert findings([*log, Launch("beside", "fill", "b", writes=(MemorySpan(1, 8, 16),))]) == []
    assert findings([*log, Launch("beside", "fill", "b", writes=(MemorySpan(1, 7, 16),))])
    log += [RecordEvent(1, "main"), Wait("beside", 1), Launch("beside", "fill", "b", writes=(MemorySpan(1, 0, 4),))]
    assert findings([*log, Launch("main", "look", "c", reads=(MemorySpan(1, 4, 8),))]) == []
    assert findings([*log, Launch("main", "look", "c", reads=(MemorySpan(1, 3, 8),))])
    assert findings([*log, Launch("other", "look", "c", reads=(MemorySpan(1, 4, 8),))])


def test_the_host_waits_before_it_uses_pinned_memory_and_what_it_launches_comes_after_it() -> None:
    copy = Launch("out", "copy_", "send", writes=(ALL,))
    update = Launch(HOST, "adamw", "update", reads=(ALL,), writes=(ALL,))
    back = Launch("up", "copy_", "back", reads=(ALL,))
    waits: list[Entry] = [RecordEvent(1, "out"), Wait(HOST, 1)]
    assert findings([Allocate(1, HOST), copy, *waits, update, back, Free(1)]) == []
    assert findings([Allocate(1, HOST), copy, update, back]) == [
        "adamw of update on host writes what copy_ of send writes on out, in no order"
    ]


def test_memory_of_another_stream_is_used_after_that_has_come_so_far() -> None:
    log: list[Entry] = [Launch("main", "work", "a"), Allocate(1, "main")]
    copy = Launch("in", "copy_", "fetch", writes=(ALL,))
    assert findings([*log, RecordEvent(1, "main"), Wait("in", 1), copy]) == []
    assert findings([*log, copy]) == [
        "copy_ of fetch on in uses memory that main has been given, before what used it there has ended"
    ]


def test_memory_is_let_go_after_other_streams_have_done_with_it() -> None:
    log: list[Entry] = [Allocate(1, "main"), Launch("out", "copy_", "send", reads=(ALL,)), RecordEvent(1, "out")]
    assert findings([*log, Wait("main", 1), Free(1)]) == []
    assert findings([*log, Wait(HOST, 1), Free(1)]) == []
    assert findings([*log, RecordStream(1, "out"), Free(1)]) == []
    assert findings([*log, Free(1)]) == ["memory of main is free again while copy_ of send may use it on out"]


@pytest.mark.skipif(not has_triton(), reason="no triton")
def test_where_a_kernel_stores_is_read_from_its_source() -> None:
    norm, activation = (importlib.import_module(f"megacore.parallel.kernels.fused.{x}") for x in ("norm", "activation"))
    assert {"y", "scale"} <= stored(norm.norm_forward) and not {"x", "weight"} & stored(norm.norm_forward)
    assert "gradient" in stored(activation.gated_backward) and "gate_up" not in stored(activation.gated_backward)


# -- that it can fail: the product, changed


def _lets_go_at_once(memory: HostMemory) -> None:
    memory._leaving.clear()


def _fetches_at_once(memory: HostMemory, host: Tensor, left: Any) -> tuple[Tensor, Any]:
    flat = host.new_empty(host.shape, device=memory.device)
    with memory.on.stream(memory.store):
        flat.copy_(host, non_blocking=True)
    there = memory.on.Event()
    there.record(memory.store)
    return flat, there


def _makes_room_at_once(run: _Run, position: int) -> None:
    for direction, message in run.requests[position]:
        run.inboxes[direction].make_room(message)


def _waits_for_nothing(values: FlatParameters) -> None:
    values._gathering, values.there = None, True


CHANGES: Sequence[tuple[str, str, Callable[[], AbstractContextManager[Any]], str]] = (
    ("activations on host", "", nullcontext, ""),
    ("activations on host", "lets go", lambda: patch.object(HostMemory, "settle", _lets_go_at_once), "is free again"),
    ("activations on host", "fetches", lambda: patch.object(HostMemory, "fetch", _fetches_at_once), "has been given"),
    ("1f1b, first", "", nullcontext, ""),
    ("1f1b, first", "makes room", lambda: patch.object(_Run, "_make_room", _makes_room_at_once), "has been given"),
    ("dp, parameters", "", nullcontext, ""),
    ("dp, parameters", "does not wait", lambda: patch.object(FlatParameters, "wait", _waits_for_nothing), "reads what"),
)
"""(case, what the product is changed to, the change, what is said)."""


def changed() -> list[list[str]]:
    """What is found of each change."""
    return list(_changed())


def _changed() -> Iterator[list[str]]:
    for name, _, change, _ in CHANGES:
        with change():
            yield findings(log_of(CASES[name], 1))


@pytest.mark.in_turn(3, 1)
def test_a_product_that_does_not_wait_is_caught() -> None:
    for (name, what, _, said), found in zip(CHANGES, in_a_process(changed), strict=True):
        if said:
            assert any(said in line for line in found), f"{name} {what}: {found}"
        else:
            assert not found
