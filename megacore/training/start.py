"""The start of a run in this process: what it goes on from is found and loaded, its folder is held and put in order."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import in_vain
from megacore.models.config import ModelConfig, flops_per_token, parameters_in_words
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.run_lock import RunLock
from megacore.say import say
from megacore.store.io.objects import place
from megacore.store.io.strict_json import read_file
from megacore.store.tensor_files.publish import replace_file
from megacore.store.tensor_files.tensors import os_errors
from megacore.store.weight_folders.audit import DamageError
from megacore.training.resume import NOTED, Damaged, Setup, Start, find, remarks
from megacore.training.trainer import Callback


def agreed(setup: Setup, control: Control) -> Setup:
    """Return a run that starts where rank 0 has found that it can: it alone has looked at all files of checkpoints."""
    told = control.tell([[str(each.path), each.reason] for each in setup.start.damaged])
    damaged = tuple(Damaged(place(path), reason) for path, reason in told)

    def start() -> Start:
        same = [each.path for each in damaged] == [each.path for each in setup.start.damaged]
        return setup.start if same else find(setup.config, damaged, checked=True)

    return setup.at(control.attempt(start))


def newest(setup: Setup, given: Sequence[Callback], control: Control) -> Setup:
    """Return a run that starts from the newest state that a callback knows of, with its folder in order and what its
    saves take from there. Raises StoreError: something cannot be read or written; on all ranks."""
    start = setup.start
    for callback in given:
        start = callback.on_find(setup, start, control)
    found = setup.at(start)
    return control.attempt(lambda: _prepared(found, control.mesh) if control.mesh.rank == 0 else found)


def instead_of(setup: Setup, used: Setup, error: DamageError, control: Control) -> Setup:
    """Return a run that starts from something else than the start of ``used``, which has turned out to be damaged while
    it was loaded. Raises DamageError: there is nothing else."""
    at, config = used.start.adapters or used.start.source, setup.config
    damaged = Damaged(error.path, str(error))
    if at is None or error.path != at.path:
        raise error
    gc.collect()  # the half of a trainer that there is: modules and hooks refer to each other
    if used.start.source is not setup.start.source or used.start.adapters is not setup.start.adapters:
        # A callback's, which is told that this one is of no use.
        return setup.at(replace(setup.start, damaged=(*setup.start.damaged, damaged)))
    if config.checkpoint.resume != AUTO:
        raise error
    found = control.attempt(lambda: find(config, (damaged,), checked=control.mesh.rank > 0))
    return agreed(setup.at(found), control)


def hold(config: Config, stack: ExitStack) -> None:
    """Hold the run's folder, and that of its checkpoints where it is elsewhere; what a holder that died was writing is
    removed."""
    out = Path(config.out)
    stack.enter_context(RunLock.take(out))
    if config.checkpoint.folder is not None:
        stack.enter_context(RunLock.take(place(config.checkpoint.folder), by=out))
    with os_errors(out):
        checkpoints.clean(checkpoints.folder_of(out, config.checkpoint.folder))


def _prepared(setup: Setup, mesh: Mesh) -> Setup:
    """Put the run's folder in order, say what the run starts from -> the run with what its saves take from there."""
    config, start, out = setup.config, setup.start, Path(setup.config.out)
    own = checkpoints.folder_of(config.out, config.checkpoint.folder)
    for each in start.damaged:
        if each.path.parent == own and each.path.exists():
            say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.reason}")
        elif each.path.parent != own:
            say(f"Not used: {each.reason}")
    _note(config, out / NOTED)
    uneven = in_vain(config.batch.global_size, config.batch.micro_size, mesh.shape.data)
    said = remarks(start, config, setup.model, mesh.shape, setup.corpora.identities)
    if config.train.epochs is not None:
        steps = f"{config.train.steps:,} steps of {config.batch.sizes} samples"
        said = [f"train.epochs={config.train.epochs:g}: {steps}", *said]
    say("\n".join([*said, *setup.corpora.remarks, *uneven, *in_no_round(config), *in_8_bits(config)]))
    return setup.held()


def in_no_round(config: Config) -> Iterator[str]:
    """Yield the last steps of a run that replicas take alone and that no outer one follows."""
    steps, every = config.train.steps, config.sync.every
    if every is not None and (left := steps % every):
        yield (
            f"sync.every={every}: no round ends with the last {left} of {steps:,} steps, so the common weights, which "
            f"are evaluated and exported, stay those of step {steps - left:,}; with train.steps={steps - left + every} "
            "one does"
        )


def in_8_bits(config: Config) -> Iterator[str]:
    """Yield what of a run is rounded to 8 bits."""
    if config.memory.compress_activations:
        yield (
            "memory.compress_activations: activations wait for the backward in 8 bits; losses stay what they are, and "
            "gradients agree with those without it, and of other layouts, to a few per cent (docs/precision.md)"
        )


def headline(config: Config, model: ModelConfig, shape: MeshShape, kind: str) -> str:
    """Return what is trained on which layout in a line; kind: of the devices."""
    sizes = " x ".join(f"{dim}={shape[dim]}" for dim in shape.DIMS)
    context = config.context.over(shape.cp, model.drops_attention)
    if context.size > 1:
        inner = f", heads over {context.heads}" if 1 < context.heads < context.size else ""
        sizes += f" (context by {context.exchange}{inner}, balance {context.balance})"
    flops = flops_per_token(model, config.data.sequence_length, config.tuning)
    return (
        f"{model.family} of {parameters_in_words(model, config.tuning)}, {flops / 1e6:,.1f} MFLOP per token, "
        f"on {shape.world} x {kind} as {sizes}, {config.train.precision}"
    )


def _note(config: Config, path: Path) -> None:
    """Write the config of a run, unless it is there: a run starts again on a full disk too."""
    text = config.to_yaml().encode()
    with os_errors(path):
        there = path.is_file() and not path.is_symlink() and path.stat().st_size == len(text)
    if not there or read_file(path, path.parent) != text:
        replace_file(path, text)
