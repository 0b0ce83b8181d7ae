"""Everything that can be wrong with a run is looked for before any of its processes starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megacore import checkpoints, open_files
from megacore.checkpoints import AUTO
from megacore.checks.machine import readable, surroundings, without_a_model
from megacore.checks.rules import problems, too_few_steps
from megacore.config import Config, CorpusConfig
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
from megacore.store.io.strict_json import StoreError, parse_json, short
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.companions import companions as beside
from megacore.store.tensor_files.dtypes import NUMBERS
from megacore.store.weight_folders.folder import WeightFolder
from megacore.training.progress import DATA
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

TOKENIZER = "tokenizer.json"
_WAY_OUT = "begin another run by checkpoint.init"


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


# -- whether a run that goes on has the tokens that it was trained on


def changed_data(start: Start, config: Config, corpora: Corpora) -> Iterator[str]:
    """Yield what is wrong with the data of a run that goes on: token files of another tokenizer, and other tokens under
    the name of a corpus that it was trained on, unless ``data.allow_changed`` says that these are meant."""
    held = start.adapters or start.source
    if start.trainer is None or held is None:
        return
    wrong = dict[str, str]()
    for corpus in config.data.train:
        if not (corpus.has_examples or corpus.is_imported or corpus.streams) and (
            problem := _other_tokenizer(held, Path(corpus.path).parent)
        ):
            wrong[corpus.path] = problem
    if not config.data.allow_changed:
        for corpus in _changed(start.trainer, config, corpora):
            wrong.setdefault(
                corpus.path,
                f"{corpus.path} holds other tokens than those that the run was trained on: put back those, let "
                f"data.allow_changed=true go on with these, or {_WAY_OUT}",
            )
    yield from (f"data.train: {problem}" for problem in wrong.values())


def _changed(trainer: Mapping[str, Any], config: Config, corpora: Corpora) -> Iterator[CorpusConfig]:
    """Yield the corpora that stand where they stood in the recipe of the run, by the same name, and are others."""
    before, recipe = trainer.get(DATA), trainer["recipe"]
    if not before or not corpora.identities:  # older checkpoints have none
        return
    # Examples become other tokens by these too, which is told.
    same = recipe.get("chat") == asdict(config.chat)
    same = same and recipe.get("data", {}).get("sequence_length") == config.data.sequence_length
    named = recipe.get("data", {}).get("train", [])
    for corpus, was, one, other in zip(config.data.train, named, before, corpora.identities, strict=False):
        if one != other and was.get("path") == corpus.path and (same or not corpus.has_examples):
            yield corpus


def _other_tokenizer(held: WeightFolder, folder: Path) -> str | None:
    """Return what is wrong where ids have another meaning beside a corpus than in a checkpoint of the run; ids that are
    known to one of the two alone are not."""
    theirs, ours = held.companions().get(TOKENIZER), beside(folder, folder, (TOKENIZER,)).get(TOKENIZER)
    if theirs is None or ours is None or theirs.read() == ours.read():
        return None
    before, here = _tokens(theirs), _tokens(ours)
    other = [token for token in before.keys() & here.keys() if before[token] != here[token]]
    if not other:
        return None
    token, size = min(other), len(before.keys() | here.keys())
    alike = len(before.keys() & here.keys()) - len(other)
    return (
        f"{folder / TOKENIZER} is another tokenizer than the run's, {theirs.path}: {alike:,} of {size:,} tokens are "
        f"alike, and {token} is {short(here[token])} and was {short(before[token])}: make the token files by "
        f"`megacore tokenize --tokenizer {theirs.path.parent}`, or {_WAY_OUT}"
    )


def _tokens(file: Companion) -> dict[int, str]:
    """Return {id: token} of a ``tokenizer.json``, none of one that is none. Raises StoreError: it cannot be read."""
    tree = parse_json(file.read(), file.path, wide=True)
    model = tree.get("model") if isinstance(tree, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram's, of [token, score]
        vocabulary = {each[0]: index for index, each in enumerate(vocabulary) if isinstance(each, list) and each}
    added = tree.get("added_tokens") if isinstance(tree, dict) else None
    known = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    known += [(each.get("content"), each.get("id")) for each in added or () if isinstance(each, dict)]
    return {index: token for token, index in known if type(index) is int and isinstance(token, str)}
