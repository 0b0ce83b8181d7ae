"""What a run would do that has been checked and is not started: `megacore train RECIPE --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megacore import checkpoints
from megacore.config import Config
from megacore.data.corpora import EXAMPLES, packed_of
from megacore.data.samples import Epochs
from megacore.parallel.enum_errors import WITH_REFERENCE
from megacore.parallel.virtual_stages import of_stage
from megacore.planning.overheads import Storage, save_of
from megacore.planning.peak_memory import Memory, memory
from megacore.planning.recipe_setting import setting_of
from megacore.planning.setting import Setting
from megacore.resources import gpus, host_memory, memory_of_gpus
from megacore.training.check import tower_elements
from megacore.training.metrics import METRICS
from megacore.training.resume import Setup, remarks
from megacore.training.start import headline


def outlook(setup: Setup, world: int, here: int) -> str:
    """Return what a run would do on machines like this one, in a few lines: its layout, ranks, steps, tokens, memory,
    and what it would write where; world: its ranks, here: those on this machine."""
    config, model, shape = setup.config, setup.model, setup.config.mesh.shape(world)
    kind = config.train.device_type(gpus())
    setting = replace(setting_of(config, model, world, kind), tower=tower_elements(setup.start, setup.corpora))
    facts = [
        ("ranks", f"{world:,}, {here:,} of them here" if here < world else f"{world:,}, all here"),
        *_course(setup),
        ("memory", _memory(memory(setting), here, kind)),
        *_images(setup, setting),
        *_reference(setup),
        *_written(config, setting, here),
    ]
    said = [*remarks(setup.start, config, model, shape, setup.corpora.identities), *setup.corpora.remarks]
    lines = [headline(config, model, shape, kind), *said, *(f"  {what:<16} {text}" for what, text in facts)]
    return "\n".join([*lines, "Nothing of this was started or written."])


def _course(setup: Setup) -> Iterator[tuple[str, str]]:
    config, done = setup.config, setup.start.progress
    end, samples = done.at(config.train.steps, config), setup.corpora.train
    ramp, step = config.batch.ramp, config.batch.global_size * config.data.sequence_length
    left = f"{done.step + 1:,} to {end.step:,}" if done.step < end.step else f"none, {done.step:,} are done"
    yield "steps", left
    epochs = ""
    if isinstance(samples, Epochs):
        epochs = f"; the data is gone through {end.samples / samples.per_epoch:,.2f} times"
    yield "tokens", f"{'' if ramp is None else 'at last '}{step:,} in a step, {end.tokens:,} in all{epochs}"


def _reference(setup: Setup) -> Iterator[tuple[str, str]]:
    """Yield what the weights that the run starts from are asked before its first step."""
    section, sides = setup.config.preference, (setup.corpora.train, setup.corpora.validation)
    if section is not None and section.loss in WITH_REFERENCE:
        sources = [packed for side in sides if side for packed in packed_of(side)]
        pairs, rows = sum(len(each.chosen) for each in sources), sum(each.per_epoch for each in sources)
        kept = Path(setup.config.out) / EXAMPLES
        yield "reference", f"of {pairs:,} pairs in {rows:,} rows, computed once before the first step, kept in {kept}"


def _memory(stages: tuple[Memory, ...], here: int, kind: str) -> str:
    """Return what each rank takes at the peak of a step, beside what there is of the memory that it takes."""
    most, fewest = (choose(stages, key=lambda each: each.peak) for choose in (max, min))
    least = f"{fewest.peak / 1e9:,.2f} to " if fewest.peak < most.peak else ""
    said = (
        f"{least}{most.peak / 1e9:,.2f} GB of each rank at the peak of a step, most of it {most.largest} "
        f"({most.terms[most.largest] / 1e9:,.2f} GB)"
    )
    room: int | None
    if kind == "cuda":
        needed, room, where = most.peak, memory_of_gpus(), "a GPU here has"
    else:
        peaks = sorted((each.peak for each in stages for _ in range(each.ranks)), reverse=True)
        needed, room = sum(peaks[:here]), host_memory()
        where = "beside Python and torch; this machine, or this container, has"
    if most.host:
        said += f", and {most.host / 1e9:,.2f} GB of host memory"
    if room is None:
        return said
    return f"{said}; {where} {room / 1e9:,.2f} GB{', which may be too little' if needed > room else ''}"


def _images(setup: Setup, setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield what attention both ways takes beside that."""
    if setting.tower and setting.model.anatomy.both_ways:
        most = max(_scores(setup, setting, each) for each in memory(setting))
        yield "images", f"up to {most / 1e9:,.2f} GB on each rank for attention both ways, if a row has images"


def _scores(setup: Setup, setting: Setting, stage: Memory) -> int:
    anatomy, layout, shape = setting.model.anatomy, setting.layout, setting.layout.mesh
    there = [layer for chunk in range(layout.chunks) for layer in layout.chunk_layers(stage.stage, chunk)]
    in_windows = anatomy.both_ways == "images in windows"
    looking = [layer for layer in there if not in_windows or anatomy.layers[layer].window is not None]
    # What is recomputed in full keeps none.
    full = of_stage(setting.recompute, stage.stage) == "full"
    layers = min(len(looking), 1) if full else len(looking) * -(-stage.in_flight // layout.chunks)
    heads = max(setting.model.sizes["heads"] // (shape.tp * shape.cp), 1)
    length, rows = setup.config.data.sequence_length, setup.config.batch.micro_size
    masks = len({anatomy.layers[layer].window for layer in looking}) * stage.in_flight
    return image_scores(rows * length**2, heads, layers, masks, anatomy.attention_softcap is not None)


def image_scores(scores: int, heads: int, layers: int, masks: int, softcap: bool) -> int:
    """Return the most bytes of attention with masks, at the last of the layers that look both ways, which keep theirs
    for the backward. ``scores``: those of a head, of the rows of a microbatch; ``heads``: those of a rank, all of whose
    scores the formula makes where there is a softcap; ``masks``: those that the layers share, of each microbatch that
    waits for its backward, and of each window."""
    each, made = (11 * heads, 17 * heads) if softcap else (0, 16)
    return scores * (each * max(layers - 1, 0) + made * bool(layers) + 4 * max(masks - 1, 0))


def _written(config: Config, setting: Setting, here: int) -> Iterator[tuple[str, str]]:
    section, out = config.checkpoint, Path(config.out)
    yield "writes", f"{out / 'config.yaml'}, {out / METRICS} and what else tells of the run"
    if section.on:
        size = save_of(setting, here, Storage.of(here, None, None), None).size
        whens = [f"every {section.every:,} steps"] * bool(section.every) + ["at the end"] * section.at_end
        whens += ["after each better evaluation"] * section.best
        kept = "all are kept" if section.keep is None else f"the newest {section.keep:,} are kept"
        folder = checkpoints.folder_of(out, section.folder)
        yield "checkpoints", f"{folder}, {' and '.join(whens)}, {size:,} bytes of tensors each; {kept}"
    else:
        yield "checkpoints", "none (checkpoint.every and checkpoint.at_end)"
    if section.export is not None:
        upload = f", and uploaded to {section.push}" if section.push is not None else ""
        yield "export", f"{section.export}, when all steps are done{upload}"
