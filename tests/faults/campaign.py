"""Faults on live runs, drawn by a seed: `megacore train` of a tiny model, which is killed, stopped and broken.

After each run its metrics and its checkpoints are those of a run of the same layout that nothing befell, bit for bit;
its incidents name what was done to it; and nothing of it is left, no process and no folder. ``python campaign.py`` in
this folder is the campaign at full size; what it prints stands in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, (Path(__file__).parents[2], Path(__file__).parents[1]))

from engine import GPT2, LLAMA, RECIPE
from kinds import KINDS
from live_run import TIMEOUT_MIN, Layout, LiveRun, Strike, metrics_of, tensors_of

from megacore.recovery import incidents
from megacore.store.strict_json import StoreError

STEPS = 50
COMMON = (
    f"train.steps={STEPS}",
    "batch.micro_size=2",
    "log.every=1",
    "evaluate.every=7",
    "checkpoint.every=9",
    "checkpoint.at_end=true",
    "optimizer.non_finite=repeat",
    "recovery.max_restarts=50",
)
DROPOUT = GPT2 | {"n_layer": 4, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
EXPERTS = LLAMA | {"family": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 8}
PACKED = RECIPE["data"] | {"within_documents": True}
TOLD_WITHIN_S = 60 * TIMEOUT_MIN + 10
"""What nothing else tells, a collective that has waited for so long does."""
MIB = 1 << 20
MEMORY = Path("/dev/shm")
WHOLE = "whole"
"""The folder of the undisturbed runs."""

LAYOUTS: Mapping[str, Layout] = {
    "dp2": Layout(2, ("mesh.dp=2",)),
    "tp2": Layout(2, ("mesh.tp=2",)),
    "pp2": Layout(2, ("mesh.pp=2",)),
    "pp2 x dp2": Layout(4, ("mesh.pp=2", "mesh.dp=2")),
    "tp2 x dp2": Layout(4, ("mesh.tp=2", "mesh.dp=2")),
    "dp3": Layout(3, ("mesh.dp=3", "batch.global_size=12")),
    "dp4, packed documents": Layout(4, ("mesh.dp=4",), {"data": PACKED}),
    "pp2 x dp2 interleaved": Layout(
        4, ("mesh.pp=2", "mesh.dp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved")
    ),
    "ep2 x dp2": Layout(4, ("mesh.ep=2", "mesh.dp=2", "experts.batch_balance=0.01"), {"model": EXPERTS}),
    "zero optimizer": Layout(2, ("mesh.dp=2", "zero.shard=optimizer")),
    "zero gradients": Layout(2, ("mesh.dp=2", "zero.shard=gradients")),
    "zero parameters": Layout(2, ("mesh.dp=2", "zero.shard=parameters")),
    "dp2, dropout": Layout(2, ("mesh.dp=2",), {"model": DROPOUT}),
    "bf16": Layout(2, ("mesh.dp=2", "train.precision=bf16")),
    "background": Layout(2, ("mesh.dp=2", "checkpoint.background=true", "checkpoint.every=2"), like="dp2"),
    "protected tp2": Layout(2, ("mesh.tp=2", "recovery.overhead=100"), like="tp2"),
    "protected pp2": Layout(2, ("mesh.pp=2", "recovery.overhead=100"), {"model": DROPOUT}),
    "protected pp2 x dp2 zero": Layout(4, ("mesh.pp=2", "mesh.dp=2", "zero.shard=optimizer", "recovery.overhead=100")),
    "compared dp2": Layout(2, ("mesh.dp=2", "recovery.compare_every=3"), like="dp2"),
    "compared dp3": Layout(3, ("mesh.dp=3", "batch.global_size=12", "recovery.compare_every=3"), like="dp3"),
    "disk": Layout(2, ("mesh.dp=2", "checkpoint.every=3"), on=8 * MIB, like="dp2"),
    "slow": Layout(2, ("mesh.dp=2", "train.steps=400", "checkpoint.every=100")),
    "poisoned": Layout(2, ("mesh.dp=2",)),
}
"""{name: layout}. The first word of some says which kinds of faults are theirs."""


@dataclass(frozen=True)
class Fault:
    """A fault that strikes a rank once it is at a step."""

    kind: str
    rank: int
    step: int


Record = Mapping[str, Any]


@dataclass
class Played:
    """A run under faults, and what was wrong with it."""

    layout: str
    run: LiveRun
    wrong: list[str]
    seconds: float
    told: list[bool] = field(default_factory=list)
    """Whether each strike was told by the right name."""

    @property
    def said(self) -> str:
        strikes = [f"{each.kind}, rank {each.rank}" for each in self.run.strikes]
        return "\n".join([*self.wrong, "", *strikes, "", *self.run.said[-120:]])

    @property
    def record(self) -> Record:
        """What the table is made of, for JSON."""
        strikes = [
            (each.kind, self.run.seconds(each), told) for each, told in zip(self.run.strikes, self.told, strict=True)
        ]
        return {"layout": self.layout, "strikes": strikes, "wrong": self.wrong, "seconds": self.seconds}


def reference(name: str, cache: Path, *more: str) -> Path:
    """Return the folder of a run of a layout that nothing befalls."""
    name = LAYOUTS[name].like or name
    digest = zlib.crc32(repr((COMMON, LAYOUTS[name], more)).encode())
    folder = cache / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{digest:08x}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        layout = LAYOUTS[name]
        run = LiveRun(folder, Layout(layout.world, (*layout.overrides, *more), layout.recipe), COMMON, RECIPE)
        if run.end(120) != 0:
            raise AssertionError("\n".join(run.said))
        run.close()
        (folder / "done").touch()
    return folder / "out"


def play(
    name: str, faults: Sequence[Fault], folder: Path, cache: Path, seed: int = 0, limit_s: float = 100.0
) -> Played:
    """Run a layout under faults."""
    whole = None if name == "poisoned" else reference(name, cache)
    random_, began = random.Random(seed), time.monotonic()
    run, beyond = LiveRun(folder, LAYOUTS[name], COMMON, RECIPE), 0
    for fault in faults:
        if run.reaches(max(fault.step, beyond), 100):
            beyond = run.step + 1  # a run that goes back and ends at one step again and again is right to give up
            struck, run.incidents = len(run.strikes), max((number for number, *_ in told_of(run.out)), default=0)
            KINDS[fault.kind].strike(run, fault.rank % run.layout.world, random_)
            if len(run.strikes) == struck:
                run.tell(f"---- no {fault.kind}: rank {fault.rank} was at no place for it")
            elif KINDS[fault.kind].named:  # what is not told yet, the end of the launcher would leave without a name
                run.wait(lambda: naming(run, run.strikes[-1], told_of(run.out)) is not None, TOLD_WITHIN_S, 0.05)
    status = run.end(limit_s)
    run.close()
    played = Played(name, run, [], time.monotonic() - began)
    if status != 0:
        played.wrong.append(f"no end within {limit_s:g} s" if status is None else f"status {status}")
    with contextlib.suppress(OSError, ValueError):
        if whole is None:
            whole = reference(name, cache, f"recovery.skip_samples={left_out(run.out)}")
        played.wrong += differences(run, whole)
    played.wrong += misnamed(played)
    played.wrong += leftovers(run)
    return played


def told_of(out: Path) -> list[tuple[int, str, int | None]]:
    """Return (number, kind, rank) of the incidents of a run; none where they cannot be read."""
    with contextlib.suppress(StoreError):
        return [(each.number, each.event.kind, each.event.rank) for each in incidents.read(out)]
    return []


def naming(
    run: LiveRun, strike: Strike, told: Sequence[tuple[int, str, int | None]]
) -> tuple[int, str, int | None] | None:
    """Return the first incident that names a fault; None where none does."""
    named = KINDS[strike.kind].named
    whose = (strike.rank, None) if strike.kind != "leave out" else (None, *range(run.layout.world))  # who waited
    return next((each for each in told if each[0] > strike.after and each[1] in named and each[2] in whose), None)


def left_out(out: Path) -> str:
    """Return the samples that a run has left out, as recipes have them."""
    newest = sorted((out / "checkpoints").glob("step-*/trainer.json"))[-1]
    return json.dumps(json.loads(newest.read_text())["skipped_samples"]).replace(" ", "")


def differences(run: LiveRun, whole: Path) -> list[str]:
    """Return what is wrong with what a run has left."""
    found = list[str]()
    ours, theirs = metrics_of(run.out), metrics_of(whole)
    if ours != theirs:
        steps = [step for step in sorted(theirs | ours) if ours.get(step) != theirs.get(step)]
        found.append(f"metrics differ at {steps}: {ours.get(steps[0])}, {theirs.get(steps[0])}")
    ours_of, theirs_of = tensors_of(run.out), tensors_of(whole)
    last = max(theirs_of).split("/")[0]
    for name in sorted(ours_of | theirs_of):
        both = name in ours_of and name in theirs_of
        if (both or name.startswith(last)) and ours_of.get(name) != theirs_of.get(name):
            found.append(f"{name} differs" if name in ours_of else f"{name} is missing")
    return found


def leftovers(run: LiveRun) -> list[str]:
    deadline = time.monotonic() + 3
    while (left := run.left_over()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    orphans = run.orphans + left
    found = [f"orphans {orphans}"] if orphans else []
    for path in [*run.temporary.glob("megacore-*"), *run.out.rglob(".*.partial")]:
        found.append(f"left over: {path.relative_to(run.folder)}")
    return found


def misnamed(played: Played) -> list[str]:
    """Return the faults that no incident names, and nobody has told."""
    run, found = played.run, list[str]()
    everything = told_of(run.out)
    told = list(everything)
    for strike in run.strikes:
        kind, hit = KINDS[strike.kind], naming(run, strike, told)
        right = (not kind.named or hit is not None) and any(kind.says in line for line in run.said)
        played.told.append(right)
        if hit is not None:
            told.remove(hit)
        if not right:
            found.append(f"{strike.kind} of rank {strike.rank} is not told: {everything}")
    return found


def kinds_of(layout: str) -> list[str]:
    """Return the kinds that may befall a layout, as often as they are to be drawn."""
    own = [name for name, kind in KINDS.items() if "" not in kind.layouts and layout.startswith(kind.layouts)]
    if layout.split(maxsplit=1)[0] in ("slow", "poisoned"):
        return own
    common = [name for name, kind in KINDS.items() if "" in kind.layouts for _ in range(kind.weight)]
    return common + own * max(1, len(common) // (2 * max(1, len(own))))


def drawn(layout: str, seed: int, number: int, kinds: Sequence[str] | None = None) -> list[Fault]:
    """Return faults that are drawn by a seed, apart by two steps at least."""
    random_ = random.Random(f"{layout} {seed}")
    steps = sorted(
        random_.sample(range(1, STEPS // 2 - 2), min(number, {"slow": 1, "poisoned": 3}.get(layout, number)))
    )
    ranks = range(LAYOUTS[layout].world)
    possible = [kind for kind in kinds_of(layout) if not kinds or kind in kinds]
    found, flipped = list[Fault](), False
    for step in steps:
        kind = random_.choice(possible)
        if "corrupted" in KINDS[kind].named:  # a run that finds it twice ends
            kind, flipped = "kill" if flipped else kind, True
        found.append(Fault(kind, random_.choice(ranks), 2 * step))
    return found


# -- the table


def table(records: Sequence[Record]) -> str:
    """Return what has become of the faults of some runs, by kind and by layout."""
    strikes = [(*strike, record) for record in records for strike in record["strikes"]]
    told = [strike for strike in strikes if KINDS[strike[0]].named or KINDS[strike[0]].says]
    hits = sum(each[2] for each in told)
    lines = [
        f"{len(strikes)} faults of {len({each[0] for each in strikes})} kinds in {len(records)} runs, of which "
        f"{sum(not record['wrong'] for record in records)} ended as the undisturbed ones; "
        f"{hits} of {len(told)} told by the right name ({hits / max(1, len(told)):.1%}); "
        f"{sum(record['seconds'] for record in records):.0f} s of runs",
        "",
        "| fault | times | layouts | told as | seconds to the next step, median / worst | told | runs as undisturbed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in KINDS.items():
        found = [each for each in strikes if each[0] == name]
        if not found:
            continue
        seconds = [each[1] for each in found if each[1] is not None]
        spent = f"{statistics.median(seconds):.2f} / {max(seconds):.2f}" if seconds else ""
        runs = {record["layout"]: record for *_, record in found}
        seen = ", ".join(sorted(kind.named)) or (kind.says and f'"{kind.says}"')
        hit = f"{sum(each[2] for each in found)} of {len(found)}" if seen else ""
        whole = sum(not record["wrong"] for record in runs.values())
        lines.append(f"| {name} | {len(found)} | {len(runs)} | {seen} | {spent} | {hit} | {whole} of {len(runs)} |")
    lines += ["", "| layout | faults | seconds | what was wrong |", "|---|---|---|---|"]
    for record in records:
        wrong = "; ".join(each[:200] for each in record["wrong"])
        lines.append(f"| {record['layout']} | {len(record['strikes'])} | {record['seconds']:.0f} | {wrong} |")
    return "\n".join(lines)


def campaign(layout: str, seed: int, faults: int, kinds: Sequence[str] | None, folder: Path) -> tuple[Record, str]:
    """Run a layout under faults that are drawn -> what the table is made of, and what was said."""
    at = folder / f"{re.sub(r'[^a-z0-9]+', '-', layout)}-{seed}-{time.time_ns() % 10**6}"
    played = play(layout, drawn(layout, seed, faults, kinds), at, folder / WHOLE, seed)
    return played.record, played.said


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults on live runs.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10, help="on each run")
    parser.add_argument("--layouts", default=",".join(LAYOUTS).replace(", ", "; "), help="their names")
    parser.add_argument("--kinds", default="", help="names; all by default")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--keep", type=Path, help="a folder that the runs are kept in; by default one in memory")
    given = parser.parse_args()
    wanted = [each.strip().replace("; ", ", ") for each in given.layouts.split(",")]
    kinds = [each.strip() for each in given.kinds.split(",") if each.strip()] or None
    layouts = sorted((name for name in LAYOUTS if name in wanted), key=lambda name: -LAYOUTS[name].world)
    began, records = time.monotonic(), list[Record]()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as made:
        folder = given.keep or Path(made)
        with ProcessPoolExecutor(given.at_once) as pool:
            wholes = dict.fromkeys(LAYOUTS[name].like or name for name in layouts if name != "poisoned")
            list(pool.map(partial(reference, cache=folder / WHOLE), wholes))
            print(f"undisturbed runs: {time.monotonic() - began:.0f} s", flush=True)
            each = partial(campaign, seed=given.seed, faults=given.faults, kinds=kinds, folder=folder)
            for future in as_completed([pool.submit(each, layout) for layout in layouts]):
                record, said = future.result()
                records.append(record)
                wrong = record["wrong"]
                print(f"{record['layout']}: {record['seconds']:.0f} s, {wrong or 'as undisturbed'}", flush=True)
                if wrong:
                    print(said, flush=True)
    print(f"{time.monotonic() - began:.0f} s in all, {given.at_once} at once, seed {given.seed}: {table(records)}")
    return int(any(each["wrong"] for each in records))


if __name__ == "__main__":
    sys.exit(main())
