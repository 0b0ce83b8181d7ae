"""Pretrain what a recipe describes: ``python -m megacore.pretrain RECIPE [overrides]`` is one rank of the run.

launch/pretrain.sh starts them, and so may torchrun. Everything that can be wrong with a run is found before a process
group starts, and said once, by the first rank of each node.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megacore import checkpoints, metrics, open_files
from megacore.check import Setup, check, files_of
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import TokenError
from megacore.data.corpora import facts
from megacore.export import export
from megacore.hardware import claim, peak_tflops
from megacore.launcher import gpus
from megacore.load import load as load_into
from megacore.optimizer import Optimizer
from megacore.rank import Here, join, leave
from megacore.recipe import ConfigError
from megacore.resume import Damaged, Start, companions, find, raw_of, remarks
from megacore.run_lock import RunLock
from megacore.save import NAMES, Kept, SaveError, Saver, State
from megacore.say import err, say
from megacore.scaler import UNSCALED, Scaling
from megacore.states.offload import Offload
from megacore.step import TrainStep
from megacore.store.adapters import check_fingerprint
from megacore.store.audit import DamageError
from megacore.store.export import with_dtype
from megacore.store.index import Adapters
from megacore.store.load import fingerprint
from megacore.store.publish import replace_file
from megacore.store.strict_json import StoreError
from megacore.store.tensors import os_errors
from megacore.trainer import NonFinite, Trainer
from models.assemble import Model
from models.config import ModelConfig, flops_per_token
from models.decoder import Losses
from models.stages import layout_of
from models.tuning import EVERYTHING
from parallel import kernels
from parallel.gradients.reduce import Gradients
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.recompute import Activations

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def trainer_of(setup: Setup, mesh: Mesh, control: Control) -> Trainer:
    """The live parts of a run on this rank, its model initialised or loaded; it logs nothing."""
    config, corpora, start = setup.config, setup.corpora, setup.start
    dtype = DTYPES[config.train.precision]
    tuning, weights = config.tuning, setup.model.schema
    layout = layout_of(setup.model, mesh.shape, config.pipeline.chunks, config.pipeline.layers_per_stage, tuning)
    losses = Losses(config.loss.label_smoothing, config.loss.z_loss, config.memory.loss_chunk)
    activations = Activations(config.memory.recompute, config.memory.offload_activations)
    hollow = config.zero.shard == "parameters"
    model = Model.create(setup.model, layout, mesh, dtype, losses, activations, hollow, tuning)
    kernels.take_flash_attention(mesh.device, model.drops_attention)
    if config.train.precision == "fp8":
        model.use_fp8()
    if config.train.async_tp:
        _overlap(model, control)
    if config.train.compile:
        model.compile()
    section = config.optimizer
    wide = section.master_weights and dtype.itemsize < 4
    gradients = Gradients(
        model.parameters,
        model.chunks,
        torch.float32 if wide else dtype,
        config.zero.shard,
        config.zero.replicas,
        offload=config.memory.offload_parameters,
    )
    if wide and mesh.device.type == "cuda":  # whose products add in fp32; a CPU's would not
        model.hand_weight_gradients(gradients.receive)
    _agree(control, start, kernels.chosen(mesh.device, config.train.compile))
    offload = _offload(config)
    try:
        optimizer = control.attempt(
            lambda: Optimizer(
                gradients,
                lr=section.lr,
                betas=section.betas,
                eps=section.eps,
                weight_decay=section.weight_decay,
                clip=section.clip,
                master_weights=section.master_weights,
                moments=torch.bfloat16 if section.moments == "bf16" else None,
                offload=offload,
            )
        )
    except StoreError as error:
        raise ConfigError([f"memory.offload_folder: {error}"]) from error
    adapters = _adapters(config, start, control)
    load_into(start, model.parameters, optimizer, config.train.seed, control)
    saver = Saver(
        checkpoints.folder_of(config.out),
        State(
            model.parameters,
            optimizer,
            offload.folder if offload else None,
            replace(layout, schema=tuning.kept(weights)),
        ),
        with_dtype(raw_of(setup.model, start.source), NAMES[dtype]),
        companions(start, config),
        control,
        Kept(config.checkpoint.keep, config.checkpoint.keep_every),
        adapters,
        tuning.frozen(weights) if adapters is None else frozenset(),
    )
    if offload and offload.folder and config.checkpoint.on:
        saver.reserve()
    pipeline = Pipeline(mesh, model.chunks, dtype, config.pipeline.schedule)
    step = TrainStep(mesh, pipeline, gradients, optimizer, _scaling(config))
    step.scaler.load(start.progress.scaler)
    held_out, rank, ranks = corpora.validation, mesh.data_rank, mesh.shape.data
    vocabulary = setup.model.vocab_size
    return Trainer(
        config,
        mesh,
        model,
        step,
        corpora.batches(corpora.train, config, rank, ranks, vocabulary),
        corpora.batches(held_out, config, rank, ranks, vocabulary) if held_out else None,
        config.log.peak_tflops or peak_tflops(mesh.device, dtype),
        control,
        saver,
        start.progress,
        None,
    )


def _overlap(model: Model, control: Control) -> None:
    """Raise ConfigError on all ranks where one of them cannot do it."""

    def use() -> None:
        try:
            model.use_async_tp()
        except ValueError as error:
            raise StoreError(str(error)) from error

    try:
        control.attempt(use)
    except StoreError as error:
        raise ConfigError([f"train.async_tp: {error}: set it to false"]) from error


def _scaling(config: Config) -> Scaling:
    """fp32 has the range of bf16; only fp16's gradients need another."""
    section = config.loss_scale
    fp16 = config.train.precision == "fp16"
    return Scaling(section.initial, section.growth_interval, section.minimum) if fp16 else UNSCALED


