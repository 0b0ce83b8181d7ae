"""A run of the whole engine on tiny models: token files and a recipe on disk, then what each rank of a run gives."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
import yaml

from megacore import checkpoints
from megacore.control import Control
from megacore.data.indexed import IndexedWriter
from megacore.models.stages import layout_of
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import execute, native, plan
from megacore.rank import RankPlace
from megacore.recipe import ConfigError
from megacore.store.tensor_files.tensors import DTYPES
from megacore.store.weight_folders import loader
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training import build, main, metrics
from megacore.training.callbacks.checkpoints import Checkpoints
from megacore.training.callbacks.incidents import Incidents
from megacore.training.callbacks.metrics import Metrics
from megacore.training.callbacks.report import FinalReport
from megacore.training.callbacks.signals import Signals
from megacore.training.check import check
from megacore.training.resume import Setup
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer

Kind = TypeVar("Kind", bound=Callback)

VOCAB = 61
LENGTH = 8
LLAMA = {
    "family": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
GPT2 = {
    "family": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": LENGTH,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
}
RECIPE: dict[str, Any] = {
    "model": LLAMA,
    "data": {"validation_fraction": 0.2, "sequence_length": LENGTH},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 1e-2},
    "schedule": {"name": "cosine", "warmup_steps": 2},
    "train": {"steps": 5, "precision": "fp64", "device": "cpu"},
    "evaluate": {"every": 2, "batches": 1},
    "checkpoint": {"at_end": False},
    "log": {"peak_tflops": 1.0, "report": False},
}


def write_corpus(prefix: Path, documents: int = 60, vocabulary: int = VOCAB) -> str:
    """Documents in which a token often follows the one before it, so that there is something to learn."""
    rng = np.random.default_rng(7)
    with IndexedWriter(prefix, vocabulary) as writer:
        for _ in range(documents):
            jumps = rng.integers(0, vocabulary, 24) * (rng.random(24) < 0.3) + 1
            writer.write(np.cumsum(jumps) % vocabulary)
    return str(prefix)


def write_recipe(folder: Path, recipe: dict[str, Any] = RECIPE) -> str:
    """RECIPE, or another one, over a corpus in the same folder."""
    corpus = folder / "corpus"
    if not corpus.with_suffix(".bin").exists():
        write_corpus(corpus)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"data": {"train": str(corpus)} | recipe["data"]}))
    return str(path)


@dataclass(frozen=True)
class Result:
    """What a rank knows after a run.

    Args:
        last: The last step that was done.
        records: Of its metrics.jsonl; on rank 0.
        weights: At the end, of this rank.
    """

    last: int
    records: list[dict[str, float | None]]
    weights: dict[str, np.ndarray]

    def values(self, key: str) -> list[float]:
        return [value for _, value in metrics.curve(self.records, key)]


def checked(recipe: str, overrides: Sequence[str] = ()) -> tuple[Setup, int]:
    """A run as this rank has checked it, and the number of ranks."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    setup = check(recipe, overrides, world, world)
    if world > 1:
        torch.distributed.barrier()  # in a real run every rank checks before the process group starts
    return setup, world


def trainer(
    recipe: str, overrides: Sequence[str] = (), log: bool = False, callbacks: Sequence[Callback] = ()
) -> Trainer:
    """The trainer of this rank, as a run makes it; without ``log`` it writes no records, and it never reports."""
    setup, world = checked(recipe, overrides)
    mesh = Mesh.create(setup.config.mesh.shape(world))
    made = build.trainer_of(setup, mesh, Control.create(mesh), callbacks)
    left_out = (FinalReport,) if log else (FinalReport, Incidents)
    made.callbacks = [each for each in made.callbacks if not isinstance(each, left_out)]
    if not log:
        of(made, Metrics)._opened = lambda run: None  # type: ignore[method-assign]
    if mesh.rank == 0 and log:
        Path(setup.config.out).mkdir(parents=True, exist_ok=True)
    return made


def of(made: Trainer, kind: type[Kind]) -> Kind:
    """The callback of a kind."""
    return next(each for each in made.callbacks if isinstance(each, kind))


def fit(recipe: str, overrides: Sequence[str] = (), callbacks: Sequence[Callback] = ()) -> int:
    """A whole run on this rank, with its folder, its records and its report -> the last step."""
    return main.fit(checked(recipe, overrides)[0], torch.device("cpu"), RankPlace.of_environment(), callbacks).step


def weights(made: Trainer) -> dict[str, np.ndarray]:
    found = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in made.model.parameters.items()}
    for name, weight in found.items():
        made.train_step.optimizer.read_weight(name, weight)
    return {name: weight.double().numpy() for name, weight in found.items()}


def result(made: Trainer, last: int) -> Result:
    path = Path(made.config.out) / metrics.METRICS
    logs = any(isinstance(each, Incidents) for each in made.callbacks)
    return Result(last, metrics.read(path) if logs and made.mesh.rank == 0 else [], weights(made))


def train(recipe: str, overrides: Sequence[str] = (), callbacks: Sequence[Callback] = ()) -> Result:
    """A run on this rank."""
    made = trainer(recipe, overrides, log=True, callbacks=callbacks)
    with mock.patch.object(metrics, "ProgressBar"):
        return result(made, made.fit())


