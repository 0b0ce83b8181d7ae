"""What saving costs a run that goes on: in the background and at once, beside torch.save and PyTorch's checkpoints.

    python benchmarks/save.py [--rounds 5] [--folder DIR] [--json results.json]
    torchrun --nproc-per-node 2 benchmarks/save.py               # two data-parallel ranks

All save the same live state, weights in bf16 and fp32 masters and moments of AdamW, and take turns in one process.
Before each save come some steps that nothing disturbs, then the save, then steps until it is done. All files are
synced: what is done is on the disk. The first round is shown apart: it makes the buffers that later ones use again.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks import ours, results
from benchmarks.steps import LR
from benchmarks.workload import Workload, llama
from megacore import checkpoints
from megacore.config import CheckpointConfig
from megacore.control import Control
from megacore.models.decoder import Microbatch
from megacore.store.weight_folders.index import MOMENTS
from megacore.training.save import Contents, Saver
from megacore.training.states.device_store import DeviceStore
from megacore.training.step import TrainStep

UNDISTURBED = 4
"""Steps before each save."""


SHAPES: Mapping[str, Workload] = {
    "full": Workload(llama(vocab=32000, hidden=640, layers=10, heads=10, kv=10, mlp=1728), 256, 1, 1),
    "tiny": Workload(llama(vocab=512, hidden=64, layers=2, heads=1, kv=1, mlp=128), 16, 1, 1),
}
"""Of a step of one rank; each further one has a sequence of its own."""


@dataclass(frozen=True)
class Run:
    """A run whose steps and state are the same for every way of saving."""

    work: Workload
    train: TrainStep
    batch: Sequence[Microbatch]

    @classmethod
    def create(cls, shape: Workload) -> Run:
        work = replace(shape, global_batch=dist.get_world_size())
        train = ours.train_step(work, "dp", torch.bfloat16, masters=True)
        return cls(work, train, ours.microbatches(work, train.mesh))

    @property
    def rank(self) -> int:
        return self.train.mesh.rank

    def step(self) -> float:
        """Seconds of one training step."""
        started = time.perf_counter()
        self.train(self.batch, LR)
        return time.perf_counter() - started

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors that make up the state."""
        found = {f"weights/{name}": tensor.detach() for name, tensor in self.train.gradients.parameters.items()}
        home = self.train.optimizer.store
        assert isinstance(home, DeviceStore)
        for number, target in enumerate(home.targets):
            name = str(number)
            found[f"master/{name}"] = target.tensor
            found |= {f"{moment}/{name}": home.adamw.state[target.tensor][moment] for moment in MOMENTS}
        return found


# -- ways to save


class Way(Protocol):
    def save(self, folder: Path, step: int) -> None:
        """Begin to save; when it returns, the next step may start."""

    def done(self) -> bool:
        """Whether all of it is on the disk, on every rank; asked after each step."""


class Megacore:
    """This project's: in the background, or waited for."""

    def __init__(self, run: Run, background: bool) -> None:
        self.background = background
        self.control = Control.create(run.train.mesh)
        parameters, raw = run.train.gradients.parameters, run.work.config.to_hugging_face()
        self.contents = Contents(parameters, run.train.optimizer, parameters.layout, raw)
        self.saver: Saver | None = None
        self.made = Path()

    def save(self, folder: Path, step: int) -> None:
        if self.saver is None:
            self.saver = Saver(folder, self.contents, self.control, CheckpointConfig(keep=1))
        self.made = checkpoints.path_of(folder, step)
        self.saver.save(step, {"step": step})
        if not self.background:
            self.saver.finish()

    def done(self) -> bool:
        assert self.saver is not None
        busy, failed = self.control.largest(*self.saver.news())
        self.saver.advance(bool(busy), bool(failed))
        published = bool(self.control.largest(self.made.exists())[0])
        if published:  # the folder is removed next, and its last file is closed a moment later
            self.saver.finish()
        return published