def _offload(config: Config) -> Offload | None:
    section = config.memory
    if section.offload_optimizer == "none":
        return None
    return Offload(Path(section.offload_folder) if section.offload_folder else None, section.offload_buffer << 20)


def _adapters(config: Config, start: Start, control: Control) -> Adapters | None:
    """What the adapters of a run belong to, if it trains some.

    Raises:
        ConfigError: they go on beside another model than they were trained on.
    """
    lora, base = config.tuning.lora, start.source
    if lora is None or base is None:
        return None
    found = Adapters(lora, str(base.path), fingerprint(base, control))
    if start.adapters is not None:
        try:
            check_fingerprint(start.adapters, base.path, found.fingerprint)
        except StoreError as error:
            raise ConfigError([f"checkpoint.init: {error}"]) from error
    return found


def _agree(control: Control, start: Start, chosen: str) -> None:
    """Each rank has looked for itself; a folder that only some of them see would break the run much later, and kernels
    that only some of them have would wait for other messages."""
    step = start.progress.step
    least, most = -int(control.largest(-step)[0]), int(control.largest(step)[0])
    if least != most:
        problem = f"ranks have found checkpoints to resume from of steps {least} to {most}"
        raise ConfigError([f"checkpoint.resume: {problem}: out must lie on a file system that all nodes share"])
    sources = control.tell([*{*control.gather(None if start.source is None else str(start.source.path))}])
    if len(sources) > 1:
        found = ", ".join(sorted(map(str, sources)))
        raise ConfigError([f"checkpoint.init: ranks have found different checkpoints of one run ({found}): name one"])
    if len(various := control.tell(sorted({*control.gather(chosen)}))) > 1:
        raise ConfigError([f"ranks have chosen different kernels: make their machines alike ({'; '.join(various)})"])


