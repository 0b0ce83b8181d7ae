"""The live parts of a run on one rank, each built from the sections of the config that it needs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megacore import checkpoints
from megacore.config import Config
from megacore.control import Control, Made
from megacore.data.batches import Batch, Batches
from megacore.data.corpora import end_of_text, packed_of
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.samples import Source
from megacore.data.text import InputError
from megacore.hardware import peak_tflops
from megacore.inference.texts import Texts
from megacore.models.assemble import Model
from megacore.models.decoder import Losses
from megacore.models.stages import layout_of
from megacore.parallel import kernels
from megacore.parallel.balance import Coefficients
from megacore.parallel.enum_errors import WITH_REFERENCE
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.preference import TOLD, PairLoss, Preference
from megacore.parallel.rank_sets import across, parts_of_dp
from megacore.parallel.token_loss import loss_of
from megacore.parallel.virtual_stages import of_stage
from megacore.parallel.weights.layout import Layout
from megacore.recipe import ConfigError
from megacore.store.conversions.adapters import check_fingerprint
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.hugging_face_files import with_dtype
from megacore.store.weight_folders.index import Adapters
from megacore.store.weight_folders.loader import fingerprint
from megacore.training.callbacks.bad_steps import BadSteps
from megacore.training.callbacks.checkpoints import Checkpoints
from megacore.training.callbacks.data_states import DataStates
from megacore.training.callbacks.evaluation import Evaluation, decides
from megacore.training.callbacks.garbage import Garbage
from megacore.training.callbacks.incidents import Incidents
from megacore.training.callbacks.metrics import Metrics
from megacore.training.callbacks.profile import Profile
from megacore.training.callbacks.recompute import Recompute
from megacore.training.callbacks.reference import ReferenceScores
from megacore.training.callbacks.repeat_steps import RepeatSteps
from megacore.training.callbacks.replicas import Replicas
from megacore.training.callbacks.report import FinalReport
from megacore.training.callbacks.rounds import EndRounds
from megacore.training.callbacks.shard_checksums import ShardChecksums
from megacore.training.callbacks.signals import Signals
from megacore.training.callbacks.spikes import TellSpikes
from megacore.training.callbacks.trace import Trace
from megacore.training.initial_state import load_initial_state
from megacore.training.local_steps import LocalSteps
from megacore.training.microbatches import Uploader
from megacore.training.resume import Setup, Start, raw_of
from megacore.training.save import NAMES, Contents, Saver
from megacore.training.scaler import UNSCALED, Scaling
from megacore.training.states.muon import Muon
from megacore.training.states.offload import Offload
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep
from megacore.training.trainer import Callback, Trainer
from megacore.training.vision_tower import load_vision_tower

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def trainer_of(setup: Setup, mesh: Mesh, control: Control, given: Sequence[Callback] = ()) -> Trainer:
    """Build the live parts of a run on this rank, its model initialised or loaded. Raises ConfigError: the ranks have
    found different things, or one of them cannot do what the config asks for; StoreError: what the run starts from is
    damaged."""
    config, start, schema = setup.config, setup.start, setup.model.schema
    _agree(control, setup, kernels.chosen(mesh.device, config.train.compile, DTYPES[config.train.precision]))
    chunks, layers = config.pipeline.chunks, config.pipeline.layers_per_stage
    split, placement = config.mesh.split, config.pipeline.placement
    own = mesh.part(config.sync.replicas_of(mesh.shape.dp))  # what takes steps alone is a mesh of its own
    layout = layout_of(setup.model, own.shape, chunks, layers, config.tuning, split, placement)
    model = _model(setup, layout, own, control)
    gradients = _gradients(config, model)
    offload = _offload(config)
    optimizer = _optimizer(config, gradients, offload, mesh, control)
    contents = _contents(setup, model, optimizer, offload, _adapters(config, start, control))
    loss = () if config.preference is None else (TOLD,)
    loss = (2,) if config.mtp_factor(schema) else loss  # of the next token, and of those further on
    dtype, schedule = DTYPES[config.train.precision], config.pipeline.schedule
    pipeline = Pipeline(own, model.chunks, dtype, schedule, gradients, loss, setup.order, config.pipeline.group)
    parts = pipeline, gradients, optimizer, _scaling(config), model.balance, model.alignment
    step = TrainStep(own, *parts, replicas=mesh if own is not mesh else None)
    step.scaler.load(start.progress.scaler)
    load_initial_state(start, model.parameters, optimizer, config.train.seed, control)
    image_reader = _on_all(control, "checkpoint.init", lambda: load_vision_tower(setup, mesh, model))
    batches = _batches(setup, setup.corpora.train, mesh, model, image_reader)
    alone = config.sync.replicas_of(mesh.shape.dp)
    batches = replace(batches, sizes=config.batch.sizes, skipped=start.progress.skipped_samples, replicas=alone)
    callbacks = _callbacks(setup, contents, mesh, model, control, given, image_reader)
    upload = Uploader(config, mesh, model)
    return Trainer(config, mesh, model, step, batches, upload, control, contents, start, callbacks)


def _batches(
    setup: Setup, source: Source, mesh: Mesh, model: Model, image_reader: Callable[[Batch], Batch] | None = None
) -> Batches:
    config, vocabulary = setup.config, setup.model.vocab_size
    sizes = config.batch.global_size, config.batch.micro_size, mesh.data_rank, mesh.shape.data
    ahead = setup.model.mtp_layers if config.mtp_factor(setup.model.schema) else 0
    how = setup.corpora.separate, vocabulary, model.context, mesh.place.cp
    return Batches(source, *sizes, *how, ahead=ahead, scores=config.scores, image_reader=image_reader)


def _callbacks(
    setup: Setup,
    contents: Contents,
    mesh: Mesh,
    model: Model,
    control: Control,
    given: Sequence[Callback],
    image_reader: Callable[[Batch], Batch] | None,
) -> list[Callback]:
    """Return what happens beside the steps, in its order: what decides whether a step stands, what others bring along,
    what shows the step, what keeps it."""
    config, optimizer = setup.config, setup.config.optimizer
    held_out = setup.corpora.validation
    evaluation = None
    if held_out:
        tasks = _on_all(control, "evaluate.tasks", lambda: _tasks(setup, model))
        evaluation = Evaluation(_batches(setup, held_out, mesh, model, image_reader), tasks)
    checkpoints_on_disk = Checkpoints(_saver(config, contents, control), setup.corpora.identities, evaluation)
    spikes = TellSpikes()
    bad: Callback = BadSteps(optimizer.max_skipped if optimizer.non_finite == "skip" else 0)
    if optimizer.non_finite == "repeat":
        bad = RepeatSteps(checkpoints_on_disk, spikes if config.recovery.spikes else None)
    peak = config.log.peak_tflops or peak_tflops(mesh.device, DTYPES[config.train.precision], kernels.mm)
    made: list[Callback] = [Trace(), spikes, bad, Recompute(), Replicas(), ShardChecksums(), *given]
    if config.sync.every is not None:
        made.insert(0, EndRounds(config.sync.every))
    if config.preference is not None and config.preference.loss in WITH_REFERENCE:
        sources = [packed for side in (setup.corpora.train, held_out) if side for packed in packed_of(side)]
        made.append(ReferenceScores(sources, lambda source: _batches(setup, source, mesh, model)))
    made += [DataStates(), Metrics(peak), Incidents()]
    keeping: list[Callback] = [checkpoints_on_disk, *([evaluation] if evaluation else [])]
    keeping = keeping[::-1] if decides(config) else keeping
    # Signals are heeded until all else has ended: the last save may take long.
    return [*made, *keeping, Garbage(), Profile(), FinalReport(), Signals()]


def _tasks(setup: Setup, model: Model) -> Callable[[], Mapping[str, float]] | None:
    """Return what asks the model the tasks of evaluations. Raises StoreError: one is not known, or there is no
    tokenizer."""
    config = setup.config
    if not config.evaluate.tasks:
        return None
    from megacore.inference import harness  # which an extra brings

    files = ModelFiles(setup.companions, raw_of(setup.model, setup.start.source), setup.model.vocab_size)
    try:
        texts = Texts.among(files, Path(config.checkpoint.init or config.out))
    except InputError as error:
        raise StoreError(str(error)) from error
    asked = harness.HarnessModel(model, texts, config.batch.micro_size * config.data.sequence_length)
    asked.check(tasks := harness.load(config.evaluate.tasks))
    return partial(harness.scores, asked, tasks)


def _model(setup: Setup, layout: Layout, mesh: Mesh, control: Control) -> Model:
    """Build this rank's part of the model, with the products and kernels of the config; its weights are still to
    come."""
    config = setup.config
    function = None if config.loss.function is None else loss_of(config.loss.function)
    section, of_pairs = config.preference, None
    if section is not None:
        weights = Preference(section.loss, section.factor, section.gamma, section.label_smoothing)
        of_pairs = PairLoss(weights, mesh.along("cp", "tp"), section.scores)
    terms, mtp = (config.loss.label_smoothing, config.loss.z_loss), config.mtp_factor(setup.model.schema)
    losses = Losses(*terms, config.memory.loss_chunk, function, of_pairs, mtp)
    memory, stage = config.memory, mesh.place.pp
    activations = Activations(
        of_stage(memory.recompute, stage),
        of_stage(memory.offload_activations, stage),
        memory.mlp_chunk,
        memory.compress_activations,
    )
    dtype, hollow = DTYPES[config.train.precision], config.zero.shard == "parameters"
    experts = config.experts
    coefficients = Coefficients(experts.sequence_balance, experts.batch_balance, experts.z_loss, experts.bias_rate)
    context = config.context.over(mesh.shape.cp, setup.model.drops_attention)
    model = Model.create(
        setup.model,
        layout,
        mesh,
        dtype,
        losses,
        activations,
        hollow,
        config.tuning,
        coefficients,
        context,
        config.loss.indexer,
    )
    kernels.take_flash_attention(mesh.device, model.drops_attention)
    if config.train.precision == "fp8":
        model.use_fp8()
    if config.train.async_tp:
        _on_all(control, "train.async_tp", lambda: _overlap(model))
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
        matrices=config.optimizer.name == "muon",
        compress=config.zero.compress,
    )
    late = config.pipeline.splits_backward
    if late or gradients.widens:
        model.hand_weight_gradients(gradients.receive, late, gradients.add_held)
    return gradients


def _optimizer(
    config: Config, gradients: Gradients, offload: Offload | None, mesh: Mesh, control: Control
) -> Optimizer:
    section, sync = config.optimizer, config.sync
    kind: Callable[..., Optimizer] = Optimizer
    if sync.every is not None:
        same = across(parts_of_dp(mesh.shape, sync.replicas_of(mesh.shape.dp)))
        mesh.make_groups(same)
        group = mesh.group(next(ranks for ranks in same if mesh.rank in ranks))
        kind = partial(LocalSteps, across=group, outer_lr=sync.lr, momentum=sync.momentum)
    make = partial(
        kind,
        gradients,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        clip=section.clip,
        master_weights=section.master_weights,
        moments=torch.bfloat16 if section.moments == "bf16" else None,
        muon=_muon(config),
        ema=config.ema.decay,
        offload=offload,
    )
    return _on_all(control, "memory.offload_folder", make)


def _muon(config: Config) -> Muon | None:
    if config.optimizer.name != "muon":
        return None
    section = config.muon
    ratio = 1.0 if section.lr is None else section.lr / config.optimizer.lr
    return Muon(section.momentum, section.nesterov, section.steps, section.scale == "original", ratio)


def _contents(
    setup: Setup, model: Model, optimizer: Optimizer, offload: Offload | None, adapters: Adapters | None
) -> Contents:
    """Return all that checkpoints hold."""
    config, start, parameters = setup.config, setup.start, model.parameters
    raw = raw_of(setup.model, start.source)
    if start.source is None and (end := end_of_text(config, setup.corpora.corpora)) is not None:
        raw = {**raw, "eos_token_id": end}
    frozen = config.tuning.frozen(setup.model.schema) if adapters is None else frozenset[str]()
    named, whole = with_dtype(raw, NAMES[DTYPES[config.train.precision]]), config.optimizer.name == "muon"
    carried = None if start.source is None else start.source.index.carried
    return Contents(
        parameters,
        optimizer,
        replace(parameters.layout, schema=config.tuning.kept(setup.model.schema)),
        named,
        setup.companions,
        adapters,
        frozen,
        whole,
        source=start.source if adapters is None and carried is not None else None,
        naming=None if carried is None else carried.naming,
        folder=offload.folder if offload else None,
    )


def _saver(config: Config, contents: Contents, control: Control) -> Saver:
    """Build what saves checkpoints; room for states on disk is taken at once."""
    saver = Saver(checkpoints.folder_of(config.out, config.checkpoint.folder), contents, control, config.checkpoint)
    if config.memory.offload_folder is not None and config.checkpoint.on:
        saver.reserve()
    return saver


def _on_all(control: Control, key: str, make: Callable[[], Made]) -> Made:
    """Make something on all ranks, or raise ConfigError on all: the recipe's key asks for what one of them cannot."""
    try:
        return control.attempt(make)
    except StoreError as error:
        raise ConfigError([f"{key}: {error}"]) from error


