"""Everything that can be wrong with a run is looked for before any of its processes starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megacore import checkpoints, open_files
from megacore.checkpoints import AUTO
from megacore.checks.machine import readable, surroundings, without_a_model
from megacore.checks.rules import problems, too_few_steps
from megacore.config import Config
from megacore.data.corpora import Corpora, has_images, vocabulary_problems
from megacore.data.data_sets import resolved
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.text import InputError
from megacore.models.config import ModelConfig, ModelConfigError
from megacore.models.registry import own_family
from megacore.models.stages import default_layers
from megacore.models.wrappers import image_problems, images_refusal
from megacore.parallel.import_path import ImportPathError, imported
from megacore.planning.capacity import capacity_problems
from megacore.planning.pipeline_order import order_of
from megacore.recipe import ConfigError, Recipe, load
from megacore.resources import gpus, memory_of_gpus
from megacore.store.io.hub import HubName
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import NUMBERS
from megacore.training.resume import (
    Setup,
    Start,
    as_begun,
    check_round,
    companions,
    data_as_begun,
    find,
    model_of,
    peft_refusals,
    raw_of,
    with_init,
)
from megacore.training.same_data import changed_data


def check(
    recipe: Recipe,
    overrides: Sequence[str],
    world_size: int,
    local_ranks: int,
    checked: bool = False,
    another_looks: bool = False,
    goes_on: bool = False,
    finetunes: bool = False,
    prepared: Path | None = None,
) -> Setup:
    """Read and check a run.

    Args:
        checked: Whether another process of this machine does so too: what takes longer for more data is left to it.
        another_looks: Whether one of any machine does so: what all share is left to it, the files of a checkpoint on a
            disk, and whether checkpoints can be kept in an object store.
        goes_on: Whether the run is going on, and this process may join it: its folder is in use, and what it started
            from may have been removed since it has a checkpoint of its own.
        finetunes: Whether it is to start from a model that there is.
        prepared: The folder that has prepared examples, instead of the run's own.

    Raises:
        ConfigError: all that is wrong.
    """
    config = as_begun(load(recipe, overrides))
    start, model, there = None, None, gpus()
    found = [*(without_a_model(config) if finetunes else []), *_missing_code(config)]
    _meet_family(config)

    def known(model: ModelConfig | None) -> list[str]:
        rules = problems(config, world_size, model, gpus=there, local_ranks=local_ranks)
        return [*rules, *(() if goes_on else surroundings(config, another_looks))]

    if HubName.of(config.checkpoint.init or "") is not None and (wrong := known(None)):
        raise ConfigError([*found, *wrong])  # before a model is fetched
    try:
        start = _start(config, another_looks, goes_on)
        if config.checkpoint.init is not None and start.source is not None:
            config = with_init(config, start.source.hub)
    except StoreError as error:
        found += [f"checkpoint: {error}"]
    try:
        # Where the source is broken, so may be the model that is to come from it.
        model = model_of(config, start.source if start else None) if start or config.model else None
    except ModelConfigError as error:
        found += [f"model: {problem}" for problem in error.problems]
    found += known(model)
    if start is not None and config.train.epochs is None:
        found += _steps_done(config, start)
    if start is not None:
        try:
            check_round(config, start, config.mesh.shape(world_size).dp)
        except (StoreError, ValueError) as error:
            found += [f"checkpoint: {error}"] * isinstance(error, StoreError)  # of a mesh, a rule says what is wrong
    if model is not None:
        found += vocabulary_problems(config, model.vocab_size)
        found += _unexportable(config, model)
    is_elsewhere = any(each.hub_name is not None for each in config.data.train + config.data.validation)
    if readable(config) and not (found and is_elsewhere):
        try:
            config = resolved(config, data_as_begun(config))
            found += [] if checked or another_looks else [f"data: {problem}" for problem in Corpora.look(config)]
        except ValueError as error:
            found.append(f"data: {error}")
    if model is not None and config.loss.function is not None and not found:
        from megacore.parallel.token_loss import loss_of, problem  # need torch

        if (wrong_loss := problem(loss_of(config.loss.function), model.vocab_size)) is not None:
            found += [f"loss.function: {config.loss.function} {wrong_loss}"]
    if model is None or start is None or found:
        raise ConfigError(found)
    try:
        travelling = companions(start, config)
        files = ModelFiles(travelling, raw_of(model, start.source), model.vocab_size)
        if start.source is not None and (carried := start.source.index.carried) is not None:
            files = replace(files, no_images=images_refusal(carried.config, model))
    except (StoreError, InputError) as error:
        raise ConfigError([f"data: {error}"]) from error
    order = order_of(config, world_size)
    device = memory_of_gpus() if config.train.device_type(there) == "cuda" else None
    no_room = list(capacity_problems(config, model, world_size, local_ranks, device))
    if no_room := [*no_room, *open_files.problems(files_of(config, world_size, local_ranks))]:
        raise ConfigError(no_room)
    try:
        corpora = Corpora.open(config if prepared is None else replace(config, out=str(prepared)), files, checked)
        config = _with_steps(config, corpora)
        if tower := tower_elements(start, corpora):
            no_room = list(capacity_problems(config, model, world_size, local_ranks, device, tower))
        wrong = [*_of_images(config, model, start, corpora)]
        changed = [] if checked or another_looks or goes_on else [*changed_data(start, config, corpora)]
    except ValueError as error:
        raise ConfigError([f"data: {error}"]) from error
    if config.train.epochs is not None:
        changed += [*too_few_steps(config), *_steps_done(config, start)]
    if changed := [*wrong, *changed, *no_room]:
        raise ConfigError(changed)
    return Setup(config, model, corpora, start, travelling, order)


def _unexportable(config: Config, model: ModelConfig) -> Iterator[str]:
    """Yield why the export of a run's adapters would be refused when they are trained."""
    export, init = config.checkpoint.export, config.checkpoint.init
    for problem in peft_refusals(config, model) if export is not None else ():
        yield (
            f"checkpoint.export ({export}) is for the peft library, and {problem}: name other linears in lora.targets, "
            f"or leave out the export and merge the adapters by `megacore convert CHECKPOINT FOLDER --to hf --base "
            f"{init}`"
        )