def stopped(recipe: str, overrides: Sequence[str], last: int) -> Result:
    """A run on this rank that is asked to end after a step."""
    made = trainer(recipe, overrides, log=True)
    signals = of(made, Signals)

    def ask(step: int) -> None:
        signals.stop = step == last

    in_steps(made, ask)
    return result(made, made.fit())


# -- what a run has left, and what is wrong with one


def path_of(out: Path | str, step: int) -> Path:
    """The checkpoint of a run after a step."""
    return checkpoints.path_of(checkpoints.folder_of(out), step)


def whole(path: Path, state: str) -> dict[str, np.ndarray]:
    """A state of a checkpoint as one process would hold it, of what is trained."""
    checkpoint = Checkpoint.open(path)
    kind = {"F64": np.float64, "F32": np.float32}
    held = {each.name for each in checkpoint.stored(state)}
    target = [each for each in native(layout_of(checkpoint.config, MeshShape()), [0]) if each.name in held]
    made, read = {}, checkpoint.read(state)
    for stored, copies in plan(checkpoint.config.schema, checkpoint.stored(state), target):
        made[stored.name] = np.zeros(stored.shape)
        for copy in copies:
            dtype, bits = read(copy.source)
            execute(copy, bits.view(kind[dtype]), made[stored.name])
    return made


def assert_near(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Each tensor of ``got`` is that of ``want``, relative to its norm."""
    for name, value in got.items():
        assert np.linalg.norm(value - want[name]) <= tolerance * np.linalg.norm(want[name]), name


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Whether all tensors of ``one`` are bitwise those of ``other``."""
    return all(np.array_equal(value, other[name]) for name, value in one.items())


def tensor_files(checkpoint: Path) -> dict[str, bytes]:
    """{path: bytes} of the tensor files of a checkpoint."""
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*.safetensors")}


def assert_same_files(one: Path, other: Path, count: int) -> None:
    """Two checkpoints have so many tensor files, which are alike to the byte."""
    mine, theirs = tensor_files(one), tensor_files(other)
    assert len(mine) == count and mine.keys() == theirs.keys()
    assert not [name for name, data in mine.items() if theirs[name] != data]


def saved_twice(recipe: str, overrides: list[str]) -> tuple[int, int]:
    """Three steps, saved as step 2 by few writers, as a small model is, and as step 3 by all, as a large one -> (bytes
    of this rank's tensors in the second, of the host memory for them)."""
    made = trainer(recipe, ["train.steps=3", "checkpoint.every=0", "evaluate.every=0", *overrides])
    made.fit()
    saver = of(made, Checkpoints)._saver
    saver.save(2, {"step": 2})
    saver.finish()
    with mock.patch("megacore.store.tensor_files.shares.SHARE_BYTES", 1):
        saver._snapshot = None
        saver.save(3, {"step": 3})
    saver.finish()
    assert saver._snapshot is not None
    written = saver._snapshot.written
    tensors = [tensor for each in written for tensor in each.file.tensors]
    wrote = sum(math.prod(each.stored.shape) * DTYPES[each.dtype].itemsize for each in tensors)
    return wrote, sum(host.nbytes for each in written for host in each.host.values())


def problems(recipe: str, *overrides: str, world: int = 1) -> tuple[str, ...]:
    """What is wrong with a run of so many ranks, before it starts."""
    with pytest.raises(ConfigError) as error:
        check(recipe, overrides, world, world)
    return error.value.problems


@contextmanager
def counting_reads() -> Iterator[list[int]]:
    """The bytes of each tensor that this rank reads of a checkpoint while the block runs."""
    plain, found = loader.assemble, list[int]()

    def counted(*given: Any) -> Any:
        _, copies, read, *_ = given
        found.append(sum(copy.source_view.numel * read(copy.source)[1].itemsize for copy in copies))
        return plain(*given)

    with mock.patch.object(loader, "assemble", counted):
        yield found


def apart(recipe: str, each: Sequence[Sequence[str]]) -> str:
    """What is said on this rank where each has overrides of its own."""
    with pytest.raises(ConfigError) as error:
        trainer(recipe, each[torch.distributed.get_rank()])
    return str(error.value)


# -- what happens to one


def in_steps(made: Trainer, act: Callable[[int], object]) -> list[int]:
    """Have something done in each step -> the steps that were begun, as they are."""
    plain, seen = made.train_step.backward, list[int]()

    def backward(*given: Any) -> Stats:
        seen.append(made.start.step + len(seen) + 1)
        act(seen[-1])
        return plain(*given)

    made.train_step.backward = backward  # type: ignore[assignment, method-assign]
    return seen


def scale_losses(made: Trainer, calls: Mapping[int, float]) -> None:
    """Multiply the losses of this rank in some calls of the pipeline, which count from 1, whatever their step."""
    plain, count = made.train_step.pipeline.train, 0

    def scaled(microbatches: Any, scale: torch.Tensor, *enter: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return plain(microbatches, scale * calls.get(count, 1.0), *enter)

    made.train_step.pipeline.train = scaled  # type: ignore[assignment, method-assign]
