"""The start of a run: from nothing, from somebody's weights, or from a checkpoint of a run, on any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.data import tokenizer
from megacore.data.corpora import Corpora
from megacore.data.skipped import in_words
from megacore.models import lora as lora_of
from megacore.models import names
from megacore.models.config import ModelConfig, ModelConfigError
from megacore.models.lora import Lora
from megacore.models.registry import configure, family
from megacore.models.scores import WEIGHT
from megacore.parallel import limits
from megacore.parallel.pipeline.schedules import Schedule
from megacore.parallel.weights.fingerprint import spell
from megacore.parallel.weights.layout import MeshShape
from megacore.recipe import ConfigError, Recipe, load
from megacore.recipe_yaml import flat, read_yaml
from megacore.say import brief
from megacore.store.conversions.adapters import is_part_of
from megacore.store.conversions.formats import open_folder
from megacore.store.io.hub import HubName
from megacore.store.io.objects import place
from megacore.store.io.strict_json import StoreError, read_file
from megacore.store.tensor_files.companions import TEMPLATES, TEXT, Companion
from megacore.store.tensor_files.companions import companions as beside
from megacore.store.weight_folders.checkpoint import TRAINER, Checkpoint
from megacore.store.weight_folders.folder import WeightFolder, with_projector
from megacore.store.weight_folders.index import EMA, INDEX, MOMENTS, VersionError, kept_as, replicas_of, residuals_of
from megacore.training.progress import DATA, Progress, recipe

NOTED = "config.yaml"
"""The file in a run's folder that has its config."""


@dataclass(frozen=True)
class Damaged:
    """A checkpoint of a run that cannot be used, and why not."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Start:
    """The start of a run: the folder of the weights, which are drawn at random where there is none, and its state of a
    run that goes on. Newer checkpoints that are damaged were passed over: to be set aside before the run writes
    anything."""

    source: WeightFolder | None = None
    trainer: Mapping[str, Any] | None = None
    progress: Progress = field(default_factory=Progress)
    said: tuple[str, ...] = ()
    adapters: WeightFolder | None = None
    damaged: tuple[Damaged, ...] = ()


@dataclass(frozen=True)
class Setup:
    """A run that has been checked: its config, its model, its data, where it starts, {name: file} of what travels with
    the model, and the order of its pipeline, if it has one of its own. A model and data of the hub are fetched, and the
    config names their commits."""

    config: Config
    model: ModelConfig
    corpora: Corpora
    start: Start
    companions: Mapping[str, Companion] = field(default_factory=dict)
    order: Schedule | None = None

    def held(self) -> Setup:
        """Return the run with the content of what travels with the model: whoever has a checkpoint that a run starts
        from may remove it while that run goes on. Raises StoreError: a file cannot be read."""
        return replace(self, companions={name: each.held() for name, each in self.companions.items()})

    def at(self, start: Start) -> Setup:
        """Return the run as it is from another start. The files of one that it keeps may be gone by now: they are
        known."""
        found = self.companions if start.source is self.start.source else companions(start, self.config)
        return replace(self, start=start, companions=found)


# -- before anything starts


def overrides_of_restart(recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a run that is started once more: it goes on from the newest of its own checkpoints.

    Where it has saved none, it begins as it did before. Raises ConfigError: the recipe cannot be read.
    """
    config = load(recipe, overrides)
    folder = checkpoints.folder_of(config.out, config.checkpoint.folder)
    if config.checkpoint.resume is not None and not checkpoints.complete(folder):
        return list(overrides)
    return [*overrides, f"checkpoint.resume={AUTO}"]


def as_begun(config: Config) -> Config:
    """Return a config of a run that goes on with the model of the hub at the commit that it began from.

    A branch has moved since, and a tag may have. Whoever wants another names its commit.
    """
    given, noted = HubName.parse(config.checkpoint.init or ""), HubName.parse(str(_noted(config, "checkpoint", "init")))
    if given is None or given.is_pinned or noted is None or not noted.is_pinned:
        return config
    return with_init(config, noted) if noted.repository == given.repository else config


def data_as_begun(config: Config) -> list[str]:
    """Return the paths of the data that a run which goes on began with."""
    listed = [each for key in ("train", "validation") for each in _noted(config, "data", key) or ()]
    return [str(each["path"]) for each in listed if isinstance(each, dict) and "path" in each]


def with_init(config: Config, name: HubName | None) -> Config:
    """Return a config whose model is that of a name of the hub, if there is one."""
    section = config.checkpoint
    return config if name is None else replace(config, checkpoint=replace(section, init=str(name)))


