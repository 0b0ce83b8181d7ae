"""Export of a finished run: its last checkpoint, or its best, in Hugging Face's format, and its upload to the hub."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.models.config import parameters_in_words
from megacore.recipe_yaml import write_yaml
from megacore.say import say
from megacore.store.conversions.adapters import to_peft
from megacore.store.conversions.conversion import to_hugging_face
from megacore.store.conversions.target import MadeFolder, make_folder
from megacore.store.io.hub import HubName, license_of, push
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.publish import replace_file
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face_files import SHARD_SIZE, parse_size
from megacore.store.weight_folders.index import EMA
from megacore.training.progress import Progress

CARD = "README.md"
"""The page of a model on the hub: what it is made of, in words and as the hub's metadata."""
_PRIVATE = ("out", "checkpoint", "log")
"""Sections of a recipe that tell of the machine alone."""


def export(config: Config, step: int, last: int) -> MadeFolder | None:
    """Make ``checkpoint.export``, and say so -> what was made, if it was. One process does so, while no other writes
    checkpoints.

    Of a run that has trained adapters it is a folder of the peft library. With ``checkpoint.push`` it is then uploaded,
    which is tried again where the run is started again. Of a run that has stopped at a step before the ``last`` nothing
    is exported. Raises StoreError: there is no checkpoint of that step, or none with the loss of an evaluation where
    the best is asked for, or the folder cannot be made or uploaded.
    """
    target = Path(str(config.checkpoint.export))
    folder = checkpoints.folder_of(config.out, config.checkpoint.folder)
    if step < last:
        say(f"  not exported     {target} (step {step} of {last})")
        return None
    there = config.checkpoint.resume == AUTO and target.is_dir() and any(target.iterdir())
    if there:
        say(f"  not exported     {target} (it is there already, and stays as it is)")
        if config.checkpoint.push is None:
            return None
    found = checkpoints.complete(folder)
    chosen = checkpoints.best(found) if config.checkpoint.best else last
    if chosen is None or chosen not in found:
        which = "with the loss of an evaluation" if chosen is None else f"of step {chosen}"
        raise StoreError(f"cannot export to {target}: there is no checkpoint {which} in {folder}")
    checkpoint = found[chosen]
    opened = Checkpoint.open(checkpoint)
    made = None if there else _made(opened, target, config.checkpoint.best, config.ema.export)
    if config.checkpoint.push is not None:
        if not (target / CARD).exists():
            replace_file(target / CARD, model_card(config.checkpoint.push, config, opened).encode())
        say(f"  uploaded         {push(config.checkpoint.push, target)}")
    return made


def _made(opened: Checkpoint, target: Path, best: bool, averaged: bool) -> MadeFolder:
    adapters, checkpoint = opened.index.adapters is not None, opened.path / EMA if averaged else opened.path
    source, dtype = opened, None
    if averaged:  # in the dtype of the weights
        source = opened.averaged()
        dtype = next(opened.dtype("weights", each) for each in opened.stored() if opened.index.has(EMA, each.name))
    plan = to_peft(opened) if adapters else to_hugging_face(source, parse_size(SHARD_SIZE), dtype)
    try:
        made = make_folder(plan, checkpoint, target, os.cpu_count() or 1)
    except StoreError as error:
        way_out = f"`megacore convert {checkpoint} {target} --to {'peft' if adapters else 'hf'}` does it again"
        raise StoreError(f"cannot export {checkpoint}: {error}\n{way_out}") from error
    say(f"  exported         {made}{f' (of step {opened.index.step}, the best)' * best}")
    return made


def model_card(name: str, config: Config, checkpoint: Checkpoint) -> str:
    """Return the README.md of a repository, for what was made of a checkpoint. Paths are cut to their last part: where
    a run lay is nobody's business. Raises StoreError: the checkpoint is of no run."""
    progress = Progress.read(checkpoint.trainer or {}, checkpoint.path)
    adapters, init = checkpoint.index.adapters is not None, config.checkpoint.init
    base = None if init is None else HubName.of(init)
    tags: dict[str, Any] = {"library_name": "peft" if adapters else "transformers", "tags": ["megacore"]}
    if base is not None:
        tags |= {"base_model": base.repository, "base_model_relation": "adapter" if adapters else "finetune"}
        if (known := license_of(base)) is not None:
            tags["license"] = known
    if base is not None:
        source = f"[{base.repository}](https://huggingface.co/{base.repository}) (revision {base.revision or 'main'})"
    else:
        source = "random weights" if init is None else f"`{Path(init).name}`"
    rank = f"Adapters of rank {config.lora.rank} for a" if adapters and config.lora else "A"
    return f"""---
{write_yaml(tags)}---

# {name.partition("/")[2]}

{rank} {checkpoint.config.family} of {parameters_in_words(checkpoint.config, config.tuning)}, trained by Megacore
from {source}: {progress.step:,} steps, {progress.tokens:,} tokens.

## Data

{_data(config)}

## Recipe

```yaml
{write_yaml(_recipe(config))}```
"""


def _data(config: Config) -> str:
    listed = (("trained on", config.data.train), ("held out", config.data.validation))
    return "\n".join(f"- `{Path(each.path).name}`, {how}" for how, corpora in listed for each in corpora)


def _recipe(config: Config) -> dict[str, Any]:
    """Return the recipe without what tells of the machine."""
    sections = {key: value for key, value in asdict(config).items() if key not in _PRIVATE}
    data = sections["data"]
    for key in ("train", "validation"):
        data[key] = [each | {"path": Path(each["path"]).name} for each in data[key]]
    if (template := sections["chat"]["template"]) is not None:
        sections["chat"]["template"] = Path(template).name
    sections["memory"]["offload_folder"] = None
    return sections