class TorchSave:
    """What it pickles, on rank 0; the others wait."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def save(self, folder: Path, step: int) -> None:
        if self.run.rank == 0:
            with open(folder / f"{step}.pt", "wb") as file:
                torch.save(self.run.tensors(), file)  # noqa: TID251 - the thing to compare with
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def done(self) -> bool:
        return True


class Distributed:
    """torch.distributed.checkpoint: at once, or with its staging and a thread."""

    def __init__(self, run: Run, background: bool) -> None:
        self.run, self.background = run, background
        # Of its own: its thread's collectives must not mix with those of the steps.
        self.group = dist.new_group(backend="gloo")
        self.future: Future[Any] | None = None

    def save(self, folder: Path, step: int) -> None:
        writer = dcp.FileSystemWriter(folder / str(step), sync_files=True)
        if self.background:
            response = dcp.async_save(self.run.tensors(), storage_writer=writer, process_group=self.group)
            assert isinstance(response, Future)
            self.future = response
        else:
            dcp.save(self.run.tensors(), storage_writer=writer)

    def done(self) -> bool:
        here = self.future is None or self.future.done()
        everywhere = torch.tensor(int(here))
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere and self.future is not None:
            self.future.result()
        return bool(everywhere)


WAYS: Mapping[str, Callable[[Run], Way]] = {
    "megacore, in the background": lambda run: Megacore(run, background=True),
    "megacore, waited for": lambda run: Megacore(run, background=False),
    "torch.save": TorchSave,
    "torch.distributed.checkpoint.async_save": lambda run: Distributed(run, background=True),
    "torch.distributed.checkpoint.save": lambda run: Distributed(run, background=False),
}


# -- measuring


@dataclass(frozen=True)
class Save:
    """Seconds of one save.

    Args:
        pause: Until the next step may start.
        done: Until all of it is on the disk, seen at the end of a step.
        undisturbed: A step without a save.
        during: The steps until it was done.
    """

    pause: float
    done: float
    undisturbed: float
    during: tuple[float, ...]

    @property
    def lost(self) -> float:
        """What the run has lost to it in all."""
        return self.done - len(self.during) * self.undisturbed

    @property
    def slower(self) -> float:
        """Steps during the save, over undisturbed ones; 1 where there were none."""
        return statistics.mean(self.during) / self.undisturbed if self.during else 1.0


def measure(run: Run, ways: Mapping[str, Way], rounds: int, folder: Path) -> dict[str, list[Save]]:
    saves: dict[str, list[Save]] = {name: [] for name in ways}
    step = 0
    for turn in range(rounds):
        for name, way in ways.items():
            undisturbed = statistics.median(run.step() for _ in range(UNDISTURBED))
            step += 1
            dist.barrier()
            started = time.perf_counter()
            way.save(folder, step)
            pause, during = time.perf_counter() - started, []
            while not way.done():
                during.append(run.step())
            save = Save(pause, time.perf_counter() - started, undisturbed, tuple(during))
            saves[name].append(save)
            dist.barrier()
            if run.rank == 0:
                print(
                    f"  round {turn + 1}: {name:40s} pause {save.pause:5.2f} s, done after {save.done:5.2f} s, "
                    f"lost {save.lost:5.2f} s   (load: {os.getloadavg()[0]:.1f})",
                    flush=True,
                )
                for made in folder.iterdir():
                    (shutil.rmtree if made.is_dir() else os.unlink)(made)
                os.sync()
            dist.barrier()
    return saves


def table(saves: Mapping[str, Sequence[Save]]) -> str:
    """Markdown; medians of all rounds but the first."""
    rows = []
    for name, (first, *rest) in saves.items():
        later = rest or [first]

        def median(of: Callable[[Save], float], later: Sequence[Save] = later) -> float:
            return statistics.median(map(of, later))

        slower = f"{median(lambda s: s.slower):.2f}x" if any(s.during for s in later) else ""
        pause, done, lost = (f"{median(attrgetter(what)):.2f}" for what in ("pause", "done", "lost"))
        rows.append((name, f"{first.pause:.2f}", pause, slower, done, lost))
    head = ("", "first pause, s:", "pause, s:", "steps meanwhile:", "done after, s:", "lost in all, s:")
    return results.table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="full")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind, the first apart (5)")
    parser.add_argument("--threads", type=int, help="of each process (the cores, shared out)")
    parser.add_argument("--folder", type=Path, help="where there is room for the state (/tmp)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="save-", dir=arguments.folder) as scratch:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
        shared: list[str] = [scratch]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0], "saves")
        folder.mkdir(exist_ok=True)
        torch.set_num_threads(arguments.threads or max(1, (os.cpu_count() or 1) // dist.get_world_size()))
        run = Run.create(SHAPES[arguments.shape])
        run.step()
        size = sum(tensor.nbytes for tensor in run.tensors().values())
        saves = measure(run, {name: way(run) for name, way in WAYS.items()}, arguments.rounds, folder)
        if run.rank == 0:
            step = statistics.median(save.undisturbed for found in saves.values() for save in found)
            print(f"\n{size / 1e9:.2f} GB, {dist.get_world_size()} processes, steps of {step:.2f} s\n\n{table(saves)}")
            report = {name: [asdict(save) for save in found] for name, found in saves.items()}
            results.write({"bytes": size, "saves": report}, arguments.json)
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
