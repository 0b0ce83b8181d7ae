"""Runs of four processes in which something is slow, whose blocks sleep: a busy machine is as good as an idle one.

    python tests/slowed.py [NAME ...]

runs each cause, and then what `megacore diagnose` advises, or the run without it, and prints what was found, and the
gain that was promised beside the one that came of it. Cores that others had, as on a busy machine, are no cause.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import engine
import torch
from torch import Tensor

from megacore.data.batches import Batches
from megacore.parallel import collectives
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.router import Router
from megacore.parallel.mesh import Group
from megacore.recipe import load
from megacore.tools.diagnose import TracedRun
from megacore.training.diagnosis import split
from megacore.training.save import Snapshot
from megacore.training.step import Phase
from megacore.training.trainer import Callback, Trainer

TOKEN_S = 0.0025
"""Seconds of a forward of a block for each of its tokens; a backward takes twice as long."""
STEPS = 5
"""Steps of a run of the table, of which the fastest counts."""
MIXTRAL = {key: value for key, value in engine.LLAMA.items() if key != "family"} | {
    "family": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "head_dim": 4,
}


@dataclass(frozen=True)
class Slowed:
    """A run in which something is slow.

    Args:
        overrides: What makes its recipe of the usual one, which has two stages of two replicas.
        found: What the first finding begins with; nothing: there is none.
        slow: What is slow in it that no key of a recipe says.
        advice: The first advice; nothing where a recipe can do nothing about it.
        model: The model, if it is another one.
        per_node: Ranks of a node.
        link: The bytes/s between nodes.
    """

    found: str = ""
    overrides: tuple[str, ...] = ()
    slow: str = ""
    advice: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    per_node: int = 4
    link: float = 0.0


CAUSES: Mapping[str, Slowed] = {
    "nothing": Slowed(),
    "half a core": Slowed("waiting for rank 3, whose actions take", slow="core"),
    "a slow link": Slowed("all_reduce dp between nodes of 1 ranks", slow="link", per_node=1, link=0.05e6),
    "an uneven stage": Slowed(
        "waiting for stage 1, whose actions take",
        ("model.num_hidden_layers=6", "pipeline.layers_per_stage=1,5"),
        advice="pipeline.layers_per_stage=3,3",
    ),
    "few microbatches": Slowed("bubble of 1f1b", ("batch.micro_size=4",), advice="batch.micro_size=2"),
    "an overloaded expert": Slowed(
        "waiting for the experts of rank 0 along ep",
        ("mesh.pp=1", "mesh.dp=2", "mesh.ep=2", "batch.micro_size=4"),
        "experts",
        "experts.sequence_balance=0.01",
        MIXTRAL,
    ),
    "slow data": Slowed("data due to rank 1", slow="data"),
    "tp across nodes": Slowed(
        "all_gather tp between nodes of 2 ranks",
        ("mesh.pp=1", "mesh.dp=1", "mesh.tp=4", "batch.micro_size=4"),
        "link",
        "mesh.tp=",
        per_node=2,
        link=0.1e6,
    ),
    "recomputation": Slowed("recomputation", ("memory.recompute=full",), advice="memory.recompute=none"),
    "a save that blocks": Slowed(
        "save", ("checkpoint.every=1", "checkpoint.background=false"), "save", "checkpoint.background=true"
    ),
    "a host that sleeps": Slowed("host", slow="host"),
}


class _Nap(torch.autograd.Function):
    """The identity, which takes so many seconds, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Any, seconds: float) -> Tensor:
        ctx.take, ctx.seconds = take, seconds
        take(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.take(2 * ctx.seconds)
        return dy.clone(), None, None


class _LateWork:
    """The work of messages that arrive at a time, at the earliest."""

    def __init__(self, work: Any, due: float) -> None:
        self.work, self.due = work, due

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


class _Slow(Callback):
    """Has the blocks of a run sleep, and what is slow be slow, in all steps but the first."""

    def __init__(self, one: Slowed, rank: int) -> None:
        self.one, self.rank, self.on = one, rank, False

    def on_start(self, run: Trainer) -> None:
        for chunk in run.model.chunks:
            for block in chunk.blocks:
                block.forward = self._napping(block.forward)

    def on_step_begin(self, run: Trainer) -> None:
        self.on = run.step > 1

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        if self.on and self.one.slow == "host" and phase in ("forward", "backward"):
            time.sleep(0.06)

    def _napping(self, forward: Any) -> Any:
        take = self._compute if (self.one.slow, self.rank) == ("core", 3) else time.sleep

        def slow(x: Tensor, *others: object) -> Tensor:
            if not self.on or "experts" in self.one.slow:
                return forward(x, *others)
            return forward(_Nap.apply(x, take, TOKEN_S * len(x)), *others)

        return slow

    def _compute(self, seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    @contextmanager
    def patches(self) -> Iterator[None]:
        steps, hidden, logits, write = Batches.steps, Experts.hidden, Router.logits, Snapshot.write
        exchange, all_reduce = collectives._exchange, torch.distributed.all_reduce

        def late(batches: Batches, first: int) -> Iterator[Any]:
            for number, batch in enumerate(steps(batches, first), 1):
                time.sleep(2.5 * (number > 1))
                yield batch

        def by_rows(experts: Experts, *given: Any) -> Tensor:
            h = hidden(experts, *given)
            return _Nap.apply(h, time.sleep, TOKEN_S * len(h)) if self.on else h

        def chosen(experts: list[int]) -> Any:
            """Tokens in turn go to these experts."""
            return lambda router, x: logits(router, x) + 99 * torch.eye(4)[experts * (len(x) // 4)]

        def slow_disk(*given: Any) -> Any:
            time.sleep(1.0 * self.on)
            return write(*given)

        def between(group: Any, size: float) -> float:
            ranks = range(4) if group is None else torch.distributed.get_process_group_ranks(group)
            crosses = len({rank // self.one.per_node for rank in ranks}) > 1
            return time.perf_counter() + self.on * crosses * size / self.one.link

        def slow_exchange(group: Group, send: Any, receive: Any) -> list[Any]:
            others = (
                x for x in range(group.size) if group.ranks[x] // self.one.per_node != self.rank // self.one.per_node
            )
            due = between(group.process_group, sum(send(x).nbytes for x in others))
            return [_LateWork(work, due) for work in exchange(group, send, receive)]

        def slow_sum(x: Tensor, *given: Any, async_op: bool = False, group: Any = None, **more: Any) -> Any:
            work = all_reduce(x, *given, group=group, async_op=async_op, **more)  # type: ignore[misc]
            return _LateWork(work, between(group, x.nbytes)) if async_op else work

        swaps: Mapping[str, list[tuple[Any, str, Any]]] = {
            "data": [(Batches, "steps", late)] if self.rank == 1 else [],
            "experts": [(Experts, "hidden", by_rows), (Router, "logits", chosen([0, 1, 0, 2]))],
            "even experts": [(Experts, "hidden", by_rows), (Router, "logits", chosen([0, 1, 2, 3]))],
            "save": [(Snapshot, "write", slow_disk)],
            "link": [(collectives, "_exchange", slow_exchange), (torch.distributed, "all_reduce", slow_sum)],
        }
        cores = os.sched_getaffinity(0)
        place = {"RANK": f"{self.rank}", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": f"{self.one.per_node}"}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, place))
            for owner, name, slow in swaps.get(self.one.slow, []):
                stack.enter_context(mock.patch.object(owner, name, slow))
            if self.one.slow == "core" and self.rank == 3:
                stack.callback(os.sched_setaffinity, 0, cores)
                os.sched_setaffinity(0, {min(cores)})
                busy = f"import os; os.sched_setaffinity(0, [{min(cores)}])\nwhile True: pass"
                stack.enter_context(_ended(subprocess.Popen([sys.executable, "-c", busy])))
            yield


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _rank(recipe: str, overrides: list[str], one: Slowed) -> None:
    slow = _Slow(one, torch.distributed.get_rank())
    with slow.patches(), mock.patch.object(engine.metrics, "ProgressBar"):
        trainer = engine.trainer(recipe, overrides, log=True, callbacks=[slow])
        recording, *others = trainer.callbacks
        trainer.callbacks = [recording, slow, *(each for each in others if each is not slow)]
        trainer.fit()


def run(pool: Any, folder: Path, one: Slowed, steps: int = 1) -> Path:
    """Run it for so many steps behind the first -> the folder of the run."""
    folder.mkdir(exist_ok=True)
    out = folder / "run"
    recipe = engine.write_recipe(folder, engine.RECIPE | ({"model": dict(one.model)} if one.model else {}))
    overrides = [f"out={out}", "mesh.pp=2", "mesh.dp=2", "evaluate.every=0", f"train.steps={1 + steps}"]
    overrides += [
        "log.trace=1",
        "batch.global_size=16",
        "batch.micro_size=1",
        "schedule.warmup_steps=1",
        *one.overrides,
    ]
    pool.run(4, _rank, recipe, overrides, one)
    (out / "config.yaml").write_text(load(recipe, overrides).to_yaml())
    return out


def remedied(one: Slowed, advice: str) -> Slowed:
    """The run with what is advised, or without what is slow where nothing is."""
    if one.slow == "experts":  # which takes many steps
        return replace(one, slow="even experts")
    return replace(one, overrides=(*one.overrides, *advice.split())) if advice else replace(one, slow="")


def _fastest(out: Path) -> TracedRun:
    """The run with the step alone that the rest of the machine has held up least."""
    found = TracedRun.of(out)
    each = {split([step], found.config, found.loads).seconds: step for step in found.steps}
    step = each[min(each)]
    return replace(found, steps=(step,), found=split([step], found.config, found.loads))


def main() -> None:
    from pool import Pool

    from megacore.tools import diagnose

    pool, chosen = Pool(), sys.argv[1:] or [*CAUSES]
    print(f"{'cause':<22}{'right':<7}{'ms':>8}{'promised':>10}{'came':>7}{'ratio':>7}  found; advice")
    for name in chosen:
        one = CAUSES[name]
        with TemporaryDirectory() as first, TemporaryDirectory() as second:
            before = _fastest(run(pool, Path(first), one, STEPS))
            said = "\n".join(diagnose._one(before))
            findings = re.findall(r"What stands out: (.*)", said)
            found = next((each for each in findings if not each.startswith("queued")), "none")
            told = re.findall(r"Advice: (.*)  \(a step would take (.*)% less\)", said)
            right = found.startswith(one.found or "none")
            if not one.found or "%" not in found:
                print(f"{name:<22}{right!s:<7}{1e3 * before.found.seconds:>8,.0f}{'':>24}  {found}")
                continue
            gain = re.search(r"would take (.*?)% less", found)[1]  # type: ignore[index]
            own = [each for each in told if each[0].startswith(one.advice)]
            right &= bool(own)
            advice, promised = own[0] if own and one.advice else ("", gain)
            after = _fastest(run(pool, Path(second), remedied(one, advice), STEPS))
            came = 1 - after.found.seconds / before.found.seconds
            ratio = float(promised) / 100 / came
            print(
                f"{name:<22}{right!s:<7}{1e3 * before.found.seconds:>8,.0f}{promised:>9}%{came:>7.0%}{ratio:>7.2f}"
                f"  {found}; {told}",
                flush=True,
            )
    pool.close()


if __name__ == "__main__":
    main()
