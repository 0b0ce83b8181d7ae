"""The live parts of a run on one rank, each built from the sections of the config that it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megacore import checkpoints
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import Batches
from megacore.data.corpora import end_of_text
from megacore.data.samples import Source
from megacore.hardware import peak_tflops
from megacore.recipe import ConfigError
from megacore.store.adapters import check_fingerprint
from megacore.store.export import with_dtype
from megacore.store.index import Adapters
from megacore.store.load import fingerprint
from megacore.store.strict_json import StoreError
from megacore.training.check import Setup
from megacore.training.load import load as load_into
from megacore.training.meter import Meter
from megacore.training.optimizer import Optimizer
from megacore.training.resume import Start, raw_of
from megacore.training.save import NAMES, Contents, Retention, Saver, TrainingState
from megacore.training.scaler import UNSCALED, Scaling
from megacore.training.states.offload import Offload
from megacore.training.step import TrainStep
from megacore.training.trainer import Trainer
from models.assemble import Model
from models.decoder import Losses
from models.stages import layout_of
from parallel import kernels
from parallel.balance import Coefficients
from parallel.gradients.reduce import Gradients
from parallel.memory.recompute import Activations
from parallel.mesh import Mesh
from parallel.pipeline.run import Pipeline
from parallel.weights.layout import Layout

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def trainer_of(setup: Setup, mesh: Mesh, control: Control) -> Trainer:
    """Build the live parts of a run on this rank, its model initialised or loaded; it logs nothing.

    Raises:
        ConfigError: the ranks have found different things, or one of them cannot do what the config asks for.
        StoreError: what the run starts from is damaged.
    """
    start = setup.start
    _agree(control, setup, kernels.chosen(mesh.device, setup.config.train.compile))
    trainer = empty_trainer_of(setup, mesh, control)
    load_into(start, trainer.model.parameters, trainer.step.optimizer, setup.config.train.seed, control)
    return trainer


def empty_trainer_of(setup: Setup, mesh: Mesh, control: Control, base: int | None = None) -> Trainer:
    """Build the live parts of a run on this rank, whose state is still to come.

    Args:
        setup: The run.
        mesh, control: Its groups.
        base: The fingerprint of the model that it trains adapters of, where that has been read before.

    Raises:
        ConfigError: a rank cannot do what the config asks for.
    """
    config, start, schema = setup.config, setup.start, setup.model.schema
    chunks, layers = config.pipeline.chunks, config.pipeline.layers_per_stage
    layout = layout_of(setup.model, mesh.shape, chunks, layers, config.tuning, config.mesh.split)
    model = _model(setup, layout, mesh, control)
    gradients = _gradients(config, model)
    offload = _offload(config)
    optimizer = _optimizer(config, gradients, offload, control)
    adapters = _adapters(config, start, control, base)
    state = TrainingState(
        model.parameters,
        optimizer,
        offload.folder if offload else None,
        replace(layout, schema=config.tuning.kept(schema)),
    )
    saver = _saver(setup, state, adapters, control)
    pipeline = Pipeline(mesh, model.chunks, DTYPES[config.train.precision], config.pipeline.schedule)
    step = TrainStep(mesh, pipeline, gradients, optimizer, _scaling(config), model.balance)
    step.scaler.load(start.progress.scaler)

    def batches(source: Source) -> Batches:
        vocabulary, place = setup.model.vocab_size, mesh.place
        return setup.corpora.batches(
            source, config, mesh.data_rank, mesh.shape.data, vocabulary, model.context, place.cp
        )

    peak = config.log.peak_tflops or peak_tflops(mesh.device, DTYPES[config.train.precision])
    return Trainer(
        config,
        mesh,
        model,
        step,
        batches(setup.corpora.train).without(start.progress.skipped_samples),
        batches(setup.corpora.validation) if setup.corpora.validation else None,
        Meter(config, setup.model, mesh, peak, start.progress.step),
        control,
        saver,
        start.progress,
        None,
        setup.corpora.identities,
    )


def _model(setup: Setup, layout: Layout, mesh: Mesh, control: Control) -> Model:
    """Build this rank's part of the model, with the products and kernels of the config; its weights are still to
    come."""
    config = setup.config
    losses = Losses(config.loss.label_smoothing, config.loss.z_loss, config.memory.loss_chunk)
    activations = Activations(config.memory.recompute, config.memory.offload_activations, config.memory.mlp_chunk)
    dtype, hollow = DTYPES[config.train.precision], config.zero.shard == "parameters"
    experts = config.experts
    coefficients = Coefficients(experts.sequence_balance, experts.batch_balance, experts.z_loss, experts.bias_rate)
    context = config.context.over(mesh.shape.cp, setup.model.drops_attention)
    model = Model.create(
        setup.model, layout, mesh, dtype, losses, activations, hollow, config.tuning, coefficients, context
    )
    kernels.take_flash_attention(mesh.device, model.drops_attention)
    if config.train.precision == "fp8":
        model.use_fp8()
    if config.train.async_tp:
        _overlap(model, control)
    if config.train.compile:
        model.compile()
    return model


def _gradients(config: Config, model: Model) -> Gradients:
    """Build what sums the model's gradients: in fp32 where there are masters for narrower weights."""
    dtype = DTYPES[config.train.precision]
    wide = config.optimizer.master_weights and dtype.itemsize < 4
    gradients = Gradients(
        model.parameters,
        model.chunks,
        torch.float32 if wide else dtype,
        config.zero.shard,
        config.zero.replicas,
        offload=config.memory.offload_parameters,
    )
    if wide and model.parameters.mesh.device.type == "cuda":  # whose products add in fp32; a CPU's would not
        model.hand_weight_gradients(gradients.receive)
    return gradients