def _overlap(model: Model) -> None:
    try:
        model.use_async_tp()
    except ValueError as error:
        raise StoreError(f"{error}: set it to false") from error


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


def _adapters(config: Config, start: Start, control: Control) -> Adapters | None:
    """Return the adapters of a run and what they belong to, if it trains some. Raises ConfigError: they go on beside
    another model than they were trained on."""
    lora, base = config.tuning.lora, start.source
    if lora is None or base is None:
        return None
    adapters = Adapters(lora, base.name, fingerprint(base, control))
    if start.adapters is not None:
        try:
            check_fingerprint(start.adapters, base.path, adapters.fingerprint)
        except StoreError as error:
            raise ConfigError([f"checkpoint.init: {error}"]) from error
    return adapters


def _agree(control: Control, setup: Setup, chosen: str) -> None:
    """Raise ConfigError on all ranks where they have found different things. Each has looked for itself; a folder that
    only some of them see would break the run much later, and kernels that only some of them have would wait for other
    messages."""
    start = setup.start
    source = None if start.source is None else start.source.name
    order = zlib.crc32(repr(setup.order).encode())
    found = control.gather([start.progress.step, source, setup.corpora.identities, chosen, order])
    if problem := control.tell(_differs(found, setup.config) if found else None):
        raise ConfigError([problem])