def _of_images(config: Config, model: ModelConfig, start: Start, corpora: Corpora) -> Iterator[str]:
    """Yield why a run cannot train on the images of its chats."""
    carried = None if start.source is None else start.source.index.carried
    if carried is not None and corpora.have_images:
        pipeline = config.pipeline
        virtual = config.mesh.pp * pipeline.chunks
        layers = pipeline.layers_per_stage or default_layers(model, virtual, pipeline.chunks > 1)
        yield from image_problems(carried.config, model, layers[0])
        context = config.context.over(config.mesh.cp, model.drops_attention)
        if context.parts > 1 and model.anatomy.both_ways:
            yield (
                f"context.exchange ({config.context.exchange}), context.heads ({config.context.heads}): the model "
                "looks both ways within an image, which only a rank that has all of its keys can: set "
                "context.exchange=heads and context.heads=1, or mesh.cp=1"
            )
    if config.train.projector and not has_images(corpora.train):
        yield "train.projector is true, and no chat of data.train has an image: set it to false"


def tower_elements(start: Start, corpora: Corpora) -> int:
    """Return the elements of what turns images into embeddings: 0 where the data have none."""
    carried = None if start.source is None else start.source.carried
    if carried is None or not corpora.have_images:
        return 0
    numbers = (each for each in carried.stored() if carried.dtype("weights", each) in NUMBERS)
    return sum(math.prod(each.shape) for each in numbers)


def _with_steps(config: Config, corpora: Corpora) -> Config:
    """Return a config with the steps that its epochs come to, if it counts those; the last may begin another one."""
    if config.train.epochs is None:
        return config
    steps = config.batch.sizes.batches(corpora.samples_of(config.train.epochs))
    return replace(config, train=replace(config.train, steps=steps))


def _steps_done(config: Config, start: Start) -> Iterator[str]:
    """Yield whether a run has done more steps than it is to do."""
    steps, done, epochs = config.train.steps, start.progress.step, config.train.epochs
    if 0 < steps < done:
        key, come = ("train.steps", f"{steps}") if epochs is None else ("train.epochs", f"{epochs:g}, {steps} steps")
        yield (
            f"{key} ({come}) is below the {done} steps that are done: the run goes on to {key} in all, choose more "
            f"than {done}{'' if epochs is None else ' steps'}, or begin another run by checkpoint.init"
        )


def _missing_code(config: Config) -> Iterator[str]:
    """Yield the import paths of the user's own code at which there is nothing; the model's is told with the model."""
    named = [("data.train", each.path) for each in config.data.train if each.is_imported]
    named += [("data.validation", each.path) for each in config.data.validation if each.is_imported]
    named += [("loss.function", each) for each in (config.loss.function,) if each is not None]
    for key, path in (*named, *(("callbacks", each) for each in config.callbacks)):
        try:
            imported(path)
        except ImportPathError as error:
            yield f"{key}: {error}"


def _meet_family(config: Config) -> None:
    """Import the recipe's family, if it is one of the user's own: checkpoints name it by its ``model_type``."""
    name = config.model.get("family")
    if isinstance(name, str) and ":" in name:
        with suppress(ModelConfigError):  # which is told where the model is made
            own_family(name)


def _start(config: Config, another_looks: bool, goes_on: bool) -> Start:
    """Return what a run starts from, or its own newest checkpoint where that is gone. Raises StoreError: neither can be
    used."""
    try:
        return find(config, checked=another_looks)
    except StoreError:
        if not goes_on or not checkpoints.complete(checkpoints.folder_of(config.out, config.checkpoint.folder)):
            raise
        return find(replace(config, checkpoint=replace(config.checkpoint, resume=AUTO)), checked=another_looks)


def files_of(config: Config, world_size: int, local_ranks: int) -> int:
    """Return the largest number of files that a rank of a run has open at once."""
    shape, kind = config.mesh.shape(world_size), config.train.device_type(gpus())
    return open_files.needed(shape, kind, nodes=world_size // local_ranks)