def _optimizer(config: Config, gradients: Gradients, offload: Offload | None, control: Control) -> Optimizer:
    """Build the optimizer.

    Raises:
        ConfigError: on all ranks, where one of them cannot offload.
    """
    section = config.optimizer
    try:
        return control.attempt(
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


def _saver(setup: Setup, state: TrainingState, adapters: Adapters | None, control: Control) -> Saver:
    """Build what saves checkpoints; room for states on disk is taken at once."""
    config, start = setup.config, setup.start
    raw = raw_of(setup.model, start.source)
    if start.source is None and (end := end_of_text(config)) is not None:
        raw = {**raw, "eos_token_id": end}
    saver = Saver(
        checkpoints.folder_of(config.out, config.checkpoint.folder),
        Contents(
            state,
            with_dtype(raw, NAMES[DTYPES[config.train.precision]]),
            setup.companions,
            adapters,
            config.tuning.frozen(setup.model.schema) if adapters is None else frozenset(),
        ),
        control,
        Retention(config.checkpoint.keep, config.checkpoint.keep_every),
    )
    if config.memory.offload_folder is not None and config.checkpoint.on:
        saver.reserve()
    return saver


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
    """Return the loss scaling, which only fp16's gradients need: fp32 has the range of bf16."""
    section = config.loss_scale
    fp16 = config.train.precision == "fp16"
    return Scaling(section.initial, section.growth_interval, section.minimum) if fp16 else UNSCALED


def _offload(config: Config) -> Offload | None:
    section = config.memory
    if section.offload_optimizer == "none":
        return None
    return Offload(Path(section.offload_folder) if section.offload_folder else None, section.offload_buffer << 20)


def _adapters(config: Config, start: Start, control: Control, known: int | None) -> Adapters | None:
    """Return the adapters of a run and what they belong to, if it trains some.

    Raises:
        ConfigError: they go on beside another model than they were trained on.
    """
    lora, base = config.tuning.lora, start.source
    if lora is None or base is None:
        return None
    adapters = Adapters(lora, str(base.path), fingerprint(base, control) if known is None else known)
    if start.adapters is not None and known is None:
        try:
            check_fingerprint(start.adapters, base.path, adapters.fingerprint)
        except StoreError as error:
            raise ConfigError([f"checkpoint.init: {error}"]) from error
    return adapters


def agree_on_data(control: Control, setup: Setup) -> None:
    """Raise ConfigError on all ranks where some have found other tokens than the rest: a sample is to be the same
    whoever takes it."""
    found = control.gather(setup.corpora.identities)
    if others := control.tell([rank for rank, here in enumerate(found) if here != found[0]]):
        paths, who = ", ".join(corpus.path for corpus in setup.config.data.train), ", ".join(map(str, others[:8]))
        raise ConfigError(
            [f"data.train: {paths} hold other tokens on ranks {who} than on rank 0: give all nodes the same files"]
        )


def _agree(control: Control, setup: Setup, chosen: str) -> None:
    """Raise what any rank has found. Each has looked for itself; a folder that only some of them see would break the
    run much later, and kernels that only some of them have would wait for other messages."""
    start, step = setup.start, setup.start.progress.step
    least, most = -int(control.largest(-step)[0]), int(control.largest(step)[0])
    if least != most:
        problem = f"ranks have found checkpoints to resume from of steps {least} to {most}"
        raise ConfigError([f"checkpoint.resume: {problem}: out must lie on a file system that all nodes share"])
    sources = control.tell([*{*control.gather(None if start.source is None else str(start.source.path))}])
    if len(sources) > 1:
        found = ", ".join(sorted(map(str, sources)))
        raise ConfigError([f"checkpoint.init: ranks have found different checkpoints of one run ({found}): name one"])
    agree_on_data(control, setup)
    if len(various := control.tell(sorted({*control.gather(chosen)}))) > 1:
        raise ConfigError([f"ranks have chosen different kernels: make their machines alike ({'; '.join(various)})"])
