"""The page of a model that a run uploads to the hub: what it is made of, in words and as the hub's metadata."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.models.config import parameters_in_words
from megacore.recipe_yaml import write_yaml
from megacore.store.io.hub import HubName, license_of
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training.progress import Progress

_PRIVATE = ("out", "checkpoint", "log")
"""Sections of a recipe that tell of the machine alone."""


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