def run(setup: Setup, device: torch.device, node: int = 8) -> int:
    """One run on the processes that there are; returns the last step that was done.

    Args:
        setup: The run.
        device: Of this process.
        node: How many successive ranks share a machine.

    Raises:
        ConfigError: the ranks have found different checkpoints to start from, or different kernels.
        StoreError: another run holds the folder, or what the run is to start from is damaged.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    timeout = timedelta(minutes=setup.config.train.timeout)
    mesh = Mesh.create(setup.config.mesh.shape(world), device, timeout)
    control, out = Control.create(mesh, node), Path(setup.config.out)
    setup = _led(setup, control)
    with ExitStack() as stack:
        if mesh.rank != 0:
            control.attempt(lambda: None)
            trainer = _built(setup, mesh, control)[1]
            control.attempt(lambda: None)
            return trainer.run()
        control.attempt(lambda: stack.enter_context(RunLock.take(out)))
        say(_headline(setup.config, setup.model, mesh))
        setup, trainer = _built(setup, mesh, control)
        if chosen := kernels.chosen(device, setup.config.train.compile):
            say(chosen)
        log = control.attempt(lambda: stack.enter_context(metrics.Log(setup.config, setup.start.progress.step)))
        last = replace(trainer, log=log).run()
        stack.close()
        say(_report(setup.config, last))
    return last


def _built(setup: Setup, mesh: Mesh, control: Control) -> tuple[Setup, Trainer]:
    """The trainer of a run, and where it really starts.

    With ``checkpoint.resume=auto``, a checkpoint that turns out to be damaged while it is loaded is set aside, and the
    one before it is taken.

    Raises:
        StoreError: what the run is to start from is damaged, and there is nothing else.
    """
    control.attempt(lambda: _prepare(setup, mesh) if mesh.rank == 0 else None)
    try:
        return setup, trainer_of(setup, mesh, control)
    except DamageError as error:
        start = setup.start.adapters or setup.start.source
        if setup.config.checkpoint.resume != AUTO or start is None or error.path != start.path:
            raise
        damaged = Damaged(error.path, str(error))
    gc.collect()  # the half of a trainer that there is: modules and hooks refer to each other
    before = control.attempt(lambda: find(setup.config, (damaged,), checked=mesh.rank > 0))
    return _built(_led(replace(setup, start=before), control), mesh, control)


def _led(setup: Setup, control: Control) -> Setup:
    """A run that starts where rank 0 has found that it can: it alone has looked at all files of the checkpoints."""
    told = control.tell([[str(each.path), each.reason] for each in setup.start.damaged])
    damaged = tuple(Damaged(Path(path), reason) for path, reason in told)

    def start() -> Start:
        same = [each.path for each in damaged] == [each.path for each in setup.start.damaged]
        return setup.start if same else find(setup.config, damaged, checked=True)

    return replace(setup, start=control.attempt(start))


def _prepare(setup: Setup, mesh: Mesh) -> None:
    """Put the run's folder in order, and say what the run starts from."""
    config, start, out = setup.config, setup.start, Path(setup.config.out)
    for each in start.damaged:
        say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.path}: {each.reason}")
    with os_errors(out):
        checkpoints.clean(checkpoints.folder_of(out))
        replace_file(out / "config.yaml", config.to_yaml().encode())
    say("\n".join([*remarks(start, config, setup.model, mesh.shape), *setup.corpora.remarks]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        err("usage: megacore.pretrain RECIPE [section.key=value ...]")
        return 2
    here = Here.now()
    try:
        # One rank of each node reads the indexes of the data for all, and one of them all the files of a checkpoint.
        setup = check(arguments[0], arguments[1:], here.world, here.local_world, here.local_rank > 0, here.rank > 0)
    except ConfigError as error:
        if here.local_rank == 0:  # of each node: a file may be missing on one
            err(error)
        return 2
    train = setup.config.train
    kind = train.device_type(gpus())
    device = claim(kind, here.local_rank)
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    said = open_files.allow(files_of(setup.config, here.world, here.local_world))
    if said is not None and here.local_rank == 0:
        say(said)
    join(here, kind, timedelta(minutes=train.timeout))
    status, last, damaged = 0, 0, None
    try:
        last = run(setup, device, here.local_world)
    except ConfigError as error:  # on every rank
        status = 2
        if here.rank == 0:
            err(error)
    except (NonFinite, SaveError, StoreError) as error:  # on every rank
        status = 1
        damaged = error.path if isinstance(error, DamageError) else None
        if here.rank == 0:
            err(error)
    except TokenError as error:  # on this rank alone: the others wait for it, until the launcher ends them
        err(f"rank {here.rank}: {error}")
        os._exit(1)
    except KeyboardInterrupt:  # the second one: under the launcher it ends all ranks itself
        err("Interrupted again: ended at once, without a checkpoint.")
        os._exit(128 + signal.SIGINT)
    if here.rank == 0 and damaged is not None:  # while the others wait, for the launcher ends one that is left over
        err(checkpoints.instead_of(damaged))
    leave(here)
    # After the group's end, so that no other rank waits for it: an export of many bytes may outlast their patience.
    if here.rank == 0 and status == 0 and setup.config.checkpoint.export is not None:
        try:
            say(export(setup.config, last))
        except StoreError as error:
            status = 1
            err(error)
    return status


def _headline(config: Config, model: ModelConfig, mesh: Mesh) -> str:
    sizes = " x ".join(f"{dim}={mesh.shape[dim]}" for dim in ("pp", "dp", "ep", "cp", "tp"))
    flops, tuning = flops_per_token(model, config.data.sequence_length, config.tuning), config.tuning
    trained = "" if tuning == EVERYTHING else f" ({tuning.trained(model.schema):,} trained)"
    return (
        f"{model.family} of {model.schema.parameters:,} parameters{trained}, {flops / 1e6:,.1f} MFLOP per token, "
        f"on {mesh.shape.world} x {mesh.device.type} as {sizes}, {config.train.precision}"
    )


def _report(config: Config, last: int) -> str:
    """The end of a run in a few lines; draws the picture."""
    out = Path(config.out)
    records = metrics.read(out / metrics.METRICS)
    known = facts(config.data.train[0]) if len(config.data.train) == 1 else None
    entropy = known.unigram_entropy if known else None
    metrics.draw(records, out / metrics.PICTURE, entropy)
    losses = [loss for _, loss in metrics.curve(records, "loss")]
    held_out = [loss for _, loss in metrics.curve(records, "validation_loss")]
    lines = ["", f"Done after step {last} of {config.train.steps}." if last < config.train.steps else "Done."]
    if losses:
        recent = losses[-10:]
        lines.append(
            f"  training loss    {sum(recent) / len(recent):.4f} nats per token (the last {len(recent)} records)"
        )
    if held_out:
        lines.append(f"  validation loss  {held_out[-1]:.4f}")
    if skipped := [count for _, count in metrics.curve(records, "skipped_steps")][-1:]:
        lines += [f"  skipped steps    {skipped[0]:,} of {last:,}, which changed nothing"] if skipped[0] else []
    if entropy is not None:
        lines.append(f"  unigram entropy  {entropy:.4f} (what knowing the tokens' frequencies alone would give)")
    paths = {"metrics": out / metrics.METRICS, "loss curve": out / metrics.PICTURE}
    paths["resolved config"] = out / "config.yaml"
    if found := checkpoints.complete(checkpoints.folder_of(out)):
        paths["checkpoint"] = found[max(found)]
    lines += [f"  {what:<16} {path}" for what, path in paths.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