def _noted(config: Config, section: str, key: str) -> Any:
    """Return what the config in the folder of a run that goes on says of a key; None where it says nothing."""
    out = Path(config.out)
    try:
        if config.checkpoint.resume is None:
            return None
        return read_yaml(read_file(out / NOTED, out, limits.RECIPE).decode())[section][key]
    except (StoreError, OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None


def find(config: Config, damaged: tuple[Damaged, ...] = (), checked: bool = False) -> Start:
    """Open what the run is to start from; ``checked``: whether another process checks the tensor files of checkpoints.
    Raises StoreError: it cannot be used, or the run has been trained on samples that are to be left out."""
    start = _find(config, damaged, checked)
    if config.train.projector and start.source is not None:
        start = replace(start, source=with_projector(start.source))
    return replace(start, progress=start.progress.without(config.recovery.skip_samples))


def _find(config: Config, damaged: tuple[Damaged, ...], checked: bool) -> Start:
    section = config.checkpoint
    if section.resume is None:
        return _from(section.init, checked)
    if section.resume != AUTO:
        return go_on(config, Checkpoint.open(checkpoints.newest_of(place(section.resume)), checked), checked)
    folder = checkpoints.folder_of(config.out, section.folder)
    checkpoint, damaged = newest_whole(folder, damaged, checked)
    if checkpoint is not None:
        return replace(go_on(config, checkpoint, checked), damaged=damaged)
    if any((each.path / INDEX).exists() for each in damaged):
        listed = "\n".join(each.reason for each in damaged)
        raise StoreError(
            f"{folder} has no checkpoint that is whole, and nothing was changed:\n{listed}\n"
            f"Mend one, or move {folder} away to begin anew"
        )
    begins = f"the run starts from {section.init}" if section.init else "the run starts afresh"
    said = f"There is no checkpoint in {folder} to resume from: {begins}."
    return replace(_from(section.init, checked), said=(said,), damaged=damaged)


def newest_whole(
    folder: Path, damaged: tuple[Damaged, ...], checked: bool = False, steps: range | None = None
) -> tuple[Checkpoint | None, tuple[Damaged, ...]]:
    """Return the newest checkpoint of a run that is whole, as far as can be known without reading its tensors, and the
    newer ones that are damaged, beside those that are known to be. Raises VersionError: another version of megacore has
    written it."""
    for step, path in reversed(checkpoints.named(folder).items()):
        if (steps is None or step in steps) and all(path != each.path for each in damaged):
            try:
                return _whole(path, checked), damaged
            except VersionError:
                raise
            except StoreError as error:
                damaged = (*damaged, Damaged(path, str(error)))
    return None, damaged


def _whole(path: Path, checked: bool) -> Checkpoint:
    if not (path / INDEX).exists():
        raise StoreError(f"{path} has no {INDEX}: it was not written to its end")
    checkpoint = Checkpoint.open(path, checked)
    if checkpoint.trainer is not None:
        Progress.read(checkpoint.trainer, path / TRAINER)
    return checkpoint


def _from(init: str | None, checked: bool) -> Start:
    return Start(open_folder(place(init), checked=checked)) if init else Start()


def go_on(config: Config, checkpoint: Checkpoint, checked: bool) -> Start:
    """Return the start of a run that goes on from a checkpoint; errors as of :func:`find`."""
    lora = config.tuning.lora
    if lora is not None:
        return _go_on_with_adapters(lora, config.checkpoint.init, checkpoint, checked)
    if held := checkpoint.index.adapters:
        raise StoreError(
            f"{checkpoint.path} holds adapters of {held.base}: resume it with its lora and its checkpoint.init"
        )
    name = "muon" if checkpoint.index.muon else "adamw"
    if name != config.optimizer.name:
        raise StoreError(
            f"{checkpoint.path} has the moments of {name}, and the recipe says optimizer.name="
            f"{config.optimizer.name}: set optimizer.name={name}, or start from its weights by checkpoint.init"
        )
    return _going_on(checkpoint)


def _go_on_with_adapters(lora: Lora, init: str | None, checkpoint: Checkpoint, checked: bool) -> Start:
    path, held = checkpoint.path, checkpoint.index.adapters
    if held is None:
        raise StoreError(f"{path} holds a model and no adapters: begin with adapters of it by checkpoint.init={path}")
    name = HubName.parse(held.base)
    begun = name is not None and name.is_pinned and name.repository == init
    base = open_folder(place(held.base if init is None or begun else init), checked=checked)
    if wrong := list(_other_adapters(lora, held.lora, base, checkpoint)):
        raise StoreError("\n".join([f"{path} cannot go on with this recipe:", *wrong]))
    return replace(_going_on(checkpoint), source=base, adapters=checkpoint)


def _other_adapters(lora: Lora, held: Lora, base: WeightFolder, checkpoint: Checkpoint) -> Iterator[str]:
    for name in ("rank", "alpha", "rslora", "base_dtype"):
        ours, theirs = getattr(lora, name), getattr(held, name)
        if ours != theirs:
            yield f"lora.{name} is {ours} in the recipe and {theirs} in the checkpoint: keep it as it was"
    schema = base.config.scoring_as(checkpoint.config).schema
    ours, theirs = (lora_of.adapters(schema, each).pieces for each in (lora, held))
    if ours != theirs:
        differ = ", ".join(sorted({spell(piece) for piece, _ in ours.items() ^ theirs.items()}))
        yield f"lora.targets is {list(lora.targets)} and was {list(held.targets)}, which differ in {differ}"
    if schema.sizes != checkpoint.config.schema.sizes:
        yield f"{base.path} is a model of other sizes than that of the adapters, {checkpoint.index.adapters}"


def _going_on(checkpoint: Checkpoint) -> Start:
    path = checkpoint.path
    missing = [state for state in MOMENTS if kept_as(state, checkpoint.index.states) is None]
    if checkpoint.trainer is None or missing:
        lacks = ", ".join([*missing, *([TRAINER] if checkpoint.trainer is None else [])])
        raise StoreError(f"{path} holds weights, but no training run (no {lacks}): start from it by checkpoint.init")
    progress = Progress.read(checkpoint.trainer, path / TRAINER)
    said = f"Resuming after step {progress.step:,} ({progress.tokens:,} tokens) from {path}."
    return Start(checkpoint, checkpoint.trainer, progress, (said,))


def check_round(config: Config, found: Start, dp: int) -> None:
    """Raise StoreError: a run goes on within a round of steps that replicas take alone, with more or fewer of them."""
    folder, tree = found.adapters or found.source, found.trainer
    if folder is None or tree is None or not (were := replicas_of(folder.states)):
        return
    every, replicas = (tree["recipe"].get("sync") or {}).get("every"), config.sync.replicas_of(dp)
    if replicas != were and isinstance(every, int) and every > 0 and found.progress.step % every:
        way_out = f"or go on from the checkpoint of a step that {every} divides, the old sync.every"
        raise StoreError(
            f"{folder.path}: step {found.progress.step} is within a round of {every} steps (sync.every) that {were} "
            f"replicas took alone, and there are {replicas} now: start {were} (sync.replicas), {way_out}"
        )


def model_of(config: Config, source: WeightFolder | None) -> ModelConfig:
    """Return the model: the recipe's, or where that names none, the source's with the fields that the recipe changes.
    Raises ModelConfigError: everything that is wrong with it, and with its fit to the source."""
    section = config.model
    if source is None and not section:
        way_out = "name a Hugging Face folder, a model of its hub or a checkpoint in checkpoint.init (--init MODEL)"
        raise ModelConfigError("model", [f"there is none: {way_out}, or set model.preset, model.family or .config"])
    if source is None or any(section.get(key) is not None for key in ("family", "preset", "config")):
        model = configure(section, config.scores)
    else:
        kind = family(source.config.family).config
        model = kind.from_hugging_face(kind.override(source.raw, section))
        model = model.scoring(1) if config.scores and not model.labels else model
    if source is not None:
        model = replace(model, projector=source.config.projector)
    wrong = [] if source is None else list(_misfits(config, model, source))
    drawn = config.scores and (source is None or not source.config.labels)
    only, freeze = config.train.only, config.train.freeze
    # What is wrong with these patterns is said elsewhere.
    if drawn and not names.problems(model.schema, only, freeze) and WEIGHT in names.frozen(model.schema, only, freeze):
        wrong.append(
            f"{WEIGHT} is drawn, and train.only or train.freeze would leave it so: name score in train.only, or take "
            "it out of train.freeze"
        )
    if wrong:
        raise ModelConfigError(model.family, wrong)
    return model


def model_alone(config: Config) -> ModelConfig:
    """Return the model of a run of which nothing else is asked. Raises ConfigError: there is none."""
    try:
        return model_of(config, find(config, checked=True).source)
    except StoreError as error:
        raise ConfigError([f"checkpoint: {error}"]) from error
    except ModelConfigError as error:
        raise ConfigError([f"model: {problem}" for problem in error.problems]) from error


def raw_of(model: ModelConfig, source: WeightFolder | None) -> Mapping[str, Any]:
    """Return the Hugging Face config of a model that started from a source: all of its fields, some of them changed."""
    ours = model.to_hugging_face()
    if source is None:
        return ours
    theirs, kind = source.config.to_hugging_face(), type(model)
    changed = {key: value for key, value in ours.items() if key not in theirs or theirs[key] != value}
    raw = kind.override(source.raw, changed)
    try:
        return raw if kind.from_hugging_face(raw) == model else ours
    except ModelConfigError:
        return ours


def _misfits(config: Config, model: ModelConfig, source: WeightFolder) -> Iterator[str]:
    """Yield the differences of the weights, which must be the same."""
    before = source.config.scoring_as(model)
    if before != source.config and source.index.carried is not None:  # the head is drawn
        yield (
            f"{source.path} is a larger model of which {model.family} is a part, and transformers has no class of "
            "it with a head of scores: start from a text model"
        )
    if config.train.projector and not source.config.projector:
        yield f"train.projector is true, and {source.path} has no projector that can be trained: set it to false"
    if config.lora is not None and source.config.projector and not config.train.projector:
        yield (
            f"{source.path} has a projector among its weights, beside which lora trains no adapters: start from what "
            "`megacore convert --to hf` makes of it"
        )
    ours, theirs = model.schema, before.schema
    way_out = f"choose another checkpoint than {source.path}, or leave the recipe's model to it"
    for axis in sorted({*ours.sizes, *theirs.sizes}):
        if ours.sizes.get(axis) != theirs.sizes.get(axis):
            size, found = (sizes.get(axis, "none") for sizes in (ours.sizes, theirs.sizes))
            yield f"{axis} is {size} in the recipe and {found} in the checkpoint: {way_out}"
    mine, held = ours.pieces, theirs.pieces
    for name, label in sorted(mine.keys() | held.keys()):
        here, there = mine.get((name, label)), held.get((name, label))
        if here != there:
            missing = "is not in the recipe's model" if here is None else "is not in the checkpoint"
            what = missing if None in (here, there) else "has other axes in the checkpoint"
            yield f"{spell((name, label))} {what}: {way_out}"


# -- what is said before it goes on


def remarks(start: Start, config: Config, model: ModelConfig, mesh: MeshShape, data: Sequence[str] = ()) -> list[str]:
    """Return the differences to where the weights come from, the samples that are left out, and adapters that can only
    be merged, a line each; data: the identity of each corpus."""
    lines = [*_of_source(start, model), *_of_run(start, config, model, mesh, data)]
    for problem in peft_refusals(config, model):
        lines.append(f"The adapters can be merged (--to hf --base), not exported by --to peft: {problem}.")
    return [limits.cut(line) for line in lines]


def _of_source(start: Start, model: ModelConfig) -> Iterator[str]:
    yield from start.said
    if start.source is None:
        return
    if not start.said:
        yield f"Starting from the weights of {start.source.name}."
    yield from (f"  {remark}" for remark in start.source.remarks)
    before, given = asdict(start.source.config), start.source.config.labels
    if model.labels and not given and start.adapters is None:
        head = start.source.config.tied[1]
        yield f"  a head of scores, {WEIGHT} [{model.labels}, {model.sizes['embed']}], is drawn in place of {head}"
    for name, value in asdict(model).items():
        if value != before.get(name) and name != "projector" and (name != "labels" or given):
            yield f"  model.{name} is {brief(value)}, and was {brief(before.get(name))}"


def _of_run(start: Start, config: Config, model: ModelConfig, mesh: MeshShape, data: Sequence[str]) -> Iterator[str]:
    """Yield what a run goes on with that is not as it was when it stopped."""
    if start.trainer is not None:
        ours = json.loads(json.dumps(recipe(config, mesh)))
        was, now = flat(start.trainer["recipe"]), flat(ours)
        changed = [key for key in now if key in was and now[key] != was[key]]
        yield from (f"  {key} is {now[key]}, and was {brief(was[key])}" for key in changed if key.startswith(_TOLD))
        source = start.adapters or start.source
        if config.ema.decay is not None and source is not None and EMA not in source.states:
            yield "  there are no averages of weights in it: they begin with its weights"
        if start.progress.updates and any(key in ("train.only", "train.freeze") for key in changed):
            yield (
                f"  what is trained from here on only has moments of 0 and the bias correction of step "
                f"{start.progress.updates:,}: its first steps are larger. Begin by checkpoint.init to count anew"
            )
        were, are = (0 if source is None else replicas_of(source.states)), config.sync.replicas_of(mesh.dp)
        if (config.sync.every is None and were) or (config.sync.every is not None and were != are):
            yield (
                f"  {max(were, 1)} replicas took steps alone (sync), and there are {are} now: the moments of the first "
                "ones are dealt out to all"
            )
        left, ranks = (0 if source is None else len(residuals_of(source.states))), mesh.dp * mesh.cp
        if left and (config.zero.compress != "int8" or ranks == 1):
            yield "  what rounding has left of gradients (zero.compress=int8) is left out from here on"
        elif left and left != ranks:
            of_ranks = f"gradients on {left} ranks (dp x cp) is dealt out to {ranks}"
            yield f"  what rounding has left of {of_ranks}: its sum stays"
        drops = any("drop" in each.name and getattr(model, each.name) for each in fields(model))
        if drops and any(key.startswith(_LAYOUT) for key in changed):
            yield "  the layout or microbatch has changed: dropout draws other masks than it would have drawn"
        held = start.trainer.get(DATA)
        before, here = (held, data) if held and data else (None, None)  # older checkpoints have none
        for corpus, one, other in zip(config.data.train, before or (), here or (), strict=False):
            if one != other:
                yield f"  {corpus.path} holds other tokens than those that the run was trained on"
        begun = start.progress.samples > 0  # what was another trainer's run begins the data anew
        if begun and _order(start.trainer["recipe"], before) != _order(ours, here):
            yield (
                "  samples come in another order from here on: some of those that were trained on in this epoch may "
                "come again, and others never"
            )
    if skipped := start.progress.skipped_samples:
        yield f"{len(skipped):,} samples of the training data are left out: {in_words(skipped)}."


def peft_refusals(config: Config, model: ModelConfig) -> Iterator[str]:
    """Yield why the peft library would load the adapters of a run wrongly, so that an export to it refuses them."""
    if (lora := config.tuning.lora) is not None:
        whole = base if is_part_of(base := str(config.checkpoint.init)) else None
        yield from lora_of.peft_problems(model.family, lora_of.targets(model.schema, lora.targets), whole)


def _order(tree: Mapping[str, Any], identities: Sequence[str] | None) -> list[Any]:
    """Return what the order of the samples hangs on, of a recipe in JSON and the identities of its corpora."""
    data, chat = tree.get("data", {}), tree.get("chat", {})
    corpora = data.get("train", [])
    held_out = None if data.get("validation") else data.get("validation_fraction")
    known = [each.get("path") for each in corpora] if identities is None else list(identities)
    sizes = [(each.get("weight"), each.get("least"), each.get("streams")) for each in corpora]
    shuffle, temperature = data.get("shuffle", True), data.get("temperature", 1.0)
    drawn = data.get("sequence_length"), data.get("seed"), shuffle, temperature, chat.get("pack")
    return [known, sizes, held_out, *drawn]


_TOLD = (
    "data.", "batch.global_size", "batch.ramp", "loss.", "chat.", "experts.", "optimizer.", "sync.", "muon.", "ema.",
    "schedule.", "lora.", "train.steps", "train.seed", "train.only", "train.freeze", "train.precision",
    "checkpoint.keep",
)  # fmt: skip
_LAYOUT = ("mesh.", "pipeline.", "batch.")


def companions(start: Start, config: Config) -> Mapping[str, Companion]:
    """Return {name: file} of what travels with the model: the source's files, or the tokenizer that the data names, or
    has beside the first corpus.

    A chat template that the recipe names takes the place of theirs, of those for tools too.
    """
    first, template = config.data.train[0], config.chat.template
    found = start.source.companions() if start.source is not None else {}
    if not found and (config.data.tokenizer is not None or not first.is_imported):
        named = config.data.tokenizer
        folder = Path(first.path).parent if named is None else tokenizer.opened(named)
        found = beside(folder, folder, TEXT)
    if template is None or not found:
        return found
    others = {name: file for name, file in found.items() if not name.startswith(TEMPLATES)}
    return {**others, tokenizer.TEMPLATE: Companion(Path(template))}
