"""A run of the whole engine on tiny models: token files and a recipe on disk, then what each rank of a run gives."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import yaml
from tqdm import tqdm

from megacore.control import Control
from megacore.data.indexed import IndexedWriter
from megacore.parallel.mesh import Mesh
from megacore.rank import RankPlace
from megacore.training import build, main, metrics
from megacore.training.callbacks.incidents import Incidents
from megacore.training.callbacks.metrics import Metrics
from megacore.training.callbacks.report import FinalReport
from megacore.training.check import Setup, check
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
    "batch": {"global_size": 8, "micro_size": 1},
    "optimizer": {"lr": 1e-2},
    "schedule": {"name": "cosine", "warmup_steps": 2},
    "train": {"steps": 5, "precision": "fp64", "device": "cpu"},
    "evaluate": {"every": 2, "batches": 2},
    "checkpoint": {"at_end": False},
    "log": {"peak_tflops": 1.0},
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
        looks = of(made, Metrics)
        looks.on_start = lambda run: looks._meter.begin(run.step)  # type: ignore[method-assign]
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
    with mock.patch.object(metrics, "tqdm", partial(tqdm, file=io.StringIO())):
        return result(made, made.fit())
