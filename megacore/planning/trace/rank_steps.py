"""The steps of one rank on fake CUDA tensors: a trainer as a rank makes it, but for data, checkpoints and values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch

from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import Batch, collate
from megacore.data.samples import Sample
from megacore.models.registry import configure
from megacore.parallel.mesh import Mesh
from megacore.planning.pipeline_order import order_of
from megacore.planning.trace.fake_cuda import DEVICE, fake_cuda
from megacore.planning.trace.simulated_gpu import SimulatedGpu
from megacore.store.io.direct import aligned_memory
from megacore.training import build
from megacore.training.callbacks import shard_checksums
from megacore.training.resume import Setup, Start
from megacore.training.trainer import Trainer


def run_steps(
    config: Config,
    world: int,
    rank: int,
    steps: Sequence[Sequence[Batch]],
    gpu: SimulatedGpu,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Have a rank run steps of these microbatches, of which it takes what its place in cp holds, on a simulated GPU.
    ``prepare``: does something to the trainer before it starts. Raises TraceFault: the shape of a tensor depends on
    numbers; also errors of torch."""
    with tempfile.TemporaryDirectory() as folder, fake_cuda(gpu.stubs(), world, rank):
        config = replace(config, out=folder)
        if config.memory.offload_optimizer == "file":
            config = replace(config, memory=replace(config.memory, offload_folder=folder))
        trainer = _trainer(config, Mesh.create(config.mesh.shape(world), DEVICE))
        prepare(trainer)
        with patch.object(shard_checksums, "_seconds_per_byte", lambda device: 1e-30):  # all are watched in each step
            trainer.call("on_start")
        for trainer.step, batches in enumerate(steps, 1):
            with gpu.step():
                # As Trainer._steps does it between two records.
                trainer.call("on_step_begin")
                trainer._commit(trainer.train_step.backward(trainer.upload(batches, trainer.step), trainer.enter))
                trainer._agree()
        trainer.call("on_error", RuntimeError())


def _trainer(config: Config, mesh: Mesh) -> Trainer:
    corpora: Any = SimpleNamespace(train=None, validation=None, identities=[], corpora=(), separate=False)
    setup = Setup(
        config, configure(config.model, config.scores), corpora, Start(), order=order_of(config, mesh.shape.world)
    )
    with (
        patch.object(build, "load_initial_state", lambda *arguments: None),
        patch.object(build, "Saver", lambda *arguments: Mock(news=lambda: (False, False))),
        # What the buffer of a file holds does not matter, but that there is memory for it does.
        patch.object(torch.Tensor, "numpy", lambda tensor: aligned_memory(tensor.nbytes)),
    ):
        return build.trainer_of(setup, mesh, Control.create(Mesh.single()))


def batches(config: Config, world: int, rank: int, count: int) -> list[Batch]:
    """Return so many microbatches of a rank, of tokens that are drawn; all of them have a label, but for the ends
    of pairs."""
    model, shape, rng = configure(config.model), config.mesh.shape(world), np.random.default_rng(0)
    rows, length = config.batch.micro_size, config.data.sequence_length
    context = config.context.over(shape.cp, model.drops_attention)
    positions = np.tile(np.arange(length), (rows, 1))
    documents = (length,) * rows if config.data.within_documents else None
    if config.preference is not None:
        # Each row is a pair, and a token that none of its documents has.
        of = np.repeat(np.arange(3, dtype=np.int32), (length - length // 2, length // 2, 1))
        texts = (rng.integers(0, model.vocab_size, (rows, length + 1)) for _ in range(count))
        pairs = (
            [Sample(text, of, np.ones_like(of, bool), length, np.zeros((1, 2))) for text in each] for each in texts
        )
        made = (collate(each, separate_documents=True, scores=config.scores) for each in pairs)
        return [batch.of_rank(context, shape.place(rank).cp) for batch in made]
    drawn = (rng.integers(0, model.vocab_size, (2, rows, length)) for _ in range(count))
    ahead = model.mtp_layers if config.mtp_factor(model.schema) else 0
    whole = (Batch(x, y, positions, documents).looking(ahead) for x, y in drawn)
    return [batch.of_rank(context, shape.place(rank).cp) for batch in whole]
