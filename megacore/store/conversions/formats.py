"""Opening a folder of weights, whichever format it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacore.checkpoints import FOLDER, newest_of
from megacore.store.conversions.adapters import AdaptedFolder
from megacore.store.io.hub import HubName, fetch
from megacore.store.io.objects import ObjectPath
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.distributed import METADATA
from megacore.store.tensor_files.universal import ZERO
from megacore.store.weight_folders.audit import DamageError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder
from megacore.store.weight_folders.foreign import ForeignFolder, is_foreign
from megacore.store.weight_folders.hugging_face import ADAPTER, CONFIG, HuggingFace, fetched
from megacore.store.weight_folders.index import EMA, INDEX, KINDS, STATES, VersionError, kind_of


def open_folder(
    path: Path,
    adapters: bool = False,
    checked: bool = False,
    ignored_fields: Sequence[str] = (),
    config: Path | None = None,
) -> SafetensorsFolder:
    """Open a checkpoint of ours, a Hugging Face folder, or a checkpoint of another trainer. Raises DamageError: it is a
    checkpoint of ours that cannot be opened; StoreError: it is none of these, or holds adapters.

    Args:
        path: The folder; that of a run, or of its checkpoints, stands for its newest checkpoint. Where there is none, a
            name of the Hugging Face hub, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, which is fetched.
        adapters: Whether a checkpoint of adapters will do, which is no model by itself.
        checked: Whether another process checks the tensor files of a checkpoint.
        ignored_fields: Unknown fields of a ``config.json`` that are left out.
        config: The model's ``config.json``, or where it is, of a checkpoint of another trainer that has none.
    """
    if config is not None and not is_foreign(path):
        raise StoreError(
            f"{path} has neither {METADATA} nor {ZERO}, and is no checkpoint of another trainer: `config` is for "
            "these, others say themselves what model they are of"
        )
    if (name := HubName.of(path)) is not None:
        folder = fetched(name, ignored_fields)
        return replace(HuggingFace.open(folder, ignored_fields), hub=name.at(folder))
    averages = path.name == EMA and (path.parent / INDEX).exists()
    path = path.parent if averages else newest_of(path)
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder{_on_the_hub(path)}")
    if not (path / INDEX).exists():
        if isinstance(path, ObjectPath):
            raise StoreError(f"{path} has no {INDEX}: a Hugging Face folder must lie on a disk, copy it to one")
        if is_foreign(path):
            return ForeignFolder.open(path, config, ignored_fields)
        if known := _of_a_trainer(path) or _known(path):
            raise StoreError(f"{path} {known}")
        return HuggingFace.open(path, ignored_fields)
    if ignored_fields:
        raise StoreError(f"{path} is a checkpoint, all of whose fields are known: leave out --ignore-field")
    try:
        checkpoint = Checkpoint.open(path, checked)
    except VersionError:
        raise
    except StoreError as error:
        raise DamageError(path, str(error)) from error
    if averages:
        checkpoint = checkpoint.averaged()
    held = checkpoint.index.adapters
    if held is not None and not adapters:
        raise StoreError(
            f"{path} holds adapters (LoRA of rank {held.lora.rank}) of {held.base}, and no model: merge the two by "
            f"`megacore convert {path} FOLDER --to hf --base {held.base}` and take that folder"
        )
    return checkpoint


def open_model(path: Path, base: Path | None = None) -> WeightFolder:
    """Open a model, or adapters with theirs. Raises StoreError: something is missing or damaged, the two do not belong
    together, or there is nothing to adapt. ``path``: a checkpoint or a Hugging Face folder; ``base``: the model of
    adapters; None for the one that they name."""
    folder = open_folder(path, adapters=True)
    held = folder.index.adapters
    if held is None:
        if base is not None:
            raise StoreError(f"--base {base} is for a checkpoint of adapters, and {path} is a model: leave it out")
        return folder
    if base is None and not Path(held.base).is_dir() and not _is_cached(held.base):
        raise StoreError(
            f"{path} holds adapters (LoRA of rank {held.lora.rank}) of {held.base}, and there is no such folder here, "
            "nor such a model in the hub's cache: give that model, a Hugging Face folder, its name on the hub or a "
            "checkpoint of it, by --base"
        )
    return AdaptedFolder.of(folder, open_folder(base or Path(held.base)))


def _is_cached(base: str) -> bool:
    """Return whether a model of the hub is here already. What a checkpoint of a stranger names is not fetched."""
    name = HubName.of(base)
    try:
        return name is not None and (fetch(name, [CONFIG], cached=True) / CONFIG).exists()
    except StoreError:
        return False


_OF_TRAINERS = {
    "*_optim_states.pt": "is a checkpoint of DeepSpeed of which each rank has a part: make a universal one of it by "
    "`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {path} --output_folder "
    "FOLDER`, and give FOLDER",
    "latest_universal": "holds checkpoints of DeepSpeed: give the universal one that `latest_universal` names",
    "mp_rank_*/model_optim_rng.pt": "is a checkpoint of Megatron-LM of which each rank has a part: let it save by "
    "`--ckpt-format torch_dist`",
    "latest_checkpointed_iteration.txt": "holds checkpoints of Megatron-LM: give one of them, such as iter_0000100",
}
"""{files that a folder of another trainer has: what is said of it, where it is not read}."""


def _of_a_trainer(path: Path) -> str | None:
    """Return the kind of a folder, if another trainer made it and it cannot be read."""
    found = (said for files, said in _OF_TRAINERS.items() if any(path.glob(files)))
    return next((said.format(path=path) for said in found), None)


def _known(path: Path) -> str | None:
    """Return the kind of a folder, if it is known and neither a checkpoint nor in Hugging Face's format."""
    if (path / CONFIG).exists():
        return None
    if (path / FOLDER).is_dir():
        return f"is the folder of a run, and there is no checkpoint in {path / FOLDER} yet"
    if kind_of(path.name)[0] in KINDS and (path.parent / INDEX).exists():
        return f"is a part of a checkpoint: give {path.parent}"
    if any((path / state).is_dir() for state in STATES):
        return f"is a checkpoint without its {INDEX}: it was not written to its end, or not copied to its end"
    if (path / ADAPTER).exists():
        return (
            "holds adapters as the peft library saves them, and no model: let peft merge them into theirs "
            "(merge_and_unload), and give the folder that this is saved to"
        )
    return None


def _on_the_hub(path: Path) -> str:
    """Return the way to a model of the hub whose name may be meant, and was taken for a path."""
    may_be = not path.exists() and str(path.parent) != "." and HubName.parse(str(path)) is not None
    return f", and {path.parent} is one here: name a model of the Hugging Face hub by {path}@main" if may_be else ""