def _differs(found: Sequence[tuple[int, str | None, Sequence[str], str, int]], config: Config) -> str | None:
    """Return what ranks have found differently, of (step, source, identities of the data, kernels, checksum of the
    pipeline's order) of each."""
    steps, sources, data, kernels_of, orders = zip(*found, strict=True)
    if len({*steps}) > 1:
        problem = f"ranks have found checkpoints to resume from of steps {min(steps)} to {max(steps)}"
        return f"checkpoint.resume: {problem}: out must lie on a file system that all nodes share"
    if len({*sources}) > 1:
        various = ", ".join(sorted(map(str, {*sources})))
        return f"checkpoint.init: ranks have found different checkpoints of one run ({various}): name one"
    if others := [rank for rank, here in enumerate(data) if here != data[0]]:  # a sample is to be the same for all
        paths, who = ", ".join(corpus.path for corpus in config.data.train), ", ".join(map(str, others[:8]))
        return f"data.train: {paths} hold other tokens on ranks {who} than on rank 0: give all nodes the same files"
    if len({*orders}) > 1:  # stages would wait for each other for ever
        return f"pipeline.order: {config.pipeline.order} is not the same on all nodes: give all of them one file"
    if len({*kernels_of}) > 1:
        return f"ranks have chosen different kernels: make their machines alike ({'; '.join(sorted({*kernels_of}))})"
    return None
