"""A model with adapters beside its weights: two folders that are read as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megacore.store.adapters import adapters_of, check_fingerprint, check_model
from megacore.store.checkpoint import Checkpoint
from megacore.store.companions import Companion
from megacore.store.convert import Source
from megacore.store.hugging_face import HuggingFace
from megacore.store.open import Folder, open_folder
from megacore.store.strict_json import StoreError
from models.config import ModelConfig
from models.tuning import Tuning
from parallel.transfer import Stored


@dataclass(frozen=True)
class Adapted:
    """Adapters, and the model that they were trained on, as far as can be known without reading its weights.

    Args:
        adapters: Their checkpoint.
        base: The model.

    Raises:
        StoreError: the checkpoint holds none, or those of a model of another shape or config.
    """

    adapters: Checkpoint
    base: Folder

    def __post_init__(self) -> None:
        check_model(self.adapters, self.base)

    @property
    def path(self) -> Path:
        return self.adapters.path

    @property
    def raw(self) -> Mapping[str, Any]:
        """The Hugging Face config of the model."""
        return self.base.raw

    @property
    def config(self) -> ModelConfig:
        return self.base.config

    @property
    def tuning(self) -> Tuning:
        """What of the model they are."""
        return Tuning(adapters_of(self.adapters).lora)

    def check(self, fingerprint: int) -> None:
        """Compare the fingerprint of the base's weights with that of those that the adapters were trained on.

        Raises:
            StoreError: they are others.
        """
        check_fingerprint(self.adapters, self.base.path, fingerprint)

    def companions(self) -> Mapping[str, Companion]:
        """What travels with the adapters, for the run may have had a chat template of its own; else with the base."""
        return self.adapters.companions() or self.base.companions()

    def source(self) -> Source:
        """The weights of both; none of them is in both."""
        beside, below = source_of(self.adapters, "weights"), source_of(self.base, "weights")
        own = self.adapters.schema.by_name

        def of(stored: Stored) -> Source:
            return beside if stored.param in own else below

        def read(stored: Stored) -> tuple[str, np.ndarray]:
            return of(stored).read(stored)

        known = {**(below.fingerprints or {}), **(beside.fingerprints or {})}
        return Source([*below.stored, *beside.stored], lambda stored: of(stored).dtype(stored), read, known)


Whole = Folder | Adapted
"""What has all weights of a model."""


def source_of(whole: Whole, state: str) -> Source:
    """The tensors of a state; a model with adapters has weights alone, as a Hugging Face folder does."""
    if isinstance(whole, Adapted):
        return whole.source()
    if isinstance(whole, HuggingFace):
        return Source.of_hugging_face(whole)
    return Source.of_checkpoint(whole, state)


def open_model(path: Path, base: Path | None = None) -> Whole:
    """A model, or adapters with theirs.

    Args:
        path: A checkpoint or a Hugging Face folder.
        base: Of adapters: the model; None for the folder that they name.

    Raises:
        StoreError: something is missing or damaged, the two do not belong together, or there is nothing to adapt.
    """
    found = open_folder(path, adapters=True)
    if not isinstance(found, Checkpoint) or found.index.adapters is None:
        if base is not None:
            raise StoreError(f"--base {base} is for a checkpoint of adapters, and {path} is a model: leave it out")
        return found
    held = found.index.adapters
    if base is None and not Path(held.base).is_dir():
        raise StoreError(
            f"{path} holds adapters (LoRA of rank {held.lora.rank}) of {held.base}, and there is no such folder here: "
            "give that model, a Hugging Face folder or a checkpoint of it, by --base"
        )
    return Adapted(found, open_folder(base or Path(held.base)))
